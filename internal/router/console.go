package router

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/adminserver"
	"github.com/dynctl/dynctl/internal/router/observe/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/secure"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// AdminOptions set up the admin API.
type AdminOptions struct {
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

// AdminHandler is the admin API, the metrics page and the probes.
func (r *Router) AdminHandler(o AdminOptions) (http.Handler, error) {
	probe := http.HandlerFunc(r.probe)
	a := adminserver.Access{
		Terms: func() adminserver.Terms {
			s := r.settings.Load()
			return adminserver.Terms{Hosts: s.AdminHosts, Body: s.Timeouts.Body, Write: s.Timeouts.Write}
		},
		Open: map[string]http.Handler{"GET /healthz": probe, "GET /readyz": probe},
	}
	if o.TokenFile != "" {
		var err error
		if a.Token, err = adminserver.ReadToken(o.TokenFile); err != nil {
			return nil, err
		}
	}
	more := map[string]http.Handler{"GET /metrics": r.metrics.Handler()}
	if o.Sim != nil {
		more["/sim/v1/"] = o.Sim
	}
	if o.Stream != nil {
		more["GET /admin/v1/stream"] = adminserver.Stream(o.Stream, r.events)
	}
	if r.settings.Load().Keys.Admin {
		a.Keys = r.secure.Keys()
	}
	c := &console{r, o}
	for _, e := range secure.Exposed(c.access()) {
		r.event(e)
	}
	return adminserver.New(a, c, c, more), nil
}

// console is a router as the admin API shows and changes it.
type console struct {
	*Router
	o AdminOptions
}

// access is who may come in at the two listeners.
func (c *console) access() admin.ListenerAccesses {
	return c.secure.Accesses(&c.settings.Load().Config, secure.Listeners{Data: c.o.Name, Admin: c.o.AdminName, Token: c.o.TokenFile != ""})
}

func (c *console) Now() time.Time { return time.Now() }

// Status is the router's, with what only the API's owner knows.
func (c *console) Status() admin.Status {
	st := c.state.Status(c.Now())
	st.Name, st.Listen, st.Access = c.o.Name, c.o.Name, c.access()
	return st
}

func (c *console) Workers() admin.WorkerList { return c.state.Workers(c.Now()) }

func (c *console) Receipts() *receipt.Ring { return c.receipts }

func (c *console) Events() *eventlog.Log { return c.events }

func (c *console) IndexStats() admin.IndexStats { return c.state.IndexStats(c.Now()) }

func (c *console) IndexChildren(q adminserver.IndexQuery) (admin.IndexChildren, error) {
	labels := map[kvindex.Rank]string{}
	for _, k := range c.registry.Snapshot().Ranks {
		labels[kvindex.Rank(k.Slot)] = k.Label
	}
	return adminserver.IndexChildren(c.index, labels, q)
}

// Previews is for adminserver.Control.
func (c *console) Previews(ctx context.Context, a *admin.IndexChildren) error {
	if c.words == nil {
		return conflict("preview", "the router keeps no words of prompts: start it with --index-preview TOKENS (index.preview)")
	}
	nodes := make([]*admin.IndexNode, 0, len(a.Children)+1)
	for i := range a.Children {
		nodes = append(nodes, &a.Children[i])
	}
	if a.Node != nil {
		nodes = append(nodes, a.Node)
	}
	runs := make([][]uint64, len(nodes))
	for i, n := range nodes {
		if id, err := strconv.ParseUint(n.ID, 16, 64); err == nil {
			runs[i] = c.index.Head(kvindex.NodeID(id), c.words.Blocks())
		}
	}
	texts, err := c.words.Texts(ctx, c.registry.Snapshot(), runs)
	for i, text := range texts {
		nodes[i].Preview = text
	}
	if err != nil {
		a.PreviewError = oneLine(err)
	}
	return nil
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
	for _, w := range c.registry.Snapshot().Workers {
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

func (c *console) AddWorker(s workers.Spec) (admin.Worker, error) {
	s.Origin = "admin API"
	changes, err := c.registry.Modify(workers.SourceAdmin, func(specs []workers.Spec) ([]workers.Spec, error) { return append(specs, s), nil })
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

func (c *console) RemoveWorker(name string) error {
	w, ok := c.registry.Snapshot().Worker(name)
	if !ok {
		return c.noWorker(name)
	}
	if w.Source == workers.SourceFile || w.Source == workers.SourceKube {
		return conflict("name", fmt.Sprintf("worker %s comes from %s; remove it there, or drain it", name, w.Origin))
	}
	_, err := c.registry.Modify(w.Source, func(specs []workers.Spec) ([]workers.Spec, error) {
		return slices.DeleteFunc(specs, func(s workers.Spec) bool { return s.Name == name || s.Name == "" && s.URL.String() == w.URL.String() }), nil
	})
	return err
}

func (c *console) DrainWorker(name string, on bool) (admin.Worker, error) {
	w, ok := c.registry.Snapshot().Worker(name)
	if !ok {
		return admin.Worker{}, c.noWorker(name)
	}
	if !on && w.State.Leaving() {
		return admin.Worker{}, conflict("name", fmt.Sprintf("worker %s comes from %s, which is being deleted: it takes no requests again", name, w.Origin))
	}
	if w.State.Draining() != on {
		w.State.SetDraining(on)
		e := eventlog.Event{Kind: "worker_draining", Worker: name, Text: fmt.Sprintf("worker %s drains: it gets no new requests, running ones finish", name)}
		if !on {
			e.Kind, e.Text = "worker_resumed", fmt.Sprintf("worker %s takes requests again", name)
		}
		c.event(e)
	}
	return c.worker(name)
}

func (c *console) MoveStreams(name string) (admin.Worker, error) {
	w, ok := c.registry.Snapshot().Worker(name)
	if !ok {
		return admin.Worker{}, c.noWorker(name)
	}
	if c.settings.Load().Decisions.Continuations == 0 {
		return admin.Worker{}, conflict("name", "streams are not continued elsewhere (continue.mode is off); set it to exact, or drain the worker without moving them")
	}
	if !w.State.Moving() {
		w.State.SetMoving()
		c.event(eventlog.Event{Kind: "worker_draining", Worker: name, Text: fmt.Sprintf("worker %s drains: it gets no new requests, its streams go on elsewhere where they can, others finish", name)})
	}
	return c.worker(name)
}

func (c *console) Route(ctx context.Context, in admin.RouteRequest) (*receipt.Receipt, error) {
	return c.dryRun(ctx, in)
}

func (c *console) Config() admin.ConfigView {
	s := c.settings.Load()
	v := admin.ConfigView{Schema: admin.Schema, Revision: s.Revision}
	for _, r := range settings.Rows() {
		v.Settings = append(v.Settings, admin.ConfigValue{Key: r.Key, Value: r.Shown(&s.Config), Origin: s.Origin[r.Key]})
	}
	return v
}

func (c *console) Patch(changes map[string]any) error { return c.settings.Patch(changes, "admin API") }

// Drain begins one; serve waits for its end.
func (c *console) Drain(timeout time.Duration) admin.DrainState {
	c.drain.Begin(timeout)
	return *c.drain.State()
}

// Draining is for adminserver.Control.
func (c *console) Draining() <-chan struct{} { return c.drain.Begun() }
