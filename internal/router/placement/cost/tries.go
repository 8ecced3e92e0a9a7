package cost

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// What a trial looks at.
const (
	// ahead is how far it looks, as a multiple of the time that an answer takes.
	ahead = 1.4
	// mostArrivals bounds the requests that arrive in it.
	mostArrivals = 1500
	// judged is the share of its time in which those arrive whose answers count: of later
	// ones too little is seen.
	judged = 0.6
	// queued is the share of what waits for prefill ranks that is there at the beginning. With
	// all of it no price is worth while that serves more requests once that is computed.
	queued = 0.5
	// blur is how far an answer's time between tokens may be off, as a share of the limit:
	// the standard deviation.
	blur = 0.08
)

// tries is a fleet in which the latest requests arrive again, once for each choice: what a
// rank has in work now it has, and what it does follows the laws. Times are in ms from now
// on.
type tries struct {
	model                   Model
	gaps                    Law
	stall, step             float64 // of the objective, and of a step that computes prompts
	during                  float64 // how fast answers go on while a prompt is computed
	span, ttftMost, itlMost float64
	fleet                   Fleet
	locally, remotely       sizes
	arrivals                []arrival
	lengths, sums           []float64 // of answers, and their running sum

	decode  []answering
	prefill []steps
	answers []answered
	ttft    []float64
	drawn   int
}

// arrival is a request that arrives at a time, whose answer comes from the rank of an index.
type arrival struct {
	request Request
	at      float64
	rank    int
}

// prepare makes a trial of what a learner knows, whose lock the caller holds. It reports
// whether there is enough for one.
func (t *tries) prepare(l *Learner, m *Model, f *Fleet, now time.Duration) bool {
	t.arrivals, t.lengths, t.sums = t.arrivals[:0], t.lengths[:0], t.sums[:0]
	if l.gapFit.count < lawEnough || len(l.history.all) == 0 || len(l.lengths.all) == 0 {
		return false
	}
	// While a rank computes a prompt its answers get no token, or nearly: that is what is
	// assumed until something else was measured.
	l.gapFit.solve(&Law{gapPrompts: 1}, nil)
	t.model, t.gaps, t.stall, t.step = *m, l.gapFit.law, m.Stall, l.step()
	t.during = min(max(1-t.gaps[gapPrompts], 0), 1)
	t.ttftMost, t.itlMost = float64(l.objective.TTFT)/float64(time.Millisecond), float64(l.objective.ITL)/float64(time.Millisecond)
	t.fleet.Decode = append(t.fleet.Decode[:0], f.Decode...)
	t.fleet.Prefill = append(t.fleet.Prefill[:0], f.Prefill...)
	sum := 0.0
	for _, n := range l.lengths.all {
		sum += float64(n)
		t.lengths, t.sums = append(t.lengths, float64(n)), append(t.sums, sum)
	}
	t.locally, t.remotely = l.sizes()
	t.span = ahead * l.answers * l.gaps
	t.arrive(&l.history, now)
	return len(t.arrivals) > 0 && t.arrivals[0].at <= judged*t.span
}

// sizes is how many tokens prompts have to compute: a mean one that waits, and the one that
// is being computed, since longer ones take longer.
type sizes struct{ waiting, underway int }

// sizes are those of the latest requests of either path. The caller holds mu.
func (l *Learner) sizes() (locally, remotely sizes) {
	var count, sum, square [2]float64
	for i := range l.history.all {
		q, path := &l.history.all[i], 0
		n := float64(q.request.Local.Tokens)
		if q.remote {
			n, path = float64(q.request.Prefill.Tokens), 1
		}
		count[path]++
		sum[path] += n
		square[path] += n * n
	}
	of := func(path int) sizes {
		return sizes{int(sum[path] / max(count[path], 1)), int(square[path] / max(sum[path], 1))}
	}
	return of(0), of(1)
}

// arrive has the requests of the last span arrive in the next one. Where fewer are known they
// come several times.
func (t *tries) arrive(history *ring[asked], now time.Duration) {
	n, begin := len(history.all), now-time.Duration(t.span*float64(time.Millisecond))
	first := 0
	for first < n && history.at(first).at < begin {
		first++
	}
	if first == n {
		return
	}
	if first == 0 { // they are not known from the beginning of the span
		begin = history.at(0).at
	}
	known := float64(now-begin) / float64(time.Millisecond)
	if known <= 0 {
		return
	}
	for base := 0.0; base < t.span; base += known {
		for k := first; k < n; k++ {
			q := history.at(k)
			at := base + float64(q.at-begin)/float64(time.Millisecond)
			if at >= t.span {
				return
			}
			if len(t.arrivals) == mostArrivals {
				t.span = at
				return
			}
			rank, in := slices.BinarySearchFunc(t.fleet.Decode, q.request.Local.Slot, func(d DecodeLoad, slot uint32) int { return cmp.Compare(d.Slot, slot) })
			if !in { // it has left
				rank = k % len(t.fleet.Decode)
			}
			t.arrivals = append(t.arrivals, arrival{q.request, at, rank})
		}
	}
}

// run tries weights.
func (t *tries) run(w Weights) Trial {
	m := &t.model
	m.Stall, m.Limit = t.stall*w.Price, t.ttftMost*w.Limit
	t.begin()
	for i := range t.arrivals {
		a := &t.arrivals[i]
		q, d := a.request, &t.decode[a.rank]
		t.advance(d, a.at)
		q.Local.Queued, _ = d.waiting(a.at)
		q.Local.Running = d.answers() + len(d.coming) - d.begun
		q.Transfer.Queued, q.Transfer.Running = q.Local.Queued, q.Local.Running
		p := t.idlest()
		q.Prefill.Queued, q.Prefill.Running = p.waiting(a.at)
		next := coming{tokens: t.length(), held: float64(q.Local.Context), answer: len(t.answers)}
		if c := m.Of(&q); c.Remote < c.Local {
			computed := p.add(a.at, m.Prefill[termOne], m.Prefill.compute(&q.Prefill), q.Prefill.Tokens)
			next.at = computed + m.Transfer.Time(&Work{Tokens: q.Transfer.Tokens, Running: q.Transfer.Running})
		} else {
			next.at = d.add(a.at, t.step, m.Local.compute(&q.Local), q.Local.Tokens)
		}
		d.expect(next)
		t.ttft = append(t.ttft, next.at-a.at)
		t.answers = append(t.answers, answered{rank: a.rank, length: next.tokens, first: next.at, late: next.at-a.at > t.ttftMost, judged: a.at <= judged*t.span})
	}
	for i := range t.decode {
		t.advance(&t.decode[i], t.span)
	}
	return t.result(w)
}

// begin gives every rank what it has in work now.
func (t *tries) begin() {
	t.decode = slices.Grow(t.decode[:0], len(t.fleet.Decode))[:len(t.fleet.Decode)]
	t.prefill = slices.Grow(t.prefill[:0], len(t.fleet.Prefill))[:len(t.fleet.Prefill)]
	t.answers, t.ttft, t.drawn = t.answers[:0], t.ttft[:0], 0
	m, last := &t.model, 0.0
	for i, tokens := range t.fleet.Prefill {
		p := &t.prefill[i]
		p.reset()
		last = max(last, p.begin(int(queued*float64(tokens)), t.remotely, m.Prefill[termOne], &m.Prefill))
	}
	for i := range t.decode {
		d, load := &t.decode[i], &t.fleet.Decode[i]
		d.reset()
		all := max(last, d.steps.begin(load.Queued, t.locally, t.step, &m.Local))
		held := 0.0
		if load.Answers > 0 {
			held = float64(load.Held) / float64(load.Answers)
		}
		for range load.Answers {
			d.running = append(d.running, running{until: t.rest(), held: held, answer: -1})
			d.held += held
		}
		slices.SortStableFunc(d.running, func(a, b running) int { return cmp.Compare(a.until, b.until) })
		// Which prompt each of these waits for is not known: their first tokens come one
		// after the other until all is computed.
		for k := range load.Waiting {
			d.expect(coming{at: all * float64(k+1) / float64(load.Waiting), tokens: t.length(), held: held, answer: -1})
		}
	}
}

// length is how long the next answer gets: the same with every choice.
func (t *tries) length() float64 {
	t.drawn++
	_, share := math.Modf(float64(t.drawn) * math.Phi)
	return t.lengths[int(share*float64(len(t.lengths)))]
}

// rest is how much is left of the next one that runs already: longer ones are met more
// often, and anywhere.
func (t *tries) rest() float64 {
	t.drawn++
	_, share := math.Modf(float64(t.drawn) * math.Phi)
	at := share * t.sums[len(t.sums)-1]
	i, _ := slices.BinarySearch(t.sums, at)
	return t.sums[min(i, len(t.sums)-1)] - at
}

// idlest is the prefill rank that is done first.
func (t *tries) idlest() *steps {
	least := &t.prefill[0]
	for i := range t.prefill {
		if t.prefill[i].ends < least.ends {
			least = &t.prefill[i]
		}
	}
	return least
}

// steps are those in which a rank computes prompts. A prompt that comes during one goes into
// the next.
type steps struct {
	// since is since when there is one after the other, begins and ends those of the last.
	since, begins, ends float64
	prompts             []prompt // those before done are
	done                int
}

// prompt is one of so many tokens that is computed until a time.
type prompt struct {
	until  float64
	tokens int
}

func (s *steps) reset() { *s = steps{prompts: s.prompts[:0]} }

// add adds a prompt that takes own ms, in a step that takes one ms besides. It returns when
// it is computed.
func (s *steps) add(at, one, own float64, tokens int) float64 {
	switch {
	case at >= s.ends:
		s.since, s.begins, s.ends = at, at, at+one+own
	case at >= s.begins:
		s.begins, s.ends = s.ends, s.ends+one+own
	default:
		s.ends += own
	}
	s.prompts = append(s.prompts, prompt{s.ends, tokens})
	return s.ends
}

// mostQueued bounds the prompts as which a trial begins with what waits on a rank.
const mostQueued = 64

// begin adds what waits at the beginning: so many tokens, of prompts of usual sizes, of which
// the first is half done. It returns when all is computed.
func (s *steps) begin(tokens int, n sizes, one float64, law *Law) float64 {
	size, done, least := n.underway, 2, max(tokens/mostQueued, 1)
	for tokens > 0 {
		size = min(max(size, least), tokens)
		s.add(0, one, law.compute(&Work{Tokens: size, Context: size})/float64(done), size)
		tokens -= size
		size, done = n.waiting, 1
	}
	return s.ends
}

// waiting are the prompts that are not computed at a time, and their tokens. Times do not
// fall.
func (s *steps) waiting(at float64) (tokens, prompts int) {
	for s.done < len(s.prompts) && s.prompts[s.done].until <= at {
		s.done++
	}
	for _, p := range s.prompts[s.done:] {
		tokens += p.tokens
	}
	return tokens, len(s.prompts) - s.done
}

// answering is a rank that answers, and computes prompts.
type answering struct {
	steps
	// now is until when it is known what it did, made how many tokens each of its answers
	// has got since the beginning, or would have, and busy for how long it had any.
	now, made, busy float64
	held            float64 // tokens of all answers
	// running are by their ends, of which ended have, coming by their beginnings, of which
	// begun have begun.
	running      []running
	coming       []coming
	ended, begun int
}

// running is an answer that began, or came into the trial, when made was from, with so many
// tokens held, and ends when it is until.
// answer is its index, or below 0.
type running struct {
	from, until, held float64
	answer            int
}

// coming is an answer of so many tokens whose first one comes at a time, after held ones.
type coming struct {
	at, tokens, held float64
	answer           int
}

// answered is what became of an answer.
type answered struct {
	rank         int
	length       float64
	first        float64 // when it began
	last         float64 // when it ended; 0 for not yet
	begun, made  float64 // the rank's made at its beginning, and at its newest token
	late, judged bool
}

func (d *answering) reset() {
	*d = answering{steps: d.steps, running: d.running[:0], coming: d.coming[:0]}
	d.steps.reset()
}

// answers is how many run.
func (d *answering) answers() int { return len(d.running) - d.ended }

// expect has an answer begin later.
func (d *answering) expect(c coming) {
	i, _ := slices.BinarySearchFunc(d.coming[d.begun:], c.at, func(o coming, at float64) int {
		if o.at <= at {
			return -1
		}
		return 1
	})
	d.coming = slices.Insert(d.coming, d.begun+i, c)
}

// start begins one.
func (d *answering) start(c coming) {
	until := d.made + c.tokens
	i, _ := slices.BinarySearchFunc(d.running[d.ended:], until, func(o running, until float64) int {
		if o.until <= until {
			return -1
		}
		return 1
	})
	d.running = slices.Insert(d.running, d.ended+i, running{from: d.made, until: until, held: c.held, answer: c.answer})
	d.held += c.held
}

// advance has a rank answer until a time.
func (t *tries) advance(d *answering, until float64) {
	for d.now < until {
		for d.begun < len(d.coming) && d.coming[d.begun].at <= d.now {
			c := d.coming[d.begun]
			d.begun++
			if c.answer >= 0 {
				t.answers[c.answer].begun = d.made
			}
			d.start(c)
		}
		next, speed := until, 1.0
		if d.begun < len(d.coming) {
			next = min(next, d.coming[d.begun].at)
		}
		if d.since <= d.now && d.now < d.ends {
			next, speed = min(next, d.ends), t.during
		}
		answers := float64(d.answers())
		if answers == 0 {
			d.now = next
			continue
		}
		r, gap, end := d.running[d.ended], t.gap(d)/speed, math.Inf(1)
		if speed > 0 {
			end = d.now + (r.until-d.made)*gap
		}
		if end > next {
			made := (next - d.now) / gap // none at speed 0
			d.made, d.held, d.busy, d.now = d.made+made, d.held+made*answers, d.busy+next-d.now, next
			continue
		}
		d.held += (r.until - d.made) * answers
		d.made, d.busy, d.now = r.until, d.busy+end-d.now, end
		d.ended++
		if r.answer >= 0 {
			a := &t.answers[r.answer]
			a.last, a.made = end, d.made
		}
		d.held = max(d.held-r.held-(r.until-r.from), 0)
	}
	for _, r := range d.running[d.ended:] {
		if r.answer >= 0 {
			t.answers[r.answer].made = d.made
		}
	}
}

// gap is the time between tokens on a rank that computes no prompt.
func (t *tries) gap(d *answering) float64 {
	const least = 0.01
	v := gapValues(d.held, float64(d.answers()), 0)
	ms := least
	for i := range v {
		ms += t.gaps[i] * v[i]
	}
	return ms
}

// result is what became of all. Whether a first token comes too late is known of every
// request, whether an answer keeps its limit of those alone that arrived in time.
func (t *tries) result(w Weights) Trial {
	late, seen, good := 0.0, 0.0, 0.0
	for i := range t.answers {
		switch a := &t.answers[i]; {
		case a.late:
			late++
		case a.judged && a.first < t.span:
			seen++
			good += t.good(a)
		}
	}
	slices.Sort(t.ttft)
	n, share := len(t.ttft), 1.0 // short answers may all begin after the span: nothing speaks against them
	if seen > 0 {
		share = good / seen
	}
	return Trial{Weights: w, Good: share * (1 - late/float64(n)), TTFT: t.ttft[min(n*95/100, n-1)]}
}

// good is how likely an answer that is not late keeps its limit. One that runs is taken to go
// on as fast as its rank was on average while it had answers.
func (t *tries) good(a *answered) float64 {
	tokens, end := a.made-a.begun, a.last
	if d := &t.decode[a.rank]; end == 0 {
		if d.made <= 0 {
			return 0
		}
		end, tokens = t.span+(a.length-tokens)*d.busy/d.made, a.length
	}
	if tokens < 1 {
		return 1
	}
	return 0.5 * math.Erfc(((end-a.first)/tokens/t.itlMost-1)/blur/math.Sqrt2)
}
