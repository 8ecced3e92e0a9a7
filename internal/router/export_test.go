package router

import "github.com/dynctl/dynctl/internal/workers/health"

// Heal ends a worker's ejection and lets good reports outweigh the bad ones,
// so that a table of failures does not depend on its order.
func (r *Router) Heal(name string) {
	w, ok := r.registry.Snapshot().Worker(name)
	if !ok {
		return
	}
	w.State.SetEjection(nil)
	for range 200 {
		r.outliers.Report(w, health.Success)
	}
}
