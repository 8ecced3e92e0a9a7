package access

import (
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"
)

const (
	// blind is how long a router may not see what another one lets through.
	blind = 100 * time.Millisecond
	// idleAfter is how long a key is taken to be in use at a router after its last request.
	idleAfter = 10 * time.Second
	// recent is how long what a key let through is repeated for other routers.
	recent = 2 * time.Second
	// extra is the share of a key's requests by which the routers of a fleet may exceed it
	// together for a moment, so that a router where the key was idle need not wait.
	extra = 0.2
)

// Spent is what a key let through at one router since its process began.
type Spent struct {
	// Key is a hash of the key's name.
	Key uint64
	// Requests that began, and those of them before the key was idle last.
	Requests, Settled uint64
	// Tokens that they used, and those of them before the key was idle last.
	Tokens, SettledTokens int64
}

// peers is what routers that share rates have in common. What one lets through, all others
// take out of their rates, so that each has what the others leave.
type peers struct {
	others atomic.Int32 // other routers

	mu      sync.Mutex // guards all below, and what is in the meters
	changed map[uint64]*meter
}

// meter is what a key let through here. It is kept when the file is read again.
type meter struct {
	peers *peers
	key   uint64

	total Spent
	sent  Spent
	// own is when a request began here last, since when the first after the key was idle;
	// other is when one began at another router.
	own, since, other time.Time
	// window is when the present blind time began, with free requests; taken began since.
	window time.Time
	free   float64
	taken  int
}

// part is this router's share of what is free in a blind time. The shares of all routers are
// 1 and extra together.
func (m *meter) part(now time.Time) float64 {
	here := now.Sub(m.own) < idleAfter && now.Sub(m.since) >= 2*blind
	there := now.Sub(m.other) < idleAfter
	switch {
	case here && !there:
		return 1
	case there && !here:
		return extra / float64(m.peers.others.Load())
	default:
		return (1 + extra) / float64(1+m.peers.others.Load())
	}
}

// hold is how long a request must wait because other routers may be letting through others
// at this moment; 0 for one that may begin if the key's rate allows it.
func (k *Key) hold(now time.Time) time.Duration {
	m := k.meter
	if m == nil || k.Rate == 0 || m.peers.others.Load() == 0 {
		return 0
	}
	m.peers.mu.Lock()
	defer m.peers.mu.Unlock()
	if now.Sub(m.window) >= blind {
		m.window, m.free, m.taken = now, k.limit.TokensAt(now), 0
	}
	if m.taken == 0 || float64(m.taken+1) <= m.free*m.part(now) {
		return 0
	}
	return m.window.Add(blind).Sub(now)
}

// spent notes requests that began and tokens that were used.
func (k *Key) spent(requests, tokens int, now time.Time) {
	m := k.meter
	if m == nil || m.peers.others.Load() == 0 {
		return
	}
	m.peers.mu.Lock()
	defer m.peers.mu.Unlock()
	m.taken += requests
	if requests > 0 {
		if now.Sub(m.own) >= idleAfter {
			m.since = now
		}
		m.own = now
	}
	if _, known := m.peers.changed[m.key]; !known {
		m.total.Settled, m.total.SettledTokens = m.total.Requests, m.total.Tokens
		m.peers.changed[m.key] = m
	}
	m.total.Requests += uint64(requests)
	m.total.Tokens += int64(tokens)
}

// SetRouters sets how many other routers share the keys' rates. Without any a key has all
// of its rate here, as it has when it is used at no other router.
func (s *Store) SetRouters(others int) {
	s.peers.others.Store(int32(others))
}

// Spent returns what keys let through here, of at most limit keys: those that changed since
// the last call, or, if all is set, in the last two seconds.
func (s *Store) Spent(all bool, limit int, now time.Time) (list []Spent) {
	p := s.peers
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.changed, func(_ uint64, m *meter) bool { return m.total == m.sent && now.Sub(m.own) >= recent })
	for _, m := range p.changed {
		if len(list) < limit && (all || m.total != m.sent) {
			m.sent = m.total
			list = append(list, m.total)
		}
	}
	return list
}

// Debit takes what a key let through at another router out of its rate and its tokens here: of
// requests no more than one burst below nothing, of tokens those of ten minutes. It reports
// false for a key that is not known.
func (s *Store) Debit(key uint64, requests uint64, tokens int64, now time.Time) bool {
	k := s.current.Load().named[key]
	if k == nil {
		return false
	}
	if requests > 0 {
		k.meter.peers.mu.Lock()
		k.meter.other = now
		k.meter.peers.mu.Unlock()
	}
	if k.Rate > 0 {
		_, burst := k.bucket()
		for n := int(min(requests, uint64(k.Rate))); n > 0 && k.limit.TokensAt(now) > -float64(burst); n -= burst {
			k.limit.ReserveN(now, min(n, burst))
		}
	}
	if k.Tokens > 0 {
		k.tokens.debit(k.Tokens, tokens, now)
	}
	return true
}

// join gives the keys of a set the meters of a store.
func (s *Set) join(p *peers) {
	s.named = make(map[uint64]*Key, len(s.keys))
	for i := range s.keys {
		k := &s.keys[i]
		if k.meter == nil {
			h := xxh3.HashString(k.Name)
			k.meter = &meter{peers: p, key: h, total: Spent{Key: h}, sent: Spent{Key: h}}
		}
		s.named[k.meter.key] = k
	}
}
