package doctor

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
)

// noticed is how long a router with the default health.interval takes to see that an engine is
// gone, and some more.
var noticed = 3 * time.Second

// answer is what this machine gets of an engine's GET /health.
type answer struct {
	code int // 0 without an answer
	date time.Time
	err  error
}

// reach asks every engine directly: is it there, healthy, and what time is it. It gives the
// workers as the router sees them afterwards.
func (e *exam) reach(ctx context.Context, ws []admin.Worker) []admin.Worker {
	if len(ws) == 0 {
		e.add("engines", "router", Fail, "the router has no worker", "dynctl workers add, or --worker, --prefill and --decode")
	}
	answers := map[string]answer{}
	for _, w := range ws {
		e.o.Step("engine " + w.Name)
		var a answer
		a.code, a.date, a.err = e.get(ctx, strings.TrimRight(w.URL, "/")+"/health")
		if a.err == nil && a.code != http.StatusOK {
			a.err = fmt.Errorf("GET /health answers %d", a.code)
		}
		answers[w.Name] = a
	}
	ws = e.look(ctx, ws, func(w *admin.Worker) bool { a := answers[w.Name]; return w.Usable && a.err != nil && a.code == 0 })
	for _, w := range ws {
		a, asked := answers[w.Name]
		if !asked {
			continue // it came meanwhile
		}
		code, date, err := a.code, a.date, a.err
		switch {
		case !w.Usable && (err != nil || !w.Draining):
			e.down[w.Name] = true
			e.notUsable(&w, err)
			continue
		case !w.Usable:
			e.add("engine", w.Name, Warn, fmt.Sprintf(draining+"it gets no new requests, %d are in progress", active(&w)), fmt.Sprintf("dynctl workers resume %s ends the drain", w.Name))
		case err != nil && code == 0:
			e.add("reachable", w.Name, Warn, fmt.Sprintf("the router reaches it, this machine does not: %v", err), "counters cannot be read from here: run doctor and bench beside the router")
			continue
		case err != nil:
			e.add("reachable", w.Name, Fail, err.Error(), "")
			continue
		}
		text := engineText(&w)
		if !date.IsZero() {
			// The Date header has whole seconds.
			if off := time.Until(date); off > 2*time.Second || off < -3*time.Second {
				e.add("clock", w.Name, Warn, fmt.Sprintf("the engine's clock is about %.0f s from this one", off.Seconds()), "run a time service there")
			}
		}
		e.add("reachable", w.Name, OK, text, "")
	}
	return ws
}

// look asks the router again while it takes a worker for usable that this machine cannot
// reach: either its engine has just died, or only this machine cannot reach it.
func (e *exam) look(ctx context.Context, ws []admin.Worker, doubted func(*admin.Worker) bool) []admin.Worker {
	inDoubt := func() bool { return slices.ContainsFunc(ws, func(w admin.Worker) bool { return doubted(&w) }) }
	for began := time.Now(); inDoubt() && time.Since(began) < noticed && wait.For(ctx, 100*time.Millisecond); {
		e.o.Step("what the router finds at its next probe")
		if list, err := e.o.Target.Admin.Workers(ctx); err == nil {
			ws = list.Workers
		}
	}
	return ws
}

// notUsable is the one finding of a worker that gets no requests and is not drained. err is
// what this machine got of it; nil when the engine answers here.
func (e *exam) notUsable(w *admin.Worker, err error) {
	why := w.Reason
	if why == "" && err != nil {
		why = err.Error()
	}
	if err == nil {
		e.add("engine", w.Name, Fail, fmt.Sprintf("not usable: %s (%s)", w.Health, orNone(why)), "its engine answers here: dynctl top --view events shows when the router gave it up")
		return
	}
	e.add("engine", w.Name, Fail, "down: "+why, "is the engine running at "+w.URL+"? its own log says why it ended; the router takes it back once it answers")
}

// active is how many of the router's requests a worker has in progress.
func active(w *admin.Worker) (n int) {
	for i := range w.Ranks {
		n += w.Ranks[i].ActiveRequests
	}
	return n
}

// engineText is what is known of a worker's engine, and nothing of what is not.
func engineText(w *admin.Worker) string {
	words := []string{"engine unknown"}
	if w.Engine != "" {
		words[0] = strings.TrimSpace(w.Engine + " " + w.Version)
	}
	// What labels say may surprise those who did not write them.
	said := func(fact, value string) {
		if value == "" {
			return
		}
		if from := w.From[fact]; from != "" && w.Source == workers.SourceKube {
			value += " (" + from + ")"
		}
		words = append(words, value)
	}
	said("role", w.Role)
	if w.Revision != "" {
		said("revision", "revision "+w.Revision)
	}
	words = append(words, fmt.Sprintf("dp %d", w.DP))
	if w.BlockSizeTokens > 0 {
		words = append(words, fmt.Sprintf("block %d", w.BlockSizeTokens))
	}
	unused := len(w.Ranks) > 0
	for _, k := range w.Ranks {
		unused = unused && k.Engine != nil && k.Engine.Unused
	}
	if unused {
		words = append(words, "idle (no load series yet, and its counters say that it has served nothing)")
	}
	return strings.Join(words, ", ")
}
