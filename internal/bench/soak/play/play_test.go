package play

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// seeds runs many seeds and returns the sum of what they did and the first
// failure by seed.
func seeds(from, n uint64, p plant) (sum Outcome, bad []*Outcome) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	var next atomic.Uint64
	for range min(runtime.GOMAXPROCS(0), 4) {
		wg.Go(func() {
			for {
				i := next.Add(1) - 1
				if i >= n {
					return
				}
				o := play(from+i, p, false)
				mu.Lock()
				sum.Requests += o.Requests
				sum.Completed += o.Completed
				sum.Left += o.Left
				sum.Cut += o.Cut
				sum.Hopeless += o.Hopeless
				sum.Attempts += o.Attempts
				sum.Remote += o.Remote
				sum.Fallbacks += o.Fallbacks
				sum.Faults += o.Faults
				sum.Batches += o.Batches
				sum.Gaps += o.Gaps
				sum.Resyncs += o.Resyncs
				sum.Restarts += o.Restarts
				sum.Checks += o.Checks
				sum.Steps += o.Steps
				if o.Err() != nil {
					bad = append(bad, o)
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return sum, bad
}

// tail is the end of a history.
func tail(o *Outcome, n int) string {
	h := o.History
	if len(h) > n {
		h = h[len(h)-n:]
	}
	return strings.Join(h, "\n")
}

// TestVirtual is the deterministic form: 300 seeds here, DYNCTL_SOAK_SEEDS of
// them by `make soak-virtual`, from DYNCTL_SOAK_SEED on. A seed that fails is
// printed with its history, and fails again whenever it is run.
func TestVirtual(t *testing.T) {
	n, from := uint64(300), uint64(1)
	if testing.Short() {
		n = 100
	}
	for name, dst := range map[string]*uint64{"DYNCTL_SOAK_SEEDS": &n, "DYNCTL_SOAK_SEED": &from} {
		if text := os.Getenv(name); text != "" {
			v, err := strconv.ParseUint(text, 10, 64)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			*dst = v
		}
	}
	began := time.Now()
	sum, bad := seeds(from, n, nothing)
	took := time.Since(began)
	t.Logf("%d seeds from %d in %v (%.0f/s): %d requests: %d completed, %d left by their client, %d cut, %d without anybody well; %d attempts, %d of them remote, %d fallbacks; "+
		"%d faults, %d restarts of the router; %d batches of events, %d gaps, %d resyncs, %d looks at the index; %d steps",
		n, from, took.Round(time.Millisecond), float64(n)/took.Seconds(), sum.Requests, sum.Completed, sum.Left, sum.Cut, sum.Hopeless, sum.Attempts, sum.Remote, sum.Fallbacks,
		sum.Faults, sum.Restarts, sum.Batches, sum.Gaps, sum.Resyncs, sum.Checks, sum.Steps)
	for i, o := range bad {
		if i == 3 {
			t.Errorf("and %d seeds more", len(bad)-i)
			break
		}
		again := Play(o.Seed, true)
		t.Errorf("%v\n%s", o.Err(), tail(again, 60))
		if again.Digest != o.Digest {
			t.Errorf("seed %d has another history when it is run again", o.Seed)
		}
	}
	if sum.Completed < sum.Requests/2 || sum.Remote == 0 || sum.Gaps == 0 || sum.Checks == 0 {
		t.Errorf("the seeds did too little: %+v", sum)
	}
}

// TestSeedsRepeat runs seeds twice: all that they did must be equal.
func TestSeedsRepeat(t *testing.T) {
	for seed := uint64(1); seed <= 10; seed++ {
		a, b := Play(seed, true), Play(seed, true)
		if d := cmp.Diff(a, b); d != "" {
			t.Fatalf("seed %d is not the same twice (-first +second):\n%s", seed, d)
		}
		if c := Play(seed, false); c.Digest != a.Digest {
			t.Fatalf("seed %d depends on whether its history is kept", seed)
		}
	}
}

// TestPlantedBugsAreFound proves that the soak sees what it is for.
func TestPlantedBugsAreFound(t *testing.T) {
	for _, c := range []struct {
		plant plant
		name  string
		n     uint64 // seeds
		says  []string
	}{
		{skipRelease, "a ledger release skipped", 24, []string{"ledger: "}},
		{applyTwice, "an event applied twice", 24, []string{"which the engine does not"}},
		{applyEarly, "an event applied out of order", 24, []string{"which the engine does not"}},
		{reuseTransfer, "transfer parameters reused", 24, []string{"the answer is", "has exited"}},
		{giveUpFallBack, "no fallback to local prefill", 80, []string{"failed although"}}, // every prefill worker must be down at once
		{endFirst, "feeds ended before the last snapshot", 100, []string{"has forgotten what it knew"}},
		{positionsFirst, "a snapshot with older positions", 100, []string{"which the engine does not"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, bad := seeds(1, c.n, c.plant)
			if len(bad) == 0 {
				t.Fatalf("not found in %d seeds", c.n)
			}
			told := 0
			for _, o := range bad {
				for _, w := range c.says {
					if strings.Contains(o.Violations[0], w) {
						told++
						break
					}
				}
				if again := play(o.Seed, c.plant, false); again.Digest != o.Digest || fmt.Sprint(again.Violations) != fmt.Sprint(o.Violations) {
					t.Errorf("seed %d fails in another way when it is run again", o.Seed)
				}
			}
			t.Logf("found by %d of %d seeds, the first %v", len(bad), c.n, bad[0].Err())
			if told == 0 {
				t.Errorf("found, but for other reasons: %v", bad[0].Err())
			}
		})
	}
}

func BenchmarkPlay(b *testing.B) {
	b.ReportAllocs()
	seed := uint64(0)
	for b.Loop() {
		seed++
		if o := Play(seed, false); o.Err() != nil {
			b.Fatal(o.Err())
		}
	}
}
