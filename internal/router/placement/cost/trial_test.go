package cost

import (
	"math"
	"math/rand/v2"
	"reflect"
	"runtime"
	"sync"
	"testing"
	"time"
)

// still is a rank whose load does not change.
type still Load

func (s still) Load() Load { return Load(s) }

// TestGapLaw: what the time between tokens is made of is found again in answers that have it.
func TestGapLaw(t *testing.T) {
	l := NewLearner(Objective{For: ForGoodput, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond})
	l.fits[LocalLeg].law, l.fits[PrefillLeg].law = Law{termCompute: 40}, Law{}
	rng := rand.New(rand.NewPCG(1, 1))
	now := time.Duration(0)
	for i := range 300 {
		load := Load{Answers: 1 + rng.IntN(40), Held: rng.IntN(400_000)}
		a := Running{Slot: 3, Rank: still(load)}
		l.Ran(&a, 1, now)
		stall := 0.0
		for range rng.IntN(4) {
			now += time.Millisecond
			w := Work{Tokens: 500 + rng.IntN(4000), Slot: 3}
			l.mu.Lock()
			l.stalled(&w, now)
			l.mu.Unlock()
			stall += 40 * float64(w.Tokens) / 1000
		}
		ms := 100*(6+0.02*float64(load.Held)/1000+0.1*float64(load.Answers)) + 0.9*stall
		now += time.Duration(ms * math.Exp(0.05*rng.NormFloat64()) * float64(time.Millisecond))
		l.Ran(&a, 101, now)
		if i%2 == 0 {
			l.Ended(&a, 0) // what is counted already is not counted again
		}
	}
	l.gapFit.solve(&Law{gapPrompts: 1}, nil)
	got := l.gapFit.law
	for i, want := range map[int]float64{termOne: 6, gapHeld: 0.02, gapAnswers: 0.1, gapPrompts: 0.9} {
		if math.Abs(got[i]-want) > 0.1*want {
			t.Errorf("term %d is %.3f, want %.3f", i, got[i], want)
		}
	}
	if l.gapFit.count != 300 {
		t.Errorf("%d stretches of 300", l.gapFit.count)
	}
}

// TestSteps: a prompt that comes while one is computed waits for the next step, which those
// that come meanwhile share.
func TestSteps(t *testing.T) {
	var s steps
	for _, c := range []struct{ at, own, done float64 }{
		{0, 100, 110}, {50, 20, 140}, {60, 30, 170}, {120, 5, 185}, {500, 1, 511},
	} {
		if done := s.add(c.at, 10, c.own, int(c.own)); done != c.done {
			t.Errorf("a prompt at %v is done at %v, want %v", c.at, done, c.done)
		}
	}
	for at, want := range map[float64]int{100: 156, 150: 36, 180: 6, 511: 0} {
		c := s
		if tokens, _ := c.waiting(at); tokens != want {
			t.Errorf("%d tokens wait at %v, want %d", tokens, at, want)
		}
	}
}

// TestAnswersTakeTheirTime: answers get as many tokens as the law says, more slowly while
// others run, and none while a prompt is computed.
func TestAnswersTakeTheirTime(t *testing.T) {
	w := &tries{gaps: Law{termOne: 10 - 0.01, gapAnswers: 0}, itlMost: 25, ttftMost: 2000, span: 4000}
	w.decode = make([]answering, 1)
	d := &w.decode[0]
	w.answers = make([]answered, 2)
	d.expect(coming{at: 0, tokens: 100, answer: 0})
	w.advance(d, 500)
	d.add(500, 0, 300, 1) // until 800
	w.advance(d, 600)
	d.add(600, 0, 200, 1) // until 1,000, one after the other
	w.answers[1].first = 600
	d.expect(coming{at: 600, tokens: 1000, answer: 1})
	w.advance(d, 4000)
	if a := w.answers[0]; math.Abs(a.last-1500) > 1e-6 || math.Abs(a.made-100) > 1e-6 {
		t.Errorf("100 tokens, 500 ms late, have come at %v: %+v", a.last, a)
	}
	// 300 tokens of the second have come, at 1,000 to 4,000; the rest is taken to come as
	// fast as the rank was: 350 tokens in 4,000 ms.
	a := &w.answers[1]
	if a.last != 0 || math.Abs(a.made-a.begun-300) > 1e-6 {
		t.Errorf("%+v of the second have come", a)
	}
	a.length = 1000
	mean := (3400 + 700*4000./350) / 1000
	if want := 0.5 * math.Erfc((mean/25-1)/blur/math.Sqrt2); math.Abs(w.good(a)-want) > 1e-9 {
		t.Errorf("good is %v, want %v", w.good(a), want)
	}
	// Whether requests are late is known of all, how fast answers go on of those that are
	// judged: here of one that is good half of the time.
	w.ttft = []float64{10, 20, 30, 5000}
	w.answers = []answered{
		{judged: true, first: 100, last: 100 + 25*200, made: 200, length: 200}, {first: 200}, {judged: true, first: 4000}, {late: true},
	}
	if r := w.result(Weights{1, 1}); math.Abs(r.Good-0.5*0.75) > 1e-9 || r.TTFT != 5000 {
		t.Errorf("the result is %+v", r)
	}
	// Nothing is seen of answers that begin after the span.
	w.answers = []answered{{judged: true, first: 4000}, {late: true}, {}, {}}
	if r := w.result(Weights{1, 1}); r.Good != 0.75 {
		t.Errorf("the result is %+v", r)
	}
	// A rank that had answers and got on with none of them says nothing good.
	w.decode[0] = answering{}
	if w.good(&answered{first: 100, length: 100}) != 0 {
		t.Error("an answer that never gets a token is good")
	}
}

// TestTrialBegins: prompts that wait at the beginning are those of usual sizes, the first of
// which is half done; an answer that ends gives back what it held and got.
func TestTrialBegins(t *testing.T) {
	law := &Law{termCompute: 100, termAttention: 10} // ms for 1,000 tokens, and the attention to what is before them
	attention := func(n float64) float64 { return 10 * n * n / 2 / 100 }
	for _, c := range []struct {
		tokens         int
		waiting, begun float64 // in thousands of tokens
	}{{0, 0, 0}, {1000, 0, 1}, {3000, 0, 3}, {7000, 4, 3}} {
		var s steps
		got := s.begin(c.tokens, sizes{waiting: 2000, underway: 3000}, 5, law)
		want := 0.0
		if c.begun > 0 {
			want = 5 + (100*c.begun+attention(c.begun))/2
		}
		if c.waiting > 0 {
			want += 5 + 100*c.waiting + 2*attention(c.waiting/2)
		}
		if tokens, _ := s.waiting(0); math.Abs(got-want) > 1e-9 || tokens != c.tokens {
			t.Errorf("%d tokens take %v ms, want %v; %d wait", c.tokens, got, want, tokens)
		}
	}
	var s steps
	if s.begin(1<<30, sizes{waiting: 1, underway: 1}, 1, law); len(s.prompts) > mostQueued+1 {
		t.Errorf("%d prompts", len(s.prompts))
	}
	w := &tries{gaps: Law{termOne: 10 - 0.01}, decode: make([]answering, 1)}
	d := &w.decode[0]
	d.running = []running{{until: 50, held: 1000, answer: -1}, {until: 1e6, held: 500, answer: -1}}
	d.held = 1500
	if w.advance(d, 1000); math.Abs(d.held-600) > 1e-6 || d.answers() != 1 {
		t.Errorf("%v tokens are held by %d answers, want 600 by one", d.held, d.answers())
	}
}

// TestUsualPrice: the price to begin with falls with the ranks that answer for each prefill
// rank, and large fleets are tried in part.
func TestUsualPrice(t *testing.T) {
	fleet := func(prefill, decode int) *Fleet {
		f := &Fleet{Prefill: make([]int, prefill), Decode: make([]DecodeLoad, decode)}
		for i := range f.Decode {
			f.Decode[i].Slot = uint32(i)
		}
		return f
	}
	for _, c := range []struct {
		prefill, decode int
		price           float64
		tried           [2]int
	}{
		{2, 14, 0.1, [2]int{2, 14}}, {4, 12, 0.3, [2]int{4, 12}}, {8, 8, 1, [2]int{8, 8}}, {12, 4, 3, [2]int{12, 4}},
		{1, 1000, 0.01, [2]int{1, 1000}}, {512, 1536, 0.3, [2]int{11, 32}}, {3, 300, 0.01, [2]int{1, 100}},
	} {
		f := fleet(c.prefill, c.decode)
		part := f.sample()
		if p := f.usual(); p != c.price || len(part.Prefill) != c.tried[0] || len(part.Decode) != c.tried[1] {
			t.Errorf("%dp%dd: price %v, tried with %d and %d; want %v, %v", c.prefill, c.decode, p, len(part.Prefill), len(part.Decode), c.price, c.tried)
		}
	}
}

// TestChoosesWeights: good requests count before a short wait, a change must be worth it,
// one trial that is off does not change the price, and it changes by one at a time.
func TestChoosesWeights(t *testing.T) {
	o := &Objective{For: ForGoodput, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond}
	type found map[Weights][2]float64
	trial := func(at found) *[choices]Trial {
		var all [choices]Trial
		for i := range all {
			all[i] = Trial{Weights: choice(i), Good: 0.5, TTFT: 1000}
			if x, ok := at[choice(i)]; ok {
				all[i].Good, all[i].TTFT = x[0], x[1]
			}
		}
		return &all
	}
	usual := Weights{1, 1}
	for _, c := range []struct {
		name string
		at   found
		want Weights
	}{
		{"all alike", nil, usual},
		{"more good requests", found{{0.3, 1}: {0.8, 1000}}, Weights{0.3, 1}},
		{"some more good requests with a price beyond", found{{0.1, 1}: {0.6, 1000}}, usual},
		{"many more good requests with a price beyond", found{{0.1, 0.1}: {0.8, 1000}}, Weights{0.3, 0.1}},
		{"with another limit, too", found{{0.3, 0.1}: {0.8, 1000}}, Weights{0.3, 0.1}},
		{"more good requests, and a long wait", found{{3, 1}: {0.8, 60_000}}, Weights{3, 1}},
		{"a shorter wait", found{{0.3, 1}: {0.5, 200}}, Weights{0.3, 1}},
		{"a shorter wait for fewer good ones", found{{0.3, 1}: {0.3, 500}}, usual},
		{"hardly better", found{{0.3, 1}: {0.505, 950}}, usual},
		{"a little better with the other limit", found{{1, 0.1}: {0.505, 900}}, Weights{1, 0.1}},
		{"hardly better with the other limit", found{{1, 0.1}: {0.5, 990}}, usual},
		{"nothing that can be counted", found{{0.3, 1}: {math.NaN(), 10}}, usual},
		{"a wait without end", found{{3, 1}: {1, math.Inf(1)}}, usual},
	} {
		w := weighing{Weights: usual, usual: 1}
		w.choose(trial(c.at), o)
		if w.Weights != c.want {
			t.Errorf("%s: weights %v, want %v", c.name, w.Weights, c.want)
		}
	}
	w := weighing{Weights: usual, usual: 1}
	for range 5 {
		w.choose(trial(found{usual: {0.95, 300}}), o)
	}
	w.choose(trial(found{usual: {0.6, 300}, {0.3, 1}: {0.6, 250}}), o)
	if w.Weights != usual {
		t.Errorf("after one trial that is off the weights are %v", w.Weights)
	}
	// A price that is far away is reached one after the other.
	w = weighing{Weights: usual, usual: 1}
	for _, want := range []float64{0.3, 0.1, 0.03, 0.03} {
		w.choose(trial(found{{0.3, 1}: {0.6, 1000}, {0.1, 1}: {0.7, 1000}, {0.03, 1}: {0.8, 1000}, {0.01, 1}: {0.8, 1000}}), o)
		if w.Weights != (Weights{want, 1}) {
			t.Errorf("weights %v, want a price of %v", w.Weights, want)
		}
	}
}

// busy teaches a learner of a fleet of four prefill and twelve decode ranks, whose prompts of
// 4,000 tokens take 200 ms on either, and whose answers have 200 tokens. every is the time
// between arrivals.
func busy(l *Learner, arrivals int, every time.Duration) (f *Fleet, now time.Duration) {
	f = &Fleet{Prefill: make([]int, 4), Decode: make([]DecodeLoad, 12)}
	for i := range f.Decode {
		f.Decode[i] = DecodeLoad{uint32(i), Load{Answers: 10, Held: 40_000}}
	}
	for i := range arrivals {
		now += every
		w := Work{Tokens: 3500 + i%1000, Context: 4000, Running: 10, Slot: uint32(i % 12)}
		kv := Work{Tokens: w.Tokens, Running: 10, Slot: w.Slot}
		q := Request{Local: w, Prefill: w, Transfer: kv}
		l.Chose(&q, i%2 == 0, now)
		took := time.Duration(w.Tokens) * 50 * time.Microsecond
		if i%2 == 0 {
			l.Took(PrefillLeg, &w, took, now)
			l.Took(TransferLeg, &kv, 5*time.Millisecond, now)
		} else {
			l.Took(LocalLeg, &w, took, now)
		}
		a := Running{Slot: w.Slot, Rank: still(f.Decode[w.Slot].Load)}
		l.Ran(&a, 1, now-2*time.Second)
		l.Ran(&a, 200, now)
		l.Ended(&a, took)
	}
	return f, now
}

// TestRenew: once a second, and not without anything new, there is a revision with the price
// that a trial found; another objective has its own price, whatever was tried.
func TestRenew(t *testing.T) {
	l := NewLearner(Objective{For: ForGoodput, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond})
	if c := l.Renew(&Fleet{}, 0); c != NoChange || l.Known().Trials != nil {
		t.Error("something was tried on no fleet")
	}
	f, now := busy(l, 400, 50*time.Millisecond)
	l.Renew(f, now+every)
	m, k := l.Model(), l.Known()
	if len(k.Trials) != choices || k.Price == 0 {
		t.Fatalf("nothing was tried: %+v", k)
	}
	if want := l.objective.model(l.answers, l.gaps); m.Stall != want.Stall*k.Price || m.Limit != want.Limit*k.Limit {
		t.Errorf("a stall costs %v and the limit is %v: %+v times %v", m.Stall, m.Limit, want, k.Weights)
	}
	for i, r := range k.Trials {
		if !(r.Good >= 0 && r.Good <= 1 && r.TTFT > 0) || r.Weights != choice(i) {
			t.Errorf("%+v", r)
		}
	}
	if l.Renew(f, now+3*every); l.Model() != m {
		t.Error("a revision without anything new")
	}
	// The same again gives the same.
	other := NewLearner(l.objective)
	f, now = busy(other, 400, 50*time.Millisecond)
	other.Renew(f, now+every)
	if got := other.Known().Trials; !reflect.DeepEqual(got, k.Trials) {
		t.Errorf("%+v, then %+v", k.Trials, got)
	}
	l.objective.For, l.fresh = ForE2E, true
	if l.Renew(f, now+5*every); l.Model().Stall != 1 {
		t.Errorf("for another objective a stall costs %v", l.Model().Stall)
	}
	if k := l.Known(); k.Trials != nil || k.Price != 0 {
		t.Errorf("for another objective prices are tried: %+v", k)
	}
	// Ranks that leave change what is usual, not what was found.
	price := other.Known().Price
	f.Prefill = f.Prefill[:1]
	other.fresh, other.history.all = true, nil
	if other.Renew(f, now+9*every); other.weighing.usual != 0.1 || other.Known().Price != price {
		t.Errorf("with one prefill rank the price is %v instead of %v, and usual is %v", other.Known().Price, price, other.weighing.usual)
	}
}

// TestTrialSeesTheLoad: with few requests every price is good, with too many none, and the
// more a stall costs the more requests wait for prefill ranks.
func TestTrialSeesTheLoad(t *testing.T) {
	trials := func(between time.Duration) []Trial {
		l := NewLearner(Objective{For: ForGoodput, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond})
		f, now := busy(l, 900, between)
		l.Renew(f, now+every)
		return l.Known().Trials
	}
	for _, r := range trials(200 * time.Millisecond) {
		if r.Good < 0.9 || r.TTFT > 1000 {
			t.Errorf("five a second: %+v", r)
		}
	}
	crowd := trials(4 * time.Millisecond)
	for _, r := range crowd {
		if r.Good > 0.5 {
			t.Errorf("250 a second: %+v", r)
		}
	}
	if dear, cheap := crowd[0], crowd[len(crowd)-1]; dear.TTFT < 2*cheap.TTFT {
		t.Errorf("250 a second: %+v, and %+v", dear, cheap)
	}
}

// TestRenewBesideRequests: a trial keeps no request waiting that reports meanwhile, and
// shares nothing with it.
func TestRenewBesideRequests(t *testing.T) {
	l := NewLearner(Objective{For: ForGoodput, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond})
	f, now := busy(l, 400, 20*time.Millisecond)
	var requests sync.WaitGroup
	for range 3 {
		requests.Go(func() { busy(l, 300, time.Millisecond) })
	}
	for i := range 50 {
		l.Renew(f, now+time.Duration(i)*every)
		l.Known()
	}
	requests.Wait()
}

// TestAimDuringATrial: what is aimed at while weights are tried is in force at their end.
func TestAimDuringATrial(t *testing.T) {
	aim := Objective{For: ForGoodput, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond}
	l := NewLearner(aim)
	f, now := busy(l, 1000, 2*time.Millisecond)
	for range 500 {
		now += every
		l.aim(aim)
		before := l.Model()
		var renewal sync.WaitGroup
		renewal.Go(func() { l.Renew(f, now) })
		for begun := false; !begun; { // the draft is made, and nobody has the lock: it is tried
			runtime.Gosched()
			l.mu.Lock()
			begun = l.published == now
			l.mu.Unlock()
		}
		l.aim(Objective{For: ForE2E})
		during := l.Model() == before
		renewal.Wait()
		if !during {
			continue // the trial had ended
		}
		if m := l.Model(); m == before || m.Stall != 1 || m.Limit != 0 {
			t.Errorf("the revision after the trial is %+v", m)
		}
		return
	}
	t.Error("no trial was caught")
}

// BenchmarkRenew is a trial of all prices at the most requests that it looks at.
func BenchmarkRenew(b *testing.B) {
	l := NewLearner(Objective{For: ForGoodput, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond})
	f, now := busy(l, 1000, 2*time.Millisecond)
	b.ReportAllocs()
	for range b.N {
		l.fresh, l.published = true, now-2*every
		l.Renew(f, now)
	}
	b.ReportMetric(float64(len(l.tries.arrivals)), "arrivals")
}

// TestUsualPriceFromTheStart: the first revision, which comes with an outcome, has the usual
// price of the fleet already; another objective begins with it again.
func TestUsualPriceFromTheStart(t *testing.T) {
	aim := Objective{For: ForGoodput, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond}
	all := NewLearners(aim)
	all.Fleet = func(string) *Fleet { return &Fleet{Prefill: make([]int, 2), Decode: make([]DecodeLoad, 14)} }
	l := all.Of("m")
	busy(l, 40, 50*time.Millisecond)
	if m, want := l.Model(), aim.model(l.answers, l.gaps).Stall; m == nil || math.Abs(m.Stall/want-0.1) > 0.1 {
		t.Errorf("the first revision is %+v; the objective says %v for a stall", m, want)
	}
	f, now := busy(l, 400, 50*time.Millisecond)
	if l.Renew(f, now+every); l.Known().Trials == nil {
		t.Fatal("nothing was tried")
	}
	aim.TTFT /= 2
	all.Aim(aim)
	if k := l.Known(); k.Trials != nil || l.weighing.Weights != (Weights{l.weighing.usual, 1}) {
		t.Errorf("tried for another objective: %+v", k)
	}
	all.Fleet = func(string) *Fleet { return &Fleet{} }
	if one := all.Of("nobody serves it"); one.weighing.Price != 0 {
		t.Errorf("the price without ranks is %v", one.weighing.Price)
	}
}

// TestPartOfAFleet: a rank that joins changes at most one rank of the part that is tried, and
// what the requests of the others asked is kept.
func TestPartOfAFleet(t *testing.T) {
	fleet := func(n int) *Fleet {
		f := &Fleet{Prefill: make([]int, n/4), Decode: make([]DecodeLoad, n)}
		for i := range f.Decode {
			f.Decode[i].Slot = uint32(i)
		}
		return f
	}
	slots := func(f *Fleet) map[uint32]bool {
		in := map[uint32]bool{}
		for _, d := range f.Decode {
			in[d.Slot] = true
		}
		return in
	}
	before, after := fleet(320).sample(), fleet(321).sample()
	left := 0
	for s := range slots(before) {
		if !slots(after)[s] {
			left++
		}
	}
	if len(before.Decode) != 32 || len(after.Decode) != 32 || left > 1 {
		t.Errorf("%d and %d ranks are tried, of which %d changed", len(before.Decode), len(after.Decode), left)
	}
	l := NewLearner(Objective{For: ForGoodput, TTFT: time.Second, ITL: time.Second})
	for i := range 900 {
		l.Chose(&Request{Local: Work{Tokens: 1, Context: 1, Slot: uint32(i % 320)}}, false, time.Duration(i))
	}
	l.triesOn(before, true)
	kept := len(l.history.all)
	for i := range l.history.all {
		if q := l.history.at(i); !slots(before)[q.request.Local.Slot] || i > 0 && q.at <= l.history.at(i-1).at {
			t.Fatalf("kept %+v", q)
		}
	}
	l.Chose(&Request{Local: Work{Tokens: 1, Context: 1, Slot: before.Decode[0].Slot}}, false, 1000)
	if kept < 80 || kept > 100 || len(l.history.all) != kept+1 {
		t.Errorf("%d of 900 requests are kept, and then %d", kept, len(l.history.all))
	}
}
