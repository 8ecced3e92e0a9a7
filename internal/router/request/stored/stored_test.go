package stored

import (
	"fmt"
	"testing"
)

func TestResponsesAreBounded(t *testing.T) {
	s, told := New(3), 0
	s.Tap(func(_, _, tenant string) {
		if told++; tenant != "t" {
			t.Errorf("other routers learn of %q, which is another tenant's", tenant)
		}
	})
	for i := range 10 {
		s.Put(fmt.Sprint(i), fmt.Sprint("w", i), "t")
	}
	s.Put("9", "other", "t")
	s.Put("9", "engine that was given the id by a client", "u") // another tenant's stays what it is
	if w, ok := s.Get("9"); !ok || w != (Response{"other", "t"}) || len(s.byID) != 3 || len(s.order) != 3 {
		t.Fatalf("%v %v, %d ids", w, ok, len(s.byID))
	}
	if told != 11 {
		t.Errorf("other routers learn of %d responses, want 11", told)
	}
	if _, ok := s.Get("6"); ok {
		t.Fatal("the oldest id is still there")
	}
}
