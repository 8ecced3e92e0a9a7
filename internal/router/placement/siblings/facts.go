package siblings

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/replicas"
	"github.com/dynctl/dynctl/internal/workers"
)

const (
	// storedFor is how long a stored response is repeated in full states, for those who
	// missed it.
	storedFor = 5 * time.Second
	// maxStored bounds those that are repeated; more replace the oldest.
	maxStored = 8 * replicas.MaxStored
)

// facts is what is shared beside load. Siblings.mu guards it.
type facts struct {
	byName map[string]replicas.Rank
	byKey  map[replicas.Rank]*workers.Worker
	orders map[replicas.Rank]replicas.Order
	stored []kept // oldest first
	// spent is what each process of another router published last of each key.
	spent map[process]map[uint64]replicas.Spent
	// ejected are the workers that each other router has ejected, by its last full state.
	ejected map[string]ejected
}

type ejected struct {
	at      time.Time
	workers []replicas.Rank
}

// process is a router from its start to its end.
type process struct {
	origin string
	epoch  int64
}

// kept is a response that a worker keeps. sent reports whether it was published.
type kept struct {
	replicas.Stored
	at   time.Time
	sent bool
}

func newFacts() facts {
	return facts{byName: map[string]replicas.Rank{}, byKey: map[replicas.Rank]*workers.Worker{}, orders: map[replicas.Rank]replicas.Order{}, spent: map[process]map[uint64]replicas.Spent{}, ejected: map[string]ejected{}}
}

// Order shares an operator's word on a worker with the other routers. The caller has
// carried it out here.
func (s *Siblings) Order(w *workers.Worker, drain int) {
	if s == nil {
		return
	}
	key := replicas.WorkerOf(w.URL.String())
	s.mu.Lock()
	o := replicas.Order{Worker: key, At: max(s.o.Clock().UnixNano(), s.orders[key].At+1), Drain: drain}
	s.orders[key] = o
	s.mu.Unlock()
	if x := s.exchange.Load(); x != nil {
		x.RequestFull()
	}
}

// Keeps shares that a worker keeps a response of a tenant.
func (s *Siblings) Keeps(id, worker, tenant string) {
	if s == nil || len(id) > replicas.MaxText || len(tenant) > replicas.MaxText {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	key, ok := s.byName[worker]
	if !ok {
		return
	}
	if len(s.stored) >= maxStored {
		s.stored = slices.Delete(s.stored, 0, 1)
	}
	s.stored = append(s.stored, kept{replicas.Stored{ID: id, Tenant: tenant, Worker: key}, s.o.Clock(), false})
}

// fill adds facts to a message.
func (s *Siblings) fill(full bool, f *replicas.Facts) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.o.Clock()
	s.stored = slices.DeleteFunc(s.stored, func(k kept) bool { return k.sent && now.Sub(k.at) >= storedFor })
	for i := range s.stored {
		if k := &s.stored[i]; !k.sent && len(f.Stored) < replicas.MaxStored {
			f.Stored, k.sent = append(f.Stored, k.Stored), true
		}
	}
	if s.o.Rates != nil {
		for _, k := range s.o.Rates.Spent(full, replicas.MaxSpent, now) {
			f.Spent = append(f.Spent, replicas.Spent(k))
		}
	}
	if !full {
		return
	}
	for i := len(s.stored) - 1; i >= 0 && len(f.Stored) < replicas.MaxStored; i-- {
		if k := &s.stored[i]; k.sent && k.at != now {
			f.Stored = append(f.Stored, k.Stored)
		}
	}
	for key, w := range s.byKey {
		if w.State.Ejection() != nil && len(f.Ejected) < replicas.MaxOrders {
			f.Ejected = append(f.Ejected, key)
		}
	}
	for _, o := range s.orders {
		f.Orders = append(f.Orders, o)
	}
	if len(f.Orders) > replicas.MaxOrders { // the newest ones
		slices.SortFunc(f.Orders, func(a, b replicas.Order) int {
			if a.Replaces(&b) {
				return -1
			}
			return 1
		})
		f.Orders = f.Orders[:replicas.MaxOrders]
	}
}

// Ejected reports whether another router has ejected the worker: a hint that it fails.
func (s *Siblings) Ejected(w *workers.Worker) bool {
	if s == nil {
		return false
	}
	key := replicas.WorkerOf(w.URL.String())
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.o.Clock()
	for _, e := range s.ejected {
		if now.Sub(e.at) < replicas.FullEvery+replicas.Lifetime && slices.Contains(e.workers, key) {
			return true
		}
	}
	return false
}

// heard takes the facts of another router.
func (s *Siblings) heard(m *replicas.Message) {
	if s.exchange.Load() != nil {
		s.firstOnce.Do(func() { close(s.first) })
	}
	for _, e := range s.take(m) {
		s.o.Event(e)
	}
}

func (s *Siblings) take(m *replicas.Message) (events []eventlog.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := &m.Facts
	s.debit(process{m.Origin, m.Epoch.UnixNano()}, f.Spent)
	if m.Full && m.From == 0 {
		s.ejected[m.Origin] = ejected{s.o.Clock(), slices.Clone(f.Ejected)}
	}
	for _, k := range f.Stored {
		if w := s.byKey[k.Worker]; w != nil && s.o.Learned != nil {
			s.o.Learned(k.ID, w.Name, k.Tenant)
		}
	}
	for _, o := range f.Orders {
		w := s.byKey[o.Worker]
		was, known := s.orders[o.Worker]
		if w == nil || known && !o.Replaces(&was) {
			continue
		}
		s.orders[o.Worker] = o
		switch {
		case o.Drain == replicas.Resumed && w.State.Draining() && !w.State.Leaving():
			w.State.SetDraining(false)
			events = append(events, eventlog.Event{Kind: "worker_resumed", Worker: w.Name, Text: fmt.Sprintf("worker %s takes requests again, by the operator of another router", w.Name)})
		case o.Drain == replicas.Moved && !w.State.Moving():
			w.State.SetMoving()
			events = append(events, eventlog.Event{Kind: "worker_draining", Worker: w.Name, Text: fmt.Sprintf("worker %s drains and its streams continue elsewhere, by the operator of another router", w.Name)})
		case o.Drain == replicas.Drained && (!w.State.Draining() || w.State.Moving()):
			w.State.SetDraining(true)
			events = append(events, eventlog.Event{Kind: "worker_draining", Worker: w.Name, Text: fmt.Sprintf("worker %s drains, by the operator of another router", w.Name)})
		}
	}
	return events
}

// debit takes what keys let through at another router out of their rates here. A message that
// is late brings less than is known, and nothing.
func (s *Siblings) debit(p process, list []replicas.Spent) {
	if s.o.Rates == nil || len(list) == 0 {
		return
	}
	known := s.spent[p]
	if known == nil {
		known = map[uint64]replicas.Spent{}
		s.spent[p] = known
	}
	now := s.o.Clock()
	for _, k := range list {
		was, ok := known[k.Key]
		if !ok {
			was = replicas.Spent{Requests: k.Settled, Tokens: k.SettledTokens}
		}
		if ok && k.Requests < was.Requests {
			continue
		}
		if s.o.Rates.Debit(k.Key, k.Requests-was.Requests, k.Tokens-was.Tokens, now) {
			known[k.Key] = k
		}
	}
}

// forget drops what is known of routers that are known no longer, or that started again. The
// caller holds mu.
func (s *Siblings) forget(origins []replicas.Origin) {
	if s.o.Rates != nil {
		live := 0
		for i := range origins {
			if origins[i].Live {
				live++
			}
		}
		s.o.Rates.SetRouters(live)
	}
	maps.DeleteFunc(s.ejected, func(name string, _ ejected) bool {
		return !slices.ContainsFunc(origins, func(o replicas.Origin) bool { return o.Origin == name })
	})
	for p := range s.spent {
		if !slices.ContainsFunc(origins, func(o replicas.Origin) bool { return o.Origin == p.origin && o.Epoch.UnixNano() == p.epoch }) {
			delete(s.spent, p)
		}
	}
}
