package models

import (
	"cmp"
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
	if e := unreported(asked, fleet, starting); e != nil {
		return e
	}
	e := &api.Error{Status: http.StatusNotFound, Code: api.CodeModelNotFound, Param: "model", Message: fmt.Sprintf("no worker serves the model %q", api.Clip(asked))}
	if known := fleet.Models(); workers.Nearest(asked, known) != "" {
		e.Message += fmt.Sprintf("; did you mean %q?", workers.Nearest(asked, known))
	} else if len(known) <= most {
		e.Message += fmt.Sprintf("; served here: %q", known)
	}
	return e
}

// most is how many models an error names.
const most = 8

// unreported is the error for a model that a worker may serve which has not reported its
// models yet; nil where there is no such worker, or no time for it is left.
func unreported(asked string, fleet *workers.Snapshot, starting bool) *api.Error {
	e := &api.Error{Status: http.StatusServiceUnavailable, Code: api.CodeNoDecodeWorker, RetryAfter: time.Second}
	silent := func(w *workers.Worker) bool { return len(w.Models) == 0 }
	switch {
	case len(fleet.Models()) == 0:
		e.Message = "no worker has reported its models yet"
	case !starting || !slices.ContainsFunc(fleet.Workers, silent):
		return nil
	case asked == "":
		e.Message = "the request names no model, and not all workers have reported theirs yet; try again, or name the model"
	default:
		e.Message = fmt.Sprintf("no worker that has reported its models serves %q, and others have not reported theirs yet; try again", api.Clip(asked))
	}
	return e
}

// Unresolved is the error for a request that does not say, by the name asked or without
// one, which model it is for; nil where it does, or the operator does. of is what the fleet
// makes of the name. The error names the models that the client may have.
//
// While the router is starting, a worker that has not reported its models yet may serve
// the name, or a second model beside the only one.
func Unresolved(asked string, of workers.Resolved, fleet *workers.Snapshot, starting bool, may func(model string) bool) *api.Error {
	if guessed := (asked == "") != of.Default; !guessed {
		return nil // by its name, or by the default for requests without one
	}
	if e := unreported(asked, fleet, starting); e != nil || of.Model != "" {
		return e
	}
	list := slices.DeleteFunc(slices.Clone(fleet.Models()), func(m string) bool { return !may(m) })
	served := fmt.Sprintf("%q", list[:min(len(list), most)])
	if len(list) > most {
		served += fmt.Sprintf(" and %d more", len(list)-most)
	}
	return &api.Error{
		Status: http.StatusBadRequest, Code: api.CodeInvalidRequest, Param: "model",
		Message: "the request names no model, and several are served here; name one of them in \"model\": " + served,
	}
}

// Key says what a client may ask for.
type Key interface {
	May(names ...string) bool
	// Refusal is the error for a model that the key is not for, by its names; nil otherwise.
	Refusal(asked string, names ...string) error
}

// Find is the model that a request asks for, as a key may. The error is that there is none,
// or that no worker serves it.
func Find(asked string, fleet *workers.Snapshot, starting bool, key Key) (workers.Resolved, error) {
	of := fleet.Resolve(asked)
	if e := Unresolved(asked, of, fleet, starting, func(model string) bool { return key.May(model) }); e != nil {
		return of, e
	}
	if err := key.Refusal(asked, cmp.Or(of.Alias, of.Model), of.Model); err != nil {
		return of, err
	}
	switch {
	case len(fleet.Model(of.Model)) > 0:
		return of, nil
	case of.Default:
		e := NotServed(of.Model, fleet, starting)
		e.Message = "routing.default_model: " + e.Message
		return of, e
	}
	return of, NotServed(asked, fleet, starting)
}

// Note says for a receipt how the model was found for a request that does not have its name
// or a plain alias of it; empty for one that does.
func Note(asked string, of workers.Resolved) string {
	switch {
	case asked == "" && of.Default:
		return "no model in the request; served by routing.default_model " + of.Model
	case asked == "" && of.Model != "":
		return fmt.Sprintf("no model in the request; %s is the only one served", of.Model)
	case of.Default:
		return fmt.Sprintf("unknown model %q; served by routing.default_model %s", api.Clip(asked), of.Model)
	case workers.IsPattern(of.Alias):
		return fmt.Sprintf("model %q matches the alias %q; served by %s", api.Clip(asked), of.Alias, of.Model)
	}
	return ""
}
