//go:build race

package sse

import (
	"testing"
	"time"
)

// TestReleasedMemoryShows: who still reads the head of a stream after it was given back
// finds nothing that a stream could have.
func TestReleasedMemoryShows(t *testing.T) {
	h := AcquireHead()
	h.Feed([]byte("data: {}\n\n"), time.Now())
	held := h.Held()
	h.Release()
	if string(held) != "!!!!!!!!!!" {
		t.Errorf("a late reader finds %q", held)
	}
}
