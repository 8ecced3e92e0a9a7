package serving_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/rig/fakeengine"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/serving"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

const completions = "/v1/completions"

// ask is a completion of a prompt of 64 tokens.
func ask(stream bool, more string) fakeengine.Ask {
	ids := strings.TrimSuffix(strings.Repeat("1000,", 64), ",")
	return fakeengine.Ask{Path: completions, Body: fmt.Sprintf(`{"model":"m","prompt":[%s],"max_tokens":12,"stream":%v%s}`, ids, stream, more)}
}

const text = "Flüsse flie" // of 12 tokens

// noFailure checks that no leg counts against its engine.
func noFailure(t *testing.T, r *fakeengine.Router) {
	t.Helper()
	if o := r.Outcomes(); strings.Contains(o, "error") || strings.Contains(o, "timeout") {
		t.Errorf("outcomes %q", o)
	}
}

// whole reports whether a client got all of the answer.
func whole(got *fakeengine.Got, stream bool) bool {
	if stream {
		return got.Status == 200 && got.Err == nil && strings.HasSuffix(got.Body, "data: [DONE]\n\n") && said(got.Body) == text
	}
	return got.Status == 200 && got.Err == nil && strings.Contains(got.Body, `"text":"`+text+`"`)
}

// said is the text of a stream.
func said(stream string) string {
	var out strings.Builder
	for _, part := range strings.Split(stream, `"text":"`)[1:] {
		s, _, _ := strings.Cut(part, `"`)
		out.WriteString(s)
	}
	return out.String()
}

// What a failure leads to.
const (
	elsewhere = "elsewhere" // another worker of the phase answers
	same      = "same"      // the worker gets it again
	local     = "local"     // without remote prefill
	given     = "given"     // the client gets what the engine said, or that it failed
)

// reason is a failure of one leg and what must follow. Where nothing is said of a phase, the
// failure is the same in all.
type reason struct {
	name    string
	answer  fakeengine.Answer
	follows string
	reason  string // of attempt.Reason, in the receipt
	health  string
	budget  int    // retries out of the budget
	phases  string // in which it can be; empty for all
	stream  string // "only" where the answer is streamed, "no" where it is not
	status  int    // what the client gets, where it is given
	dead    bool   // the worker gives no sign of life
	body    string // what the client gets of it, where it is given
}

const words = `{"error":{"message":"the engine's own words"}}`

// mebi is a piece of 1 MiB.
var mebi = strings.Repeat("x", 1<<20)

// chunks is an answer of n MiB whose length nothing shows.
func chunks(status, n int) fakeengine.Answer {
	a := fakeengine.Answer{Status: status, Header: []string{"Content-Type: application/json", "Transfer-Encoding: chunked"}}
	for range n {
		a.Pieces = append(a.Pieces, fakeengine.Piece{Text: mebi})
	}
	return a
}

// drips is an answer that is no stream, and whose pauses together exceed every timeout.
func drips(status int) fakeengine.Answer {
	a := fakeengine.Answer{Status: status, Header: []string{"Content-Type: application/json", "Transfer-Encoding: chunked"}}
	for range 60 {
		a.Pieces = append(a.Pieces, fakeengine.Piece{Wait: 500 * time.Millisecond, Text: " "})
	}
	return a
}

// TestLongAnswers: an answer whose length nothing shows is computed once and reaches the client
// whole, whatever its length.
func TestLongAnswers(t *testing.T) {
	for _, fleet := range []string{"2a", "1p2d", "1p2d sglang"} {
		for _, n := range []int{31, 32, 33, 48} {
			t.Run(fmt.Sprintf("%s/%d MiB", fleet, n), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r, phase := fakeengine.New(t, fleet), "decode"
					if fleet == "2a" {
						phase = "aggregated"
					}
					all(r, phase, always(chunks(200, n)))
					got := r.Send(t.Context(), ask(false, ""))
					if got.Status != 200 || got.Err != nil || len(got.Body) != n<<20 || len(r.Requests(phase)) != 1 {
						t.Errorf("%d requests, status %d, %d bytes, error %v", len(r.Requests(phase)), got.Status, len(got.Body), got.Err)
					}
					if o := r.Outcomes(); strings.Contains(o, "error") {
						t.Errorf("outcomes %q", o)
					}
				})
			})
		}
	}
}

var reasons = []reason{
	{name: "refused", answer: fakeengine.Fails(upstream.Connect, false), follows: elsewhere, reason: "connect", health: "connect error", budget: 1},
	{name: "no answer", answer: fakeengine.Hangs(), dead: true, follows: elsewhere, reason: "timeout", health: "timeout", budget: 1, phases: "local decode"},
	{name: "an answer that takes too long", answer: fakeengine.Hangs(), follows: given, status: 504, reason: "too_long", health: "canceled", phases: "local decode", stream: "no"},
	{name: "no first token in time", answer: fakeengine.Hangs(), follows: elsewhere, reason: "timeout", health: "timeout", budget: 1, phases: "local decode", stream: "only"},
	{name: "no answer of a prefill", answer: fakeengine.Hangs(), follows: elsewhere, reason: "timeout", health: "timeout", budget: 1, phases: "prefill"},
	{name: "reset", answer: fakeengine.Fails(upstream.Reset, true), follows: elsewhere, reason: "reset", health: "server error", budget: 1},
	{name: "reset, not sent", answer: fakeengine.Fails(upstream.Reset, false), follows: elsewhere, reason: "reset", health: "server error", budget: 1},
	{name: "reset in the answer", answer: fakeengine.JSON(200, "{").Then(1, fakeengine.Piece{Fail: upstream.Reset}), follows: elsewhere, reason: "reset", health: "server error", budget: 1},
	{name: "pause in the answer", answer: fakeengine.JSON(200, "{").Then(1, fakeengine.Piece{Wait: fakeengine.Never}), follows: elsewhere, reason: "timeout", health: "timeout", budget: 1},
	{name: "an answer that drips", answer: drips(200), follows: given, status: 504, reason: "too_long", health: "canceled", phases: "local decode", stream: "no"},
	{name: "a refusal that drips", answer: drips(400), follows: given, status: 504, reason: "too_long", health: "canceled", phases: "local decode", stream: "no"},
	{name: "no stream, and it drips", answer: drips(200), follows: elsewhere, reason: "timeout", health: "timeout", budget: 1, phases: "local decode", stream: "only"},
	{name: "a prefill that drips", answer: drips(200), follows: elsewhere, reason: "timeout", health: "timeout", budget: 1, phases: "prefill"},
	{name: "no HTTP", answer: fakeengine.Fails(upstream.Protocol, true), follows: elsewhere, reason: "protocol", health: "server error", budget: 1},
	{name: "stale", answer: fakeengine.Stale(), follows: same, reason: "stale_connection", health: "canceled", budget: 0},
	{name: "invalid", answer: fakeengine.Fails(upstream.Invalid, false), follows: given, reason: "invalid", health: "canceled"},
	{name: "an error without a kind", answer: fakeengine.Answer{Fail: fmt.Errorf("odd")}, follows: given, reason: "invalid", health: "canceled"},

	{name: "500", answer: fakeengine.JSON(500, words), follows: elsewhere, reason: "status_5xx", health: "server error", budget: 1},
	{name: "503", answer: fakeengine.JSON(503, words), follows: elsewhere, reason: "status_5xx", health: "server error", budget: 1},
	{name: "503 with Retry-After", answer: fakeengine.JSON(503, words, "Retry-After: 7"), follows: elsewhere, reason: "overloaded", health: "refusal", budget: 1},
	{name: "429", answer: fakeengine.JSON(429, words), follows: elsewhere, reason: "overloaded", health: "refusal", budget: 1},
	{name: "529", answer: fakeengine.JSON(529, words), follows: elsewhere, reason: "overloaded", health: "refusal", budget: 1},
	{name: "503 in SGLang's words", answer: fakeengine.JSON(503, `{"message":"The request queue is full."}`), follows: elsewhere, reason: "overloaded", health: "refusal", budget: 1},
	{name: "engine dead", answer: fakeengine.JSON(500, `{"error":{"message":"EngineCore encountered an issue."}}`), follows: elsewhere, reason: "engine_dead", health: "server error", budget: 1},
	{name: "400", answer: fakeengine.JSON(400, words), follows: given, reason: "status_4xx", health: "client error", body: words},
	{name: "404 for the model", answer: fakeengine.JSON(404, `{"error":{"message":"The model `+"`m`"+` does not exist.","type":"NotFoundError","param":"model","code":404}}`), follows: elsewhere, reason: "unknown_model", health: "client error"},
	{name: "404 of another router for the model", answer: fakeengine.JSON(404, `{"error":{"message":"no worker serves it","code":"model_not_found"}}`), follows: elsewhere, reason: "unknown_model", health: "client error"},
	{name: "400 for an adapter", answer: fakeengine.JSON(400, `{"error":{"message":"The following requested LoRA adapters are not loaded: a"}}`), follows: elsewhere, reason: "unknown_model", health: "client error"},
	{name: "404 for something else", answer: fakeengine.JSON(404, words), follows: given, reason: "status_4xx", health: "client error", body: words},
	{name: "400 longer than is kept", answer: chunks(400, 48), follows: given, reason: "status_4xx", health: "client error", body: mebi},
	{name: "302", answer: fakeengine.JSON(302, words, "Location: http://elsewhere/"), follows: elsewhere, reason: "status_3xx", health: "server error", budget: 1},
	{name: "401 for the router's key", answer: fakeengine.JSON(401, words), follows: elsewhere, reason: "worker_unauthorized", health: "server error", budget: 1},
	{name: "508", answer: fakeengine.JSON(508, words), follows: elsewhere, reason: "loop", health: "client error", budget: 0},

	{name: "error event", answer: fakeengine.Stream(words), follows: elsewhere, reason: "stream_error", health: "server error", budget: 1, stream: "only", phases: "local decode"},
	{name: "error event in SGLang's words", answer: fakeengine.Stream(`{"error":{"message":"The request queue is full."}}`, "[DONE]"), follows: elsewhere, reason: "overloaded", health: "refusal", budget: 1, stream: "only", phases: "local decode"},
	{name: "error event for an adapter", answer: fakeengine.Stream(`{"error":{"message":"The following requested LoRA adapters are not loaded: a","code":400}}`, "[DONE]"), follows: elsewhere, reason: "unknown_model", health: "client error", stream: "only", phases: "local decode"},
	{name: "empty stream", answer: fakeengine.Stream(), follows: elsewhere, reason: "reset", health: "server error", budget: 1, stream: "only", phases: "local decode"},
	{name: "cut before the first token", answer: fakeengine.Stream(": hello\n\n").Then(1, fakeengine.Piece{Fail: upstream.Reset}), follows: elsewhere, reason: "reset", health: "server error", budget: 1, stream: "only", phases: "local decode"},

	{name: "no parameters", answer: fakeengine.JSON(200, fakeengine.Prefilled("r1", 64, "null")), follows: given, reason: "missing_params", health: "success", phases: "nixl prefill"},
	{name: "wrong parameters", answer: fakeengine.JSON(200, fakeengine.Prefilled("r1", 64, `{"remote_host":1}`)), follows: elsewhere, reason: "bad_params", health: "success", budget: 1, phases: "nixl prefill"},
	{name: "ended", answer: fakeengine.JSON(200, strings.Replace(fakeengine.Prefilled("r1", 64, "null"), "length", "stop", 1)), follows: local, reason: "", health: "success", phases: "nixl prefill"},
	{name: "an error in the answer", answer: fakeengine.JSON(200, words), follows: elsewhere, reason: "stream_error", health: "server error", budget: 1, phases: "prefill"},
}

// TestReasons: every way in which a leg fails, of each phase, and what follows: which worker
// is asked next, what the client gets, how it counts for the health of the worker and for
// the budget of retries; and all that the request held is given back.
func TestReasons(t *testing.T) {
	for _, phase := range []struct {
		name, fleet, worker, other string
		concurrent                 bool
	}{
		{"local", "2a", "aggregated-0", "aggregated-1", false},
		{"nixl prefill", "2p1d", "prefill-0", "prefill-1", false},
		{"nixl decode", "1p2d", "decode-0", "decode-1", false},
		{"sglang prefill", "2p1d sglang", "prefill-0", "prefill-1", true},
		{"sglang decode", "1p2d sglang", "decode-0", "decode-1", true},
	} {
		for i := range reasons {
			c := &reasons[i]
			for _, stream := range []bool{false, true} {
				fits := c.phases == ""
				for w := range strings.FieldsSeq(c.phases) {
					fits = fits || strings.HasSuffix(phase.name, w)
				}
				if strings.HasPrefix(c.phases, "nixl") {
					fits = phase.name == c.phases
				}
				if !fits || c.stream == "only" && !stream || c.stream == "no" && stream {
					continue
				}
				t.Run(fmt.Sprintf("%s/%s/%v", phase.name, c.name, stream), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						r := fakeengine.New(t, phase.fleet, func(c *settings.Config) { c.Retry.Attempts = 3 })
						specs := fakeengine.Specs(t, phase.fleet)
						for i := range specs {
							specs[i].APIKey = "key"
						}
						r.Apply(specs)
						r.Next(phase.worker, c.answer)
						r.Alive = func(w *workers.Worker) bool { return !c.dead || w.Name != phase.worker }
						var rereads atomic.Int32
						r.Legs.Reread = func(context.Context) { rereads.Add(1) }
						got := r.Send(t.Context(), ask(stream, ""))
						c.check(t, r, phase.worker, phase.other, got, stream)
						if n := rereads.Load(); (n == 1) != (c.reason == "unknown_model") || n > 1 {
							t.Errorf("the models of the fleet are read %d times", n)
						}
					})
				})
			}
		}
	}
}

// check compares what followed with what must.
func (c *reason) check(t *testing.T, r *fakeengine.Router, worker, other string, got *fakeengine.Got, stream bool) {
	t.Helper()
	outcomes, phase := r.Outcomes(), strings.Split(worker, "-")[0]
	var asked []string
	for _, q := range r.Requests(phase) {
		asked = append(asked, q.Worker)
	}
	want := []string{worker}
	switch c.follows {
	case elsewhere:
		want = append(want, other)
	case same:
		want = append(want, worker)
	}
	if strings.Join(asked, " ") != strings.Join(want, " ") {
		t.Errorf("asked %q, want %q", asked, want)
	}
	if leg := worker + ": " + c.reason; c.reason != "" && !strings.Contains(got.Legs(), leg) {
		t.Errorf("the legs are %q, without %q", got.Legs(), leg)
	}
	if o := worker + ": " + c.health; !strings.Contains(outcomes, o) {
		t.Errorf("the outcomes are %q, without %q", outcomes, o)
	}
	if n := strings.Count(outcomes, "error") + strings.Count(outcomes, "timeout") + strings.Count(outcomes, "refusal"); n > 1 {
		t.Errorf("one leg failed, and the outcomes are %q", outcomes)
	}
	if c.follows != given && !whole(got, stream) {
		t.Errorf("%s, want the whole answer", got)
	} else if c.follows == given && (got.Status < 300 || c.body != "" && got.Body != c.body) {
		t.Errorf("%s, want the engine's error %s", got, c.body)
	}
	if c.status != 0 && got.Status != c.status {
		t.Errorf("%s, want status %d", got, c.status)
	}
	if c.status == 504 && (len(r.Requests("")) > 2 || got.Err == nil || !strings.Contains(got.Err.Message, "timeouts.response")) {
		t.Errorf("%d requests: %s", len(r.Requests("")), got)
	}
	if events := r.Events("worker_failing"); c.status == 504 && (len(events) != 1 || !strings.HasPrefix(events[0], worker+" failed")) {
		t.Errorf("the events are %q, want one of %s", events, worker)
	}
	if n := r.Retries(); n != c.budget {
		t.Errorf("%d retries are taken out of the budget, want %d", n, c.budget)
	}
	retries := 0
	if c.follows == elsewhere {
		retries = 1
	}
	if n := int(r.Traffic.Retries.Load()); n != retries && c.follows != same {
		t.Errorf("%d retries are counted, want %d", n, retries)
	}
}

// TestLegsThatAreNotSent: a worker that is ejected between the choice and the dispatch, and a
// transfer that cannot begin, cost another decision. Neither is an attempt, a retry or a
// failure, and an engine's answer from before is worth more.
func TestLegsThatAreNotSent(t *testing.T) {
	var eject func(name string) func(*fakeengine.Router)
	eject = func(name string) func(*fakeengine.Router) {
		return func(r *fakeengine.Router) {
			r.Decided = func(c *serving.Call) {
				if r.Decided = nil; c.Routing.Run.Attempt > 1 { // again and again
					eject(name)(r)
				}
				r.Worker(name).State.SetEjection(&workers.Ejection{Since: time.Now(), Until: time.Now().Add(time.Hour), Reason: "by the test"})
			}
		}
	}
	for _, c := range []struct {
		name, fleet string
		attempts    int
		set         func(r *fakeengine.Router)
		legs        string
		decisions   int
		retries     int
		status      int
	}{
		{"ejected", "2a", 1, eject("aggregated-0"), "aggregated-1", 2, 0, 200},
		{"decode ejected", "1p2d", 1, eject("decode-0"), "prefill-0, decode-1", 2, 0, 200},
		{"prefill ejected", "2p1d", 1, eject("prefill-0"), "prefill-1, decode-0", 2, 0, 200},
		{"ejected after an answer", "2a", 3, func(r *fakeengine.Router) {
			r.Always("aggregated-0", func(*fakeengine.Request) fakeengine.Answer {
				eject("aggregated-1")(r)
				return fakeengine.JSON(429, words, "Retry-After: 7")
			})
		}, "aggregated-0: overloaded", 5, 0, 429},
		{"no receiver", "2p2d lmcache", 4, func(r *fakeengine.Router) {
			specs := fakeengine.Specs(t, "2p2d lmcache")
			specs[2].LMCache, specs[3].LMCache = nil, nil
			r.Apply(specs)
		}, "decode-0", 3, 1, 200},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := fakeengine.New(t, c.fleet, func(s *settings.Config) { s.Retry.Attempts = c.attempts })
				c.set(r)
				got := r.Send(t.Context(), ask(false, ""))
				if n := len(got.Receipt.Earlier) + 1; got.Status != c.status || got.Legs() != c.legs || n != c.decisions {
					t.Errorf("%d by legs %q after %d decisions, want %d by %q after %d: %q", got.Status, got.Legs(), n, c.status, c.legs, c.decisions, got.Receipt.Notes)
				}
				if c.status == 200 && !whole(got, false) || c.status == 429 && got.Body != words {
					t.Errorf("%s", got)
				}
				noFailure(t, r)
				for i, n := range got.Receipt.Notes {
					if slices.Contains(got.Receipt.Notes[:i], n) {
						t.Errorf("a note twice: %q", got.Receipt.Notes)
					}
				}
				if n, all := r.Retries(), int(r.Traffic.Retries.Load()); n != c.retries || all != c.retries {
					t.Errorf("%d retries are counted, %d in the budget", all, n)
				}
			})
		})
	}
}
