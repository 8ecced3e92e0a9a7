package router

import (
	"fmt"
	"testing"
	"time"
)

func TestRetryBudgetIsAShareAboveAFloor(t *testing.T) {
	var b retryBudget
	now := time.Unix(100, 0)
	granted := func() (n int) {
		for range 1000 {
			if b.take(now, 0.2) {
				n++
			}
		}
		return n
	}
	if n := granted(); n != budgetFloor {
		t.Fatalf("a quiet router may retry %d times", n)
	}
	now = now.Add(budgetWindow)
	for range 100 {
		b.request(now)
	}
	if n := granted(); n != 20 {
		t.Fatalf("after 100 requests %d more retries", n)
	}
	now = now.Add(3 * budgetWindow)
	if n := granted(); n != budgetFloor {
		t.Fatalf("after a pause %d retries", n)
	}
}

func TestStickyResponsesAreBounded(t *testing.T) {
	s := newStickyResponses(3)
	for i := range 10 {
		s.put(fmt.Sprint(i), fmt.Sprint("w", i), "t")
	}
	s.put("9", "other", "t")
	s.put("9", "engine that was told to take the id", "u") // another tenant's stays what it is
	if w, ok := s.get("9"); !ok || w != (stored{"other", "t"}) || len(s.byID) != 3 || len(s.order) != 3 {
		t.Fatalf("%v %v, %d ids", w, ok, len(s.byID))
	}
	if _, ok := s.get("6"); ok {
		t.Fatal("the oldest id is still there")
	}
}
