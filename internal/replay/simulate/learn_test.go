package simulate

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/affinity"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
)

// TestLearnsFromShortPrompts: where all prompts are shorter than the threshold that decides at
// first, a threshold that is auto has learned both paths within 200 requests, and makes at most
// five of them late for it.
func TestLearnsFromShortPrompts(t *testing.T) {
	for _, rate := range []int{2, 4, 8} {
		for seed := range uint64(3) {
			rng := rand.New(rand.NewPCG(seed, 9))
			all := make([]arrivals.Request, 200)
			for i := range all {
				q := arrivals.Request{Number: i, At: time.Duration(i) * time.Second / time.Duration(rate)}
				q.BlockSize, q.IDs, q.ISL, q.OSL = 64, trace.LocalIDs, 50+rng.IntN(1551), 20+rng.IntN(100)
				for b := range q.ISL/64 + 1 {
					q.Blocks = append(q.Blocks, uint64(i)<<16|uint64(b))
				}
				all[i] = q
			}
			late := func(threshold string) (late, remote uint64, learned bool) {
				rule, err := decide.ParseThreshold(threshold)
				if err != nil {
					t.Fatal(err)
				}
				r, res, err := play(t.Context(), arrivals.FromSlice(all), Setup{
					Fleet: fleet(t, "2p2d:block=16,kv_blocks=4096"), Seed: seed, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond,
					Options: Decisions(selector.KV, rule), SlowFactor: 2,
				})
				if err != nil {
					t.Fatal(err)
				}
				return res.Requests - r.good, res.Remote, r.costs.Model().Compares() && r.costs.Model().Timed()
			}
			auto, remote, learned := late("auto")
			local, _, _ := late("2048")
			t.Logf("%d a second, seed %d: %d late, %d remote, learned %v; with threshold 2,048 %d late", rate, seed, auto, remote, learned, local)
			if !learned || auto > 5 {
				t.Errorf("%d a second, seed %d: %d late, learned %v", rate, seed, auto, learned)
			}
		}
	}
}

// clients are prompts of 200 to 4,000 tokens that share nothing, of n clients each of which sends
// the next one when the last is answered. An order says which prompts come when.
func clients(n, turns int, order uint64) []arrivals.Request {
	all := mixed(time.Duration(n*turns)*time.Second, 1)
	rand.New(rand.NewPCG(order, order)).Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	none := int64(0)
	for i := range all {
		q := &all[i]
		q.At, q.SessionKey, q.ThinkUS = 0, client(i%n), &none
	}
	return all
}

// client is the session of a client.
func client(i int) uint64 { return selector.HashSession(fmt.Sprint("client ", i)) }

// TestSlowRankOfTwo: of two ranks that answer one is six times slower. From the second minute on eight
// clients get as many answers as with the best fixed split of the clients by a fixed threshold, and
// more by one that is auto. The rank has its share again within a minute of being well. A single
// run depends on the order of the prompts: there are six.
func TestSlowRankOfTwo(t *testing.T) {
	if testing.Short() {
		t.Skip("66 runs of four simulated minutes")
	}
	const n, second, well, back, end = 8, time.Minute, 150 * time.Second, 210 * time.Second, 4 * time.Minute
	play := func(all []arrivals.Request, decode selector.Policy, threshold string, prepare func(*run)) (answers, share float64) {
		t.Helper()
		rule, err := decide.ParseThreshold(threshold)
		if err != nil {
			t.Fatal(err)
		}
		s := Setup{
			Fleet: fleet(t, "2p2d:block=16,kv_blocks=4096"), Seed: 1, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond, ClosedLoop: true,
			Options: Decisions(selector.KV, rule), SlowFactor: 2, Faults: []Fault{{0, SlowDecode, 6}, {well, SlowDecode, 1}},
		}
		s.Decode = decode
		r, err := newRun(s)
		if err != nil {
			t.Fatal(err)
		}
		defer r.close()
		prepare(r)
		stop, err := r.begin(arrivals.FromSlice(all))
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
		until := func(at time.Duration) (answers, slow float64) {
			for r.world.Now() < at && r.world.Step() {
			}
			if r.err != nil || r.open < n {
				t.Fatalf("after %s: %d clients, %v", r.world.Now(), r.open, r.err)
			}
			return float64(r.res.Completed), float64(r.ranks[3].requests)
		}
		a, _ := until(second)
		b, _ := until(well)
		if decode == selector.Session {
			return b - a, 0
		}
		c, k := until(back)
		d, l := until(end)
		return b - a, (l - k) / (d - c)
	}
	least := map[string]float64{"1024": .95, "auto": 1.1}
	for order := range uint64(6) {
		all := clients(n, 600, order)
		best, splits := 0.0, []float64{}
		for slow := range n + 1 {
			answers, _ := play(all, selector.Session, "1024", func(r *run) {
				for i := range n {
					home := r.ranks[2].rank.Label
					if i < slow {
						home = r.ranks[3].rank.Label
					}
					r.sessions.Move("", client(i), affinity.Homes{}, affinity.Homes{home}, r.clock())
				}
			})
			best, splits = max(best, answers), append(splits, answers)
		}
		t.Logf("answers by the clients on the slow rank: %v", splits)
		for _, threshold := range []string{"1024", "auto"} {
			answers, share := play(all, selector.KV, threshold, func(*run) {})
			t.Logf("threshold %s: %v answers, %.2f of the best split; well again the rank has %.2f of them", threshold, answers, answers/best, share)
			if answers < least[threshold]*best || share < .4 {
				t.Errorf("order %d, threshold %s: %v answers, the best split has %v; well again the rank has %.2f of them", order, threshold, answers, best, share)
			}
		}
	}
}
