package replay

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/route"
)

// VerifyReport says how many recorded decisions come out the same.
type VerifyReport struct {
	Decisions uint64 `json:"decisions"`
	// Equal came out the same: Proven from the caches of the replay, Unproven
	// with recorded figures in the place of what the recording does not have.
	Equal    uint64 `json:"equal"`
	Proven   uint64 `json:"proven"`
	Unproven uint64 `json:"unproven"`
	// InputsDiffer counts decisions that saw other caches than the replay has,
	// whether or not they came out the same.
	InputsDiffer uint64 `json:"inputs_differ"`
	// Raced counts decisions that were made while events of their ranks were
	// being applied, and come out the same with one of the states of that time.
	Raced uint64 `json:"raced"`
	// Unknown counts decisions with caches that cannot be known, because the recording began
	// after them or does not have its end; they take the recorded figures.
	Unknown uint64 `json:"partly_unknown"`
	// ByNames counts decisions with overlaps that the router may have found by the engine's
	// names of the prompt's blocks, and the recording lacks what names are computed from; they
	// take the recorded overlaps.
	ByNames uint64 `json:"found_by_names"`
	// TieBreaks, OtherRules and Real are the divergences: another rank of equal
	// cost, what a router with other rules decided (or one that explored), and everything
	// else.
	TieBreaks  uint64 `json:"tie_breaks"`
	OtherRules uint64 `json:"other_rules"`
	Real       uint64 `json:"real"`
	// Unverifiable decisions cannot be made again, so they are neither equal nor
	// divergent: the recording lacks what they depend on, or has what this reader
	// does not know. FirstLack says what, of the first of them.
	Unverifiable uint64 `json:"unverifiable"`
	FirstLack    string `json:"first_unverifiable,omitempty"`
	// Cut says that the trace ends within a line: what was recorded after it is not
	// in these figures.
	Cut bool `json:"cut,omitempty"`
	// First is the first divergence, FirstInput the first decision with other inputs,
	// FirstTaken the first that took recorded figures, with the reasons for that; nil without
	// one.
	First      *Divergence `json:"first_divergence,omitempty"`
	FirstInput *Divergence `json:"first_other_input,omitempty"`
	FirstTaken *Divergence `json:"first_recorded_figures,omitempty"`

	// RecordedHit and ReplayedHit are the shares of prompt tokens found in the
	// chosen ranks' caches.
	RecordedHit float64 `json:"recorded_hit_ratio"`
	ReplayedHit float64 `json:"replayed_hit_ratio"`

	prompt, recorded, replayed uint64
}

// Match is the share of decisions that were proven to come out the same, 1 for
// none at all. What took recorded figures has proven nothing.
func (r *VerifyReport) Match() float64 {
	if r.Decisions == 0 {
		return 1
	}
	return float64(r.Proven) / float64(r.Decisions)
}

// Divergent counts the decisions that come out differently.
func (r *VerifyReport) Divergent() uint64 { return r.TieBreaks + r.OtherRules + r.Real }

// Divergence is one decision that comes out differently, or could, and why.
type Divergence struct {
	Line    int64         `json:"line"`
	Time    time.Duration `json:"t_ns"`
	ID      string        `json:"decision"`
	Request string        `json:"request_id,omitempty"`
	// Recorded and Replayed are "path rank" with the cost of the decode rank.
	Recorded string `json:"recorded"`
	Replayed string `json:"replayed"`
	// Because are the reasons, the best first.
	Because []string `json:"because"`
}

// Bounds of a Verifier.
const (
	// horizon is how long events are held back for decisions that were made
	// before them and recorded after them.
	horizon     = 500 * time.Millisecond
	maxHeld     = 1 << 15
	maxHeldSize = 64 << 20
	maxSeen     = 64
)

// Verifier plays a trace and makes its decisions again.
//
// A decision is recorded after it was made, and batches are applied by others
// meanwhile. The trace bounds what it can have seen: all that was applied when
// the request came, nothing that arrived after the decision was recorded.
// Between the two every state of a rank's entries counts as reproduced.
type Verifier struct {
	p      *Player
	m      *maker
	q      kvindex.Query
	report VerifyReport

	held   []*heldRecord
	size   int
	free   []*heldRecord
	open   []*openDecision
	newest time.Duration
	ended  bool // the recording's last record was played
	// earlier are the overlaps of first attempts, which later ones share.
	earlier map[string]*trace.Decision
	order   []string
}

type heldRecord struct {
	rec  trace.Record
	own  []byte
	hash []uint64
	dec  *openDecision
}

// openDecision is a decision whose possible states are being gathered.
type openDecision struct {
	rec     trace.Record
	d       *trace.Decision
	prompt  kvgroup.Prompt // empty before the first look
	began   time.Duration
	passed  bool // its own place in the trace was reached
	started bool
	seen    map[place]*seen
}

// place is a candidate of a decision.
type place struct {
	phase int // 0 decode, 1 prefill
	rank  string
}

// seen are the figures that a rank had while a decision may have been made.
type seen struct {
	// overlap are pairs of states of which the second one follows the first one, or is
	// the same: a reader may find some blocks of a step. resident are the least and the
	// most blocks of all.
	overlap  [][2]prefix
	resident [2]int
	newest   prefix
	// at are the figures at the decision's own place.
	overlapAt  prefix
	residentAt int
	// partial says that what the rank's cache began with was not known then, though it may
	// have been cleared since.
	partial bool
	// named says that more may have been found by the engine's names than is known here.
	named bool
}

// prefix is what a rank holds of a prompt, in the phase's blocks.
type prefix struct {
	blocks int // on its device
	route.Tiers
}

func prefixOf(c *decision.Candidate) prefix { return prefix{c.OverlapBlocks, c.Tiers} }

// String is the blocks of the device, and those of other tiers where there are any.
func (p prefix) String() string {
	s := strconv.Itoa(p.blocks)
	if p.Tiers != (route.Tiers{}) {
		s += fmt.Sprintf(" (then %d cpu, %d disk, %d remote)", p.CPU, p.Disk, p.Remote)
	}
	return s
}

// between reports whether it can be found while a rank goes from one of a pair to the
// other.
func (p prefix) between(pair [2]prefix) bool {
	a, b := pair[0], pair[1]
	in := func(n, x, y int) bool { return min(x, y) <= n && n <= max(x, y) }
	return in(p.blocks, a.blocks, b.blocks) && in(int(p.CPU), int(a.CPU), int(b.CPU)) &&
		in(int(p.Disk), int(a.Disk), int(b.Disk)) && in(int(p.Remote), int(a.Remote), int(b.Remote))
}

// more reports whether it is longer than another.
func (p prefix) more(than prefix) bool {
	return p.blocks > than.blocks || p.length() > than.length()
}

func (p prefix) length() int { return p.blocks + int(p.CPU+p.Disk+p.Remote) }

// NewVerifier verifies with a player that has played nothing yet.
func NewVerifier(p *Player) *Verifier {
	return &Verifier{p: p, m: new(maker), earlier: map[string]*trace.Decision{}}
}

// Play takes the next record.
func (v *Verifier) Play(rec *trace.Record) error {
	h := v.take(rec)
	v.newest = max(v.newest, rec.Time)
	v.ended = v.ended || rec.Kind == trace.KindEnd
	if rec.Kind == trace.KindDecision && rec.Decision != nil {
		d := rec.Decision
		o := &openDecision{rec: *rec, d: d, began: time.Duration(d.BeganUS) * time.Microsecond, seen: map[place]*seen{}}
		h.dec = o
		v.open = append(v.open, o)
	}
	v.held = append(v.held, h)
	for len(v.held) > 0 && (v.newest-v.held[0].rec.Time > horizon || len(v.held) > maxHeld || v.size > maxHeldSize) {
		if err := v.step(); err != nil {
			return err
		}
	}
	return nil
}

// take copies a record, whose slices are the reader's.
func (v *Verifier) take(rec *trace.Record) *heldRecord {
	var h *heldRecord
	if n := len(v.free); n > 0 {
		h, v.free = v.free[n-1], v.free[:n-1]
	} else {
		h = new(heldRecord)
	}
	h.rec, h.dec = *rec, nil
	h.own = append(h.own[:0], rec.Batch.Payload...)
	h.rec.Batch.Payload = h.own
	h.hash = append(append(h.hash[:0], rec.Event.Names...), rec.Event.Locals...)
	h.rec.Event.Names = h.hash[:len(rec.Event.Names)]
	h.rec.Event.Locals = h.hash[len(rec.Event.Names):]
	v.size += len(h.own) + 8*len(h.hash) + 256
	return h
}

// step plays the oldest record that is held.
func (v *Verifier) step() error {
	h := v.held[0]
	v.held = v.held[1:]
	v.size -= len(h.own) + 8*len(h.hash) + 256
	v.judgeUntil(h.rec.Time)
	if h.dec != nil {
		v.start(h.dec)
		v.look(h.dec, "", false)
		h.dec.passed = true
		return nil
	}
	switch h.rec.Kind {
	case trace.KindBatch, trace.KindClear, trace.KindFeed, trace.KindEvent, trace.KindRank, trace.KindDropped:
	default:
		v.free = append(v.free, h)
		return nil
	}
	// What the feed says of itself can be read a little before it is recorded.
	received := h.rec.Time - 10*time.Millisecond
	if h.rec.Kind == trace.KindBatch {
		received = h.rec.Batch.Received
	}
	for _, o := range v.open {
		if h.rec.Time >= o.began {
			v.start(o)
		}
	}
	may := func(o *openDecision) bool { return o.started && (!o.passed || received <= o.rec.Time) }
	look := func() {
		for _, o := range v.open {
			if may(o) {
				v.look(o, h.rec.Rank, h.rec.Kind == trace.KindBatch)
			}
		}
	}
	if slices.ContainsFunc(v.open, may) {
		v.p.seen = look
	}
	err := v.p.Play(&h.rec)
	v.p.seen = nil
	if err != nil {
		return err
	}
	look()
	if len(v.free) < 1024 {
		v.free = append(v.free, h)
	}
	return nil
}

// start notes the figures before the first event that a decision may or may
// not have seen.
func (v *Verifier) start(o *openDecision) {
	if o.started {
		return
	}
	o.started = true
	v.look(o, "", false)
}

// look adds the present figures of one rank, or of all; of a step of its batch if so said.
func (v *Verifier) look(o *openDecision, rank string, step bool) {
	asked := false
	for n, phase := range []*selector.Input{&o.d.Input.Decode, &o.d.Input.Prefill} {
		for i := range phase.Candidates {
			c := &phase.Candidates[i]
			if rank != "" && c.Rank != rank {
				continue
			}
			r := v.p.ranks[c.Rank]
			if r == nil || !r.fed {
				continue
			}
			if !asked {
				v.p.Overlap(o.d.Locals, &v.q)
				if o.prompt.Seq == nil {
					o.prompt = promptOf(o.d)
				}
				asked = true
			}
			k := place{n, c.Rank}
			s := o.seen[k]
			overlap := v.overlap(o, r, phase)
			stats, _ := v.p.index.RankStats(r.slot)
			resident := int(stats.Blocks)
			if s == nil {
				s = &seen{newest: overlap, resident: [2]int{resident, resident}}
				o.seen[k] = s
			}
			s.add(overlap, resident, step, !o.passed)
			s.partial = s.partial || r.partial
			// Of a rank whose batches are missing it is not known what names would find.
			s.named = s.named || o.prompt.Text == nil && r.byNames() && r.gap == nil
		}
	}
}

func (s *seen) add(overlap prefix, resident int, step, here bool) {
	pair := [2]prefix{overlap, overlap}
	if step {
		pair[0] = s.newest
	}
	if !slices.Contains(s.overlap, pair) && len(s.overlap) < maxSeen {
		s.overlap = append(s.overlap, pair)
	}
	s.resident = [2]int{min(s.resident[0], resident), max(s.resident[1], resident)}
	s.newest = overlap
	if here {
		s.overlapAt, s.residentAt = overlap, resident
	}
}

// overlap is a rank's overlap in the phase's blocks, as the router counts it.
func (v *Verifier) overlap(o *openDecision, r *playRank, p *selector.Input) prefix {
	if r.size != o.d.BlockSize || o.d.Approximate {
		return prefix{}
	}
	n, beyond := r.usable(&v.q, o.prompt)
	unit := max(p.BlockSize, 1)
	return prefix{n / unit, beyond.Scale(1, unit)}
}

// judgeUntil judges the decisions that are so long ago at a time that nothing to
// come arrived before they were made.
func (v *Verifier) judgeUntil(now time.Duration) {
	kept := v.open[:0]
	for _, o := range v.open {
		if !o.passed || now-o.rec.Time <= horizon/2 {
			kept = append(kept, o)
			continue
		}
		v.judge(o)
	}
	clear(v.open[len(kept):])
	v.open = kept
}

// Finish plays what is still held and returns the report.
func (v *Verifier) Finish() (*VerifyReport, error) {
	for len(v.held) > 0 {
		if err := v.step(); err != nil {
			return nil, err
		}
	}
	for _, o := range v.open {
		v.judge(o)
	}
	v.open = nil
	if v.report.prompt > 0 {
		v.report.RecordedHit = float64(v.report.recorded) / float64(v.report.prompt)
		v.report.ReplayedHit = float64(v.report.replayed) / float64(v.report.prompt)
	}
	return &v.report, nil
}

// judge makes a decision again and compares.
func (v *Verifier) judge(o *openDecision) {
	d := o.d
	if d.Unverifiable != "" {
		v.lacks(d, d.Unverifiable)
		return
	}
	v.m.load(d)
	first := v.earlier[d.ID]
	if d.Attempt <= 1 {
		v.remember(d)
		first = nil
	}
	// A batch is recorded a little after it was applied: the last ones may be in the next part.
	lost := !v.ended && v.newest-o.rec.Time <= horizon/2
	var f findings
	for n, in := range []*selector.Input{&v.m.in.Decode, &v.m.in.Prefill} {
		for i := range in.Candidates {
			c := in.Candidates[i] // as recorded
			s := o.seen[place{n, c.Rank}]
			r := v.p.ranks[c.Rank]
			if s == nil || r == nil || d.Approximate || r.size != d.BlockSize {
				continue // a prediction, or blocks of another size: as recorded
			}
			now := &in.Candidates[i]
			partial := s.partial || r.partial // its first batch may have come after the decision
			switch {
			case s.residentAt == c.ResidentBlocks:
			case s.resident[0] <= c.ResidentBlocks && c.ResidentBlocks <= s.resident[1]:
				f.raced = true
			case partial:
				f.unknown = true
				f.taken = append(f.taken, residents(&c, s)+before)
			case lost:
				f.unknown = true
				f.taken = append(f.taken, residents(&c, s)+after)
			default:
				now.ResidentBlocks = s.residentAt
				f.residents = append(f.residents, residents(&c, s))
			}
			switch {
			case s.overlapAt == prefixOf(&c):
			case slices.ContainsFunc(s.overlap, prefixOf(&c).between), first != nil && sameOverlap(first, &c):
				f.raced = true
			case partial && prefixOf(&c).more(s.overlapAt):
				f.unknown = true
				f.taken = append(f.taken, overlaps(&c, s)+before)
			case s.named && s.foundMore(&c) && c.OverlapBlocks*max(in.BlockSize, 1) <= len(d.Locals)*d.BlockSize:
				f.named = true
				f.taken = append(f.taken, overlaps(&c, s)+byNames)
			case lost:
				f.unknown = true
				f.taken = append(f.taken, overlaps(&c, s)+after)
			default:
				now.OverlapBlocks, now.Tiers = s.overlapAt.blocks, s.overlapAt.Tiers
				f.why = append(f.why, v.because(r, &c, s))
			}
		}
	}
	plan := v.m.decide()
	v.count(o, plan, &f)
}

// findings are what a decision's recorded inputs are beside the replayed ones.
type findings struct {
	raced, unknown, named bool
	// why are the overlaps that differ, taken the figures that were taken as recorded;
	// residents are those sizes of caches that differ, which break ties only.
	why, taken, residents []string
}

// Why a recorded figure is taken.
const (
	before  = "; what the rank's cache began with is not in the recording"
	after   = "; what it saw may be recorded after the end of this file"
	byNames = "; more may be found by the engine's names of the prompt's blocks, which this recording does not have"
)

// foundMore reports whether a candidate differs from what the rank had by more blocks on
// the device only: names find no others.
func (s *seen) foundMore(c *decision.Candidate) bool {
	return c.Tiers == s.overlapAt.Tiers && c.OverlapBlocks > s.overlapAt.blocks
}

func overlaps(c *decision.Candidate, s *seen) string {
	return fmt.Sprintf("%s: recorded overlap %v blocks, replayed %v", c.Rank, prefixOf(c), s.overlapAt)
}

func residents(c *decision.Candidate, s *seen) string {
	return fmt.Sprintf("%s: recorded %d blocks held, replayed %d", c.Rank, c.ResidentBlocks, s.residentAt)
}

// lacks counts a decision that cannot be made again.
func (v *Verifier) lacks(d *trace.Decision, why string) {
	rep := &v.report
	rep.Decisions++
	if rep.Unverifiable++; rep.FirstLack == "" {
		rep.FirstLack = fmt.Sprintf("%s: %s", d.ID, why)
	}
}

func (v *Verifier) remember(d *trace.Decision) {
	if len(v.order) >= 1024 {
		delete(v.earlier, v.order[0])
		v.order = v.order[1:]
	}
	v.earlier[d.ID] = d
	v.order = append(v.order, d.ID)
}

// sameOverlap reports whether an earlier attempt saw the candidate's overlap.
func sameOverlap(d *trace.Decision, c *decision.Candidate) bool {
	for _, p := range []*selector.Input{&d.Input.Decode, &d.Input.Prefill} {
		for i := range p.Candidates {
			if k := &p.Candidates[i]; k.Rank == c.Rank {
				return prefixOf(k) == prefixOf(c)
			}
		}
	}
	return false
}

// because says why a rank's replayed overlap is another than the recorded one.
func (v *Verifier) because(r *playRank, c *decision.Candidate, s *seen) string {
	text := overlaps(c, s)
	switch {
	case r.gap != nil && r.gap.from == r.gap.to:
		return text + fmt.Sprintf("; batch %d of this rank is missing from the trace (between lines %d and %d)", r.gap.from, r.gap.after, r.gap.atLine)
	case r.gap != nil:
		return text + fmt.Sprintf("; batches %d to %d of this rank are missing from the trace (between lines %d and %d)", r.gap.from, r.gap.to, r.gap.after, r.gap.atLine)
	case v.p.counts.Dropped > 0:
		return text + fmt.Sprintf("; %d records were dropped while recording", v.p.counts.Dropped)
	case !r.trustKnown:
		return text + "; the trace does not say whether the router trusted this rank's feed"
	case r.lastLine > 0:
		return text + fmt.Sprintf("; the rank's entries last changed at line %d", r.lastLine)
	}
	return text
}

func (v *Verifier) count(o *openDecision, plan *decide.Plan, f *findings) {
	d, rep := o.d, &v.report
	now := asDecided(&v.m.in, plan)
	rep.Decisions++
	rep.prompt += uint64(max(d.Input.Facts.ISL, 0))
	rep.recorded += uint64(max(d.Cached, 0))
	rep.replayed += uint64(max(now.Cached, 0))
	// The cached tokens are a consequence; path, ranks and error are what was done.
	equal := d.Path == now.Path && d.DecodeRank == now.DecodeRank && d.PrefillRank == now.PrefillRank && (d.Error == "") == (now.Error == "")
	same := equal
	if len(f.why) == 0 && d.Rules == decide.Rules {
		same = equal && d.Reason == now.Reason && d.Costs == now.Costs && v.sameCosts(d)
	}
	divergence := func(because []string) *Divergence {
		div := &Divergence{
			Line: o.rec.Line, Time: o.rec.Time, ID: d.ID, Request: d.RequestID, Because: because, Recorded: describe(d), Replayed: describe(now),
		}
		if equal && !same {
			div.Recorded += ", " + d.Reason
			div.Replayed += ", " + now.Reason
		}
		return div
	}
	if f.unknown {
		rep.Unknown++
	}
	if f.named {
		rep.ByNames++
	}
	if len(f.taken) > 0 && rep.FirstTaken == nil {
		rep.FirstTaken = divergence(f.taken)
	}
	if len(f.why) > 0 {
		rep.InputsDiffer++
		if rep.FirstInput == nil {
			rep.FirstInput = divergence(f.why)
		}
	}
	if same {
		rep.Equal++
		if len(f.taken) > 0 {
			rep.Unproven++
		} else {
			rep.Proven++
		}
		if f.raced {
			rep.Raced++
		}
		return
	}
	if rep.First == nil {
		rep.First = divergence(v.cause(d, f))
	}
	switch {
	case len(f.why) == 0 && (d.Explore || d.Rules != decide.Rules):
		rep.OtherRules++
	case !equal && d.Path == now.Path && d.PrefillRank == now.PrefillRank && v.sameCost(plan, d.DecodeRank):
		rep.TieBreaks++
	default:
		rep.Real++
	}
}

// cause says why a decision comes out differently. Figures that were taken as recorded are
// none: they are the same on both sides.
func (v *Verifier) cause(d *trace.Decision, f *findings) []string {
	const otherwise = "this dynctl decides otherwise than the one that recorded (another version or policy)"
	switch {
	case len(f.why) > 0:
		return f.why
	case d.Explore:
		return []string{"the router that recorded had drawn the request to take the dearer path (routing.explore), which this dynctl does not do"}
	case d.Rules != decide.Rules:
		return []string{fmt.Sprintf("the router that recorded had rules %d, this dynctl has %d", d.Rules, decide.Rules)}
	case len(f.residents) == 0:
		return []string{"the inputs are the same: " + otherwise}
	case v.sameCosts(d):
		return f.residents
	}
	return append([]string{otherwise}, f.residents...)
}

func describe(d *trace.Decision) string {
	switch {
	case d.Error != "":
		return "error: " + d.Error
	case d.PrefillRank != "":
		return fmt.Sprintf("%s %s, prefill on %s, cost %.4g", d.Path, d.DecodeRank, d.PrefillRank, costOf(d))
	}
	return fmt.Sprintf("%s %s, cost %.4g", d.Path, d.DecodeRank, costOf(d))
}

// sameCosts reports whether every candidate costs what was recorded, to the last
// bit.
func (v *Verifier) sameCosts(d *trace.Decision) bool {
	same := func(a, b decision.Candidate) bool { return a.Cost == b.Cost }
	return slices.EqualFunc(d.Input.Decode.Candidates, v.m.in.Decode.Candidates, same) &&
		slices.EqualFunc(d.Input.Prefill.Candidates, v.m.in.Prefill.Candidates, same)
}

// sameCost reports whether the recorded rank costs as much as the chosen one.
func (v *Verifier) sameCost(plan *decide.Plan, rank string) bool {
	if plan.DecodeIndex < 0 || plan.Decode.Verdict != selector.Chosen {
		return false
	}
	list := v.m.in.Decode.Candidates
	i := slices.IndexFunc(list, func(c decision.Candidate) bool { return c.Rank == rank })
	return i >= 0 && list[i].Cost == list[plan.DecodeIndex].Cost
}
