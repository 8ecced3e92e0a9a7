package page

import (
	"math"
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

// TestRatesOfATreeComeSoon: of many open runs those without rates are loaded again first, and
// none of them starves because others on the screen stand above it.
func TestRatesOfATreeComeSoon(t *testing.T) {
	tr := newTree()
	var rows []radixRow
	now := time.Date(2026, 11, 21, 14, 0, 0, 0, time.UTC)
	for range 40 {
		k := &node{parent: tr.root, open: true, asked: now, n: admin.IndexNode{Children: 1}}
		k.kids = []*node{{parent: k, rate: math.NaN()}}
		rows = append(rows, radixRow{k: k})
	}
	tr.root.asked = now
	rated := map[*node]bool{}
	for s := range 5 {
		now = now.Add(time.Second)
		for _, k := range tr.due(rows, now, 2*time.Second, 3) {
			k.asked = now
			if k != tr.root {
				k.kids[0].rate, rated[k] = 1, true
			}
		}
		if s == 4 && len(rated) != len(rows) {
			t.Errorf("after %d s %d of %d runs have rates", s+1, len(rated), len(rows))
		}
	}
	asked := map[*node]int{}
	for range 30 {
		now = now.Add(time.Second)
		due := tr.due(rows, now, 2*time.Second, 3)
		if len(due) > 3 {
			t.Fatalf("%d are loaded at once", len(due))
		}
		for _, k := range due {
			k.asked = now
			asked[k]++
		}
	}
	for _, r := range rows {
		if asked[r.k] == 0 {
			t.Errorf("one of %d open runs was not loaded in half a minute", len(rows))
			break
		}
	}
}
