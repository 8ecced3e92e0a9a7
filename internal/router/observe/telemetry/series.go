package telemetry

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// maxLabels is how many labels a family of series has at most.
const maxLabels = 4

// family is a metric with labels. It keeps the series that it has resolved:
// several are counted for each request, and Prometheus' own look-up hashes and
// locks each time. Who reads waits for nobody; a new series copies the table,
// which is as rare as a new worker or a new model.
type family[T any] struct {
	vec    *prometheus.MetricVec
	with   func(labels ...string) T
	worker int // the place of the label worker, -1: it has none

	making *sync.Mutex // orders the making of series with their end
	here   func(worker string) bool
	forget func(worker string)
	known  atomic.Pointer[map[[maxLabels]string]T]
}

// of is the series of these values of the labels, in their order.
func (f *family[T]) of(labels ...string) T {
	var k [maxLabels]string
	copy(k[:], labels)
	if known := f.known.Load(); known != nil {
		if s, ok := (*known)[k]; ok {
			return s
		}
	}
	s := f.add(k, len(labels))
	// A request may end after its worker has left, and would bring back for good
	// what was forgotten.
	if f.worker >= 0 && f.here != nil && !f.here(k[f.worker]) {
		f.forget(k[f.worker])
	}
	return s
}

func (f *family[T]) add(k [maxLabels]string, n int) T {
	f.making.Lock()
	defer f.making.Unlock()
	known := map[[maxLabels]string]T{}
	if old := f.known.Load(); old != nil {
		if s, ok := (*old)[k]; ok {
			return s
		}
		known = maps.Clone(*old)
	}
	s := f.with(slices.Clone(k[:n])...)
	known[k] = s
	f.known.Store(&known)
	return s
}

// drop ends the series of a worker. The caller holds making.
func (f *family[T]) drop(worker string) {
	if old := f.known.Load(); old != nil {
		known := maps.Clone(*old)
		maps.DeleteFunc(known, func(k [maxLabels]string, _ T) bool { return k[f.worker] == worker })
		f.known.Store(&known)
	}
	f.vec.DeletePartialMatch(prometheus.Labels{"worker": worker})
}
