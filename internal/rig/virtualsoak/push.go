package virtualsoak

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
)

// pushWait is how long a decode engine waits for KV that is to be pushed to it.
const pushWait = 300 * time.Millisecond

// pushes draws whether both legs of a request are sent at once, because prefill engines push
// their KV or decode engines ask for it by the transfer's name, with numbers of its own.
func (s *stage) pushes() {
	rng := rand.New(rand.NewPCG(s.out.Seed, 0x70757368))
	if rng.IntN(4) == 0 {
		s.group.Connector = []workers.Connector{workers.ConnectorNIXLPush, workers.ConnectorMooncake}[rng.IntN(2)]
	}
}

// atOnce reports whether the legs of a request are sent at once.
func (s *stage) atOnce() bool { return s.group.Connector != workers.ConnectorNIXL }

// transfer is one whose legs find each other by its name.
type transfer struct {
	kv      *engine.Pull // nil until the prompt is computed
	waits   func()       // is called then; nil where no decode engine waits
	asked   bool         // a prefill leg has had it
	written bool         // its request was written
}

// query is the bootstrap server of a prefill worker, as the router asks it. It takes a while
// only where the prefill leg is under way: before, that counts as in progress and is no leg.
func (s *stage) query(ctx context.Context, server string) ([]byte, error) {
	if legs := s.running.q.legs; len(legs) > 0 && legs[len(legs)-1].phase == route.Prefill && !legs[len(legs)-1].over {
		if s.pause(ctx, s.between(50*time.Microsecond, time.Millisecond)); ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
	}
	n := s.byHost[strings.TrimPrefix(server, "http://")]
	if n == nil || !n.up {
		return nil, errors.New("refused")
	}
	return fmt.Appendf(nil, `{"0":{"engine_id":%q,"worker_addr":{}}}`, n.v.EngineID()), nil
}

func (s *stage) transfer(name string) *transfer {
	t := s.transfers[name]
	if t == nil {
		t = &transfer{}
		s.transfers[name] = t
	}
	return t
}

// computed is a prefill engine that has the KV of a transfer.
func (l *leg) computed(o engine.Output) {
	s, t := l.s, l.s.transfer(l.push)
	t.kv = &engine.Pull{EngineID: l.life, RequestID: l.id, Host: "127.0.0.1", Port: 5600, Blocks: o.Pinned}
	if t.waits != nil {
		s.w.At(s.w.Now(), t.waits)
	}
}

// registers is a decode engine that makes room for KV. It takes the request up when that
// has come from the engine that it was told of.
func (l *leg) registers(r engine.Request, from string) {
	s, t := l.s, l.s.transfer(l.push)
	inc := l.n.inc
	if !t.written {
		s.violate("%s: the decode leg of %s was sent before the request of its prefill leg was written", l.q.id, l.push)
	}
	if t.waits != nil {
		s.violate("the transfer %s feeds two requests", l.push)
	}
	done := false
	lost := func() bool { // its process is gone
		if !done && !l.over && l.n.inc != inc {
			l.later(func() { l.reset("engine is down") })
			done = true
		}
		return done || l.over
	}
	t.waits = func() {
		if lost() || t.kv.EngineID != from {
			return
		}
		done = true
		r.Pull = t.kv
		l.submit(r)
	}
	if t.kv != nil {
		t.waits()
	}
	l.n.onKill = append(l.n.onKill, func() { lost() })
	s.w.At(s.w.Now()+pushWait, func() {
		if !lost() {
			done = true
			l.later(func() { l.refuses(http.StatusInternalServerError, "no KV came") })
		}
	})
}

// beside runs a prefill leg beside its decode leg: it is a task, too.
type beside struct{ s *stage }

// Go is for pair.Runner.
func (b beside) Go(f func()) {
	b.s.start(b.s.running.q, func() {
		b.s.running.beside = true
		f()
	})
}

// Wait is for pair.Runner.
func (b beside) Wait(ctx context.Context, done <-chan struct{}, limit time.Duration) {
	s, t, until := b.s, b.s.running, b.s.w.Now()+limit
	if limit > 0 {
		s.w.At(until, func() { s.wake(t) })
	}
	t.done = done
	for ctx.Err() == nil && !t.joined() && (limit == 0 || s.w.Now() < until) {
		s.block(ctx)
	}
	t.done = nil
}

// joined reports whether what the task waits for has ended.
func (t *task) joined() bool {
	select {
	case <-t.done:
		return true
	default:
		return false
	}
}
