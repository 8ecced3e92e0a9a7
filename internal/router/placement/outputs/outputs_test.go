package outputs

import (
	"strconv"
	"testing"
)

// TestExpect: a tenant's own answers count once there are enough, those of its model before;
// old ones fade.
func TestExpect(t *testing.T) {
	l := New()
	if n := l.Expect("m", "a"); n != 0 {
		t.Errorf("expects %d tokens of nothing", n)
	}
	for range enough - 1 {
		l.Learn("m", "a", 100)
	}
	l.Learn("m", "", 500)
	if a, b := l.Expect("m", "a"), l.Expect("m", "b"); a != 150 || b != 150 {
		t.Errorf("the model's mean is 150, not %d and %d", a, b)
	}
	l.Learn("m", "a", 180)
	if a, b, other := l.Expect("m", "a"), l.Expect("m", ""), l.Expect("n", "a"); a != 110 || b != 153 || other != 0 {
		t.Errorf("a tenant of 110, a model of 153, another of 0: %d, %d, %d", a, b, other)
	}
	for range 10 * recent {
		l.Learn("m", "a", 20)
	}
	if a := l.Expect("m", "a"); a != 20 {
		t.Errorf("expects %d after many answers of 20", a)
	}
	if n := (*Lengths)(nil).Expect("m", "a"); n != 0 {
		t.Errorf("a nil table expects %d", n)
	}
}

// TestBound: of more names than there is room for those stay that are heard of.
func TestBound(t *testing.T) {
	l := New()
	for i := range 5 * maxMeans {
		l.Learn("m", "", 7)
		l.Learn(strconv.Itoa(i), "", 9)
		if n := len(l.newest) + len(l.before); n > 2*maxMeans {
			t.Fatalf("%d means", n)
		}
	}
	if kept, last, first := l.Expect("m", ""), l.Expect(strconv.Itoa(5*maxMeans-1), ""), l.Expect("0", ""); kept != 7 || last != 9 || first != 0 {
		t.Errorf("kept %d, last %d, first %d", kept, last, first)
	}
}
