package affinity

import (
	"testing"
	"time"
)

// TestMove: a session has the homes where it was sent last, for each model and phase. Of two
// decisions that saw the same homes the first one counts.
func TestMove(t *testing.T) {
	table, now := New(), time.Unix(0, 0)
	want := func(model string, id uint64, want Homes) {
		t.Helper()
		if got := table.Homes(model, id, now); got != want {
			t.Errorf("session %d with %q is at %q, want %q", id, model, got, want)
		}
	}
	want("m", 1, Homes{})
	table.Move("m", 1, Homes{}, Homes{"d0", ""}, now)
	table.Move("m", 1, Homes{}, Homes{"d1", "p0"}, now) // was made at the same time
	want("m", 1, Homes{"d0", "p0"})
	table.Move("m", 1, Homes{"d0", "p0"}, Homes{"d2", ""}, now)
	want("m", 1, Homes{"d2", "p0"})
	want("other", 1, Homes{})
	want("m", 2, Homes{})
	now = now.Add(maxIdle)
	want("m", 1, Homes{"d2", "p0"})
	table.Move("m", 1, Homes{"d2", "p0"}, Homes{"d2", ""}, now) // is used, and stays
	now = now.Add(maxIdle + 1)
	want("m", 1, Homes{})
	table.Move("m", 1, Homes{}, Homes{"d3", ""}, now) // no home is left of what it had
	want("m", 1, Homes{"d3", ""})
}

// TestTableIsBounded: a full table keeps the sessions that are used.
func TestTableIsBounded(t *testing.T) {
	const limit = 8
	table, now := newTable(limit), time.Unix(0, 0)
	for id := uint64(1); id < 100; id++ {
		table.Move("", id, Homes{}, Homes{"d0"}, now)
		table.Move("", 1, Homes{"d0"}, Homes{"d0"}, now)
		if n := len(table.newer) + len(table.older); n > limit {
			t.Fatalf("%d sessions are known, want at most %d", n, limit)
		}
		for _, kept := range []uint64{1, id, max(id, 3) - 2} {
			if table.Homes("", kept, now) != (Homes{"d0"}) {
				t.Errorf("after session %d session %d is not known", id, kept)
			}
		}
	}
	if table.Homes("", 50, now) != (Homes{}) {
		t.Error("a session that was used least recently is still known")
	}
}

// TestTableIsFree: a known session costs no allocation.
func TestTableIsFree(t *testing.T) {
	table, now := New(), time.Unix(0, 0)
	table.Move("m", 1, Homes{}, Homes{"d0", "p0"}, now)
	if n := testing.AllocsPerRun(100, func() {
		homes := table.Homes("m", 1, now)
		table.Move("m", 1, homes, homes, now)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
