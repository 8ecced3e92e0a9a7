package attempt

import (
	"testing"
	"time"
)

func TestRetryBudgetIsAShareAboveAFloor(t *testing.T) {
	var b Budget
	now := time.Unix(100, 0)
	granted := func() (n int) {
		for range 1000 {
			if b.Take(now, 0.2) {
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
		b.Request(now)
	}
	if n := granted(); n != 20 {
		t.Fatalf("after 100 requests %d more retries", n)
	}
	now = now.Add(3 * budgetWindow)
	if n := granted(); n != budgetFloor {
		t.Fatalf("after a pause %d retries", n)
	}
}

// TestRetryIsGivenBack: what is given back can be granted once more, also after a turn of
// the window; nothing makes it more than it was.
func TestRetryIsGivenBack(t *testing.T) {
	var b Budget
	now := time.Unix(100, 0)
	b.Return(now)
	for n := range budgetFloor {
		if !b.Take(now, 0) {
			t.Fatalf("retry %d is not granted", n)
		}
	}
	now = now.Add(budgetWindow)
	if b.Take(now, 0) {
		t.Fatal("more than the floor")
	}
	if b.Return(now); !b.Take(now, 0) || b.Take(now, 0) {
		t.Fatal("one that was given back is not granted once")
	}
}
