package decide

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/affinity"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/placement/siblings"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// Options are the operator's part of decisions, of one configuration revision.
type Options struct {
	// Decode and Prefill are the policies of the phases.
	Decode, Prefill selector.Policy
	Weights         selector.Weights
	Busy            selector.Busy
	Rule            Rule
	// Attempts is how many there may be of one request. LocalWithoutParams says
	// that the decode rank prefills alone when a prefill gave no transfer
	// parameters.
	Attempts           int
	LocalWithoutParams bool
	// Continuations is how often the rest of one stream may come from another engine.
	Continuations int
}

// Blind reports whether no decision looks at caches: no policy, limit, gate,
// threshold or cost does.
func (s *Options) Blind() bool {
	return !s.Decode.LooksAtCaches() && !s.Prefill.LooksAtCaches() && s.Busy.PrefillTokens == 0 && s.Rule.PrefillGate == 0 &&
		!s.Rule.Auto && (s.Rule.Threshold <= 0 || s.Rule.On == OnISL)
}

// Priced reports whether decisions depend on the cost model.
func (s *Options) Priced() bool {
	return s.Rule.Auto || s.Timed()
}

// Timed reports whether a policy ranks by times, where they are known.
func (s *Options) Timed() bool { return s.Decode == selector.KV || s.Prefill == selector.KV }

// Criteria are what a decision needs to know of a request, except for its prompt's blocks.
type Criteria struct {
	// Model is as in Input.
	Model string
	Facts api.Facts
	Force route.Force
	// Costs is the cost model; nil while too little is known.
	Costs *cost.Model
	// Session is selector.HashSession of the session's name; 0 for none.
	Session uint64
	Pin     Pin
	// Chances are those of the decode and of the prefill phase. They are the
	// caller's, once for all attempts: a retry continues from where the request
	// began, and shifts no other request's turn.
	Chances [2]Chance
	// Siblings is what is known of other routers, for this decision; nil for nothing.
	Siblings *siblings.Seen
	// Waited says that the request has waited for a place: its limits are nearer than
	// its costs say.
	Waited bool
}

// Pin is the workers and the ranks that the client requires.
type Pin struct {
	// Decode and Prefill are the workers' names; empty for any.
	Decode, Prefill string
	// HasRank reports that Rank, the number of a data-parallel rank of the decode
	// worker, is required; HasPrefillRank and PrefillRank are the same for prefill.
	HasRank, HasPrefillRank bool
	Rank, PrefillRank       int
}

// rank is the required rank of a phase; has is false where any will do.
func (p *Pin) rank(phase route.Phase) (n int, has bool) {
	if phase == route.Prefill {
		return p.PrefillRank, p.HasPrefillRank
	}
	return p.Rank, p.HasRank
}

// worker is the name of a phase's worker.
func (p *Pin) worker(phase route.Phase) string {
	if phase == route.Prefill {
		return p.Prefill
	}
	return p.Decode
}

// Chance is what a choice depends on in addition to what is known: the request's turn in
// a phase's round-robin sequence, and its random number.
type Chance struct{ Turn, Draw uint64 }

// FleetView is what only the caller can see of the fleet. Health and the engines' own
// load stand in the workers.
type FleetView interface {
	// Overlap is how many leading tokens of the prompt a rank is taken to hold on its
	// device. Where its other tiers continue from there, beyond gets what they hold, in tokens.
	Overlap(w *workers.Worker, k *workers.Rank, beyond *route.Tiers) (tokens int)
	// Resident is how many blocks a rank holds, of whatever prompts.
	Resident(k *workers.Rank) int
	// Ledger is the account of the work that was given to ranks.
	Ledger() *ledger.Ledger
	// Homes is where a session with a model is; see affinity.Table. It is called for policy
	// session only.
	Homes(model string, session uint64) affinity.Homes
}

// Effects are what a decision requires of its caller. A dry run drops them.
type Effects struct {
	// Readmit are ejected or silent workers that were candidates, because a phase has no
	// other worker.
	Readmit []*workers.Worker
	// ReturnTurn says that the request has no use for its turn in the prefill
	// phase: it is the next request's, unless that has one already.
	ReturnTurn bool
	// Homes is where the plan sends the session, for affinity.Table's Move; empty for a
	// phase whose policy is not session, or that the plan does not use.
	Homes affinity.Homes
}

// Run is one request with all its attempts. Begin reuses its memory, or Compact and
// Release give it back.
type Run struct {
	Criteria Criteria
	// In and Plan are the newest decision's.
	In      Input
	Plan    Plan
	History attempt.History
	// Attempt is the number of the newest decision, from 1 on. The history counts
	// what was tried.
	Attempt int
	// After is what says what follows a failure; a test may put a bug there.
	After func(*attempt.History, attempt.Allowance, []*workers.State) attempt.Next

	progress

	memory *memory         // nil while the run has none
	chosen [2]workers.Peer // of a compacted plan, decode and prefill
}

// progress is what a run knows of its request besides.
type progress struct {
	// The settings and workers of the newest decision.
	settings *Options
	workers  []*workers.Worker
	// gaveUp is why remote prefill was given up in this request; empty if it was
	// not.
	gaveUp attempt.Reason
	// forceBefore is the path that was required before remote prefill was given up.
	forceBefore route.Force
	// served says for which phases, decode and prefill, the newest decision has seen a worker
	// that is usable, or only ejected.
	served [2]bool
	// prompt is how many tokens the prompt has at least (promptOf). held says for which phases,
	// decode and prefill, the newest decision saw a worker that holds it, and long for which it
	// excluded workers whose windows are too small.
	prompt     int
	held, long [2]bool
}

// Begin begins another request.
func (r *Run) Begin(q Criteria) {
	r.History.Reset()
	r.reset()
	r.Criteria, r.Attempt, r.progress, r.chosen = q, 0, progress{}, [2]workers.Peer{}
}

// NextPlan makes the plan of the next attempt from the workers that serve the
// request's model. unit is the router's block in tokens. A phase whose workers are
// all kept out, some of them by nothing but their ejection, has those as
// candidates. Where that leaves the request without a plan, so have those that are kept
// out by nothing but their silence (see [workers.Condition.Silent]).
func (r *Run) NextPlan(s *Options, list []*workers.Worker, unit int, seen FleetView) (e Effects) {
	r.acquire()
	in, q := &r.In, &r.Criteria
	in.Rule, in.Model, in.Facts, in.Force, in.GaveUp, in.Costs = s.Rule, q.Model, q.Facts, q.Force, string(r.gaveUp), nil
	if s.Priced() {
		in.Costs = q.Costs
	}
	r.settings, r.workers, r.served, r.long, r.prompt = s, list, [2]bool{}, [2]bool{}, promptOf(&q.Facts)
	r.Attempt++
	var choice *selector.Siblings
	if q.Siblings != nil {
		choice = q.Siblings.Choice()
	}
	var homes affinity.Homes
	if q.Session != 0 && (s.Decode == selector.Session || s.Prefill == selector.Session) {
		homes = seen.Homes(q.Model, q.Session)
	}
	for _, p := range [...]struct {
		in     *selector.Input
		peers  *[]workers.Peer
		phase  route.Phase
		policy selector.Policy
		chance Chance
	}{
		{&in.Decode, &in.DecodePeers, route.Decode, s.Decode, q.Chances[0]},
		{&in.Prefill, &in.PrefillPeers, route.Prefill, s.Prefill, q.Chances[1]},
	} {
		*p.in = selector.Input{
			Phase: p.phase, Policy: p.policy, Weights: s.Weights, Busy: s.Busy, ISL: q.Facts.ISL, BlockSize: unit,
			SessionKey: q.Session, Draw: p.chance.Draw, Turn: p.chance.Turn, Candidates: p.in.Candidates,
			Siblings: choice, Limit: decision.Kept,
		}
		r.held[index(p.phase)] = r.holds(list, p.phase)
		if q.Session != 0 && p.policy == selector.Session {
			p.in.Home = cmp.Or(homes[index(p.phase)], selector.HomeNew)
		}
		if r.list(p.in, p.peers, list, seen, nil) {
			continue
		}
		r.bringBack(&e, p.in, p.peers, seen, ejected)
	}
	MakePlan(in, &r.Plan)
	silent := func(w *workers.Worker) bool { return w.State.Silent() }
	if errors.Is(r.Plan.Err, ErrNoDecode) && r.bringBack(&e, &in.Decode, &in.DecodePeers, seen, silent) {
		MakePlan(in, &r.Plan)
	}
	if errors.Is(r.Plan.Err, ErrNoPrefill) && r.bringBack(&e, &in.Prefill, &in.PrefillPeers, seen, silent) {
		MakePlan(in, &r.Plan)
	}
	e.ReturnTurn = r.Attempt == 1 && r.Plan.Path != route.Remote
	if r.Plan.Err == nil && in.Decode.Home != "" {
		e.Homes[0] = in.Decode.Candidates[r.Plan.DecodeIndex].Rank
	}
	if r.Plan.Path == route.Remote && in.Prefill.Home != "" {
		e.Homes[1] = in.Prefill.Candidates[r.Plan.PrefillIndex].Rank
	}
	return e
}

// Move has a table note where the newest decision sends its session; e is what NextPlan
// returned.
func (r *Run) Move(e *Effects, table *affinity.Table, now time.Time) {
	if e.Homes == (affinity.Homes{}) {
		return
	}
	saw := affinity.Homes{r.In.Decode.Home, r.In.Prefill.Home}
	for i := range saw {
		if saw[i] == selector.HomeNew {
			saw[i] = ""
		}
	}
	table.Move(r.Criteria.Model, r.Criteria.Session, saw, e.Homes, now)
}

// bringBack makes workers that are kept out by nothing but a condition the candidates of a
// phase, if it has no other candidate, and reports whether there are any.
func (r *Run) bringBack(e *Effects, in *selector.Input, peers *[]workers.Peer, seen FleetView, condition func(*workers.Worker) bool) bool {
	if _, ok := r.History.Stay(in.Phase); ok { // others may be well: NoChoice lets them be chosen
		return false
	}
	if slices.ContainsFunc(in.Candidates, func(c decision.Candidate) bool { return c.KeptOut == "" }) {
		return false
	}
	before := len(e.Readmit)
	for _, w := range r.workers {
		if ok, _ := w.State.Usable(); ok || !condition(w) || !can(w, in.Phase) {
			continue
		}
		if why, _ := r.keptOut(w, in.Phase, ""); why == "" {
			e.Readmit = append(e.Readmit, w)
		}
	}
	back := e.Readmit[before:]
	return len(back) > 0 && r.list(in, peers, r.workers, seen, back)
}

// CopyTo makes another run a copy of this one, with the same criteria and history and no
// decision: its caller may use or drop the result.
func (r *Run) CopyTo(to *Run) {
	to.Begin(r.Criteria)
	to.History.Failures, to.History.Bans = append(to.History.Failures, r.History.Failures...), append(to.History.Bans, r.History.Bans...)
	to.History.Lost, to.History.Stays = append(to.History.Lost, r.History.Lost...), append(to.History.Stays, r.History.Stays...)
	to.History.Attempts, to.History.Continued, to.History.Local = r.History.Attempts, r.History.Continued, r.History.Local
	to.Attempt, to.After, to.settings, to.workers, to.gaveUp, to.forceBefore, to.prompt, to.held = r.Attempt, r.After, r.settings, r.workers, r.gaveUp, r.forceBefore, r.prompt, r.held
}

// can reports whether a worker does the work of a phase.
func can(w *workers.Worker, p route.Phase) bool {
	if p == route.Prefill {
		return w.Role.CanPrefill()
	}
	return w.Role.CanDecode()
}

// ejected reports whether nothing but its ejection keeps a worker from use.
func ejected(w *workers.Worker) bool {
	return !w.State.Draining() && w.State.Condition().Health == workers.Ejected
}

// Serves reports whether a worker is usable, or only its ejection keeps it from use.
func Serves(w *workers.Worker) bool {
	ok, _ := w.State.Usable()
	return ok || ejected(w)
}

// list fills the candidates of a phase and reports whether one of them may be
// used. Those who are let back are taken for healthy.
func (r *Run) list(in *selector.Input, peers *[]workers.Peer, list []*workers.Worker, seen FleetView, back []*workers.Worker) (any bool) {
	in.Candidates, *peers = in.Candidates[:0], (*peers)[:0]
	pin, phase := &r.Criteria.Pin, index(in.Phase)
	l := lister{Run: r, in: in, peers: *peers, seen: seen, given: seen.Ledger(), back: back, choosy: r.HasOwnBans() || pin.worker(in.Phase) != ""}
	// Now and then an idle rank that was little slower than its peers is taken for as fast, or
	// no request would show that it is well. A slow prefill rank gets short prompts all the time.
	if c := r.Criteria.Costs.Tuning(); in.Phase != route.Prefill && c.Teaches(r.Criteria.Chances[0].Turn) {
		l.forgiven = c.TeachWithin
	}
	l.stay, _ = r.History.Stay(in.Phase)
	l.rank, l.pinned = pin.rank(in.Phase)
	for _, w := range list {
		if can(w, in.Phase) {
			l.add(w)
		}
	}
	*peers = l.peers
	for i := range in.Candidates {
		c := &in.Candidates[i]
		any = any || c.KeptOut == ""
		fresh, long := l.given.Fresh(l.peers[i].Rank)
		if !r.long[phase] {
			fresh -= long // what only some ranks could take says nothing of how evenly the rest is spread
		}
		c.FreshTokens += fresh
	}
	return any
}

// lister lists the candidates of a phase.
type lister struct {
	*Run
	in    *selector.Input
	peers []workers.Peer
	seen  FleetView
	given *ledger.Ledger
	back  []*workers.Worker // who are taken for healthy
	// choosy says that the request itself keeps workers out, whatever their windows.
	choosy bool
	stay   attempt.Stay
	rank   int // with pinned the only one
	pinned bool
	// forgiven is up to how many times as long as its peers an idle rank takes that is not slow.
	forgiven float64
}

// add adds a worker's ranks.
func (l *lister) add(w *workers.Worker) {
	unusable := ""
	if ok, why := w.State.Usable(); !ok && !slices.Contains(l.back, w) {
		unusable = why
	}
	if unusable == "" || ejected(w) {
		l.served[index(l.in.Phase)] = true
	}
	why, tried := unusable, false
	if l.choosy || outgrows(&l.Criteria.Facts, l.prompt, w, l.in.Phase) {
		why, tried = l.keptOut(w, l.in.Phase, unusable)
	}
	capacity := Capacity(w, l.in.BlockSize)
	for _, k := range w.Ranks {
		l.peers = append(l.peers, workers.Peer{Worker: w, Rank: k})
		// Made where it stands: what is appended is written twice, and a large fleet's
		// candidates are half a megabyte.
		n := len(l.in.Candidates)
		l.in.Candidates = slices.Grow(l.in.Candidates, 1)[:n+1]
		c := &l.in.Candidates[n]
		*c = decision.Candidate{}
		c.Rank, c.Slot, c.KeptOut, c.Tried, c.KVBlocks = k.Label, k.Slot, why, tried, capacity
		if why == "" && l.pinned && k.DP != l.rank {
			c.KeptOut = "the request pins another rank"
		}
		l.look(c, w, k)
	}
}

// look writes what is known of a rank into its candidate: what it holds, and its load. Of its
// FreshTokens these are only those of other routers.
func (l *lister) look(c *decision.Candidate, w *workers.Worker, k *workers.Rank) {
	c.OverlapBlocks = l.seen.Overlap(w, k, &c.Tiers) / l.in.BlockSize
	if c.Tiers != (route.Tiers{}) {
		c.Tiers = c.Tiers.Scale(1, l.in.BlockSize)
	}
	c.ResidentBlocks = l.seen.Resident(k)
	var now ledger.Load
	l.given.Read(k, &now)
	c.ActiveRequests, c.Answering, c.PrefillTokens, c.DecodeBlocks, c.CachedBlocks = now.Requests, now.Answering, now.PrefillTokens, now.DecodeBlocks, now.CachedBlocks
	c.LastTurn = now.LastTurn
	if s := l.Criteria.Siblings; s != nil {
		s.Add(c, k, l.in.Busy.Requests)
	}
	if times := k.Times(); times > 1 && (c.ActiveRequests > 0 || times > l.forgiven) {
		c.Times = times
	}
	if l.stay.Computed && l.stay.Worker == w.State {
		c.PrefillTokens = 0 // no other prompt is in the way of what is computed
	}
	c.KVUsage = -1
	if e := k.Load(); e != nil && e.Known() {
		c.HasLoad = true
		c.Running, c.Waiting, c.KVUsage = max(0, e.Running), max(0, e.Waiting), e.KVUsage
	}
}

// keptOut says why a worker is no choice in a phase, whatever it would cost; empty
// if it is one. tried says that it had its turn in this request. unusable is why its state
// forbids it; empty for a usable one, and for an ejected one that is let back.
func (r *Run) keptOut(w *workers.Worker, p route.Phase, unusable string) (why string, tried bool) {
	if why, tried = r.History.Banned(w.State, p); tried {
		return why, true
	}
	if unusable != "" {
		return unusable, false
	}
	if name := r.Criteria.Pin.worker(p); name != "" && name != w.Name {
		return "the request pins another worker", false
	}
	if why = r.History.Elsewhere(w.State, p); why == "" && r.tooSmall(w, p) {
		why, r.long[index(p)] = r.tooSmallWhy(w, p), true
	}
	return why, false
}

// Claims are what the plan takes of its decode and of its prefill rank.
func (r *Run) Claims() (decode, prefill ledger.Claim) {
	p, isl := &r.Plan, r.Criteria.Facts.ISL
	decode = ledger.Claim{ContextTokens: isl, CachedTokens: p.CachedTokens, BlockSize: r.In.Decode.BlockSize, Long: r.long[index(route.Decode)]}
	if p.Path == route.Local {
		decode.PrefillTokens = p.EffISL
		return decode, ledger.Claim{}
	}
	decode.LoadTokens = p.EffISL
	return decode, ledger.Claim{PrefillTokens: isl - p.PrefillCached, BlockSize: r.In.Prefill.BlockSize, Long: r.long[index(route.Prefill)]}
}

// Slots appends the slots of the plan's ranks to a list.
func (r *Run) Slots(list []uint32) []uint32 {
	p, in := &r.Plan, &r.In
	list = append(list, in.DecodePeers[p.DecodeIndex].Rank.Slot)
	if p.Path == route.Remote {
		list = append(list, in.PrefillPeers[p.PrefillIndex].Rank.Slot)
	}
	return list
}

// Failed says what follows when a leg of the plan has failed. A retry that is budgeted needs room in the caller's budget; without it
// NoBudget says what follows.
func (r *Run) Failed(f attempt.Failure) attempt.Next {
	after := r.After
	if after == nil {
		after = attempt.AfterFailure
	}
	r.History.Add(f)
	return r.enterNext(after(&r.History, attempt.Allowance{
		Attempts: r.settings.Attempts, LocalWithoutParams: r.settings.LocalWithoutParams, Continuations: r.settings.Continuations,
		// Whoever can prefill by itself need not be usable, nor the one chosen now.
		LocalPrefill: r.settings.Rule.Fallback != FallbackError && slices.ContainsFunc(r.workers, func(w *workers.Worker) bool {
			return can(w, route.Decode) && !needsPrefill(w)
		}),
	}, r.prefills()))
}

// MayMove reports whether another worker could take the request, or its decode rank prefill,
// if a leg failed now. It changes nothing.
func (r *Run) MayMove(f attempt.Failure) bool {
	var after Run
	r.CopyTo(&after)
	switch after.Failed(f).Step {
	case attempt.FallBack:
		return true
	case attempt.Retry:
		return slices.ContainsFunc(r.workers, func(w *workers.Worker) bool {
			_, unusable := w.State.Usable()
			why, _ := after.keptOut(w, f.Phase, unusable)
			return why == "" && can(w, f.Phase)
		})
	}
	return false
}

// NoBudget says what follows when there is no budget for a retry.
func (r *Run) NoBudget() attempt.Next { return r.enterNext(attempt.AfterNoBudget(&r.History)) }

// Busy reports whether the newest decision failed for want of room only: some ranks of
// a phase could have been chosen but for a limit.
func (r *Run) Busy() (phase route.Phase, is bool) {
	switch p := &r.Plan; {
	case errors.Is(p.Err, ErrNoDecode):
		return route.Decode, p.Decode.Verdict == selector.AllBusy
	case errors.Is(p.Err, ErrNoPrefill):
		return route.Prefill, p.Prefill.Verdict == selector.AllBusy
	}
	return "", false
}

// Unserved reports whether the newest decision failed because the model has no usable worker
// for a phase. Workers that only this request excludes, and ejected ones, count as usable.
func (r *Run) Unserved() (phase route.Phase, is bool) {
	switch err := r.Plan.Err; {
	case errors.Is(err, ErrNoDecode):
		phase = route.Decode
	case errors.Is(err, ErrNoPrefill):
		phase = route.Prefill
	default:
		return "", false
	}
	return phase, !r.served[index(phase)]
}

// index is a phase's place in pairs of decode and prefill.
func index(p route.Phase) int {
	if p == route.Prefill {
		return 1
	}
	return 0
}

// HasOwnBans reports whether this request excludes workers that other requests may use,
// after failures of its own or of the stream that it continues. What it does not find,
// another request with the same criteria may find.
func (r *Run) HasOwnBans() bool {
	return len(r.History.Failures) > 0 || len(r.History.Bans) > 0 || len(r.History.Stays) > 0
}

// Retract takes back the newest decision, since the request waits: the next one replaces
// it.
func (r *Run) Retract() {
	r.Attempt--
	r.Criteria.Waited = true
}

// NoChoice says what follows a plan with an error.
func (r *Run) NoChoice() attempt.Next {
	missing := route.Decode
	if errors.Is(r.Plan.Err, ErrNoPrefill) {
		missing = route.Prefill
	}
	return r.enterNext(attempt.AfterNoChoice(&r.History, missing))
}

// enterNext applies the policy's answer to the next decision.
func (r *Run) enterNext(next attempt.Next) attempt.Next {
	r.History.Bans, r.History.Stays = next.Bans, next.Stays
	if next.Step == attempt.Continue {
		// All that follows is about the rest.
		if r.gaveUp != "" {
			r.Criteria.Force, r.gaveUp = r.forceBefore, ""
		}
		r.History.Failures, r.History.Attempts, r.History.Local = r.History.Failures[:0], 0, false
		r.History.Continued++
	}
	if next.Step == attempt.FallBack {
		// The decode rank prefills alone, and the plan says why.
		r.History.Local, r.gaveUp = true, r.History.Failures[len(r.History.Failures)-1].Reason
		r.forceBefore, r.Criteria.Force = r.Criteria.Force, route.ForceLocal
	}
	return next
}

// prefills are the workers that could prefill but for their bans. An ejected one
// comes back when there is no other.
func (r *Run) prefills() (list []*workers.State) {
	for _, w := range r.workers {
		if w.Role.CanPrefill() && Serves(w) {
			list = append(list, w.State)
		}
	}
	return list
}
