package access

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
)

// fleet is routers that share rates: each sees what the others let through a while later.
type fleet struct {
	now     time.Time
	routers []*Store
	keys    []*Key
	sent    []map[uint64]Spent
	late    []func()
}

func newFleet(t *testing.T, routers int, limits string) *fleet {
	t.Helper()
	f := &fleet{now: time.Unix(1_800_000_000, 0)}
	path := filepath.Join(t.TempDir(), "keys.yaml")
	if err := os.WriteFile(path, []byte(fmt.Sprintf("keys:\n  - {name: k, sha256: %064x, %s}\n", 1, limits)), 0o600); err != nil {
		t.Fatal(err)
	}
	for range routers {
		s, err := NewStore(Options{Path: path, Event: func(eventlog.Event) {}, Loaded: func(string) {}})
		if err != nil {
			t.Fatal(err)
		}
		s.SetRouters(routers - 1)
		f.routers, f.keys, f.sent = append(f.routers, s), append(f.keys, &s.current.Load().keys[0]), append(f.sent, map[uint64]Spent{})
	}
	return f
}

// step lets 25 ms pass, and messages of 50 ms arrive a step later.
func (f *fleet) step(n int) {
	f.now = f.now.Add(25 * time.Millisecond)
	for _, deliver := range f.late {
		deliver()
	}
	f.late = nil
	if n%2 != 0 {
		return
	}
	for i, s := range f.routers {
		for _, k := range s.Spent(false, 10, f.now) {
			was, ok := f.sent[i][k.Key]
			if !ok {
				was = Spent{Requests: k.Settled, Tokens: k.SettledTokens}
			}
			f.sent[i][k.Key] = k
			f.late = append(f.late, func() {
				for j, to := range f.routers {
					if j != i {
						to.Debit(k.Key, k.Requests-was.Requests, k.Tokens-was.Tokens, f.now)
					}
				}
			})
		}
	}
}

// TestSharedRate: a key that is used at one router has its whole rate; used at two, both
// together never let more through than 1.2 times, at any time, and nearly all of it; what one
// leaves, the other has within a second.
func TestSharedRate(t *testing.T) {
	const perMinute, burst = 600, 100
	allowed := func(passed time.Duration) float64 { return burst + perMinute*passed.Minutes() }
	for name, c := range map[string]struct {
		wants func(router, step int) int // requests in a step
		least float64                    // share of what the key may at the end
	}{
		"one router":            {func(r, _ int) int { return 20 * (1 - r) }, 0.99},
		"both":                  {func(int, int) int { return 20 }, 0.97},
		"one, then the other":   {func(r, n int) int { return map[bool]int{true: 20}[(n/800)%2 == r] }, 0.97},
		"both now and then":     {func(r, n int) int { return map[bool]int{true: 20}[n%(400+200*r) < 100] }, 0},
		"a little at the other": {func(r, n int) int { return map[bool]int{true: 20, false: n % 2}[r == 0] }, 0.97},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, 2, fmt.Sprintf("rate: %d", perMinute))
			start, through := f.now, 0
			for n := range 4800 { // two minutes
				for r, k := range f.keys {
					for range c.wants(r, n) {
						if k.Take(f.now) == 0 {
							through++
						}
					}
				}
				if most := 1.2*allowed(f.now.Sub(start)) + 1; float64(through) > most {
					t.Fatalf("%d requests after %v, at most %.0f are 1.2 times", through, f.now.Sub(start), most)
				}
				f.step(n)
			}
			if want := c.least * allowed(f.now.Sub(start)); float64(through) < want {
				t.Errorf("%d requests in two minutes, want %.0f", through, want)
			}
		})
	}
}

// TestHandover: the whole rate is at the other router within a second after the first one
// stops.
func TestHandover(t *testing.T) {
	f := newFleet(t, 2, "rate: 6000")
	run := func(router, steps int) (through int) {
		for n := range steps {
			for range 20 {
				if f.keys[router].Take(f.now) == 0 {
					through++
				}
			}
			f.step(n)
		}
		return through
	}
	run(0, 2400)
	run(1, 40)
	if got := run(1, 40); got < 95 || got > 120 {
		t.Errorf("%d requests in the second after a second, want 100", got)
	}
}

// TestSharedTokens: tokens that were used at one router are used at all.
func TestSharedTokens(t *testing.T) {
	f := newFleet(t, 2, "tokens: 1000")
	f.keys[0].Spend(3000, f.now)
	for n := range 4 {
		f.step(n)
	}
	if f.keys[1].tokens.wait(1000, f.now) == 0 {
		t.Error("the other router lets requests begin")
	}
}

// TestDebit: what other routers claim takes a bounded time to pay off, and a key that is not
// known takes nothing.
func TestDebit(t *testing.T) {
	f := newFleet(t, 2, "rate: 60, tokens: 60")
	s, k := f.routers[0], f.keys[0]
	for range 100 {
		if !s.Debit(k.meter.key, 1<<63, 1<<62, f.now) {
			t.Fatal("the key is not known")
		}
	}
	if got := k.limit.TokensAt(f.now); got < -20 {
		t.Errorf("%v requests are left", got)
	}
	if wait := k.tokens.wait(60, f.now); wait < 9*time.Minute || wait > 10*time.Minute {
		t.Errorf("tokens come back after %v", wait)
	}
	if s.Debit(7, 1, 1, f.now) {
		t.Error("a key that does not exist")
	}
	if f.keys[0].Take(f.now.Add(30*time.Second)) > 0 {
		t.Error("it is not paid off after half a minute")
	}
}

// TestAloneUnshared: a router without others counts nothing.
func TestAloneUnshared(t *testing.T) {
	f := newFleet(t, 1, "rate: 600")
	for range 100 {
		if f.keys[0].Take(f.now) != 0 {
			t.Fatal("a key has less than its burst")
		}
	}
	if list := f.routers[0].Spent(true, 10, f.now); len(list) != 0 {
		t.Errorf("%+v", list)
	}
}
