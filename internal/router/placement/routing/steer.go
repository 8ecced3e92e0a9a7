package routing

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/stored"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// The headers by which a client steers.
const (
	headerPath    = "X-Dynctl-Path"
	headerWorker  = "X-Dynctl-Worker"
	headerPrefill = "X-Dynctl-Prefill-Worker"
	headerRank    = "X-Data-Parallel-Rank"
)

// Steer takes the path, the workers and the rank that the headers of a request ask for.
// Callers check whether the client may steer.
func (q *Request) Steer(h http.Header) (err error) {
	c := &q.Run.Criteria
	if c.Force, err = route.ParseForce(h.Get(headerPath)); err != nil {
		return api.BadRequest(headerPath, "header %s: %v", headerPath, err)
	}
	for _, p := range [...]struct {
		header string
		pin    *string
		has    *bool
		rank   *int
	}{{headerWorker, &c.Pin.Decode, &c.Pin.HasRank, &c.Pin.Rank}, {headerPrefill, &c.Pin.Prefill, &c.Pin.HasPrefillRank, &c.Pin.PrefillRank}} {
		name := h.Get(p.header)
		if name == "" {
			continue
		}
		w, k := q.named(name)
		if w == nil {
			return &api.Error{Status: http.StatusNotFound, Code: api.CodeWorkerNotFound, Param: p.header, Message: fmt.Sprintf("header %s: there is no worker or rank %q", p.header, api.Clip(name))}
		}
		*p.pin = w.Name
		if k != nil {
			*p.has, *p.rank = true, k.DP
		}
	}
	if v := h.Get(headerRank); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 0 {
			return api.BadRequest("X-data-parallel-rank", "header X-data-parallel-rank: %q is not a rank", api.Clip(v))
		}
		if c.Pin.HasRank && c.Pin.Rank != n {
			return api.BadRequest("X-data-parallel-rank", "header X-data-parallel-rank: %d is not the rank in %s", n, headerWorker)
		}
		c.Pin.HasRank, c.Pin.Rank = true, n
	}
	return nil
}

// named finds a worker by its name, or with one of its ranks by the rank's label ("w/dp0"), as
// the headers of answers have it. Both are nil for an unknown name.
func (q *Request) named(name string) (*workers.Worker, *workers.Rank) {
	if w, ok := q.Fleet.Worker(name); ok {
		return w, nil
	}
	if w, ok := q.Fleet.Worker(name[:max(0, strings.LastIndexByte(name, '/'))]); ok {
		if i := slices.IndexFunc(w.Ranks, func(k *workers.Rank) bool { return k.Label == name }); i >= 0 {
			return w, w.Ranks[i]
		}
	}
	return nil, nil
}

// Keepers are the workers that may keep a stored response of the request's model.
func (q *Request) Keepers() (list []*workers.Worker) {
	for _, w := range q.List {
		if w.Role.CanDecode() {
			list = append(list, w)
		}
	}
	return list
}

// PinToResponse has the request go to the worker that keeps the response of an id for its tenant;
// with an empty id it goes anywhere. param is the member of the body that has the id, if
// it is there. mine says that the response cannot be another tenant's.
func (q *Request) PinToResponse(id, param string, from *stored.Responses, tenant string, mine bool) error {
	if id == "" {
		return nil
	}
	unknown := func(why string) error {
		return &api.Error{
			Status: http.StatusNotFound, Code: api.CodeInvalidRequest, Param: param,
			Message: fmt.Sprintf("response %q is not known here: %s", api.Clip(id), why),
		}
	}
	if r, ok := from.Get(id); ok && (q.Dry || r.Tenant == tenant) {
		if _, ok := q.Fleet.Worker(r.Worker); !ok { // to wait for it would be in vain
			return unknown("the worker that has it has left")
		}
		q.Run.Criteria.Pin.Decode = r.Worker
		return nil
	}
	if len(q.Keepers()) <= 1 && (mine || q.Dry) {
		return nil // whoever made it, it was there
	}
	if mine {
		return unknown("no worker of the model keeps it")
	}
	return unknown("it was made before the router's restart, by another router, for another tenant, or too long ago")
}
