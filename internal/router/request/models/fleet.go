package models

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

const (
	askTimeout = 2 * time.Second // for all workers together
	askAtOnce  = 16
)

// Ask asks the usable workers of a fleet for their models, one for each set of models,
// and merges what they answer. Of a worker that ask gives nil of, the models are missing.
// The answer is for other requests, too: that ctx ends does not make it empty.
func Ask(ctx context.Context, fleet *workers.Snapshot, aliases []Alias, ask func(context.Context, *workers.Worker) []byte) (*List, error) {
	var asked []*workers.Worker
	for _, w := range fleet.Workers {
		if ok, _ := w.State.Usable(); ok && !slices.ContainsFunc(asked, func(a *workers.Worker) bool { return slices.Equal(a.Models, w.Models) }) {
			asked = append(asked, w)
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTimeout)
	defer cancel()
	answers := make([][]byte, len(asked))
	var g errgroup.Group
	g.SetLimit(askAtOnce)
	for i, w := range asked {
		g.Go(func() error {
			answers[i] = ask(ctx, w)
			return nil
		})
	}
	_ = g.Wait() // none of them fails
	return Merge(slices.DeleteFunc(answers, func(b []byte) bool { return b == nil }), aliases)
}

// NotServed is the error for a client that asks for a model which no worker of a fleet
// serves. While the router is starting, a worker that has not reported its models yet may
// serve it: clients try again after a 503, not after a 404.
func NotServed(asked string, fleet *workers.Snapshot, starting bool) *api.Error {
	known := fleet.Models()
	silent := func(w *workers.Worker) bool { return len(w.Models) == 0 }
	wait := &api.Error{Status: http.StatusServiceUnavailable, Code: api.CodeNoDecodeWorker, RetryAfter: time.Second}
	switch {
	case len(known) == 0:
		wait.Message = "no worker has reported its models yet"
		return wait
	case starting && slices.ContainsFunc(fleet.Workers, silent):
		wait.Message = fmt.Sprintf("no worker that has reported its models serves %q, and others have not reported theirs yet; try again", api.Clip(asked))
		return wait
	}
	e := &api.Error{Status: http.StatusNotFound, Code: api.CodeModelNotFound, Param: "model"}
	if asked == "" {
		e.Message = "the request names no model and there is none to choose from"
	} else {
		e.Message = fmt.Sprintf("no worker serves the model %q", api.Clip(asked))
	}
	if near := workers.Nearest(asked, known); near != "" {
		e.Message += fmt.Sprintf("; did you mean %q?", near)
	} else if len(known) <= 8 {
		e.Message += fmt.Sprintf("; served here: %q", known)
	}
	return e
}
