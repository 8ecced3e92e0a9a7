// Package door is the HTTP side of the router: it admits, authenticates, reads and tokenizes a
// request, has the call answered, and copies the answer to the client. What is behind it
// ([serving]) knows no HTTP server.
package door

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/control"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/lifecycle"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/routing"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/media"
	"github.com/dynctl/dynctl/internal/router/request/models"
	"github.com/dynctl/dynctl/internal/router/request/stored"
	"github.com/dynctl/dynctl/internal/router/serving"
	"github.com/dynctl/dynctl/internal/settings/effective"
	"github.com/dynctl/dynctl/internal/workers"
)

// Parts are what a door uses.
type Parts struct {
	Log      *slog.Logger
	Event    func(eventlog.Event)
	Tracer   *telemetry.Tracer // nil for none
	Settings *effective.InForce
	Registry *workers.Registry
	Secure   *control.Secure
	// Requests ends when the router stops waiting for requests.
	Requests context.Context
	Hop      api.Hop
	// Starting reports whether workers may not have answered yet at a time because the router
	// had just begun.
	Starting func(time.Time) bool
	// Probe answers probes, and Panicked reports a panic, where the stack still shows it.
	Probe    http.HandlerFunc
	Panicked func(*serving.Call, any)

	Drain     *control.Drain
	Limiter   *admission.Limiter
	RankQueue *admission.Queue
	Bodies    *admission.Memory
	Budget    *attempt.Budget

	Decider *routing.Decider
	Media   *media.Table
	// Reread asks the fleet's usable workers which models they serve.
	Reread func(context.Context, *workers.Snapshot)
	Stored *stored.Responses
	Client *upstream.Client

	Failures *watch.Failures
	Receipts *receipt.Ring
	Stream   *lifecycle.Stream
	// Untrusted reports whether the index may be wrong about the rank with a slot.
	Untrusted func(slot uint32) bool

	Answers serving.Engine
}

// Door is the data plane: an http.Handler.
type Door struct {
	Parts
	lists  models.Lists
	finder *stored.Finder
}

// New makes a door.
func New(p Parts) *Door {
	d := &Door{Parts: p, finder: stored.NewFinder()}
	d.lists = models.Lists{
		Fleet: p.Registry.Snapshot, Of: modelsOf(p.Client), Failed: func(err error) { p.Log.Warn("a model list could not be read", "err", err) },
		Aliases: func() (list []models.Alias) {
			for _, k := range p.Settings.Load().Aliases {
				if !workers.IsPattern(k.Name) {
					list = append(list, models.Alias{Name: k.Name, Target: k.Model})
				}
			}
			return list
		},
	}
	return d
}

// doorKey is the key of a context under which the door is found whose router cancels it.
type doorKey struct{}

// Context is one for the requests of a server of the door's own. They end with the router:
// without such a context each one would pay for a context of its own.
func (d *Door) Context() context.Context { return context.WithValue(d.Requests, doorKey{}, d) }

// ServeHTTP is the data plane. Probes are answered here, too, because load
// balancers ask the port that they send to.
func (d *Door) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	s := d.Settings.Load()
	limits := &s.Timeouts
	api.WithoutRoot(req.URL, s.RootPath)
	now := time.Now()
	api.BoundBody(w, req, now.Add(limits.Body))
	if api.AllowOrigin(w.Header(), req, s.CORSOrigins) {
		new(api.AnswerDeadline).Extend(w, limits.Write)
		w.WriteHeader(http.StatusNoContent)
		return
	}
	// A proxy that believed a length beside a chunked body would take what follows for
	// a request: nothing may follow. And clients must not keep connections to a router
	// that is leaving.
	if len(req.TransferEncoding) > 0 && admission.MayHaveLength(req.Context()) || d.Drain.On() {
		w.Header()["Connection"] = []string{"close"}
	}
	switch req.URL.Path {
	case "/health", "/healthz", "/readyz":
		new(api.AnswerDeadline).Extend(w, limits.Write)
		d.Probe(w, req)
		return
	}
	x := d.newExchange(w, req, now)
	// Requests end with their client, or when the router stops waiting.
	end := func() {}
	if x.ctx = req.Context(); x.ctx.Value(doorKey{}) != d {
		ctx, cancel := context.WithCancel(x.ctx)
		stop := context.AfterFunc(d.Requests, cancel)
		x.ctx, end = ctx, func() { stop(); cancel() }
	}
	id := api.RequestID(req.Header)
	x.call.ID, x.record.ID, x.record.Client = id, id, req
	w.Header()["X-Request-Id"] = []string{id}
	if d.Tracer != nil {
		x.record.Span = d.Tracer.Server(x.ctx, req.Header, req.Method+" "+req.URL.Path)
		x.record.Span.String("dynctl.request_id", id)
	}
	defer func() {
		p := recover()
		if p != nil {
			_ = x.out.close(fmt.Errorf("panic: %v", p))
		}
		end()
		if cut, _ := p.(error); p != nil && !errors.Is(cut, http.ErrAbortHandler) {
			d.Panicked(x.call, p)
			answered := x.out.committed
			_ = x.finish(fmt.Errorf("panic: %v", p))
			if p = nil; answered {
				p = http.ErrAbortHandler
			}
		}
		x.release()
		if p != nil {
			panic(http.ErrAbortHandler)
		}
	}()
	err := x.serve()
	x.out.writeBy.Extend(w, limits.Write) // what is not written yet
	begun := x.out.committed
	if e := x.finish(err); e != nil && (begun || e.Status == api.StatusClientClosed) {
		x.abort(e)
	}
}
