// Package control is a running router as those who run it see and change it: its state, as
// the admin API and Prometheus show it, what the admin API does, its drain, and its
// certificates, API keys and listeners.
package control

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/adminserver"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/replicas"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/settings/effective"
	"github.com/dynctl/dynctl/internal/workers"
)

// Options set up the admin API.
type Options struct {
	// TokenFile holds the bearer token; empty asks for none.
	TokenFile string
	// Name of this replica in status; the data plane's address. AdminName is the
	// admin API's.
	Name, AdminName string
	// Sim controls the simulated engines of this process, under /sim/v1/; nil
	// without them.
	Sim http.Handler
	// Stream answers GET /admin/v1/stream with a recording; nil for none.
	Stream http.Handler
}

// Description is the router at a time: a State, or a test's.
type Description interface {
	Status(time.Time) admin.Status
	Workers(time.Time) admin.WorkerList
	IndexStats(time.Time) admin.IndexStats
}

// Router is what the admin API reaches of a router.
type Router struct {
	State    Description
	InForce  *effective.Reloader
	Registry *workers.Registry
	Index    *kvindex.Index
	Kept     *receipt.Ring
	Log      *eventlog.Log
	Secure   *Secure
	Ending   *Drain
	Engines  *Engines
	// Ordered is called when an operator has drained a worker, or let it take requests again
	// ([replicas.Order] has the values); nil where no other router needs to know.
	Ordered func(w *workers.Worker, drain int)
	// DryRun decides about a request to an endpoint, with its body, and does nothing.
	DryRun func(context.Context, *api.Endpoint, admin.RouteRequest) (*receipt.Receipt, error)
	// Metrics answers with the page of metrics, Probe whether requests can be served.
	Metrics, Probe http.Handler
}

// Handler is the admin API, the metrics page and the probes. Listeners that let everybody
// in are logged.
func (r *Router) Handler(o Options) (http.Handler, error) {
	a := adminserver.Access{
		Terms: func() adminserver.Terms {
			s := r.InForce.Load()
			return adminserver.Terms{Hosts: s.AdminHosts, Body: s.Timeouts.Body, Write: s.Timeouts.Write}
		},
		Open: map[string]http.Handler{"GET /healthz": r.Probe, "GET /readyz": r.Probe},
	}
	if o.TokenFile != "" {
		var err error
		if a.Token, err = adminserver.ReadToken(o.TokenFile); err != nil {
			return nil, err
		}
	}
	more := map[string]http.Handler{"GET /metrics": r.Metrics}
	if o.Sim != nil {
		more["/sim/v1/"] = o.Sim
	}
	if o.Stream != nil {
		more["GET /admin/v1/stream"] = adminserver.Stream(o.Stream, r.Log)
	}
	if r.InForce.Load().Keys.Admin {
		a.Keys = r.Secure.Keys()
	}
	c := &console{r, o}
	for _, e := range Exposed(c.access()) {
		r.Log.Add(e)
	}
	return adminserver.New(a, c, c, more), nil
}

// console is a router as the admin API shows and changes it.
type console struct {
	*Router
	o Options
}

// access is who may come in at the two listeners.
func (c *console) access() admin.ListenerAccesses {
	return c.Secure.Accesses(&c.InForce.Load().Config, Listeners{Data: c.o.Name, Admin: c.o.AdminName, Token: c.o.TokenFile != ""})
}

// Now is for adminserver.Reader.
func (c *console) Now() time.Time { return time.Now() }

// Status is the router's, with what only the API's owner knows.
func (c *console) Status() admin.Status {
	st := c.State.Status(c.Now())
	st.Name, st.Listen, st.Access = c.o.Name, c.o.Name, c.access()
	return st
}

// Workers is for adminserver.Reader.
func (c *console) Workers() admin.WorkerList { return c.State.Workers(c.Now()) }

// Receipts is for adminserver.Reader.
func (c *console) Receipts() *receipt.Ring { return c.Kept }

// Events is for adminserver.Reader.
func (c *console) Events() *eventlog.Log { return c.Log }

// IndexStats is for adminserver.Reader.
func (c *console) IndexStats() admin.IndexStats { return c.State.IndexStats(c.Now()) }

// IndexChildren is for adminserver.Reader.
func (c *console) IndexChildren(q adminserver.IndexQuery) (admin.IndexChildren, error) {
	labels := map[kvindex.Rank]string{}
	for _, k := range c.Registry.Snapshot().Ranks {
		labels[kvindex.Rank(k.Slot)] = k.Label
	}
	return adminserver.IndexChildren(c.Index, labels, q)
}

// worker describes one worker.
func (c *console) worker(name string) (admin.Worker, error) {
	for _, w := range c.Workers().Workers {
		if w.Name == name {
			return w, nil
		}
	}
	return admin.Worker{}, c.noWorker(name)
}

func (c *console) noWorker(name string) error {
	var names []string
	for _, w := range c.Registry.Snapshot().Workers {
		names = append(names, w.Name)
	}
	e := &api.Error{Status: http.StatusNotFound, Code: api.CodeWorkerNotFound, Param: "name", Message: fmt.Sprintf("there is no worker %q", api.Clip(name))}
	if near := workers.Nearest(name, names); near != "" {
		e.Message += fmt.Sprintf("; did you mean %q?", near)
	}
	return e
}

// conflict is the error for what the fleet as it is does not allow.
func conflict(param, message string) error {
	return &api.Error{Status: http.StatusConflict, Code: api.CodeInvalidRequest, Param: param, Message: message}
}

// AddWorker is for adminserver.Control.
func (c *console) AddWorker(s workers.Spec) (admin.Worker, error) {
	s.Origin = "admin API"
	changes, err := c.Registry.Modify(workers.SourceAdmin, func(specs []workers.Spec) ([]workers.Spec, error) { return append(specs, s), nil })
	if err != nil {
		return admin.Worker{}, conflict("spec", err.Error())
	}
	for _, change := range changes {
		if change.Kind == workers.Added {
			return c.worker(change.New.Name)
		}
	}
	return admin.Worker{}, conflict("spec", "the fleet did not change")
}

// RemoveWorker is for adminserver.Control.
func (c *console) RemoveWorker(name string) error {
	w, ok := c.Registry.Snapshot().Worker(name)
	if !ok {
		return c.noWorker(name)
	}
	if w.Source == workers.SourceFile || w.Source == workers.SourceKube {
		return conflict("name", fmt.Sprintf("worker %s comes from %s; remove it there, or drain it", name, w.Origin))
	}
	_, err := c.Registry.Modify(w.Source, func(specs []workers.Spec) ([]workers.Spec, error) {
		return slices.DeleteFunc(specs, func(s workers.Spec) bool { return s.Name == name || s.Name == "" && s.URL.String() == w.URL.String() }), nil
	})
	return err
}

// DrainWorker is for adminserver.Control.
func (c *console) DrainWorker(name string, on bool) (admin.Worker, error) {
	w, ok := c.Registry.Snapshot().Worker(name)
	if !ok {
		return admin.Worker{}, c.noWorker(name)
	}
	if !on && w.State.Leaving() {
		return admin.Worker{}, conflict("name", fmt.Sprintf("worker %s comes from %s, which is being deleted: it takes no requests again", name, w.Origin))
	}
	if w.State.Draining() != on {
		w.State.SetDraining(on)
		c.ordered(w, map[bool]int{true: replicas.Drained, false: replicas.Resumed}[on])
		e := eventlog.Event{Kind: "worker_draining", Worker: name, Text: fmt.Sprintf("worker %s drains: it gets no new requests, running ones finish", name)}
		if !on {
			e.Kind, e.Text = "worker_resumed", fmt.Sprintf("worker %s takes requests again", name)
		}
		c.Log.Add(e)
	}
	return c.worker(name)
}

func (c *console) ordered(w *workers.Worker, drain int) {
	if c.Ordered != nil {
		c.Ordered(w, drain)
	}
}

// MoveStreams is for adminserver.Control.
func (c *console) MoveStreams(name string) (admin.Worker, error) {
	w, ok := c.Registry.Snapshot().Worker(name)
	if !ok {
		return admin.Worker{}, c.noWorker(name)
	}
	if c.InForce.Load().Decisions.Continuations == 0 {
		return admin.Worker{}, conflict("name", "streams are not continued elsewhere (continue.mode is off); set it to exact, or drain the worker without moving them")
	}
	if !w.State.Moving() {
		w.State.SetMoving()
		c.ordered(w, replicas.Moved)
		c.Log.Add(eventlog.Event{Kind: "worker_draining", Worker: name, Text: fmt.Sprintf("worker %s drains: it gets no new requests, its streams continue elsewhere where they can, others finish", name)})
	}
	return c.worker(name)
}

// CallEngines is for adminserver.Control.
func (c *console) CallEngines(ctx context.Context, in *admin.ControlCall) (admin.ControlAnswer, error) {
	fleet := c.Registry.Snapshot()
	list := fleet.Workers
	if len(in.Workers) > 0 {
		list = nil
		for _, name := range in.Workers {
			w, ok := fleet.Worker(name)
			if !ok {
				return admin.ControlAnswer{}, c.noWorker(name)
			}
			if !slices.Contains(list, w) {
				list = append(list, w)
			}
		}
	}
	return c.Engines.Call(ctx, list, in), nil
}

// Route is for adminserver.Control.
func (c *console) Route(ctx context.Context, in admin.RouteRequest) (*receipt.Receipt, error) {
	if in.Body == nil {
		if models := c.Registry.Snapshot().Models(); in.Model == "" && len(models) == 1 {
			in.Model = models[0]
		}
		var prompt any = in.Prompt
		if in.Tokens != nil {
			prompt = in.Tokens
		}
		raw, err := json.Marshal(map[string]any{"model": in.Model, "prompt": prompt})
		if err != nil {
			return nil, err
		}
		in.Body = raw
	}
	ep, err := api.Lookup(http.MethodPost, in.Endpoint)
	if err != nil {
		return nil, err
	}
	if ep.Body != api.JSONBody {
		return nil, api.BadRequest("endpoint", "%s takes no JSON body", in.Endpoint)
	}
	return c.DryRun(ctx, ep, in)
}

// Config is for adminserver.Control.
func (c *console) Config() admin.ConfigView {
	s := c.InForce.Load()
	v := admin.ConfigView{Schema: admin.Schema, Revision: s.Revision}
	for _, r := range settings.Rows() {
		v.Settings = append(v.Settings, admin.ConfigValue{Key: r.Key, Value: r.Shown(&s.Config), Origin: s.Origin[r.Key]})
	}
	return v
}

// Patch is for adminserver.Control.
func (c *console) Patch(changes map[string]any) error { return c.InForce.Patch(changes, "admin API") }

// Drain begins one; serve waits for its end.
func (c *console) Drain(timeout time.Duration) admin.DrainState {
	c.Ending.Begin(timeout)
	return *c.Ending.State()
}

// Draining is for adminserver.Control.
func (c *console) Draining() <-chan struct{} { return c.Ending.Begun() }
