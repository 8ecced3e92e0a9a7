package door

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/request/access"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/models"
	"github.com/dynctl/dynctl/internal/router/request/stored"
	"github.com/dynctl/dynctl/internal/router/serving"
	"github.com/dynctl/dynctl/internal/workers"
)

// maxKeeperAnswer is how much of a worker's answer to a search is read: it names the response's
// id near its start. A longer answer is cut off, with the connection.
const maxKeeperAnswer = 64 << 10

// pinToResponse sends what belongs to a stored response to the worker that has it.
func (d *Door) pinToResponse(ctx context.Context, c *serving.Call, key *access.Key, path string) error {
	id, param := "", ""
	switch c.Endpoint.Kind {
	case api.ResponseObject:
		id, _, _ = strings.Cut(strings.TrimPrefix(path, "/v1/responses/"), "/")
	case api.Responses:
		id, param = c.View.PreviousResponseID, "previous_response_id"
	}
	mine := d.Secure.Keys() == nil
	if mine && id != "" {
		if err := d.findResponse(ctx, c, id); err != nil {
			return err
		}
	}
	return c.Routing.PinToResponse(id, param, d.Stored, key.Owner(), mine)
}

// findResponse queries the workers of the model for a response that the router does not know, as
// after its restart. With keys that must not be: a response belongs to a tenant, and the engines
// do not know whose it is. The error is that a worker which may keep the response did not answer.
func (d *Door) findResponse(ctx context.Context, c *serving.Call, id string) error {
	list := c.Routing.Keepers()
	if _, known := d.Stored.Get(id); known || len(list) <= 1 || !stored.Searchable(id) {
		return nil
	}
	found, err := d.finder.Find(ctx, id, func() stored.Found { return d.queryKeepers(ctx, id, c.Hops, list) })
	if err != nil || found.Unclear == "" {
		return err
	}
	return &api.Error{
		Status: http.StatusServiceUnavailable, Code: api.CodeNoDecodeWorker, RetryAfter: stored.RetryAfter,
		Message: fmt.Sprintf("response %q is not known here, and a worker may keep it: %s; try again", api.Clip(id), found.Unclear),
	}
}

// queryKeepers queries the usable workers of a list for a response, and remembers the one that
// keeps it.
func (d *Door) queryKeepers(ctx context.Context, id, hops string, list []*workers.Worker) (f stored.Found) {
	var mu sync.Mutex // guards f and answered
	var answered []*workers.Worker
	found, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	models.EachUsable(ctx, list, func(ctx context.Context, w *workers.Worker) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(found, cancel)()
		keeps, ok := keepsResponse(ctx, d.Client, w, id, hops)
		mu.Lock()
		defer mu.Unlock()
		if ok {
			answered = append(answered, w)
		}
		if keeps && f.Worker == "" {
			f.Worker = w.Name
			stop()
		}
	})
	if f.Worker != "" {
		d.Stored.Put(id, f.Worker, "")
		return f
	}
	if i := slices.IndexFunc(list, func(w *workers.Worker) bool { return !slices.Contains(answered, w) }); i >= 0 {
		f.Unclear = list[i].Name + " has not answered"
	}
	return f
}

// keepsResponse queries a worker for a response. ok reports whether it said yes or no.
func keepsResponse(ctx context.Context, client *upstream.Client, w *workers.Worker, id, hops string) (keeps, ok bool) {
	resp, err := client.Do(ctx, &upstream.Leg{Base: w.URL, Path: "/v1/responses/" + id, Method: http.MethodGet, APIKey: w.APIKey, Set: []upstream.HeaderField{{Key: api.HeaderHop, Value: hops}}})
	if err != nil {
		return false, false
	}
	defer resp.Close()
	var start []byte
	for len(start) < maxKeeperAnswer {
		p, err := resp.Next()
		if err != nil {
			break
		}
		start = append(start, p...)
	}
	// Some servers answer 200 to whatever they do not know.
	keeps = resp.Status == http.StatusOK && bytes.Contains(start, []byte(`"`+id+`"`))
	return keeps, resp.Status < http.StatusInternalServerError
}
