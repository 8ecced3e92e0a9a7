package replay

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestBlindness: of two routers that put prompts on one rank shortly one after the other, the
// second one is blind if what it knew is older, and not if it knew, or if it was its own choice;
// where it would have chosen otherwise, what that costs is the difference of the costs, in
// milliseconds where times are known.
func TestBlindness(t *testing.T) {
	learned := &cost.Model{Revision: 7, Local: cost.LegModel{1, 20, 1, 20, 0}, Prices: cost.Prices{
		Step: cost.StepModel{5, 1, 0.1, 0.05, 10, 1}, Others: 1, Answer: 1, Length: 100, NoRemote: true, Constants: cost.Tuned,
	}}
	for name, costs := range map[string]*cost.Model{"by blocks": nil, "by times": learned} {
		t.Run(name, func(t *testing.T) { testBlindness(t, costs) })
	}
}

func testBlindness(t *testing.T, costs *cost.Model) {
	s := &decide.Options{Decode: selector.KV, Prefill: selector.KV, Weights: selector.DefaultWeights()}
	start := time.Unix(1_800_000_000, 0)
	// record has decisions at some milliseconds, of which each takes the first rank and knew
	// the other router's work of age milliseconds ago.
	record := func(began time.Time, age int32, at ...int) []byte {
		p, err := trace.AppendHeader(nil, trace.Header{Source: "test", Start: began, BlockSize: 16})
		if err != nil {
			t.Fatal(err)
		}
		references := trace.NewReferences()
		for i, ms := range at {
			in := &decide.Input{Model: "m", Costs: costs, Facts: api.Facts{Kind: api.Completion, ISL: 1600, Source: route.FromIDs}}
			for k := range 3 {
				in.Decode.Candidates = append(in.Decode.Candidates, decision.Candidate{Rank: fmt.Sprint("w", k, "/dp0"), Slot: uint32(k), KVUsage: -1, Siblings: decision.Siblings{SiblingAgeMS: age}})
				in.DecodePeers = append(in.DecodePeers, workers.Peer{Worker: &workers.Worker{Name: fmt.Sprint("w", k)}})
			}
			in.Decode.Phase, in.Decode.Policy, in.Decode.Weights, in.Decode.ISL, in.Decode.BlockSize = route.Decode, s.Decode, s.Weights, 1600, 16
			var plan decide.Plan
			decide.MakePlan(in, &plan)
			d := &trace.Decision{ID: fmt.Sprint("d", i), Attempt: 1, Model: "m", BlockSize: 16, Revision: 1, Settings: s, Input: in, Rules: decide.Rules}
			d.SetPlan(in, &plan)
			if d.DecodeRank != "w0/dp0" {
				t.Fatalf("chosen %s: %s", d.DecodeRank, d.Error)
			}
			if p, err = references.AppendRecord(p, &trace.Record{Kind: trace.KindDecision, Time: time.Duration(ms) * time.Millisecond, Decision: d}); err != nil {
				t.Fatal(err)
			}
		}
		return p
	}
	// The second router began 10 ms later: its decisions are at 110, 150 and 410 ms.
	recordings := [][]byte{record(start, 50, 100, 105, 600), record(start.Add(10*time.Millisecond), 45, 100, 140, 400)}
	b := NewBlindness()
	read := func(i int) *trace.Reader {
		r, err := trace.NewReader(bytes.NewReader(recordings[i]), "t", trace.Options{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(r.Close)
		b.Begin(i, r.Header())
		return r
	}
	for i := range recordings {
		for rec, err := range read(i).All() {
			if err != nil {
				t.Fatal(err)
			}
			b.Note(rec)
		}
	}
	for i := range recordings {
		if err := b.Judge(t.Context(), read(i), 0, 0); err != nil {
			t.Fatal(err)
		}
	}
	// At 110 ms both choices of the other router, at 100 and 105 ms, are unseen. At 150 ms the
	// known work is 45 ms old: that of 105 ms is just in it.
	got := *b.Report()
	regret, zero, unit := TimesRegret{Decisions: 2, Otherwise: got.Otherwise, Regret: got.Regret, Greatest: got.Greatest}, got.ByTimes, "taken another rank,"
	if costs != nil {
		regret, zero, unit = zero, TimesRegret{Otherwise: got.Otherwise, Regret: got.Regret, Greatest: got.Greatest}, "taken another rank by its times"
	}
	if got.Decisions != 6 || got.Blind != 2 || got.Unseen != 3 || regret.Decisions != 2 || regret.Otherwise != 2 || !(regret.Greatest > 0) || !(regret.Regret > regret.Greatest) || zero != (TimesRegret{}) {
		t.Errorf("%+v", got)
	}
	var text strings.Builder
	if err := got.Text(&text); err != nil || !strings.Contains(text.String(), "33.33% of 6 decisions") || strings.Count(text.String(), "33.33% would have "+unit) != 1 || strings.Count(text.String(), "\n") != 2 {
		t.Errorf("%v, %s", err, text.String())
	}
}
