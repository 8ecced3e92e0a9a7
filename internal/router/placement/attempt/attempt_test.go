package attempt

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

const (
	prefill = route.Prefill
	decode  = route.Decode
)

// TestAfterFailure names each answer of the policy.
func TestAfterFailure(t *testing.T) {
	p1, p2, d1, d2 := &workers.State{}, &workers.State{}, &workers.State{}, &workers.State{}
	both := []*workers.State{p1, p2}
	usual := Allowance{Attempts: 3, LocalPrefill: true}
	out := func(w *workers.State, p route.Phase) Ban { return Ban{Worker: w, Phase: p} }
	suspect := func(w *workers.State, p route.Phase) Ban { return Ban{Worker: w, Phase: p, Suspect: true} }
	for _, c := range []struct {
		name     string
		history  History
		failure  Failure
		settings Allowance
		prefills []*workers.State
		poor     bool // the budget is used up
		want     Next
	}{
		{"another worker", History{Attempts: 1}, Failure{Worker: d1, Phase: decode, Reason: "connect"}, usual, both, false,
			Next{Step: Retry, Budgeted: true, Bans: []Ban{out(d1, decode)}}},
		{"a router that leads back: no budget is needed", History{Attempts: 1}, Failure{Worker: d1, Phase: decode, Reason: Loop, Sent: true}, usual, both, true,
			Next{Step: Retry, Bans: []Ban{out(d1, decode)}}},
		{"routers that lead back, and no attempt left", History{Attempts: 3}, Failure{Worker: d1, Phase: decode, Reason: Loop, Sent: true}, usual, both, true,
			Next{Why: NoAttempts, Bans: []Ban{out(d1, decode)}}},
		{"nobody would do better", History{Attempts: 1}, Failure{Worker: d1, Phase: decode, Reason: Status4xx}, usual, both, false,
			Next{}},
		{"ejected meanwhile", History{Attempts: 3}, Failure{Worker: d1, Phase: decode, Reason: Ejected}, usual, both, true,
			Next{Step: Retry, Free: true, Bans: []Ban{suspect(d1, decode)}}},
		{"ejected meanwhile again", History{Attempts: 3, Failures: []Failure{{Worker: d1, Phase: decode, Reason: Ejected}}}, Failure{Worker: d1, Phase: decode, Reason: Ejected}, usual, both, true,
			Next{Step: Retry, Free: true, Bans: []Ban{out(d1, decode)}}},
		{"a stale connection", History{Attempts: 3}, Failure{Worker: d1, Phase: decode, Reason: Stale}, usual, both, true,
			Next{Step: Retry, Free: true, Stays: []Stay{{Worker: d1, Phase: decode}}}},
		{"no room at decode, and a prefill that has the KV", History{Attempts: 1}, Failure{Worker: d1, Phase: decode, Reason: Overloaded, Sent: true, Other: p1}, usual, both, false,
			Next{Step: Retry, Budgeted: true, Bans: []Ban{out(d1, decode)}, Stays: []Stay{{Worker: p1, Phase: prefill, Computed: true}}}},
		{"no room at prefill", History{Attempts: 1}, Failure{Worker: p1, Phase: prefill, Reason: Overloaded, Sent: true}, usual, both, false,
			Next{Step: Retry, Budgeted: true, Bans: []Ban{out(p1, prefill)}}},
		{"no attempt left", History{Attempts: 3}, Failure{Worker: d1, Phase: decode, Reason: "reset"}, usual, both, false,
			Next{Why: NoAttempts, Bans: []Ban{out(d1, decode)}}},
		{"no budget", History{Attempts: 1}, Failure{Worker: d1, Phase: decode, Reason: "reset"}, usual, both, true,
			Next{Why: NoBudget, Bans: []Ban{out(d1, decode)}}},
		{"either may be at fault", History{Attempts: 1}, Failure{Worker: d1, Phase: decode, Reason: "timeout", Other: p1}, usual, both, false,
			Next{Step: Retry, Budgeted: true, Bans: []Ban{suspect(p1, prefill), suspect(d1, decode)}}},
		{"the last prefill worker is only a suspect", History{Attempts: 1}, Failure{Worker: d1, Phase: decode, Reason: "timeout", Other: p1}, usual, both[:1], false,
			Next{Step: Retry, Budgeted: true, Bans: []Ban{suspect(d1, decode)}}},
		{"the last prefill worker", History{Attempts: 1}, Failure{Worker: p1, Phase: prefill, Reason: "connect"}, usual, both[:1], true,
			Next{Step: FallBack, Bans: []Ban{out(p1, prefill)}}},
		{"the last prefill worker, and no fallback", History{Attempts: 1}, Failure{Worker: p1, Phase: prefill, Reason: "connect"}, Allowance{Attempts: 3}, both[:1], false,
			Next{Bans: []Ban{out(p1, prefill)}}},
		{"both prefill workers failed: the decode rank prefills", History{Attempts: 2, Bans: []Ban{out(p1, prefill)}, Failures: []Failure{{Worker: p1, Phase: prefill, Reason: "connect"}}}, Failure{Worker: p2, Phase: prefill, Reason: "reset", Sent: true}, usual, both, true,
			Next{Step: FallBack, Bans: []Ban{out(p1, prefill), out(p2, prefill)}}},
		{"both prefill workers failed, and no fallback: the first may be well again", History{Attempts: 2, Bans: []Ban{out(p1, prefill)}, Failures: []Failure{{Worker: p1, Phase: prefill, Reason: "connect"}}}, Failure{Worker: p2, Phase: prefill, Reason: "reset", Sent: true}, Allowance{Attempts: 3}, both, false,
			Next{Step: Retry, Budgeted: true, Bans: []Ban{out(p2, prefill)}}},
		{"another prefill worker", History{Attempts: 1}, Failure{Worker: p1, Phase: prefill, Reason: "connect"}, usual, both, false,
			Next{Step: Retry, Budgeted: true, Bans: []Ban{out(p1, prefill)}}},
		{"prefill failed in the last attempt", History{Attempts: 3}, Failure{Worker: p1, Phase: prefill, Reason: "connect"}, usual, both, true,
			Next{Step: FallBack, Bans: []Ban{out(p1, prefill)}}},
		{"a suspect beside a sure one", History{Attempts: 2, Bans: []Ban{suspect(p2, prefill), suspect(d2, decode)}}, Failure{Worker: p1, Phase: prefill, Reason: "connect"}, usual, both, false,
			Next{Step: Retry, Budgeted: true, Bans: []Ban{suspect(d2, decode), out(p1, prefill)}}},
		{"no parameters", History{Attempts: 1}, Failure{Worker: p1, Phase: prefill, Reason: MissingParams}, usual, both, false,
			Next{Bans: []Ban{out(p1, prefill)}}},
		{"no parameters, by policy local", History{Attempts: 3}, Failure{Worker: p1, Phase: prefill, Reason: MissingParams}, Allowance{Attempts: 3, LocalWithoutParams: true}, both, true,
			Next{Step: FallBack, Bans: []Ban{out(p1, prefill)}}},
		{"two engines answered with errors: one more try", History{Attempts: 2, Failures: []Failure{{Worker: d2, Phase: decode, Reason: Status5xx, Sent: true}}}, Failure{Worker: d1, Phase: decode, Reason: StreamError, Sent: true}, Allowance{Attempts: 9}, both, false,
			Next{Step: Retry, Budgeted: true, Bans: []Ban{out(d1, decode)}}},
		{"three engines answered with errors", History{Attempts: 3, Failures: []Failure{{Worker: d2, Phase: decode, Reason: Status5xx, Sent: true}, {Worker: p2, Phase: decode, Reason: Status5xx, Sent: true}}}, Failure{Worker: d1, Phase: decode, Reason: Protocol, Sent: true}, Allowance{Attempts: 9}, both, false,
			Next{Why: NoMoreTry, Bans: []Ban{out(d1, decode)}}},
		{"one of three was not reached", History{Attempts: 3, Failures: []Failure{{Worker: d2, Phase: decode, Reason: Status5xx, Sent: true}, {Worker: p2, Phase: decode, Reason: "connect"}}}, Failure{Worker: d1, Phase: decode, Reason: "timeout", Sent: true}, Allowance{Attempts: 9}, both, false,
			Next{Step: Retry, Budgeted: true, Bans: []Ban{out(d1, decode)}}},
		{"errors of the phases are counted each", History{Attempts: 3, Failures: []Failure{{Worker: p1, Phase: prefill, Reason: Status5xx, Sent: true}, {Worker: d2, Phase: decode, Reason: Status5xx, Sent: true}}}, Failure{Worker: d1, Phase: decode, Reason: "timeout", Sent: true}, Allowance{Attempts: 9}, both, false,
			Next{Step: Retry, Budgeted: true, Bans: []Ban{out(d1, decode)}}},
		{"three prefill engines answered with errors: the decode rank prefills", History{Attempts: 3, Failures: []Failure{{Worker: d2, Phase: prefill, Reason: Status5xx, Sent: true}, {Worker: p2, Phase: prefill, Reason: Status5xx, Sent: true}}}, Failure{Worker: p1, Phase: prefill, Reason: "reset", Sent: true}, Allowance{Attempts: 9, LocalPrefill: true}, both, true,
			Next{Step: FallBack, Bans: []Ban{out(p1, prefill)}}},
		{"one engine died: another one", History{Attempts: 1}, Failure{Worker: d1, Phase: decode, Reason: Reset, Sent: true}, Allowance{Attempts: 9}, both, false,
			Next{Step: Retry, Budgeted: true, Bans: []Ban{out(d1, decode)}}},
		{"two engines died", History{Attempts: 2, Lost: []Loss{{d2, true}}}, Failure{Worker: d1, Phase: decode, Reason: Reset, Sent: true}, Allowance{Attempts: 9}, both, false,
			Next{Why: NoMoreLost, Bans: []Ban{out(d1, decode)}}},
		{"one died and one hangs", History{Attempts: 2, Lost: []Loss{{d2, true}}}, Failure{Worker: d1, Phase: decode, Reason: Timeout, Sent: true}, Allowance{Attempts: 9}, both, false,
			Next{Why: NoMoreLost, Bans: []Ban{out(d1, decode)}}},
		{"two died, one in each phase: no fallback either", History{Attempts: 2, Lost: []Loss{{d2, true}}}, Failure{Worker: p1, Phase: prefill, Reason: Reset, Sent: true}, Allowance{Attempts: 9, LocalPrefill: true}, both, false,
			Next{Why: NoMoreLost, Bans: []Ban{out(p1, prefill)}}},
		{"both engines of a pair died at once", History{Attempts: 1}, Failure{Worker: p1, Phase: prefill, Reason: Reset, Sent: true, Other: d1, OtherLost: true}, Allowance{Attempts: 9}, both, false,
			Next{Why: NoMoreLost, Bans: []Ban{out(p1, prefill)}}},
		{"one engine died twice", History{Attempts: 2, Lost: []Loss{{d1, true}}}, Failure{Worker: d1, Phase: decode, Reason: Reset, Sent: true}, Allowance{Attempts: 9}, both, false,
			Next{Step: Retry, Budgeted: true, Bans: []Ban{out(d1, decode)}}},
		{"two died, and an engine answers that its own is dead", History{Attempts: 2, Lost: []Loss{{d2, true}}}, Failure{Worker: d1, Phase: decode, Reason: EngineDead, Sent: true}, Allowance{Attempts: 9}, both, false,
			Next{Why: NoMoreLost, Bans: []Ban{out(d1, decode)}}},
		{"closed as idle after another died: it may be the request", History{Attempts: 1, Lost: []Loss{{d2, true}}}, Failure{Worker: d1, Phase: decode, Reason: Stale, Sent: true}, Allowance{Attempts: 9}, both, false,
			Next{Why: NoMoreLost}},
		{"the other phase fails: this one stays", History{Attempts: 1, Lost: []Loss{{d1, false}}, Stays: []Stay{{Worker: d1, Phase: decode, Why: "idle"}}}, Failure{Worker: p1, Phase: prefill, Reason: Overloaded, Sent: true}, Allowance{Attempts: 9}, both, false,
			Next{Step: Retry, Budgeted: true, Bans: []Ban{out(p1, prefill)}, Stays: []Stay{{Worker: d1, Phase: decode}}}},
		{"it answers: it is not lost", History{Attempts: 1, Lost: []Loss{{d1, false}}, Stays: []Stay{{Worker: d1, Phase: decode}}}, Failure{Worker: d1, Phase: decode, Reason: Overloaded, Sent: true}, Allowance{Attempts: 9}, both, false,
			Next{Step: Retry, Budgeted: true, Bans: []Ban{out(d1, decode)}}},
		{"closed as idle, and then no connection: it died", History{Attempts: 1, Lost: []Loss{{d2, true}, {d1, false}}, Failures: []Failure{{Worker: d1, Phase: decode, Reason: Stale, Sent: true}}}, Failure{Worker: d1, Phase: decode, Reason: Connect}, Allowance{Attempts: 9}, both, false,
			Next{Why: NoMoreLost, Bans: []Ban{out(d1, decode)}}},
		{"a stream whose second engine died", History{Attempts: 1, Continued: 1, Lost: []Loss{{d2, true}}}, Failure{Worker: d1, Phase: decode, Reason: Reset, Sent: true, Begun: true}, Allowance{Attempts: 9, Continuations: 9}, both, false,
			Next{Why: NoMoreLost}},
		{"the first token ended the answer", History{Attempts: 3}, Failure{Worker: p1, Phase: prefill, Reason: Ended}, Allowance{Attempts: 3}, both, true,
			Next{Step: FallBack}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := c.history
			h.Add(c.failure)
			h.Attempts = c.history.Attempts
			got := AfterFailure(&h, c.settings, c.prefills)
			if got.Budgeted && c.poor {
				h.Bans = got.Bans
				got = AfterNoBudget(&h)
			}
			for i := range got.Bans {
				if slices.Contains(c.history.Bans, got.Bans[i]) {
					continue
				}
				if got.Bans[i].Why == "" {
					t.Errorf("a ban without a reason: %+v", got.Bans[i])
				}
				got.Bans[i].Why = ""
			}
			for i := range got.Stays {
				if got.Stays[i].Why == "" {
					t.Errorf("a phase stays for no reason: %+v", got.Stays[i])
				}
				got.Stays[i].Why = ""
			}
			if len(got.Stays) == 0 {
				got.Stays = nil
			}
			if d := cmp.Diff(c.want, got, sameWorker, sameLength); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
		})
	}
}

var (
	sameWorker = cmp.Comparer(func(a, b *workers.State) bool { return a == b })
	sameLength = cmp.Transformer("list", func(b []Ban) []Ban {
		if len(b) == 0 {
			return nil
		}
		return b
	})
)

// TestAnswered: an answer clears an engine of an idle close, and not of a death.
func TestAnswered(t *testing.T) {
	a, b := &workers.State{}, &workers.State{}
	var h History
	h.Add(Failure{Worker: a, Phase: prefill, Reason: Stale, Sent: true, Alive: true})
	if len(h.Lost) != 0 {
		t.Errorf("it shows a sign of life, and is lost: %+v", h.Lost)
	}
	h.Add(Failure{Worker: a, Phase: prefill, Reason: Stale, Sent: true})
	h.Add(Failure{Worker: b, Phase: decode, Reason: Reset, Sent: true})
	if h.Answered(b); len(h.Lost) != 2 {
		t.Errorf("lost: %+v", h.Lost)
	}
	if h.Answered(a); len(h.Lost) != 1 || h.Lost[0].Worker != b {
		t.Errorf("lost: %+v", h.Lost)
	}
}

// TestAfterNoChoice: suspects of the phase that has nobody come back, all at
// once, then those that failed, one by one, unless it was but one.
func TestAfterNoChoice(t *testing.T) {
	p1, d1, d2 := &workers.State{}, &workers.State{}, &workers.State{}
	h := History{Bans: []Ban{{Worker: p1, Phase: prefill, Suspect: true}, {Worker: d1, Phase: decode, Suspect: true}, {Worker: d2, Phase: decode}}}
	next := AfterNoChoice(&h, decode)
	if next.Step != LiftBans || len(next.Bans) != 2 || len(h.Bans) != 3 {
		t.Fatalf("%+v, left %+v", next, h.Bans)
	}
	h.Bans = next.Bans
	h.Failures = []Failure{{Worker: d2, Phase: decode}, {Worker: d2, Phase: decode}, {Worker: p1, Phase: prefill}}
	if next = AfterNoChoice(&h, decode); next.Step != GiveUp || len(next.Bans) != 2 {
		t.Fatalf("%+v", next)
	}
	h.Bans = append(h.Bans, Ban{Worker: d1, Phase: decode})
	h.Failures = append(h.Failures, Failure{Worker: d1, Phase: decode}, Failure{Worker: d2, Phase: decode})
	for _, want := range []*workers.State{d1, d2} { // the one whose last failure is older comes first
		next = AfterNoChoice(&h, decode)
		if _, out := banned(next.Bans, want, decode); next.Step != LiftBans || out || len(next.Bans) != len(h.Bans)-1 {
			t.Fatalf("%+v", next)
		}
		h.Bans = next.Bans
	}
	if next = AfterNoChoice(&h, decode); next.Step != GiveUp {
		t.Fatalf("%+v", next)
	}
}

// fleet is a router's work on one request, with engines that fail as drawn.
type fleet struct {
	prefills, decodes []*workers.State
	sick              map[*workers.State]Reason // the reason, "kv" for KV that is gone
	h                 History
	budget            int
}

func (f *fleet) free(list []*workers.State, p route.Phase) (free []*workers.State) {
	for _, w := range list {
		if _, out := f.h.Banned(w, p); !out {
			free = append(free, w)
		}
	}
	return free
}

// run tries until the policy ends it. It reports success and the legs sent.
func (f *fleet) run(t *rapid.T, s Allowance) (ok bool, legs int) {
	pick := func(list []*workers.State) *workers.State {
		return list[rapid.IntRange(0, len(list)-1).Draw(t, "pick")]
	}
	for steps := 1; ; steps++ {
		if steps > 100 {
			t.Fatalf("no end: %+v", f.h)
		}
		decodes, prefills := f.free(f.decodes, decode), f.free(f.prefills, prefill)
		if len(decodes) == 0 {
			next := AfterNoChoice(&f.h, decode)
			if next.Step != LiftBans {
				return false, legs
			}
			f.h.Bans = next.Bans
			continue
		}
		d := pick(decodes)
		legs++
		fail := Failure{Worker: d, Phase: decode, Reason: f.sick[d]}
		if len(prefills) > 0 && !f.h.Local {
			p := pick(prefills)
			switch why := f.sick[p]; {
			case why == "kv" && fail.Reason == "":
				fail.Reason, fail.Other = "status_5xx", p
			case why == "kv":
				fail.Other = p
			case why != "":
				fail = Failure{Worker: p, Phase: prefill, Reason: why}
			default:
				if fail.Reason != "" && fail.Reason != "connect" {
					fail.Other = p
				}
			}
		}
		if fail.Reason == "" {
			return true, legs
		}
		fail.Sent = fail.Reason != Connect
		f.h.Add(fail)
		if f.h.Attempts != legs {
			t.Fatalf("%d attempts are counted, engines were asked %d times", f.h.Attempts, legs)
		}
		before := slices.Clone(f.h.Bans)
		next := AfterFailure(&f.h, s, f.prefills)
		if again := AfterFailure(&f.h, s, f.prefills); !cmp.Equal(next, again, sameWorker) {
			t.Fatalf("asked twice: %+v and %+v", next, again)
		}
		if !cmp.Equal(before, f.h.Bans, sameWorker, sameLength) {
			t.Fatalf("the question changed the history")
		}
		switch {
		case next.Budgeted && f.budget == 0:
			f.h.Bans = next.Bans
			next = AfterNoBudget(&f.h)
		case next.Budgeted:
			f.budget--
		}
		if next.Step == Retry && f.h.Attempts >= s.Attempts {
			t.Fatalf("retry after %d attempts of %d", f.h.Attempts, s.Attempts)
		}
		f.h.Bans = next.Bans
		switch next.Step {
		case GiveUp:
			if next.Why == NoAttempts && legs < s.Attempts {
				t.Fatalf("the attempts are used up after %d of %d", legs, s.Attempts)
			}
			return false, legs
		case FallBack:
			if f.h.Local {
				t.Fatal("fell back twice")
			}
			f.h.Local = true
		}
		if _, out := f.h.Banned(fail.Worker, fail.Phase); !out && fail.Other == nil && next.Step != GiveUp {
			t.Fatalf("a worker failed for certain and is not kept out: %+v", next)
		}
	}
}

// TestRequestsEnd: whatever fails, a request ends within its attempts, its
// budget and the one fallback; and where somebody who is well could serve it,
// there are attempts and budget enough and a decode rank may prefill, it is
// served.
func TestRequestsEnd(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		f := &fleet{sick: map[*workers.State]Reason{}}
		well := false
		reason := rapid.SampledFrom([]Reason{"", "", "connect", "timeout", "reset", "status_5xx", "overloaded", "kv"})
		for range rapid.IntRange(0, 3).Draw(t, "prefills") {
			w := &workers.State{}
			f.prefills = append(f.prefills, w)
			f.sick[w] = reason.Draw(t, "prefill")
		}
		for range rapid.IntRange(1, 4).Draw(t, "decodes") {
			w := &workers.State{}
			f.decodes = append(f.decodes, w)
			if r := reason.Draw(t, "decode"); r != "kv" {
				f.sick[w] = r
			}
			well = well || f.sick[w] == ""
		}
		s := Allowance{Attempts: rapid.SampledFrom([]int{1, 3, 16}).Draw(t, "attempts"), LocalPrefill: rapid.Bool().Draw(t, "local")}
		f.budget = rapid.SampledFrom([]int{0, 2, 100}).Draw(t, "budget")
		budget := f.budget
		ok, legs := f.run(t, s)
		if most := min(s.Attempts, budget+1) + 1; legs > most {
			t.Fatalf("%d attempts, %d allowed", legs, most)
		}
		for _, p := range []route.Phase{prefill, decode} {
			broke := map[*workers.State]bool{}
			for _, x := range f.h.Failures {
				if x.broke() && x.Phase == p {
					broke[x.Worker] = true
				}
			}
			if len(broke) > 3 {
				t.Fatalf("%d engines broke in phase %s", len(broke), p)
			}
		}
		died := map[*workers.State]bool{}
		for _, x := range f.h.Failures {
			if x.Sent && (x.Reason == Reset || x.Reason == Timeout) {
				died[x.Worker] = true
			}
		}
		if len(died) > MaxLost {
			t.Fatalf("%d engines died of one request", len(died))
		}
		breaking := 0
		for _, w := range f.decodes {
			if f.sick[w] != "" && f.sick[w].Means().Broke {
				breaking++
			}
		}
		loses := slices.ContainsFunc(f.prefills, func(w *workers.State) bool { return f.sick[w] == "kv" })
		plenty := s.LocalPrefill && s.Attempts == 16 && budget == 100
		harmless := !loses && breaking <= 2 && len(f.h.Lost) < MaxLost
		if well && !ok && plenty && harmless {
			t.Fatalf("failed although a decode worker is well: %+v", f.h)
		}
	})
}

// TestMeanings: every reason is fit for a label and says nothing that contradicts
// itself, and every way in which a leg gets no answer is one.
func TestMeanings(t *testing.T) {
	for r, m := range meanings {
		if r == "" || strings.ToLower(string(r)) != string(r) || strings.ContainsAny(string(r), " -") {
			t.Errorf("%q is not a fit label", r)
		}
		if m.Final && (m.Broke || m.Mutual) {
			t.Errorf("%s: nobody would do better, and yet a worker is to blame: %+v", r, m)
		}
		if m.Mutual && !m.Broke {
			t.Errorf("%s: either worker is at fault, and yet none broke: %+v", r, m)
		}
		if m.Broke && !m.Outcome.Failure() {
			t.Errorf("%s: the engine broke, and its health does not show it: %+v", r, m)
		}
	}
	for _, k := range []upstream.Kind{upstream.Connect, upstream.Timeout, upstream.Reset, upstream.Protocol, upstream.Canceled, upstream.Invalid} {
		if _, ok := meanings[Reason(k)]; !ok {
			t.Errorf("package upstream fails with %q, which means nothing here", k)
		}
	}
	if m := Reason("other").Means(); m.Final || m.Broke || m.Outcome.Failure() {
		t.Errorf("a reason that there is not means %+v", m)
	}
}

// TestAfterCut: a stream that has begun goes on elsewhere as often as it may, and to
// whoever broke off only when nobody else is left; what is tried for the rest counts
// anew.
func TestAfterCut(t *testing.T) {
	a, b := &workers.State{}, &workers.State{}
	h := &History{Attempts: 3, Failures: []Failure{{Worker: b, Phase: decode, Reason: Reset, Sent: true}}, Bans: []Ban{{Worker: b, Why: "x"}}}
	cut := Failure{Worker: a, Phase: decode, Reason: Reset, Sent: true, Begun: true}
	h.Add(cut)
	if n := AfterFailure(h, Allowance{Attempts: 3}, nil); n.Step != GiveUp {
		t.Errorf("without leave: %+v", n)
	}
	n := AfterFailure(h, Allowance{Attempts: 3, Continuations: 2}, nil)
	if n.Step != Continue || n.Budgeted || n.Free {
		t.Fatalf("%+v", n)
	}
	h.Bans = n.Bans
	for _, p := range []route.Phase{decode, prefill} {
		if _, out := h.Banned(a, p); !out {
			t.Errorf("the engine that broke off is asked for %s at once", p)
		}
		if back := AfterNoChoice(h, p); back.Step != LiftBans {
			t.Errorf("nobody else is left for %s: %+v", p, back)
		}
	}
	if _, out := h.Banned(b, decode); out {
		t.Error("who failed before the answer began is out for its rest")
	}
	h.Continued = 2
	if n := AfterFailure(h, Allowance{Attempts: 3, Continuations: 2}, nil); n.Step != GiveUp || n.Why != NoMoreMove {
		t.Errorf("%+v", n)
	}
	gone := cut
	gone.Reason = Canceled
	h.Add(gone)
	if n := AfterFailure(h, Allowance{Continuations: 9}, nil); n.Step != GiveUp {
		t.Errorf("nobody waits for it: %+v", n)
	}
}

// TestExcuse: each worker is named once, in the order in which they broke.
func TestExcuse(t *testing.T) {
	if got, want := WhyUncounted([]Failure{{Name: "b"}, {Name: "a"}, {Name: "b"}}), "b, a broke while working on this request; it failed wherever it was sent, and counts against no engine"; got != want {
		t.Errorf("%q, not %q", got, want)
	}
}
