package admission

import (
	"sync"
	"sync/atomic"
)

// Memory is a number of bytes that requests share. What does not fit is refused
// at once: who waited for memory would hold memory meanwhile. It is safe for
// concurrent use.
type Memory struct {
	limit, used atomic.Int64
	full        atomic.Bool

	mu sync.Mutex // orders what told hears
	// told hears when the memory is used up, and when half of it is free again.
	told func(full bool)
}

// NewMemory is a memory of limit bytes. told may be nil; it is called when a
// first request is refused, and again once half of the memory is free.
func NewMemory(limit int64, told func(full bool)) *Memory {
	m := &Memory{told: told}
	m.limit.Store(limit)
	return m
}

// SetLimit changes the limit; what is taken stays taken.
func (m *Memory) SetLimit(limit int64) {
	m.limit.Store(limit)
	m.eased()
}

// Take takes n bytes, or none if they do not fit. What was taken must be given
// back exactly once.
func (m *Memory) Take(n int64) bool {
	for {
		used := m.used.Load()
		if n > 0 && used+n > m.limit.Load() {
			m.refuse()
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
	if m.full.CompareAndSwap(false, true) && m.told != nil {
		m.told(true)
	}
	m.mu.Unlock()
	m.eased() // the others may have given everything back before full was set
}

// eased ends the state of being full once half of the memory is free.
func (m *Memory) eased() {
	if !m.full.Load() || m.used.Load() > m.limit.Load()/2 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.used.Load() <= m.limit.Load()/2 && m.full.CompareAndSwap(true, false) && m.told != nil {
		m.told(false)
	}
}

// Used is the number of bytes that are taken.
func (m *Memory) Used() int64 { return m.used.Load() }

// Limit is the number of bytes that can be taken.
func (m *Memory) Limit() int64 { return m.limit.Load() }

// Full reports whether a request was refused and less than half of the memory
// has become free since.
func (m *Memory) Full() bool { return m.full.Load() }
