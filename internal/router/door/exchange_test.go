package door

import (
	"testing"
	"unsafe"
)

// TestExchangeIsSmall: each stream that waits for a token holds an exchange. One byte more
// than this, and Go's allocator gives each 128 more.
func TestExchangeIsSmall(t *testing.T) {
	if n := unsafe.Sizeof(exchange{}); n > 768 {
		t.Errorf("an exchange has %d bytes, and may have 768", n)
	}
}
