package admission

import (
	"sync"
	"sync/atomic"
	"time"
)

// fullFor is how long the memory counts as full at least after a refusal, so that
// refused requests cannot fill the event log.
const fullFor = 5 * time.Second

// Memory is an amount that requests share: bytes of bodies, or requests to workers at a
// time. What does not fit is refused immediately: a request that waited would hold some
// meanwhile. It is safe for
// concurrent use.
type Memory struct {
	limit, used atomic.Int64
	full        atomic.Bool

	mu      sync.Mutex  // orders the calls of onChange
	refused time.Time   // the newest refusal
	waits   *time.Timer // calls look when the newest refusal may be long enough ago; nil for no call
	// onChange is called when the memory is used up, and when half of it is free
	// again. It is nil once the memory is closed.
	onChange func(full bool, limit int64)
}

// NewMemory is a memory of limit bytes. onChange may be nil; it is called when a
// first request is refused, and again once half of the memory is free and no
// request has been refused for a while. It gets the limit of that moment.
func NewMemory(limit int64, onChange func(full bool, limit int64)) *Memory {
	m := &Memory{onChange: onChange}
	m.limit.Store(limit)
	return m
}

// SetLimit changes the limit; what is taken stays taken.
func (m *Memory) SetLimit(limit int64) {
	m.limit.Store(limit)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.refused = time.Time{} // those were refused under another limit
	m.ease()
}

// Take takes n bytes, or none if they do not fit: then a request is refused. What was taken
// must be given back exactly once.
func (m *Memory) Take(n int64) bool {
	ok := m.Try(n)
	if !ok {
		m.refuse()
	}
	return ok
}

// Try is Take for what can do without: if the bytes do not fit, no request counts as refused.
func (m *Memory) Try(n int64) bool {
	for {
		used := m.used.Load()
		if n > 0 && used+n > m.limit.Load() {
			return false
		}
		if m.used.CompareAndSwap(used, used+n) {
			return true
		}
	}
}

// Give gives n bytes back.
func (m *Memory) Give(n int64) {
	m.used.Add(-n)
	m.eased()
}

func (m *Memory) refuse() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.refused = time.Now()
	if m.full.CompareAndSwap(false, true) && m.onChange != nil {
		m.onChange(true, m.limit.Load())
	}
	m.wait(fullFor)
}

// wait has look run once the newest refusal may be long enough ago. The caller
// holds mu.
func (m *Memory) wait(d time.Duration) {
	if m.waits == nil && m.onChange != nil {
		m.waits = time.AfterFunc(d, m.look)
	}
}

// look ends the state of being full after its least time; where there is no room
// yet, Give does.
func (m *Memory) look() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.waits = nil
	if left := fullFor - time.Since(m.refused); left > 0 {
		m.wait(left)
		return
	}
	m.ease()
}

// eased calls ease with mu held; it costs nothing while the memory is not full.
func (m *Memory) eased() {
	if !m.full.Load() || m.used.Load() > m.limit.Load()/2 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ease()
}

// ease ends the state of being full when half of the memory is free and no
// request was refused for a while. The caller holds mu.
func (m *Memory) ease() {
	if m.used.Load() <= m.limit.Load()/2 && time.Since(m.refused) >= fullFor && m.full.CompareAndSwap(true, false) && m.onChange != nil {
		m.onChange(false, m.limit.Load())
	}
}

// Close stops the calls of onChange, and waits for one that is running. What is
// taken may be given back later.
func (m *Memory) Close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.onChange = nil
	if m.waits != nil {
		m.waits.Stop()
		m.waits = nil
	}
}

// Used is the number of bytes that are taken.
func (m *Memory) Used() int64 { return m.used.Load() }

// Limit is the number of bytes that can be taken.
func (m *Memory) Limit() int64 { return m.limit.Load() }

// Full reports whether a request was refused a moment ago, or before and less
// than half of the memory has become free since.
func (m *Memory) Full() bool {
	m.eased()
	return m.full.Load()
}
