package virtualsoak

import (
	"cmp"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/rig/property"
)

// inBubble runs seeds where the clock is theirs.
func inBubble(t *testing.T, f func()) {
	t.Helper()
	synctest.Test(t, func(*testing.T) { f() })
}

// played is a seed that was played.
func played(t *testing.T, seed uint64, p plant, history bool) (o *Outcome) {
	t.Helper()
	inBubble(t, func() { o = play(seed, p, history) })
	return o
}

// add adds what another seed did.
func (o *Outcome) add(p *Outcome) {
	to, from := reflect.ValueOf(o).Elem(), reflect.ValueOf(p).Elem()
	for i := range to.NumField() {
		if f := to.Field(i); f.Kind() == reflect.Int {
			f.SetInt(f.Int() + from.Field(i).Int())
		}
	}
	for why, n := range p.CutFor {
		if o.CutFor == nil {
			o.CutFor = map[string]int{}
		}
		o.CutFor[why] += n
	}
}

// seeds runs many seeds, none after one that is enough, and returns the sum of
// what they did and those that failed, by seed.
func seeds(t *testing.T, from, n uint64, p plant, enough func(*Outcome) bool) (sum Outcome, bad []*Outcome) {
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
				o := played(t, from+i, p, false)
				mu.Lock()
				sum.add(o)
				if o.Err() != nil {
					bad = append(bad, o)
					if enough(o) {
						next.Store(n)
					}
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	slices.SortFunc(bad, func(a, b *Outcome) int { return cmp.Compare(a.Seed, b.Seed) })
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
	n := uint64(300)
	if testing.Short() {
		n = 100
	}
	n, from := property.FromEnv(t, "DYNCTL_SOAK_SEEDS", n), property.FromEnv(t, "DYNCTL_SOAK_SEED", 1)
	began := time.Now()
	sum, bad := seeds(t, from, n, nothing, func(*Outcome) bool { return false })
	took := time.Since(began)
	t.Logf("%d seeds from %d in %v (%.0f/s): %d requests: %d completed, %d left by their client, %d cut, %d given up; %d attempts, %d of them remote, %d fallbacks; "+
		"%d faults, %d engines died of a request, %d prefills handed over to another decode rank, %d restarts of the router; %d ejections of workers, %d ended for want of others, %d requests came late for a trial, %d failures taken back; %d streams went on elsewhere, %d of which waited for a place and %d left a drained worker, %d were ended for their engine, %d for a stop string at the seam; cut: %v; %d requests waited for a rank; %d batches of events, %d gaps, %d resyncs, %d looks at the index; %d steps",
		n, from, took.Round(time.Millisecond), float64(n)/took.Seconds(), sum.Requests, sum.Completed, sum.Left, sum.Cut, sum.Hopeless, sum.Attempts, sum.Remote, sum.Fallbacks,
		sum.Faults, sum.Died, sum.HandedOver, sum.Restarts, sum.Ejections, sum.Readmitted, sum.Refused, sum.Excused, sum.Continued, sum.MovesWaited, sum.Moved, sum.Closed, sum.Stopped, sum.CutFor, sum.Waited, sum.Batches, sum.Gaps, sum.Resyncs, sum.Checks, sum.Steps)
	for i, o := range bad {
		if i == 3 {
			t.Errorf("and %d seeds more", len(bad)-i)
			break
		}
		again := played(t, o.Seed, nothing, true)
		t.Errorf("%v\n%s", o.Err(), tail(again, 60))
		if again.Digest != o.Digest {
			t.Errorf("seed %d has another history when it is run again", o.Seed)
		}
	}
	if sum.Completed < sum.Requests/2 {
		t.Errorf("of %d requests only %d were completed", sum.Requests, sum.Completed)
	}
	for what, n := range map[string]int{
		"remote attempts": sum.Remote, "gaps": sum.Gaps, "ejections": sum.Ejections, "readmitted workers": sum.Readmitted, "excused failures": sum.Excused,
		"continued streams": sum.Continued, "streams that waited to move": sum.MovesWaited, "moved streams": sum.Moved, "streams ended by a stop string": sum.Stopped,
		"streams ended for their engine": sum.Closed, "requests that waited": sum.Waited, "checks of the index": sum.Checks, "blocks outside a device": sum.Outside,
		"engines that died": sum.Died, "prefills handed over": sum.HandedOver,
	} {
		if n == 0 {
			t.Errorf("the seeds had no %s", what)
		}
	}
}

// TestSeedsRepeat runs seeds twice: all that they did must be equal.
func TestSeedsRepeat(t *testing.T) {
	for seed := uint64(1); seed <= 10; seed++ {
		a, b := played(t, seed, nothing, true), played(t, seed, nothing, true)
		if d := gocmp.Diff(a, b); d != "" {
			t.Fatalf("seed %d is not the same twice (-first +second):\n%s", seed, d)
		}
		if c := played(t, seed, nothing, false); c.Digest != a.Digest {
			t.Fatalf("seed %d depends on whether its history is kept", seed)
		}
	}
}

// rareSeeds is how many seeds must be asked for before the rare bugs are planted.
const rareSeeds = 2000

// TestPlantedBugsAreFound proves that the soak sees what it is for. Each bug is
// tried until it is found; the rare ones, which need too many seeds for every
// day, only when many are asked for, and then within as many.
func TestPlantedBugsAreFound(t *testing.T) {
	many := property.FromEnv(t, "DYNCTL_SOAK_SEEDS", 0)
	for _, c := range []struct {
		plant plant
		name  string
		n     uint64 // seeds, 0 for a rare one
		says  []string
	}{
		{skipRelease, "a ledger release skipped", 24, []string{"ledger: "}},
		{applyTwice, "an event applied twice", 24, []string{"which the engine does not"}},
		{applyEarly, "an event applied out of order", 100, []string{"which the engine does not"}},
		{reuseTransfer, "transfer parameters reused", 24, []string{"the answer is", "has exited"}},
		{giveUpFallBack, "no fallback to local prefill", 80, []string{"failed although"}}, // every prefill worker must be down at once
		{endFirst, "feeds ended before the last snapshot", 100, []string{"has forgotten what it knew"}},
		{positionsFirst, "a snapshot with older positions", 100, []string{"which the engine does not"}},
		{positionsJustBefore, "a snapshot whose positions are older by a moment", 0, []string{"which the engine does not"}},
		{displace, "a late reservation displaces a live account", 100, []string{"ledger: "}},
		{forgetFailed, "a failed worker is not kept out", 100, []string{"failed although", "which had failed it"}},
		{keepOut, "a worker that was kept out never comes back", 300, []string{"failed although"}},
		{leaveEjected, "an ejected worker is not brought back when nobody else is left", 100, []string{"which is kept out"}},
		{numbersOnly, "a new publisher whose numbers fit is taken for the old one", 100, []string{"which the engine does not", "although every batch was applied"}},
		{forgetEase, "those in line do not learn of a rank that has room", 24, []string{"waits although"}},
		{seamTwice, "a stream goes on with a token that the client has", 24, []string{"the answer is"}},
		{aheadOfText, "a stream goes on within a character", 100, []string{"the client read", "the answer is"}},
		{forgetRefusal, "a stream is not refused by name", 24, []string{"it should be"}},
		{keepPlace, "a place of the rest of a stream is not given back", 24, []string{"requests have one"}},
		{oneTooMany, "one rest too many at once on a rank", 100, []string{"rests of streams at once"}},
		{forgetNext, "those who wait for a place do not learn of one", 100, []string{"although there is one"}},
		{keepOutside, "blocks that leave the host's memory are not heard of", 24, []string{"counts as outside the device"}},
		{forgetLost, "a request takes down a third engine", 100, []string{"engines died of"}},
		{blameEngines, "failures of a request that breaks every engine are not taken back", 300, []string{"which breaks every engine"}},
		{resendElsewhere, "a request goes elsewhere after an idle close", 100, []string{"had closed an idle connection"}},
		{loseEvent, "an event of the account lost", 24, []string{"account: "}},
		{doubleEvent, "an event of the account twice", 24, []string{"account: "}},
		{keepLeg, "a leg that is not closed", 24, []string{"was closed 0 times"}},
		{wholeLimit, "the limit of a stream that goes on is not reduced", 100, []string{"the answer is"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := c.n
			if n == 0 {
				if n = many; n < rareSeeds {
					t.Skipf("it is rare: DYNCTL_SOAK_SEEDS=%d or more (make soak-virtual) plants it", rareSeeds)
				}
			}
			shows := func(o *Outcome) bool {
				return slices.ContainsFunc(c.says, func(w string) bool { return strings.Contains(o.Violations[0], w) })
			}
			began := time.Now()
			_, bad := seeds(t, 1, n, c.plant, shows)
			i := slices.IndexFunc(bad, shows)
			switch {
			case len(bad) == 0:
				t.Fatalf("not found in %d seeds", n)
			case i < 0:
				t.Fatalf("found, but for other reasons: %v", bad[0].Err())
			}
			o := bad[i]
			t.Logf("found after %d seeds in %v: %v", o.Seed, time.Since(began).Round(time.Millisecond), o.Err())
			if again := played(t, o.Seed, c.plant, false); again.Digest != o.Digest || fmt.Sprint(again.Violations) != fmt.Sprint(o.Violations) {
				t.Errorf("seed %d fails in another way when it is run again", o.Seed)
			}
		})
	}
}
