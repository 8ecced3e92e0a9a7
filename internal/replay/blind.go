package replay

import (
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/route"
)

// BlindReport is what routers of one fleet did not see of each other's decisions, by their
// recordings, and what that cost.
type BlindReport struct {
	Decisions uint64 `json:"decisions"`
	// Blind are those whose rank another router had just chosen, too, unseen; Unseen are these
	// choices.
	Blind  uint64 `json:"blind_decisions"`
	Unseen uint64 `json:"unseen_choices"`
	// Otherwise are decisions that would have taken another rank, had they seen all choices.
	Otherwise uint64 `json:"otherwise"`
	// Regret is by how much the ranks that they took cost more than the best ones, with all
	// choices seen, in the unit of the policy's costs; Greatest is that of one decision. ByTimes
	// are those of decisions by times.
	Regret   float64     `json:"regret"`
	Greatest float64     `json:"greatest_regret"`
	ByTimes  TimesRegret `json:"by_times"`
}

// TimesRegret is the regret of decisions by times, in milliseconds of all the requests that they
// concern.
type TimesRegret struct {
	// Decisions had unseen choices among their ranks.
	Decisions uint64  `json:"decisions"`
	Otherwise uint64  `json:"otherwise"`
	Regret    float64 `json:"regret_ms"`
	Greatest  float64 `json:"greatest_regret_ms"`
}

// Blindness merges the recordings of several routers. Note takes all records of each
// recording; then Judge takes each recording again.
type Blindness struct {
	router int
	start  time.Time
	by     map[string][]choice // by rank, of all routers
	sorted bool
	m      maker
	report BlindReport
}

// choice is a rank that a router chose at a time, with the work that it gave it.
type choice struct {
	router         int
	at             time.Time
	tokens, blocks int
}

// NewBlindness merges nothing yet.
func NewBlindness() *Blindness { return &Blindness{router: -1, by: map[string][]choice{}} }

// Begin begins the recording of a router, by its header.
func (b *Blindness) Begin(router int, h trace.Header) { b.router, b.start = router, h.Start }

// Note takes a record.
func (b *Blindness) Note(rec *trace.Record) {
	d := rec.Decision
	if d == nil || d.Error != "" {
		return
	}
	at, isl, unit := b.start.Add(rec.Time), d.Input.Facts.ISL, max(1, d.Input.Decode.BlockSize)
	blocks := (isl + unit - 1) / unit
	if d.PrefillRank == "" {
		b.by[d.DecodeRank] = append(b.by[d.DecodeRank], choice{b.router, at, d.EffISL, blocks})
		return
	}
	b.by[d.DecodeRank] = append(b.by[d.DecodeRank], choice{b.router, at, 0, blocks})
	b.by[d.PrefillRank] = append(b.by[d.PrefillRank], choice{b.router, at, d.EffISL, 0})
}

// unseen are the choices of other routers for a candidate that are not in its figures, since
// they are younger than what the router knew.
func (b *Blindness) unseen(c *decision.Candidate, at time.Time) []choice {
	if c.SiblingAgeMS == 0 {
		return nil
	}
	list := b.by[c.Rank]
	first := func(at time.Time) int {
		i, _ := slices.BinarySearchFunc(list, at, func(c choice, at time.Time) int { return c.at.Compare(at) })
		return i
	}
	return list[first(at.Add(-time.Duration(c.SiblingAgeMS)*time.Millisecond)):first(at)]
}

// Judge judges the decisions of a recording that Begin began again, from a time in it until
// another, 0 for its end.
func (b *Blindness) Judge(ctx context.Context, r *trace.Reader, from, to time.Duration) error {
	if !b.sorted {
		for _, list := range b.by {
			slices.SortFunc(list, func(x, y choice) int { return x.at.Compare(y.at) })
		}
		b.sorted = true
	}
	for rec, err := range r.All() {
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return err
		}
		if to > 0 && rec.Time > to {
			break
		}
		if d := rec.Decision; d != nil && d.Unverifiable == "" && d.Error == "" && rec.Time >= from {
			b.judge(d, b.start.Add(rec.Time))
		}
	}
	return nil
}

func (b *Blindness) judge(d *trace.Decision, at time.Time) {
	b.report.Decisions++
	b.m.load(d)
	in, taken := &b.m.in.Decode, d.DecodeRank
	if d.Path == string(route.Remote) {
		in, taken = &b.m.in.Prefill, d.PrefillRank
	}
	timed := in.Policy == selector.KV && b.m.in.Costs.Timed()
	added := false
	for i := range in.Candidates {
		c := &in.Candidates[i]
		n := uint64(0)
		for _, u := range b.unseen(c, at) {
			if u.router == b.router {
				continue
			}
			n++
			added = true
			c.ActiveRequests++
			c.PrefillTokens += u.tokens
			c.FreshTokens += u.tokens
			c.DecodeBlocks += u.blocks
		}
		if c.Rank == taken && n > 0 {
			b.report.Blind++
			b.report.Unseen += n
		}
	}
	if !added {
		return
	}
	if timed {
		b.judgeTimes(in, taken)
		return
	}
	phase := *in
	if in == &b.m.in.Decode {
		phase = b.m.in.DecodePhase()
	}
	phase.Siblings, phase.Limit = nil, 0
	var out selector.Ranking
	selector.Pick(&phase, &out)
	best, ok := out.Best()
	i := slices.IndexFunc(phase.Candidates, func(c decision.Candidate) bool { return c.Rank == taken })
	if !ok || i < 0 {
		return
	}
	if regret := phase.Candidates[i].Cost - phase.Candidates[best].Cost; regret > 0 {
		b.report.Otherwise++
		b.report.Regret += regret
		b.report.Greatest = max(b.report.Greatest, regret)
	}
}

// judgeTimes judges a decision by times, with all choices in its candidates. Their prices are made
// with the plan. Ranks that cost the same within what prices are sure of are as good.
func (b *Blindness) judgeTimes(in *selector.Input, taken string) {
	t := &b.report.ByTimes
	t.Decisions++
	for _, phase := range []*selector.Input{&b.m.in.Decode, &b.m.in.Prefill} {
		phase.Siblings, phase.Limit = nil, 0
	}
	ranking := &b.m.decide().Decode
	if in == &b.m.in.Prefill {
		ranking = &b.m.plan.Prefill
	}
	i := slices.IndexFunc(in.Candidates, func(c decision.Candidate) bool { return c.Rank == taken })
	if !ranking.InTime || !slices.Contains(ranking.Order, i) {
		return
	}
	best := in.Candidates[i].Cost
	for _, k := range ranking.Order {
		best = min(best, in.Candidates[k].Cost)
	}
	if cost := in.Candidates[i].Cost; cost > b.m.in.Costs.Equal(best) {
		t.Otherwise++
		t.Regret += cost - best
		t.Greatest = max(t.Greatest, cost-best)
	}
}

// Report is what was found.
func (b *Blindness) Report() *BlindReport { return &b.report }

// Text writes the report for people.
func (r *BlindReport) Text(out io.Writer) error {
	share := func(n uint64) string {
		if r.Decisions == 0 {
			return "-"
		}
		return fmt.Sprintf("%.2f%%", 100*float64(n)/float64(r.Decisions))
	}
	t := &r.ByTimes
	_, err := printable.Fprintf(out, "BLIND   %s of %d decisions took a rank that another router had just chosen unseen (%d choices)\n", share(r.Blind), r.Decisions, r.Unseen)
	if err == nil && (r.Otherwise > 0 || t.Otherwise == 0) {
		_, err = printable.Fprintf(out, "        %s would have taken another rank, had they seen all choices; regret %.4g in sum, %.4g at most\n", share(r.Otherwise), r.Regret, r.Greatest)
	}
	if err == nil && t.Decisions > 0 {
		_, err = printable.Fprintf(out, "        %s would have taken another rank by its times, had they seen all choices; regret %.4g ms in sum, %.4g ms at most\n", share(t.Otherwise), t.Regret, t.Greatest)
	}
	return err
}
