package cost

import (
	"reflect"
	"testing"
)

// TestList: every constant is listed once, within its bounds, and At is its own field.
func TestList(t *testing.T) {
	list := List()
	if fields := reflect.TypeFor[Constants]().NumField(); len(list) != fields {
		t.Fatalf("%d are listed, want %d", len(list), fields)
	}
	for i, c := range list {
		changed := Tuned
		*c.At(&changed)++
		for k := range list {
			was, now := reflect.ValueOf(Tuned).Field(k).Float(), reflect.ValueOf(changed).Field(k).Float()
			if differs := was != now; differs != (k == i) {
				t.Errorf("%s: field %d is %v, was %v", c.Key, k, now, was)
			}
		}
		field := reflect.TypeFor[Constants]().Field(i)
		if tag := field.Tag.Get("json"); tag != c.Key && tag != "-" {
			t.Errorf("%s is %q in recordings", c.Key, tag)
		}
		for _, factor := range []float64{0.5, 1, 1.5} { // of the table of docs/lab/cost-in-time.md
			all := Tuned
			if v := factor * *c.At(&all); c.Unit == "" || v < c.Least || v > c.Most {
				t.Errorf("%s: %v %q is not between %v and %v", c.Key, v, c.Unit, c.Least, c.Most)
			}
		}
	}
}

// TestUnknown: a model that knows nothing teaches as often as its constants say.
func TestUnknown(t *testing.T) {
	c := Tuned
	c.TeachEvery = 1
	m := Unknown(c)
	if m.Timed() || m.Compares() || m.Lacks != 1<<LocalLeg|1<<PrefillLeg|1<<TransferLeg || *m.Tuning() != c || !m.Tuning().Teaches(3) {
		t.Errorf("%+v", m)
	}
	if m = nil; m.Tuning() != &Tuned {
		t.Errorf("without a model: %+v", m.Tuning())
	}
}
