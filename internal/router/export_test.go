package router

import (
	"time"

	"github.com/dynctl/dynctl/internal/router/serving/resumed"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/health"
)

// Heal ends a worker's ejection and lets good reports outweigh the bad ones,
// so that a table of failures does not depend on its order.
func (r *Router) Heal(name string) {
	w, ok := r.registry.Snapshot().Worker(name)
	if !ok {
		return
	}
	w.State.SetEjection(nil)
	for range 200 {
		if a, ok := r.outliers.Admit(w); ok {
			r.outliers.Report(a, health.Success)
		}
	}
}

// ForgetLoad makes the load of a worker's ranks unknown until the next scrape.
func (r *Router) ForgetLoad(name string) {
	if w, ok := r.registry.Snapshot().Worker(name); ok {
		for _, k := range w.Ranks {
			l := workers.UnknownLoad(time.Now())
			k.SetLoad(&l)
		}
	}
}

// WithoutResumed makes the router one whose streams end with their engine, as if there were
// no package resumed.
func (r *Router) WithoutResumed() { r.door.Answers = r.answers.(*resumed.Engine).Next }

// BodyMemory is how many bytes of limits.body_memory are taken.
func (r *Router) BodyMemory() int64 { return r.bodies.Used() }
