package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

const (
	callsAtOnce   = 64 // to engines, of all control calls together
	maxCallAnswer = 64 << 10
	namedFailures = 4 // of a call, in its event
)

// Engines makes the calls of operators to engines.
type Engines struct {
	o     EnginesOptions
	slots chan struct{}
}

// EnginesOptions are what control calls need of a router.
type EnginesOptions struct {
	Client *upstream.Client
	// Forget drops what a rank is known to hold, as why says.
	Forget func(k *workers.Rank, why string)
	// Models reads again which models a worker serves.
	Models func(context.Context, *workers.Worker)
	Event  eventlog.Sink
}

// NewEngines makes what calls engines.
func NewEngines(o EnginesOptions) *Engines {
	return &Engines{o, make(chan struct{}, callsAtOnce)}
}

// Call calls workers, several at a time, and returns when all have answered, the call's time is
// up, or ctx ends. The index and the lists of models follow. One event has the outcome.
func (e *Engines) Call(ctx context.Context, list []*workers.Worker, in *admin.ControlCall) admin.ControlAnswer {
	ctx, cancel := context.WithTimeout(ctx, in.Timeout)
	defer cancel()
	out := admin.ControlAnswer{Schema: admin.Schema, Action: in.Action, Workers: make([]admin.ControlResult, len(list))}
	var all sync.WaitGroup
	for i, w := range list {
		r := &out.Workers[i]
		r.Worker = w.Name
		leg, err := engineCall(w, in)
		if err != nil {
			r.Message = err.Error()
			continue
		}
		select {
		case e.slots <- struct{}{}:
		case <-ctx.Done():
			r.Message = "not called: no time was left"
			continue
		}
		all.Go(func() {
			defer func() { <-e.slots }()
			e.one(ctx, w, leg, in.Action, r)
		})
	}
	all.Wait()
	ev := eventlog.Event{Kind: "workers_called", Fields: map[string]any{"action": in.Action, "workers": len(list)}}
	var failed []string
	for i := range out.Workers {
		if r := &out.Workers[i]; !r.OK {
			if out.Failed++; out.Failed <= namedFailures {
				failed = append(failed, r.Worker+": "+r.Message)
			}
		}
	}
	ev.Fields["failed"] = out.Failed
	ev.Text = fmt.Sprintf("%s: %d of %d workers did it", in.Action, len(list)-out.Failed, len(list))
	if out.Failed > 0 {
		ev.Severity = eventlog.Warn
		ev.Text += "; " + strings.Join(failed, "; ")
	}
	e.o.Event.Emit(ev)
	return out
}

// one calls one worker.
func (e *Engines) one(ctx context.Context, w *workers.Worker, leg *upstream.Leg, action string, r *admin.ControlResult) {
	began := time.Now()
	var sent bool // as far as is known
	resp, err := e.o.Client.Do(ctx, leg)
	if err != nil {
		f, ok := errors.AsType[*upstream.Failure](err)
		sent = !ok || f.Kind != upstream.Connect
		r.Message = err.Error()
	} else {
		body, _ := resp.ReadAll(maxCallAnswer) // the status is the answer
		resp.Close()
		r.Status, r.OK = resp.Status, resp.Status/100 == 2
		sent = r.OK
		r.Message = api.Clip(strings.TrimSpace(string(body)))
		if r.Status == http.StatusNotFound && w.WireEngine() == workers.VLLM { // its own page does not help
			r.Message = "vLLM offers this only with VLLM_SERVER_DEV_MODE=1 (prefix cache, sleep), a profiler, or VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
		}
	}
	r.DurationMS = float64(time.Since(began).Microseconds()) / 1000
	switch {
	case !sent:
	case action == admin.ResetPrefixCache, action == admin.Sleep:
		for _, k := range w.Ranks {
			e.o.Forget(k, "the control call "+action+" empties the engine's cache")
		}
	case action == admin.LoadAdapter, action == admin.UnloadAdapter:
		e.o.Models(ctx, w)
	}
}

// engineCall is the request that has a worker's engine do what a call wants. The error is that
// the engine cannot.
func engineCall(w *workers.Worker, in *admin.ControlCall) (*upstream.Leg, error) {
	leg := &upstream.Leg{Base: w.URL, Method: http.MethodPost, APIKey: w.APIKey}
	var body map[string]any
	switch in.Action {
	case admin.LoadAdapter:
		body = map[string]any{"lora_name": in.Adapter, "lora_path": in.Path}
	case admin.UnloadAdapter:
		body = map[string]any{"lora_name": in.Adapter}
	}
	switch w.WireEngine() {
	case workers.VLLM:
		leg.Path = "/" + in.Action
		q := url.Values{}
		switch in.Action {
		case admin.LoadAdapter, admin.UnloadAdapter:
			leg.Path = "/v1/" + in.Action
		case admin.Sleep:
			if len(in.Tags) > 0 {
				return nil, errors.New("vllm sleeps as a whole; use level instead of tag")
			}
			if in.Level != "" {
				q.Set("level", in.Level)
			}
		case admin.WakeUp:
			q["tags"] = in.Tags
		}
		if len(q) > 0 {
			if s := q.Encode(); s != "" {
				leg.Path += "?" + s
			}
		}
	case workers.SGLang:
		leg.Path = "/" + in.Action
		switch in.Action {
		case admin.ResetPrefixCache:
			leg.Path = "/flush_cache"
		case admin.Sleep, admin.WakeUp:
			if leg.Path = "/release_memory_occupation"; in.Action == admin.WakeUp {
				leg.Path = "/resume_memory_occupation"
			}
			if in.Level != "" {
				return nil, errors.New("sglang has no levels of sleep; use tag")
			}
			if body = map[string]any{}; len(in.Tags) > 0 {
				body["tags"] = in.Tags
			}
		}
	default:
		return nil, fmt.Errorf("not called: dynctl knows no such call of %s", w.WireEngine())
	}
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		leg.Body = [][]byte{raw}
		leg.Set = []upstream.HeaderField{{Key: "Content-Type", Value: "application/json"}}
	}
	return leg, nil
}
