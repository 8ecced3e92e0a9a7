package api

import (
	"net/http"
	"strings"
	"testing"
)

// TestHop: a request that comes back is recognised, whatever routers it has passed
// meanwhile, and one that passes several routers in a row is not.
func TestHop(t *testing.T) {
	t.Parallel()
	a, b, c := NewHop(), NewHop(), NewHop()
	if a == b || len(a) != hopLength {
		t.Fatalf("hops %q and %q", a, b)
	}
	at := func(values ...string) http.Header { return http.Header{HeaderHop: values} }
	h := at(a.After(nil))
	if !a.Passed(h) || b.Passed(h) || a.Passed(nil) {
		t.Errorf("after one router: %v", h)
	}
	h = at(c.After(at(b.After(h))))
	if h.Get(HeaderHop) != string(a)+", "+string(b)+", "+string(c) || !a.Passed(h) || !b.Passed(h) || !c.Passed(h) {
		t.Errorf("after three routers: %v", h)
	}
	if h = at("evil, "+strings.ToLower(string(b)), string(a)+"\t,,"+string(a)+"x"); !a.Passed(h) || b.Passed(h) || c.After(h) != string(a)+", "+string(c) {
		t.Errorf("what is no hop goes on: %q", c.After(h))
	}
	h = at(a.After(nil))
	for range maxHops - 1 {
		if !a.Passed(h) {
			t.Fatalf("forgotten too early: %v", h)
		}
		h = at(NewHop().After(h))
	}
	if h = at(b.After(h)); a.Passed(h) || len(h.Get(HeaderHop)) != maxHops*(hopLength+2)-2 {
		t.Errorf("the header grows: %v", h)
	}
}

// FuzzHop: whatever a client writes, it is not taken for a request that came back, and the
// header that goes on is bounded and has the router's own hop.
func FuzzHop(f *testing.F) {
	for _, s := range []string{"", "x", string(NewHop()), string(NewHop()) + " ,\t" + string(NewHop()), strings.Repeat(string(NewHop())+",", 40)} {
		f.Add(s, s)
	}
	me := NewHop()
	f.Fuzz(func(t *testing.T, one, two string) {
		h := http.Header{HeaderHop: {one, two}}
		next := http.Header{HeaderHop: {me.After(h)}}
		if me.Passed(h) || !me.Passed(next) || len(next.Get(HeaderHop)) > maxHops*(hopLength+2) {
			t.Fatalf("%q goes on as %q", h, next)
		}
		if again := NewHop().After(next); len(next.Get(HeaderHop)) < (maxHops-1)*(hopLength+2) && !strings.HasPrefix(again, next.Get(HeaderHop)+", ") {
			t.Fatalf("%q goes on as %q", next, again)
		}
	})
}
