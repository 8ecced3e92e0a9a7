package router

import (
	"context"
	"net/http"
	"strconv"
	"strings"

	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/models"
	"github.com/dynctl/dynctl/internal/workers"
)

// maxModelAnswer bounds a worker's list of its models.
const maxModelAnswer = 8 << 20

// rereadModels asks the fleet's usable workers which models they serve. Requests that come
// meanwhile wait for the same answers, and for a few seconds no worker is asked again.
func (e *engines) rereadModels(ctx context.Context, fleet *workers.Snapshot) {
	_, _ = e.rereads.Get(ctx, 0, func() *models.List { // the error is that of ctx
		models.EachUsable(ctx, fleet.Workers, e.monitor.Models)
		return new(models.List)
	})
}

// answerModels answers a request for the list of models or for one of them.
func (x *exchange) answerModels() error {
	list, err := x.r.lists.Get(x.ctx, x.call.Hops)
	if err != nil {
		return err
	}
	var body []byte
	if x.key != nil && len(x.key.Models) > 0 {
		list = list.Only(func(id string) bool { return x.key.May(id) })
	}
	if x.call.Endpoint.Kind == api.Model {
		id := strings.TrimPrefix(x.req.URL.Path, "/v1/models/")
		x.call.Name = id
		if err := x.key.Refusal(id, id); err != nil {
			return x.refuse("model", err)
		}
		var ok bool
		if body, ok = list.Model(id); !ok {
			return models.NotServed(id, x.r.registry.Snapshot(), x.r.starting(x.record.Start))
		}
	} else {
		body = list.JSON()
	}
	h := x.w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	x.status, x.committed = http.StatusOK, true
	x.writeBy.Extend(x.w, x.call.Routing.Settings.Timeouts.Write)
	x.w.WriteHeader(http.StatusOK)
	if x.req.Method != http.MethodHead {
		_, _ = x.w.Write(body) // a client that is gone is no news here
	}
	return nil
}

// modelsOf is what asks a worker for its answer to /v1/models.
func modelsOf(client *upstream.Client) func(context.Context, *workers.Worker, string) []byte {
	return func(ctx context.Context, w *workers.Worker, hops string) []byte {
		resp, err := client.Do(ctx, &upstream.Leg{Base: w.URL, Path: "/v1/models", Method: http.MethodGet, APIKey: w.APIKey, Set: []upstream.HeaderField{{Key: api.HeaderHop, Value: hops}}})
		if err != nil {
			return nil // probes report why
		}
		defer resp.Close()
		if body, err := resp.ReadAll(maxModelAnswer); err == nil && resp.Status == http.StatusOK {
			return body
		}
		return nil
	}
}
