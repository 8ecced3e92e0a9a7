package arrivals

import (
	"reflect"
	"testing"
)

// TestGenerate: each shape is what it says, in the order of arrival, and the same each
// time.
func TestGenerate(t *testing.T) {
	reuse := map[string][2]float64{"agents": {.9, .99}, "chats": {.5, .9}, "documents": {0, 0}, "bursts": {.4, .8}}
	for _, shape := range Shapes() {
		all, err := Generate(shape, 1000, 1)
		if err != nil || len(all) != 1000 {
			t.Fatalf("%s: %d requests, %v", shape, len(all), err)
		}
		again, _ := Generate(shape, 1000, 1)
		other, _ := Generate(shape, 1000, 2)
		if !reflect.DeepEqual(all, again) || reflect.DeepEqual(all, other) {
			t.Errorf("%s: the same seed gives another, or another the same", shape)
		}
		for i := range all {
			q := &all[i]
			if q.Number != i || i > 0 && q.At < all[i-1].At || q.OSL < 1 || q.ISL < 1 || len(q.Blocks) != (q.ISL+generated-1)/generated {
				t.Fatalf("%s: request %d: %+v", shape, i, q)
			}
		}
		bound, err := Bound(FromSlice(all), generated, 0)
		if want := reuse[shape]; err != nil || bound < want[0] || bound > want[1] {
			t.Errorf("%s: %.2f can be reused, want %v (%v)", shape, bound, want, err)
		}
	}
	for _, c := range []struct {
		shape string
		n     int
	}{{"moon", 10}, {"chats", 0}, {"chats", maxGenerated + 1}} {
		if all, err := Generate(c.shape, c.n, 1); err == nil {
			t.Errorf("%d %s: %d requests", c.n, c.shape, len(all))
		}
	}
}
