package replicas

import "time"

// Apply is take, for tests that read only whether a full state should be requested.
func (v *View) Apply(now time.Time, m *Message) (ask bool) {
	_, ask = v.take(now, m)
	return ask
}

// Load is the load that the other live routers have on a rank, together. age is the time
// since the oldest part of it was known to be true, without its way here. ok is false if no
// live router has published its load on the rank, or the rank is unknown.
func (v *View) Load(now time.Time, rank Rank) (sum Load, age time.Duration, ok bool) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	s := v.sum(now, rank)
	if s.Since.IsZero() {
		return Load{}, 0, false
	}
	return s.Load, now.Sub(s.Since), true
}
