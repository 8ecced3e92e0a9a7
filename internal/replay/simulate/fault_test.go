package simulate

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
)

func TestParseFault(t *testing.T) {
	for text, want := range map[string]Fault{
		"10m:prefill_slow=3": {10 * time.Minute, SlowPrefill, 3}, "1m:one_prefill_slow=3": {time.Minute, SlowOne, 3}, "1m:one_decode_slow=3": {time.Minute, SlowDecode, 3}, "0s:network_slow=1.5": {0, SlowNetwork, 1.5}, "90s:prefill_gone=0.5": {90 * time.Second, PrefillGone, .5},
	} {
		if got, err := ParseFault(text); err != nil || got != want {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "10m", "10m:", "prefill_slow=3", "-1s:prefill_slow=3", "1s:prefill_slow", "1s:prefill_slow=0.5", "1s:prefill_slow=NaN", "1s:network_slow=Inf", "1s:prefill_gone=1.1", "1s:prefill_gone=-1", "1s:decode_gone=1"} {
		if f, err := ParseFault(text); err == nil {
			t.Errorf("%q is %+v", text, f)
		}
	}
}

// TestFaults: engines change at the time of a fault and not before, and only requests that
// count are counted.
func TestFaults(t *testing.T) {
	all := sessions(30, 6) // 18 s
	const middle = 9 * time.Second
	run := func(from time.Duration, faults ...Fault) *Result {
		t.Helper()
		r, err := Run(t.Context(), arrivals.FromSlice(all), Setup{
			Fleet: fleet(t, "2p2d:block=16,kv_blocks=4096"), Seed: 1, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond, Faults: faults, CountFrom: from,
			Options: decide.Options{Decode: selector.KV, Prefill: selector.KV, Weights: selector.DefaultWeights()}, // always remote
		})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	whole, second := run(0), run(middle)
	if second.Requests != whole.Requests/2 || second.Completed != second.Requests || second.Failed != 0 {
		t.Errorf("from the middle on: %d of %d requests, %d completed", second.Requests, whole.Requests, second.Completed)
	}
	slow := run(middle, Fault{middle, SlowPrefill, 3})
	if slow.TTFT.P50 < 1.5*second.TTFT.P50 {
		t.Errorf("prefill three times slower: p50 %v ms, before %v", slow.TTFT.P50, second.TTFT.P50)
	}
	// The prefill engines are well again at once: as if nothing had been.
	if r := run(middle, Fault{middle, SlowPrefill, 3}, Fault{middle, SlowPrefill, 1}); r.TTFT != second.TTFT {
		t.Errorf("well again: %+v, want %+v", r.TTFT, second.TTFT)
	}
	if r := run(middle, Fault{middle, SlowNetwork, 1e4}); r.TTFT.P50 < second.TTFT.P50+100 {
		t.Errorf("the network ten thousand times slower: p50 %v ms, before %v", r.TTFT.P50, second.TTFT.P50)
	}
	if r := run(0, Fault{time.Hour, SlowPrefill, 3}); r.TTFT != whole.TTFT {
		t.Errorf("a fault after the end: %+v, want %+v", r.TTFT, whole.TTFT)
	}
	half, none := run(middle, Fault{middle, PrefillGone, .5}), run(middle, Fault{middle, PrefillGone, 1})
	if half.Failed > half.Requests/4 || half.Remote < half.Requests/2 || half.Completed+half.Failed != half.Requests {
		t.Errorf("one of two prefill engines gone: %d remote, %d failed of %d", half.Remote, half.Failed, half.Requests)
	}
	if none.Degraded < none.Requests/2 {
		t.Errorf("no prefill engine left: %d of %d go without", none.Degraded, none.Requests)
	}
}

// TestFaultNeedsItsEngines: a fault of engines that the fleet does not have is refused before
// anything runs.
func TestFaultNeedsItsEngines(t *testing.T) {
	for _, c := range []struct {
		fleet string
		kind  FaultKind
		want  string // part of the error, empty for none
	}{
		{"2p", SlowDecode, "one_decode_slow: a fault of an engine that answers needs one"}, {"2a", SlowDecode, ""}, {"1p1d", SlowDecode, ""},
		{"2a", SlowOne, "needs prefill engines"}, {"2d", PrefillGone, "needs prefill engines"}, {"1p1d", SlowOne, ""},
	} {
		_, err := Run(t.Context(), arrivals.FromSlice(sessions(2, 2)), Setup{
			Fleet: fleet(t, c.fleet+":block=16"), Seed: 1, Faults: []Fault{{time.Second / 10, c.kind, 1}},
			Options: decide.Options{Decode: selector.KV, Prefill: selector.KV, Weights: selector.DefaultWeights()},
		})
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s of %s: %v, want %q", c.kind, c.fleet, err, c.want)
		}
	}
}

func FuzzParseFault(f *testing.F) {
	for _, text := range []string{"10m:prefill_slow=3", "1s:network_slow=10", "0s:prefill_gone=0.5", "x"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if got, err := ParseFault(text); err == nil && !(got.At >= 0 && got.By >= 0 && got.By <= 1e6) {
			t.Errorf("%q: %+v", text, got)
		}
	})
}

// mixed are prompts of 200 to 4,000 tokens that share nothing, so many a second.
func mixed(span time.Duration, perSecond int) []arrivals.Request {
	rng := rand.New(rand.NewPCG(3, 5))
	all := make([]arrivals.Request, int(span.Seconds())*perSecond)
	for i := range all {
		q := arrivals.Request{Number: i, At: time.Duration(i) * time.Second / time.Duration(perSecond)}
		q.BlockSize, q.IDs, q.OSL = 64, trace.LocalIDs, 20+rng.IntN(40)
		q.ISL = int(200 * math.Pow(20, rng.Float64()))
		for b := range q.ISL/64 + 1 {
			q.Blocks = append(q.Blocks, uint64(i)<<16|uint64(b))
		}
		all[i] = q
	}
	return all
}

// TestReturnsAfterFault: where engines change, a threshold that is auto serves about as many
// requests well as the fixed one that is best then, in the five minutes from the fault on
// and after them. The judge's -drift has eight more loads.
func TestReturnsAfterFault(t *testing.T) {
	if testing.Short() {
		t.Skip("33 runs of some ten simulated minutes")
	}
	const begin, returned, end = 3 * time.Minute, 8 * time.Minute, 11 * time.Minute
	all := mixed(end, 12)
	for _, f := range []Fault{{begin, SlowPrefill, 3}, {begin, SlowNetwork, 10}, {begin, PrefillGone, .5}} {
		t.Run(string(f.Kind), func(t *testing.T) {
			t.Parallel()
			run := func(rule decide.Rule, from, to time.Duration) *Result {
				n, _ := slices.BinarySearchFunc(all, to, func(q arrivals.Request, at time.Duration) int { return cmp.Compare(q.At, at) })
				r, err := Run(t.Context(), arrivals.FromSlice(all[:n]), Setup{
					Fleet: fleet(t, "2p2d:block=16,kv_blocks=4096"), Seed: 1, TTFT: 120 * time.Millisecond, ITL: 12 * time.Millisecond, Faults: []Fault{f}, CountFrom: from,
					Options: decide.Options{Decode: selector.KV, Prefill: selector.KV, Weights: selector.DefaultWeights(), Rule: rule},
				})
				if err != nil {
					t.Fatal(err)
				}
				return r
			}
			auto := decide.Rule{Threshold: 512, Auto: true}
			if r := run(auto, 0, begin); r.Remote < r.Requests/5 || r.Remote > r.Requests*19/20 {
				t.Errorf("before, %d of %d were remote: there is nothing to relearn", r.Remote, r.Requests)
			}
			for _, w := range [][2]time.Duration{{begin, returned}, {returned, end}} {
				best := 0.0
				for _, threshold := range []int{0, 512, 2048, 1 << 20} {
					best = max(best, run(decide.Rule{Threshold: threshold, LoadCredit: decide.LoadCredit}, w[0], w[1]).Good)
				}
				r := run(auto, w[0], w[1])
				t.Logf("from %v on %.3f are good, with the best threshold %.3f; %d of %d remote", w[0], r.Good, best, r.Remote, r.Requests)
				if r.Good < .95*best {
					t.Errorf("from %v on %.3f are good, with the best threshold %.3f", w[0], r.Good, best)
				}
			}
		})
	}
}
