package resumed_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tidwall/gjson"

	"github.com/dynctl/dynctl/internal/rig/fakeengine"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/settings"
)

const ms = time.Millisecond

func exact(c *settings.Config) { c.Continue.Mode, c.Routing.PrefillFallback = settings.ContinueExact, "local" }

// prompt is 40 ids, so that there are blocks to move.
var prompt = strings.TrimSuffix(strings.Repeat("1000,", 40), ",")

// The requests that are cut, with the members that a case adds.
func completion(more string) fakeengine.Ask {
	return fakeengine.Ask{Path: "/v1/completions", Body: `{"model":"m","prompt":[` + prompt + `],"max_tokens":100,"stream":true` + more + `}`}
}

func words(more string) fakeengine.Ask {
	return fakeengine.Ask{Path: "/v1/completions", Body: `{"model":"m","prompt":"` + strings.Repeat("words ", 40) + `","max_tokens":100,"stream":true` + more + `}`}
}

func chat(more string) fakeengine.Ask {
	return fakeengine.Ask{Path: "/v1/chat/completions", Body: `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("hello ", 40) + `"}],"max_completion_tokens":100,"stream":true` + more + `}`}
}

var limited = fakeengine.Ask{Path: "/v1/completions", Body: `{"model":"m","prompt":[` + prompt + `],"max_tokens":7,"stream":true` + usage + `}`}

const usage = `,"stream_options":{"include_usage":true}`

// seen is what a client makes of a stream.
type seen struct {
	text, finish, usage, roles, odd string
	ids, kinds, errors, done        int
}

func read(stream string) (s seen) {
	ids, kinds := map[string]bool{}, map[string]bool{}
	for event := range strings.SplitSeq(stream, "\n\n") {
		data, ok := strings.CutPrefix(event, "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			s.done++
			continue
		}
		v := gjson.Parse(data)
		if v.Get("error").Exists() {
			s.errors++
			continue
		}
		c := v.Get("choices.0")
		ids[v.Get("id").Str+v.Get("created").Raw] = true
		kinds[fmt.Sprint(v.Get("object"), c.Get("text").Exists(), c.Get("delta").Exists())] = true
		s.text += c.Get("text").Str + c.Get("delta.content").Str
		s.roles += c.Get("delta.role").Str
		s.finish += c.Get("finish_reason").Str
		if u := v.Get("usage"); u.Exists() {
			s.usage += fmt.Sprint(u.Get("prompt_tokens"), "+", u.Get("completion_tokens"), "=", u.Get("total_tokens"))
		}
		for _, at := range []gjson.Result{c.Get("token_ids"), c.Get("prompt_token_ids"), v.Get("prompt_token_ids")} {
			if at.IsArray() {
				s.odd += data
			}
		}
	}
	s.ids, s.kinds = len(ids), len(kinds)
	return s
}

// cut has the next stream of a completion or a chat end after n events with a piece; done
// reports whether that has happened.
func cut(r *fakeengine.Router, n int, end fakeengine.Piece) (done *bool) {
	done = new(bool)
	r.Serves = func(q *fakeengine.Request) fakeengine.Answer {
		a := r.Model.Answer(q)
		if *done || !gjson.GetBytes(q.Body, "stream").Bool() || strings.HasPrefix(q.Worker, "prefill") {
			return a
		}
		*done = true
		return a.Then(n, end)
	}
	return done
}

func run(t *testing.T, name, fleet string, set func(*settings.Config), f func(t *testing.T, r *fakeengine.Router)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) { f(t, fakeengine.New(t, fleet, exact, set)) })
	})
}

func plain(*settings.Config) {}

// TestEngineDiesAfterAnyToken: a stream whose engine dies after any of its events, in any way,
// is to its client the stream of one engine: each token once, one id, one usage, one end.
func TestEngineDiesAfterAnyToken(t *testing.T) {
	for _, end := range []struct {
		name   string
		piece  fakeengine.Piece
		reason string
	}{
		{"reset", fakeengine.Piece{Fail: upstream.Reset}, "reset"},
		{"pause", fakeengine.Piece{Wait: fakeengine.Never}, "timeout"},
		{"no HTTP", fakeengine.Piece{Fail: upstream.Protocol}, "protocol"},
		{"within an event", fakeengine.Piece{Text: `data: {"id":"cmpl`}, "reset"},
		{"error event", fakeengine.Piece{Text: "data: {\"error\":{\"message\":\"the engine is dead\"}}\n\n"}, "stream_error"},
	} {
		for _, fleet := range []string{"2a", "1p2d"} {
			for kind, q := range map[string]fakeengine.Ask{"ids": completion(usage), "words": words(usage), "chat": chat(usage), "limit": limited} {
				var want seen
				events := 0
				run(t, "whole/"+fleet+"/"+kind, fleet, plain, func(t *testing.T, r *fakeengine.Router) {
					got := r.Send(t.Context(), q)
					want, events = read(got.Body), strings.Count(got.Body, "data: ")
					if want.done != 1 || want.text == "" || want.usage == "" || want.finish != "length" {
						t.Fatalf("%s", got)
					}
				})
				first, last := 1, events-3 // of the events after which it goes on elsewhere
				if kind == "chat" {
					first = 2 // which begins with a role
				}
				for n := range events {
					if n < first && strings.HasPrefix(end.piece.Text, "data: {\"id") {
						continue // a good end of a stream of nothing
					}
					run(t, fmt.Sprintf("%s/%s/%s/%d", end.name, fleet, kind, n), fleet, plain, func(t *testing.T, r *fakeengine.Router) {
						cut(r, n, end.piece)
						got := r.Send(t.Context(), q)
						if s := read(got.Body); s != want || got.Err != nil {
							t.Errorf("%+v\nwant %+v\n%v, legs %s, %q\n%s", s, want, got.Err, got.Legs(), got.Receipt.Notes, got.Body)
						}
						c := got.Receipt.Continued
						if (n >= first && n <= last) != (len(c) == 1) || len(c) == 1 && (c[0].Reason != end.reason || c[0].From != got.Receipt.Legs[0].Worker && fleet == "2a" || c[0].Tokens > n) {
							t.Errorf("%+v", c)
						}
						if o := r.Outcomes(); strings.Count(o, "error")+strings.Count(o, "timeout") != 1 {
							t.Errorf("outcomes %q", o)
						}
					})
				}
			}
		}
	}
}

var (
	_ attempt.Budget
	_ = context.Background
	_ = json.Marshal
	_ = errors.New
	_ = httptest.NewRecorder
	_ = os.Getenv
	_ = filepath.Join
)
