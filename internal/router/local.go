package router

import (
	"context"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/models"
	"github.com/dynctl/dynctl/internal/workers"
)

// modelCache keeps the merged answer to /v1/models for a moment, so that
// clients that poll it do not multiply into the fleet. Those who come while the
// fleet is asked wait for that answer; no lock is held meanwhile.
type modelCache struct {
	mu     sync.Mutex
	answer *modelAnswer // the newest, being fetched or done
}

// modelAnswer is the fleet's answer at one revision. The rest is set when done
// is closed.
type modelAnswer struct {
	revision uint64
	done     chan struct{}
	at       time.Time
	list     *models.List // nil when fetching it failed
}

// fresh reports whether the answer can be given out at a fleet's revision.
func (a *modelAnswer) fresh(revision uint64, now time.Time) bool {
	if a == nil || a.revision != revision {
		return false
	}
	select {
	case <-a.done:
		return a.list != nil && now.Sub(a.at) < modelCacheTime
	default:
		return true
	}
}

const (
	modelCacheTime  = 5 * time.Second
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
	c := &r.modelCache
	for {
		c.mu.Lock()
		a := c.answer
		mine := !a.fresh(snap.Revision, time.Now())
		if mine {
			a = &modelAnswer{revision: snap.Revision, done: make(chan struct{})}
			c.answer = a
		}
		c.mu.Unlock()
		if mine {
			func() {
				defer close(a.done)
				a.list = r.askModels(ctx, snap)
				a.at = time.Now()
			}()
		}
		select {
		case <-a.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if a.list != nil {
			return a.list, nil
		}
		// Whoever asked panicked; ask again.
	}
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
