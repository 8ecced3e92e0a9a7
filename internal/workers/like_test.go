package workers

import (
	"reflect"
	"slices"
	"testing"
)

// TestLike: workers that differ in a fact are not alike, but for facts that no decision compares
// between workers. A fact that is new is compared.
func TestLike(t *testing.T) {
	apart := []string{"KVBlocks", "PoolBlocks", "Bootstrap", "LMCache", "From"}
	made := func(change func(*Worker)) *Worker {
		w := &Worker{Name: "w"}
		change(w)
		w.Classify()
		return w
	}
	plain := made(func(*Worker) {})
	if !plain.Like(plain) || !plain.Like(made(func(w *Worker) { w.Name = "other" })) {
		t.Error("workers with the same facts are not alike")
	}
	if plain.Like(nil) || plain.Like(&Worker{}) || (&Worker{}).Like(&Worker{}) {
		t.Error("a worker that was not classified is like another")
	}
	if plain.Like(made(func(w *Worker) { w.LoRAs = []string{"a"} })) {
		t.Error("a worker with an adapter is like one without")
	}
	for i, f := range reflect.VisibleFields(reflect.TypeFor[Facts]()) {
		other := made(func(w *Worker) { setSome(reflect.ValueOf(&w.Facts).Elem().Field(i)) })
		if plain.Like(other) != slices.Contains(apart, f.Name) {
			t.Errorf("%s: alike is %v", f.Name, plain.Like(other))
		}
	}
}

// setSome gives a field a value that is not zero.
func setSome(v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		v.SetString("x")
	case reflect.Int:
		v.SetInt(1)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
	default:
		v.Set(reflect.New(v.Type().Elem()))
	}
}
