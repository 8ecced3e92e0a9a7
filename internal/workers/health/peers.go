package health

import (
	"fmt"
	"math"
	"time"

	"github.com/dynctl/dynctl/internal/workers"
)

// peerKey names the workers that do the same work: with the same first model, and
// either all decode or all only prefill.
type peerKey struct {
	model  string
	decode bool
}

func keyOf(w *workers.Worker) peerKey {
	k := peerKey{decode: w.Role.CanDecode()}
	if len(w.Models) > 0 {
		k.model = w.Models[0]
	}
	return k
}

// tallies count how requests ended: those to one worker, or to all workers of a key. A
// worker is compared with what its peers did meanwhile: a request that breaks every engine
// breaks each of them at the same rate, and none of them is an outlier.
type tallies struct {
	total   tally
	windows [2]tally // the present and the last half of a window
	half    int64    // number of the present half
}

// tally counts requests by how they ended.
type tally struct{ served, failed, refused uint64 }

// minus is t without b, and no less than nothing: what b counts may have been taken out
// of t before.
func (t tally) minus(b tally) tally {
	return tally{t.served - min(t.served, b.served), t.failed - min(t.failed, b.failed), t.refused - min(t.refused, b.refused)}
}

func (t tally) plus(b tally) tally {
	return tally{t.served + b.served, t.failed + b.failed, t.refused + b.refused}
}

func (t tally) requests() uint64 { return t.served + t.failed + t.refused }

// turn begins a half of a window, if another one has come.
func (t *tallies) turn(half int64) {
	switch {
	case half == t.half:
		return
	case half == t.half+1:
		t.windows[0], t.windows[1] = tally{}, t.windows[0]
	default:
		t.windows = [2]tally{}
	}
	t.half = half
}

func (t *tallies) add(one tally, half int64) {
	t.turn(half)
	t.total, t.windows[0] = t.total.plus(one), t.windows[0].plus(one)
}

func (t *tallies) recent(half int64) tally {
	t.turn(half)
	return t.windows[0].plus(t.windows[1])
}

// half is the number of the half window that a time lies in.
func (o *Outliers) half(now time.Time) int64 { return now.UnixNano() / int64(o.opts.Window/2) }

// all are the tallies of the workers of a worker's key, itself included.
func (o *Outliers) all(w *workers.Worker) *tallies {
	k := keyOf(w)
	t := o.peers[k]
	if t == nil {
		t = &tallies{}
		o.peers[k] = t
	}
	return t
}

// tally counts an outcome for a worker, and remembers how its peers stood before, if it is
// the first that is no success.
func (o *Outliers) tally(r *record, out Outcome, now time.Time) {
	var one tally
	switch {
	case out == Success:
		one.served = 1
	case out == Refused:
		one.refused = 1
	case out.Failure() && out != ConnectError:
		one.failed = 1
	default:
		return
	}
	all := o.all(r.worker)
	if k := keyOf(r.worker); k != r.key { // its models have become known, or others
		r.key, r.own, r.before = k, tallies{}, all.total
	}
	if r.failures == 0 && r.refused == 0 {
		r.before = all.total.minus(r.own.total)
	}
	half := o.half(now)
	all.add(one, half)
	r.own.add(one, half)
}

// untally takes a failure back that was counted.
func (o *Outliers) untally(r *record) {
	if r.own.total.failed == 0 {
		return
	}
	one, all := tally{failed: 1}, o.all(r.worker)
	r.own.total, all.total = r.own.total.minus(one), all.total.minus(one)
	r.own.turn(all.half)
	for i := range r.own.windows {
		if r.own.windows[i].failed > 0 {
			r.own.windows[i], all.windows[i] = r.own.windows[i].minus(one), all.windows[i].minus(one)
			return
		}
	}
}

// others is what the peers of a worker did since its failures or refusals in a row
// began, or within the last window, whichever is more.
func (o *Outliers) others(r *record, now time.Time) tally {
	all, half := o.all(r.worker), o.half(now)
	recent := all.recent(half).minus(r.own.recent(half))
	streak := all.total.minus(r.own.total).minus(r.before)
	if streak.requests() > recent.requests() {
		return streak
	}
	return recent
}

// chance is how likely it may be that a worker fails as it does although it is no worse
// than its peers: one in ten thousand, since thousands of runs of failures are judged.
const chance = 1e-4

// worse reports whether a worker of whose requests failed of n failed is worse than
// peers of whose requests bad failed and good did not. It compares the worker's share
// with the peers' by Chernoff's bound for binomial tails (the relative entropy of the
// shares, times n). Two assumed failures of the peers allow for small samples.
func worse(failed, n int, bad, good uint64) bool {
	p := (float64(bad) + 2) / (float64(bad) + float64(good) + 2)
	q := float64(failed) / float64(n)
	if q <= p {
		return false
	}
	entropy := q * math.Log(q/p)
	if q < 1 {
		entropy += (1 - q) * math.Log((1-q)/(1-p))
	}
	return float64(n)*entropy >= -math.Log(chance)
}

// differs reports whether a worker that fails does so more than its peers, or than one
// of them that has many requests and serves them all. If no request to a peer failed, it
// does.
func (o *Outliers) differs(r *record, now time.Time) bool {
	p := o.others(r, now)
	failed, n := r.failures, r.failures
	if total := r.windows[0].total + r.windows[1].total; r.failures < o.opts.Consecutive {
		failed, n = r.windows[0].failed+r.windows[1].failed, total
	}
	if p.failed == 0 || worse(failed, n, p.failed, p.served) {
		return true
	}
	if r.failures%o.opts.Consecutive != 0 { // not for each of many failures: it reads all records
		return false
	}
	key, half := keyOf(r.worker), o.half(now)
	own := r.own.recent(half)
	failed, n = int(own.failed), int(own.failed+own.served)
	for s, other := range o.records {
		if s == r.worker.State || keyOf(other.worker) != key {
			continue
		}
		if t := other.own.recent(half); t.failed == 0 && worse(failed, n, 0, t.served) {
			return true
		}
	}
	return false
}

// peersFail reports whether at least half of the requests to a worker's peers fail.
func (o *Outliers) peersFail(r *record, now time.Time) bool {
	p := o.others(r, now)
	return p.failed > 0 && p.failed >= p.served
}

// judgeRefusals returns why a worker that refuses requests is ejected, or "": it takes no
// request at all for half a window, and answers none, while its peers take theirs. A
// worker that is full of long answers is left alone.
func (o *Outliers) judgeRefusals(r *record, now time.Time) string {
	if r.refused < o.opts.MinRequests || now.Sub(r.refusedFrom) < o.opts.Window/2 || o.opts.Answering(r.worker) {
		return ""
	}
	p := o.others(r, now)
	if p.served == 0 || p.refused > 0 && !worse(r.refused, r.refused, p.refused, p.served) {
		return ""
	}
	return fmt.Sprintf("it refused %d requests in a row, while its peers took %d of %d", r.refused, p.served, p.served+p.refused)
}
