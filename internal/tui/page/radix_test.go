package page

import (
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// TestAgesAndEvictions: the age of a run is unknown at first sight, never nought, and a
// lower bound for one that was there before; evictions are what a subtree that is known
// exactly became smaller by.
func TestAgesAndEvictions(t *testing.T) {
	began := time.Unix(1000, 0)
	tr := newTree()
	take := func(s int, kids ...admin.IndexNode) {
		tr.take(admin.BrowseQuery{}, &admin.IndexChildren{Now: began.Add(time.Duration(s) * time.Second), Children: kids, Total: len(kids)}, nil)
	}
	run := func(id string, blocks int, exact bool) admin.IndexNode {
		return admin.IndexNode{ID: id, Local: id, Blocks: blocks, Exact: exact}
	}
	of := func(id string) (age string, lost float64) { return tr.nodes[id].age(), tr.nodes[id].lost }
	take(0, run("a", 100, true), run("b", 500, false))
	for _, id := range []string{"a", "b"} {
		if age, lost := of(id); age != "-" || lost == lost {
			t.Errorf("%s at first sight: %s, %g", id, age, lost)
		}
	}
	take(4, run("a", 60, true), run("b", 300, false), run("c", 10, true))
	if age, lost := of("a"); age != ">4.0s" || lost != 10 {
		t.Errorf("a: %s, %g", age, lost)
	}
	if age, lost := of("b"); age != ">4.0s" || lost == lost {
		t.Errorf("b, of which a lower bound is known: %s, %g", age, lost)
	}
	if age, lost := of("c"); age != "-" || lost == lost {
		t.Errorf("c is new: %s, %g", age, lost)
	}
	take(14, run("a", 80, true), run("b", 300, true), run("c", 5, true))
	if _, lost := of("a"); lost == lost {
		t.Errorf("a grew and lost %g", lost)
	}
	if _, lost := of("b"); lost == lost {
		t.Errorf("b was not known before and lost %g", lost)
	}
	if age, lost := of("c"); age != "10s" || lost != .5 {
		t.Errorf("c: %s, %g", age, lost)
	}
}
