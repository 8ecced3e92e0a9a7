package router

import (
	"context"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/models"
	"github.com/dynctl/dynctl/internal/workers"
)

const (
	modelAskTimeout = 2 * time.Second
	maxModelAnswer  = 8 << 20
)

// local answers what the router knows by itself.
func (x *exchange) local() error {
	list, err := x.r.models(x.ctx)
	if err != nil {
		return err
	}
	var body []byte
	if x.key != nil && len(x.key.Models) > 0 {
		list = list.Only(func(id string) bool { return x.key.May(id) })
	}
	if x.ep.Kind == api.Model {
		id := strings.TrimPrefix(x.req.URL.Path, "/v1/models/")
		x.asked = id
		if err := x.mayAsk(); err != nil {
			return x.refuse("model", err)
		}
		var ok bool
		if body, ok = list.Model(id); !ok {
			x.d.Fleet = x.r.registry.Snapshot()
			return x.noModel()
		}
	} else {
		body = list.JSON()
	}
	h := x.w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	x.status, x.committed = http.StatusOK, true
	x.boundAnswer(x.d.Settings.Timeouts.Write)
	x.w.WriteHeader(http.StatusOK)
	if x.req.Method != http.MethodHead {
		_, _ = x.w.Write(body) // a client that is gone is no news here
	}
	return nil
}

// models are the merged model lists of the fleet.
func (r *Router) models(ctx context.Context) (*models.List, error) {
	snap := r.registry.Snapshot()
	return r.modelLists.Get(ctx, snap.Revision, func() *models.List { return r.askModels(ctx, snap) })
}

// askModels asks the fleet for its models.
func (r *Router) askModels(ctx context.Context, snap *workers.Snapshot) *models.List {
	// One worker for each set of models is enough.
	var ask []*workers.Worker
	var sets [][]string
	for _, w := range snap.Workers {
		if ok, _ := w.State.Usable(); ok && !slices.ContainsFunc(sets, func(s []string) bool { return slices.Equal(s, w.Models) }) {
			ask, sets = append(ask, w), append(sets, w.Models)
		}
	}
	answers := make([][]byte, len(ask))
	// The answer is for other clients, too; this one going away must not make
	// it empty.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), modelAskTimeout)
	defer cancel()
	var g errgroup.Group
	g.SetLimit(16)
	for i, w := range ask {
		g.Go(func() error {
			resp, err := r.client.Do(ctx, &upstream.Leg{Base: w.URL, Path: "/v1/models", Method: http.MethodGet, APIKey: w.APIKey})
			if err != nil {
				return nil // the worker's models are missing; probes tell why
			}
			defer resp.Close()
			if body, err := resp.ReadAll(maxModelAnswer); err == nil && resp.Status == http.StatusOK {
				answers[i] = body
			}
			return nil
		})
	}
	_ = g.Wait()
	answers = slices.DeleteFunc(answers, func(b []byte) bool { return b == nil })
	s := r.settings.Load()
	aliases := make([]models.Alias, len(s.Aliases))
	for i, a := range s.Aliases {
		aliases[i] = models.Alias{Name: a.Name, Target: a.Model}
	}
	list, err := models.Merge(answers, aliases)
	if err != nil {
		r.log.Warn("a model list could not be read", "err", err)
	}
	return list
}

// responseID is the id in the path of a stored response.
func responseID(path string) string {
	id, _, _ := strings.Cut(strings.TrimPrefix(path, "/v1/responses/"), "/")
	return id
}
