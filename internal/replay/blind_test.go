package replay

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestBlindness: of two routers that put prompts on one rank shortly one after the other, the
// second one is blind if what it knew is older, and not if it knew, or if it was its own choice;
// where it would have chosen otherwise, what that costs is the difference of the costs.
func TestBlindness(t *testing.T) {
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
			in := &decide.Input{Model: "m", Facts: api.Facts{Kind: api.Completion, ISL: 1600, Source: route.FromIDs}}
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
	got := b.Report()
	if got.Decisions != 6 || got.Blind != 2 || got.Unseen != 3 || got.Otherwise != 2 || !(got.Greatest > 0) || !(got.Regret > got.Greatest) {
		t.Errorf("%+v", got)
	}
	var text strings.Builder
	if err := got.Text(&text); err != nil || !strings.Contains(text.String(), "33.33% of 6 decisions") {
		t.Errorf("%v, %s", err, text.String())
	}
}
