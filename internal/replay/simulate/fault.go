package simulate

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
)

// FaultKind is what a fault does to engines in a run.
type FaultKind string

// The kinds.
const (
	// SlowPrefill makes the prefill ranks slower by Fault.By, which is set against their
	// speed at the start: 1 makes them well.
	SlowPrefill FaultKind = "prefill_slow"
	// SlowOne does that with the prefill engine named last.
	SlowOne FaultKind = "one_prefill_slow"
	// SlowDecode does that with the engine named last of those that answer.
	SlowDecode FaultKind = "one_decode_slow"
	// SlowNetwork does that with the transfers of KV between engines.
	SlowNetwork FaultKind = "network_slow"
	// PrefillGone ends a share of the prefill engines, those named last first, rounded.
	// What they work on fails; the router notices when it next reads their load figures.
	PrefillGone FaultKind = "prefill_gone"
)

// Fault is one change of a run's engines.
type Fault struct {
	// At is the time since the first request arrived, under the run's clock.
	At   time.Duration
	Kind FaultKind
	// By is a factor of at least 1, or with PrefillGone a share from 0 to 1.
	By float64
}

// ParseFault reads "10m:prefill_slow=3".
func ParseFault(text string) (f Fault, err error) {
	at, rest, _ := strings.Cut(text, ":")
	kind, by, _ := strings.Cut(rest, "=")
	f.Kind = FaultKind(kind)
	if f.At, err = time.ParseDuration(at); err != nil || f.At < 0 {
		return Fault{}, fmt.Errorf("%q: want a time before the colon, as in 10m:prefill_slow=3", text)
	}
	f.By, err = strconv.ParseFloat(by, 64)
	switch f.Kind {
	case SlowPrefill, SlowOne, SlowDecode, SlowNetwork:
		if err != nil || !(f.By >= 1 && f.By <= 1e6) {
			return Fault{}, fmt.Errorf("%q: want a factor of 1 to 1e6 after %s=", text, kind)
		}
	case PrefillGone:
		if err != nil || !(f.By >= 0 && f.By <= 1) {
			return Fault{}, fmt.Errorf("%q: want a share from 0 to 1 after %s=", text, kind)
		}
	default:
		return Fault{}, fmt.Errorf("%q: there are the faults %s, %s, %s, %s and %s", text, SlowPrefill, SlowOne, SlowDecode, SlowNetwork, PrefillGone)
	}
	return f, nil
}

// wire is a timing model whose transfers take longer at times.
type wire struct {
	engine.Timing
	slow *float64 // 1 is normal
}

// Transfer is the time that moving the KV of so many tokens takes.
func (w wire) Transfer(tokens int) time.Duration {
	return time.Duration(float64(w.Timing.Transfer(tokens)) * *w.slow)
}

// expect has the faults happen at their times.
func (r *run) expect() error {
	for _, f := range r.s.Faults {
		switch {
		case f.Kind != SlowDecode && !r.split:
			return fmt.Errorf("%s: a fault of prefill engines or of transfers needs prefill engines in the fleet", f.Kind)
		case f.Kind == SlowDecode && !slices.ContainsFunc(r.list, func(w *workers.Worker) bool { return w.Role.CanDecode() }):
			return fmt.Errorf("%s: a fault of an engine that answers needs one in the fleet", f.Kind)
		}
		r.world.At(f.At, func() { r.suffer(f) })
	}
	return nil
}

// suffer does to the engines what a fault says.
func (r *run) suffer(f Fault) {
	if f.Kind == SlowNetwork {
		r.wire = f.By
		return
	}
	var suffering []*workers.Worker
	for _, w := range r.list {
		if w.Role.CanDecode() == (f.Kind == SlowDecode) {
			suffering = append(suffering, w)
		}
	}
	switch n := len(suffering); f.Kind {
	case PrefillGone:
		suffering = suffering[n-int(math.Round(f.By*float64(n))):]
	case SlowOne, SlowDecode:
		suffering = suffering[n-1:]
	}
	for _, w := range suffering {
		for _, rank := range w.Ranks {
			k := r.ranks[rank.Slot]
			switch core := k.eng.Core(); {
			case f.Kind == PrefillGone:
				k.eng.Kill("gone")
			case core != nil:
				core.SetSlow(f.By)
				k.eng.Touch()
			}
		}
	}
}
