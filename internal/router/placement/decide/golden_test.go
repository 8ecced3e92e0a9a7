package decide

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

var update = flag.Bool("update", false, "write the golden decisions")

const (
	goldenDecisions = 5000
	goldenFile      = "testdata/decisions.txt.gz"
)

// TestDecisionsOnEveryPlatform makes decisions that were made before, on another
// machine: path, ranks, and every cost to the last bit are those of the file.
// Go may compute x*y+z in one rounding where the processor can (arm64, and amd64
// with GOAMD64=v3), so a sum that allows it fails here on one of them.
func TestDecisionsOnEveryPlatform(t *testing.T) {
	var now []string
	makeDecisions(func(i int, in *Input, p *Plan) { now = append(now, fmt.Sprintf("%d %s", i, line(in, p))) })
	was := strings.Split(strings.TrimSuffix(unpack(t, goldenFile), "\n"), "\n")
	sameDecisions(t, was, now)
	if *update {
		pack(t, goldenFile, strings.Join(now, "\n")+"\n")
	}
}

// makeDecisions makes the golden decisions, in their order: ordinary ones first, a quarter
// of them with paths by cost, an eighth with everything by times, then some of what ordinary ones have too seldom.
func makeDecisions(each func(i int, in *Input, p *Plan)) {
	rng, costs, times := rand.New(rand.NewPCG(7, 2026)), rand.New(rand.NewPCG(8, 2026)), rand.New(rand.NewPCG(10, 2026))
	var p Plan
	for i := range goldenDecisions {
		in := someInput(rng)
		switch {
		case i%4 == 3:
			withCosts(in, costs)
		case i%8 == 1:
			withTimes(in, times)
		}
		MakePlan(in, &p)
		each(i, in, &p)
	}
	rng = rand.New(rand.NewPCG(9, 2026))
	for i := range 12 * len(seldom) {
		in := someInput(rng)
		seldom[i%len(seldom)](in)
		MakePlan(in, &p)
		each(goldenDecisions+i, in, &p)
	}
}

// sameDecisions fails the test, with the difference by decision, unless two lists of decisions are
// the same. With -update it shows the difference only.
func sameDecisions(t *testing.T, was, now []string) {
	t.Helper()
	switch d := differences(was, now); {
	case d == "":
	case *update:
		t.Log(d)
	default:
		t.Errorf("%s\nIf this is intended: go test ./internal/router/placement/decide -run TestDecisions -update -v", d)
	}
}

// differences says which decisions of two lists are not the same, by the numbers they begin
// with: how many moved from which path and reason to which, and the first ones whole. It is
// empty if all are the same.
func differences(was, now []string) string {
	const most = 20
	number := func(d string) int {
		n, _ := strconv.Atoi(strings.Fields(d + " -")[0])
		return n
	}
	why := func(d string) string { // path and reason
		f := append(strings.Fields(d), "-", "-", "-")
		return f[1] + " " + strings.TrimSuffix(f[2], ":")
	}
	old, all := map[int]string{}, map[int]string{}
	for _, d := range was {
		old[number(d)], all[number(d)] = d, ""
	}
	for _, d := range now {
		all[number(d)] = d
	}
	var list strings.Builder
	changed, moved := 0, map[string]int{}
	for _, n := range slices.Sorted(maps.Keys(all)) {
		before, after := old[n], all[n]
		if before == after {
			continue
		}
		if changed++; changed <= most {
			fmt.Fprintf(&list, "\n- %s\n+ %s", cmp.Or(before, "(new)"), cmp.Or(after, fmt.Sprint(n, " (gone)")))
		}
		if move := why(before) + " -> " + why(after); why(before) != why(after) {
			moved[move]++
		} else {
			moved["the same path and reason, other ranks or costs"]++
		}
	}
	if changed == 0 {
		return ""
	}
	text := fmt.Sprintf("%d of %d decisions changed:", changed, len(all))
	for _, move := range slices.Sorted(maps.Keys(moved)) {
		text += fmt.Sprintf("\n%6d %s", moved[move], move)
	}
	if changed > most {
		fmt.Fprintf(&list, "\nand %d more", changed-most)
	}
	return text + list.String()
}

// unpack reads a packed file. One that is missing is empty with -update.
func unpack(t *testing.T, name string) string {
	t.Helper()
	file, err := os.Open(filepath.FromSlash(name))
	if *update && errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	z, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func pack(t *testing.T, name, text string) {
	t.Helper()
	var out bytes.Buffer
	z, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(z, text); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.FromSlash(name), out.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}

// line is a plan in one line: what was chosen with its costs in hex, and a digest
// of both rankings whole.
func line(in *Input, p *Plan) string {
	digest := fnv.New32a()
	chosen := func(s *selector.Input, r *selector.Ranking, i int) string {
		fmt.Fprint(digest, r.Verdict, r.Policy, r.Order, r.Eligible, r.Tied, r.TieBreak, r.Sampled)
		for k := 0; r.Policy != "" && k < len(s.Candidates); k++ {
			fmt.Fprintf(digest, " %x %s", s.Candidates[k].Cost, s.Why(k))
		}
		if i < 0 {
			return "- -"
		}
		return s.Candidates[i].Rank + " " + strconv.FormatFloat(s.Candidates[i].Cost, 'x', -1, 64)
	}
	d, f := chosen(&in.Decode, &p.Decode, p.DecodeIndex), chosen(&in.Prefill, &p.Prefill, p.PrefillIndex)
	path := string(p.Path)
	if p.Err != nil {
		path = "error"
	}
	if p.CostRevision > 0 {
		fmt.Fprintf(digest, " %x %x", p.Costs.Local, p.Costs.Remote)
	}
	return fmt.Sprintf("%s %s %d %d %s %s %08x", path, p.Reason, p.CachedTokens, p.PrefillCached, d, f, digest.Sum32())
}

// withCosts has the path of a request follow from costs, and ranks be slow, as rng has it.
func withCosts(in *Input, rng *rand.Rand) {
	in.Rule.Auto, in.Rule.Threshold = true, max(in.Rule.Threshold, 1)
	stall := float64(rng.IntN(2)) / 13
	in.Decode.Weights.Stall, in.Prefill.Weights.Stall = stall, stall
	law := func() (l cost.LegModel) {
		for i := range l {
			l[i] = 20 * rng.Float64()
		}
		return l
	}
	m := &cost.Model{Revision: 1 + rng.Uint64N(9), Local: law(), Prefill: law(), Transfer: law(), Stall: rng.Float64(), Limit: 500 * rng.Float64(), Beyond: 0.05, Lost: 500 * rng.Float64()}
	for slot := range 12 {
		if rng.IntN(3) > 0 {
			continue
		}
		times := 1.5 + float64(3*rng.Float64())
		for _, list := range [][]decision.Candidate{in.Decode.Candidates, in.Prefill.Candidates} {
			if slot < len(list) {
				list[slot].Times = times
			}
		}
	}
	in.Costs = m
}

// withTimes has policy kv choose ranks and paths by times that are known.
func withTimes(in *Input, rng *rand.Rand) {
	threshold := in.Rule.Threshold
	withCosts(in, rng)
	if rng.IntN(3) == 0 { // paths by a fixed threshold
		in.Rule.Auto, in.Rule.Threshold = false, threshold
	}
	in.Decode.Policy, in.Prefill.Policy = selector.KV, selector.KV
	in.Facts.Output = rng.IntN(3) * rng.IntN(900)
	for _, s := range []*selector.Input{&in.Decode, &in.Prefill} {
		s.Weights.Others = 1.0 / 3 * float64(1+rng.IntN(6))
		for i := range s.Candidates {
			s.Candidates[i].Answering = rng.IntN(s.Candidates[i].ActiveRequests + 1)
		}
	}
	c := cost.Tuned
	c.Behind, c.Keep = rng.Float64(), rng.Float64()
	in.Costs.Prices = cost.Prices{
		Step: cost.StepModel{9 * rng.Float64(), rng.Float64(), rng.Float64(), rng.Float64(), 20 * rng.Float64(), 20 * rng.Float64()}, Others: float64(rng.IntN(3)), Answer: 1,
		Loss: 2000 * rng.Float64(), LateOnce: true, Rooms: true, GapLimit: 1 + float64(40*rng.Float64()), Length: 1 + float64(500*rng.Float64()), Stalled: 3 * rng.Float64(), Error: 0.2 * rng.Float64(),
		NoRemote: rng.IntN(6) == 0, Lacks: cost.Legs(rng.IntN(8)), Constants: c,
	}
	if in.Costs.Limit = 4 * in.Costs.Limit; in.Costs.Limit == 0 {
		in.Costs.Loss = 0
	}
}

// blocksPolicies are those whose choices do not depend on what was learned.
var blocksPolicies = []selector.Policy{
	selector.KVBlocks, selector.KVDynamo, selector.LeastLoaded, selector.RoundRobin, selector.PowerOfTwo, selector.Random, selector.Session,
}

// someInput is a fleet and a request as rng has them. Few of its figures are
// powers of two: only sums that are rounded show how they are rounded.
func someInput(rng *rand.Rand) *Input {
	one := func(of ...float64) float64 { return of[rng.IntN(len(of))] }
	isl := rng.IntN(9000)
	in := &Input{
		Rule: Rule{
			Threshold: []int{0, 0, 500, 2048}[rng.IntN(4)], On: []Measure{OnEffISL, OnEffISL, OnISL, ""}[rng.IntN(4)],
			Fallback:    []Fallback{FallbackLocal, FallbackLocal, FallbackLocal, FallbackError}[rng.IntN(4)],
			PrefillGate: []int{0, 0, 4000}[rng.IntN(3)], DecodeGate: one(0, 0, 0.7), LoadCredit: LoadCredit,
		},
		Facts: api.Facts{
			Kind: []api.Kind{api.Chat, api.Chat, api.Chat, api.Completion, api.Completion, api.Completion, api.Messages, api.Generate}[rng.IntN(8)], Splittable: rng.IntN(40) > 0,
			ISL: isl, Source: []route.Source{route.FromIDs, route.FromLocal, route.FromLocal, route.FromLocal, route.FromEstimate, route.FromEstimate, route.FromNothing}[rng.IntN(7)],
			N: 1 + rng.IntN(40)/39, Prompts: 1 + rng.IntN(40)/39, MaxTokens: int64(rng.IntN(40)) - 1, MinTokens: -1,
		},
		Force: []route.Force{route.ForceAuto, route.ForceAuto, route.ForceAuto, route.ForceAuto, route.ForceAuto, route.ForceAuto, route.ForceAuto, route.ForceAuto, route.ForceLocal, route.ForceRemote}[rng.IntN(10)],
	}
	// The weights are stated, so that another default changes no decision here.
	weights := selector.Weights{OverlapCredit: 1, CreditCPU: 0.8, CreditDisk: 0.25, PrefillLoadScale: 1, Queue: 1.0 / 4, DecodeLoad: 1.0 / 64, Stall: 1.0 / 16, Spread: 1.0 / 128}
	if rng.IntN(3) > 0 {
		weights = selector.Weights{
			OverlapCredit: one(1, 0.9, 2.0/3), CreditDecay: one(0, 0.3, 1.1), PrefillLoadScale: one(1, 0.7, 1.3), Queue: one(0, 0.1, 1.0/3),
			DecodeLoad: one(0, 0.01, 1.0/7), Spread: one(0, 0.003), ActiveRequest: one(0, 0.6, 1.9), Temperature: one(0, 0, 0.2, 0.9),
		}
	}
	block := []int{16, 7, 48, 64, 100}[rng.IntN(5)]
	busy := selector.Busy{DecodeBlocksShare: one(0, 0.8), PrefillTokens: []int{0, 6000}[rng.IntN(2)], Waiting: []int{0, 6}[rng.IntN(2)], KVUsage: one(0, 0.9)}
	policy := func() selector.Policy {
		if rng.IntN(3) > 0 {
			return selector.KVBlocks
		}
		return blocksPolicies[rng.IntN(len(blocksPolicies))]
	}
	connectors := []workers.Connector{
		workers.ConnectorNIXL, workers.ConnectorNIXL, workers.ConnectorNIXL, workers.ConnectorNIXL, workers.ConnectorNIXL,
		workers.ConnectorNIXL, workers.ConnectorLMCache, workers.ConnectorLMCache, workers.ConnectorSharedStorage, workers.ConnectorNone,
	}
	fill := func(s *selector.Input, peers *[]workers.Peer, phase route.Phase, role workers.Role) {
		*s = selector.Input{
			Phase: phase, Policy: policy(), Weights: weights, Busy: busy, ISL: isl, BlockSize: block,
			SessionKey: rng.Uint64() >> (63 * rng.IntN(2)), Draw: rng.Uint64(), Turn: rng.Uint64() >> 40,
		}
		for n := range min(rng.IntN(30), 1+rng.IntN(6)) {
			w := &workers.Worker{
				Facts: workers.Facts{
					Engine: workers.VLLM, Role: role, Connector: connectors[rng.IntN(len(connectors))],
					BlockSize: block, Version: []string{"", "0.31.0", "0.32.0"}[rng.IntN(3)], ChatTokens: []string{"", "37:9c", "38:aa"}[rng.IntN(8)/6+rng.IntN(8)/7],
				},
				Name: fmt.Sprintf("%s-%d", role, n),
			}
			if rng.IntN(8) == 0 {
				w.Engine, w.Connector = workers.SGLang, workers.ConnectorSGLang
			}
			for dp := range 1 + rng.IntN(6)/5 {
				c := decision.Candidate{
					Rank: fmt.Sprintf("%s/dp%d", w.Name, dp), Slot: uint32(len(s.Candidates)), OverlapBlocks: rng.IntN(isl/block + 2), ActiveRequests: rng.IntN(9),
					PrefillTokens: rng.IntN(8000), DecodeBlocks: rng.IntN(3000), FreshTokens: rng.IntN(300000), LastTurn: rng.Uint64() >> 50,
					ResidentBlocks: rng.IntN(4000), KVBlocks: rng.IntN(4000), HasLoad: rng.IntN(5) > 0, Running: rng.IntN(8), Waiting: rng.IntN(8), KVUsage: rng.Float64(),
				}
				if rng.IntN(4) == 0 { // as its neighbour, so that something else decides
					c.OverlapBlocks, c.PrefillTokens, c.DecodeBlocks, c.FreshTokens, c.ActiveRequests = 0, 0, 0, 0, 0
				}
				switch rng.IntN(20) {
				case 0:
					c.KeptOut = "draining"
				case 1:
					c.KeptOut, c.Tried = "failed in this request", true
				}
				s.Candidates = append(s.Candidates, c)
				*peers = append(*peers, workers.Peer{Worker: w, Rank: &workers.Rank{WorkerName: w.Name, DP: dp, Label: c.Rank}})
			}
		}
	}
	fill(&in.Decode, &in.DecodePeers, route.Decode, []workers.Role{workers.Decode, workers.Decode, workers.Aggregated}[rng.IntN(3)])
	fill(&in.Prefill, &in.PrefillPeers, route.Prefill, workers.Prefill)
	return in
}
