package trace

import (
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

// TestLines: lines come whole, with their ends and sizes, whether they fit into the buffer
// or not; those that are too long are passed over; what has no end says what cut it.
func TestLines(t *testing.T) {
	const limit = 1 << 19
	in := strings.Repeat("a", limit-1) + "\n" + strings.Repeat("b", limit) + "\n" + "c\n\n" + strings.Repeat("d", limit+1)
	l := newLines(strings.NewReader(in), limit)
	for i, want := range []struct {
		first string
		kept  int
		n     int
		err   error
	}{{"a", limit, limit, nil}, {"", 0, limit + 1, errLong}, {"c", 2, 2, nil}, {"\n", 1, 1, nil}, {"", 0, limit + 1, errLong}, {"", 0, 0, io.EOF}} {
		p, n, err := l.Next()
		if len(p) != want.kept || n != want.n || !errors.Is(err, want.err) || !strings.HasPrefix(string(p), want.first) {
			t.Errorf("line %d: %d bytes of %d, %v; want %+v", i, len(p), n, err, want)
		}
	}
	broken := errors.New("broken")
	for cut, want := range map[io.Reader]error{
		strings.NewReader("rest"): io.EOF,
		io.MultiReader(strings.NewReader("rest"), iotest.ErrReader(broken)): broken,
	} {
		if p, n, err := newLines(cut, limit).Next(); string(p) != "rest" || n != 4 || !errors.Is(err, want) {
			t.Errorf("a line without end: %q, %d bytes, %v; want %v", p, n, err, want)
		}
	}
	if p, _, err := newLines(io.MultiReader(strings.NewReader(in[limit:2*limit]), iotest.ErrReader(broken)), 1<<10).Next(); p != nil || !errors.Is(err, broken) {
		t.Errorf("a line that is too long and breaks off: %d bytes, %v", len(p), err)
	}
}
