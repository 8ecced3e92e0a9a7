package door

import (
	"context"
	"net/http"
	"strconv"
	"strings"

	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/request/access"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/models"
	"github.com/dynctl/dynctl/internal/router/serving"
	"github.com/dynctl/dynctl/internal/workers"
)

// maxModelAnswer bounds a worker's list of its models.
const maxModelAnswer = 8 << 20

// answerModels answers a request for the list of models or for one of them.
func (x *exchange) answerModels() error {
	list, err := x.d.lists.Get(x.ctx, x.call.Hops)
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
			return models.NotServed(id, x.d.Registry.Snapshot(), x.d.Starting(x.record.Start))
		}
	} else {
		body = list.JSON()
	}
	h := x.out.w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	x.out.status, x.out.committed = http.StatusOK, true
	x.out.writeBy.Extend(x.out.w, x.call.Routing.Settings.Timeouts.Write)
	x.out.w.WriteHeader(http.StatusOK)
	if x.req.Method != http.MethodHead {
		_, _ = x.out.w.Write(body) // a client that is gone is no news here
	}
	return nil
}

// findModel finds the model and its workers, and the adapter that the prompt's
// blocks belong to. Endpoints without a body have no model.
func (d *Door) findModel(ctx context.Context, c *serving.Call, key *access.Key) (err error) {
	q := &c.Routing
	fleet := d.Registry.Snapshot()
	var of workers.Resolved
	waits := q.Settings.Limits.WaitForWorker
	switch {
	case c.Endpoint.Body != api.NoBody:
		if of, err = models.Find(c.Name, fleet, d.Starting(c.Start), key, false); models.Unknown(err) {
			d.Reread(ctx, fleet)
			fleet = d.Registry.Snapshot()
			of, err = models.Find(c.Name, fleet, d.Starting(c.Start), key, false)
		}
		if err != nil && waits {
			of, err = models.Find(c.Name, fleet, d.Starting(c.Start), key, true)
		}
	case c.Endpoint.Kind != api.ResponseObject: // a stored response has an owner
		err = key.Refusal("")
	}
	if err != nil {
		return err
	}
	c.Model = of.Model
	q.Model, q.Named, q.ModelNote = of.Model, c.View.LoRA, models.Note(c.Name, of)
	if q.UseFleet(fleet); len(q.List) == 0 && !(waits && fleet.Knows(of.Model)) {
		return models.NotServed(c.Name, fleet, d.Starting(c.Start))
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
