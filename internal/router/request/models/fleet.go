package models

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

const (
	queryTimeout  = 2 * time.Second // for all workers together
	queriesAtOnce = 16
)

// Query requests the models of a fleet's usable workers and merges their answers. Of workers
// with the same models it takes the first answer; query returns nil for none. If no such worker
// answers, their models are missing. The answer is for other requests, too: that ctx ends does
// not make it empty.
func Query(ctx context.Context, fleet *workers.Snapshot, aliases []Alias, query func(context.Context, *workers.Worker) []byte) (*List, error) {
	var alike [][]*workers.Worker // by their models
	for _, w := range fleet.Workers {
		if ok, _ := w.State.Usable(); !ok {
			continue
		}
		i := slices.IndexFunc(alike, func(a []*workers.Worker) bool { return slices.Equal(a[0].Models, w.Models) })
		if i < 0 {
			i, alike = len(alike), append(alike, nil)
		}
		alike[i] = append(alike[i], w)
	}
	answers := make([][]byte, len(alike))
	each(ctx, len(alike), func(ctx context.Context, i int) {
		for _, w := range alike[i] {
			if answers[i] = query(ctx, w); answers[i] != nil || ctx.Err() != nil {
				return
			}
		}
	})
	return Merge(slices.DeleteFunc(answers, func(b []byte) bool { return b == nil }), aliases)
}

// EachUsable calls do once for each usable worker of a list, a few at a time. It is for answers
// that other requests get, too: that ctx ends does not end do, but a limit for all workers
// together does.
func EachUsable(ctx context.Context, list []*workers.Worker, do func(context.Context, *workers.Worker)) {
	usable := slices.DeleteFunc(slices.Clone(list), func(w *workers.Worker) bool {
		ok, _ := w.State.Usable()
		return !ok
	})
	each(ctx, len(usable), func(ctx context.Context, i int) { do(ctx, usable[i]) })
}

// each calls do for each of n, a few at a time, within the limit for all of them.
func each(ctx context.Context, n int, do func(ctx context.Context, i int)) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), queryTimeout)
	defer cancel()
	var g errgroup.Group
	g.SetLimit(queriesAtOnce)
	for i := range n {
		g.Go(func() error {
			do(ctx, i)
			return nil
		})
	}
	_ = g.Wait() // none of them fails
}

// NotServed is the error for a client that asks for a model which no worker of a fleet
// serves. While the router is starting, a worker that has not reported its models yet may
// serve it: clients try again after a 503, not after a 404.
func NotServed(requested string, fleet *workers.Snapshot, starting bool) *api.Error {
	if e := unreported(requested, fleet, starting); e != nil {
		return e
	}
	e := &api.Error{Status: http.StatusNotFound, Code: api.CodeModelNotFound, Param: "model", Message: fmt.Sprintf("no worker serves the model %q", api.Clip(requested))}
	if known := fleet.Models(); workers.Nearest(requested, known) != "" {
		e.Message += fmt.Sprintf("; did you mean %q?", workers.Nearest(requested, known))
	} else if len(known) <= most {
		e.Message += fmt.Sprintf("; served here: %q", known)
	}
	return e
}

// most is how many models an error names.
const most = 8

// unreported is the error for a model that a worker may serve which has not reported its
// models yet; nil where there is no such worker, or no time for it is left.
func unreported(requested string, fleet *workers.Snapshot, starting bool) *api.Error {
	e := &api.Error{Status: http.StatusServiceUnavailable, Code: api.CodeNoDecodeWorker, RetryAfter: time.Second}
	silent := func(w *workers.Worker) bool { return len(w.Models) == 0 }
	switch {
	case len(fleet.Models()) == 0:
		e.Message = "no worker has reported its models yet"
	case !starting || !slices.ContainsFunc(fleet.Workers, silent):
		return nil
	case requested == "":
		e.Message = "the request names no model, and not all workers have reported theirs yet; try again, or name the model"
	default:
		e.Message = fmt.Sprintf("no worker that has reported its models serves %q, and others have not reported theirs yet; try again", api.Clip(requested))
	}
	return e
}

// Unresolved is the error for a request that does not say, by the requested name or without
// one, which model it is for; nil where it does, or the operator does. of is what the fleet
// makes of the name. The error names the models that the client may have.
//
// While the router is starting, a worker that has not reported its models yet may serve
// the name, or a second model beside the only one.
func Unresolved(requested string, of workers.Resolved, fleet *workers.Snapshot, starting bool, may func(model string) bool) *api.Error {
	if guessed := (requested == "") != of.Default; !guessed {
		return nil // by its name, or by the default for requests without one
	}
	if e := unreported(requested, fleet, starting); e != nil || of.Model != "" {
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

// Find is the model that a request asks for, as a key may. The error is that the model is
// unknown, or that no worker serves it; with known, a model that the fleet knows may be without
// one.
func Find(requested string, fleet *workers.Snapshot, starting bool, key Key, known bool) (workers.Resolved, error) {
	of := fleet.Resolve(requested)
	if e := Unresolved(requested, of, fleet, starting, func(model string) bool { return key.May(model) }); e != nil {
		return of, e
	}
	if err := key.Refusal(requested, cmp.Or(of.Alias, of.Model), of.Model); err != nil {
		return of, err
	}
	list, _ := fleet.Candidates(of.Model)
	switch {
	case len(list) > 0 || known && fleet.Knows(of.Model):
		return of, nil
	case of.Default:
		e := NotServed(of.Model, fleet, starting)
		e.Message = "routing.default_model: " + e.Message
		return of, e
	}
	return of, NotServed(requested, fleet, starting)
}

// Unknown reports whether an error of [Find] is that no worker serves the model: one may since
// its models were read.
func Unknown(err error) bool {
	e, ok := errors.AsType[*api.Error](err)
	return ok && e.Code == api.CodeModelNotFound
}

// Note says for a receipt how the model was found for a request that does not have its name
// or a plain alias of it; empty for one that does.
func Note(requested string, of workers.Resolved) string {
	switch {
	case requested == "" && of.Default:
		return "no model in the request; served by routing.default_model " + of.Model
	case requested == "" && of.Model != "":
		return fmt.Sprintf("no model in the request; %s is the only one served", of.Model)
	case of.Default:
		return fmt.Sprintf("unknown model %q; served by routing.default_model %s", api.Clip(requested), of.Model)
	case workers.IsPattern(of.Alias):
		return fmt.Sprintf("model %q matches the alias %q; served by %s", api.Clip(requested), of.Alias, of.Model)
	}
	return ""
}
