package resumed_test

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/rig/fakeengine"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/serving/resumed"
	"github.com/dynctl/dynctl/internal/settings"
)

const ms = time.Millisecond

func exact(c *settings.Config) {
	c.Continue.Mode, c.Routing.PrefillFallback = settings.ContinueExact, "local"
}

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
		v := rawjson.Value(data)
		if v.Get("error").Exists() {
			s.errors++
			continue
		}
		c := v.Get("choices.0")
		ids[v.Get("id").String()+v.Get("created").String()] = true
		kinds[fmt.Sprint(v.Get("object"), c.Get("text").Exists(), c.Get("delta").Exists())] = true
		s.text += c.Get("text").String() + c.Get("delta.content").String()
		s.roles += c.Get("delta.role").String()
		s.finish += c.Get("finish_reason").String()
		if u := v.Get("usage"); u.Exists() {
			s.usage += fmt.Sprint(u.Get("prompt_tokens"), "+", u.Get("completion_tokens"), "=", u.Get("total_tokens"))
		}
		for _, at := range []rawjson.Value{c.Get("token_ids"), c.Get("prompt_token_ids"), v.Get("prompt_token_ids")} {
			if rawjson.IsArray(at) {
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
		if *done || !rawjson.Value(q.Body).Get("stream").Bool() || strings.HasPrefix(q.Worker, "prefill") {
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
				if end.name != "reset" && end.name != "error event" && fleet+kind != "2aids" {
					continue // what differs is below
				}
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
						if (n >= first && n <= last) != (len(c) == 1) {
							t.Errorf("continued %+v, want that from event %d to %d", c, first, last)
						}
						for _, m := range c {
							if from := got.Receipt.Legs[0].Worker; m.Reason != end.reason || m.From != from && fleet == "2a" || m.Tokens > n {
								t.Errorf("%+v, want because %q from %s after %d tokens at most", m, end.reason, from, n)
							}
						}
						if o := r.Outcomes(); strings.Count(o, "error")+strings.Count(o, "timeout") != 1 || len(r.Events("worker_failing")) != 1 {
							t.Errorf("outcomes %q", o)
						}
					})
				}
			}
		}
	}
}

var reset = fakeengine.Piece{Fail: upstream.Reset}

// metric is a line of the router's metrics.
func metric(t *testing.T, r *fakeengine.Router, series string) float64 {
	t.Helper()
	w := httptest.NewRecorder()
	r.Metrics.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	_, rest, ok := strings.Cut(w.Body.String(), "\n"+series+" ")
	if !ok {
		return 0
	}
	text, _, _ := strings.Cut(rest, "\n")
	n, err := strconv.ParseFloat(text, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestNotContinued: a stream that cannot be continued for certain is refused by name, in the
// receipt, the client's error and a metric; what is harmless is continued.
func TestNotContinued(t *testing.T) {
	for _, c := range []struct{ more, label string }{
		{`,"presence_penalty":0.5`, "penalties"},
		{`,"frequency_penalty":-1`, "penalties"},
		{`,"seed":7`, "seed"},
		{`,"n":2`, "several_answers"},
		{`,"best_of":2`, "several_answers"},
		{`,"logprobs":0`, "logprobs"},
		{`,"echo":true`, "echo"},
		{`,"stop":"zzz"`, "stop_strings"}, // without a tokenizer they cannot be watched
		{`,"response_format":{"type":"json_object"}`, "guided_decoding"},
		{`,"structured_outputs":{"regex":"a"}`, "guided_decoding"},
		{`,"bad_words":["x"]`, "other_field"},
		{`,"seed":7,"temperature":0,"presence_penalty":0.0,"stop":null,"repetition_penalty":1.1,"nothing":null`, ""},
	} {
		for _, end := range []fakeengine.Piece{reset, {Text: "data: {\"error\":{\"message\":\"the engine is dead\"}}\n\n"}} {
			run(t, c.label+c.more+string(end.Fail), "2a", plain, func(t *testing.T, r *fakeengine.Router) {
				cut(r, 5, end)
				got := r.Send(t.Context(), completion(c.more))
				s, o := read(got.Body), got.Receipt.Outcome
				if c.label == "" {
					if got.Err != nil || s.text != r.Text || len(got.Receipt.Continued) != 1 {
						t.Errorf("%s %+v", got, o)
					}
					return
				}
				if got.Err == nil || o.NotContinued == "" || !strings.Contains(got.Err.Message, "not continued elsewhere: "+o.NotContinued) {
					t.Fatalf("%s %+v", got, o)
				}
				if n := len(r.Requests("")); n != 1 || len(got.Receipt.Continued) != 0 {
					t.Errorf("%d requests, want 1; continued %+v", n, got.Receipt.Continued)
				}
				if s.errors != 0 || !strings.HasPrefix(r.Text, s.text) {
					t.Errorf("%d errors in the stream, and %q of %q", s.errors, s.text, r.Text)
				}
				if end.Text != "" && !strings.Contains(got.Err.Message, "the engine is dead") {
					t.Errorf("%s", got.Err.Message)
				}
				if n := metric(t, r, fmt.Sprintf("dynctl_streams_not_continued_total{why=%q}", c.label)); n != 1 {
					t.Errorf("counted %v times", n)
				}
			})
		}
	}
}

// TestEndings: what follows a stream that breaks off, in small cases.
func TestEndings(t *testing.T) {
	moves := func(n int) func(*settings.Config) { return func(c *settings.Config) { c.Continue.Moves = n } }
	for _, c := range []struct {
		name, fleet string
		set         func(*settings.Config)
		play        func(n int, a fakeengine.Answer) fakeengine.Answer // what request n gets
		legs        int
		continued   int
		message     string // of the client's error; empty for a whole answer
		dead        bool   // workers that failed cannot be used
	}{
		{"continue.mode is off", "2a", func(c *settings.Config) { c.Continue.Mode = settings.ContinueOff }, func(n int, a fakeengine.Answer) fakeengine.Answer { return a.Then(5, reset) }, 1, 0, "broke off in the middle of the answer", false},
		{"with off an error event is the client's", "2a", func(c *settings.Config) { c.Continue.Mode = settings.ContinueOff }, func(n int, a fakeengine.Answer) fakeengine.Answer {
			return a.Then(5, fakeengine.Piece{Text: "data: {\"error\":{\"message\":\"dead\"}}\n\n"})
		}, 1, 0, "own error", false},
		{"nobody else", "1a", plain, func(n int, a fakeengine.Answer) fakeengine.Answer {
			if n == 0 {
				return a.Then(5, reset)
			}
			return a
		}, 2, 1, "", false},
		{"two engines died", "4a", plain, func(n int, a fakeengine.Answer) fakeengine.Answer { return a.Then(5, reset) }, 2, 1, attempt.NoMoreLost, false},
		{"as often as it may", "4a", moves(1), func(n int, a fakeengine.Answer) fakeengine.Answer {
			return a.Then(5, fakeengine.Piece{Fail: upstream.Protocol})
		}, 2, 1, attempt.NoMoreMove, false},
		{"three engines, one after the other", "4a", moves(5), func(n int, a fakeengine.Answer) fakeengine.Answer {
			if n < 3 {
				return a.Then(5, fakeengine.Piece{Fail: upstream.Protocol})
			}
			return a
		}, 4, 3, "", false},
		{"all others are full", "2a", plain, func(n int, a fakeengine.Answer) fakeengine.Answer {
			if n == 0 {
				return a.Then(5, reset)
			}
			return fakeengine.JSON(429, "{}")
		}, 4, 1, "no other engine could continue it", false},
		{"the first one that is asked is full", "3a", plain, func(n int, a fakeengine.Answer) fakeengine.Answer {
			switch n {
			case 0:
				return a.Then(5, reset)
			case 1:
				return fakeengine.JSON(429, "{}")
			}
			return a
		}, 3, 1, "", false},
		{"the rest is no stream", "3a", plain, func(n int, a fakeengine.Answer) fakeengine.Answer {
			switch n {
			case 0:
				return a.Then(5, reset)
			case 1:
				return fakeengine.JSON(200, "{}")
			}
			return a
		}, 3, 1, "", false},
		{"the engine reports no ids", "2a", plain, func(n int, a fakeengine.Answer) fakeengine.Answer {
			for i := range a.Pieces {
				a.Pieces[i].Text, _, _ = strings.Cut(a.Pieces[i].Text, `,"token_ids"`)
				a.Pieces[i].Text += "}]}\n\n"
			}
			return a.Then(5, reset)
		}, 1, 0, "the engine does not report token ids", false},
		{"a first token of the prefill", "1p2d lmcache", plain, func(n int, a fakeengine.Answer) fakeengine.Answer { return a.Then(5, reset) }, 2, 0, "its first token came from the prefill engine", false},
	} {
		run(t, c.name, c.fleet, c.set, func(t *testing.T, r *fakeengine.Router) {
			n := 0
			r.Serves = func(q *fakeengine.Request) fakeengine.Answer {
				a := r.Model.Answer(q)
				if !strings.HasPrefix(q.Worker, "prefill") {
					a = c.play(n, a)
					n++
				}
				return a
			}
			got := r.Send(t.Context(), completion(""))
			s := read(got.Body)
			switch {
			case c.message == "own error":
				if got.Err != nil || s.errors != 1 {
					t.Errorf("%s", got)
				}
			case c.message == "" && (got.Err != nil || s.text != r.Text || s.ids != 1), c.message != "" && (got.Err == nil || !strings.Contains(got.Err.Message, c.message)), !strings.HasPrefix(r.Text, s.text):
				t.Errorf("%s", got)
			}
			if legs := len(got.Receipt.Legs); legs != c.legs || len(got.Receipt.Continued) != c.continued {
				t.Errorf("%d legs, want %d: %s; %+v, %q", legs, c.legs, got.Legs(), got.Receipt.Continued, got.Receipt.Notes)
			}
		})
	}
}

// vocabulary writes the tokenizer of the model, whose ids are bytes.
func vocabulary(t *testing.T) string {
	t.Helper()
	next, tokens := rune(256), []string{}
	for b := range 256 {
		c := rune(b)
		if b < '!' || b > '~' && b < 0xa1 || b == 0xad {
			c = next
			next++
		}
		tokens = append(tokens, fmt.Sprintf("%q:%d", string(c), b))
	}
	path := filepath.Join(t.TempDir(), "tokenizer.json")
	file := `{"added_tokens":[],"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":{` + strings.Join(tokens, ",") + `},"merges":[]}}`
	if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestStopStringsAcrossTheSeam: a stream with stop strings that is cut after any event ends
// where it would have, with the same text, reason and count.
func TestStopStringsAcrossTheSeam(t *testing.T) {
	path := vocabulary(t)
	tokenizer := func(c *settings.Config) { c.Tokens.Path = path }
	for _, stop := range []string{`["never in it","nor this"]`, `["fließen","zzz"]`, `"on it g"`, `["ü"]`} {
		for kind, ask := range map[string]func(string) fakeengine.Ask{"ids": completion, "words": words} {
			for _, fleet := range []string{"2a", "1p2d"} {
				q := ask(usage + `,"stop":` + stop)
				var want seen
				events, moved := 0, 0
				run(t, "whole", fleet, tokenizer, func(t *testing.T, r *fakeengine.Router) {
					got := r.Send(t.Context(), q)
					want, events = read(got.Body), strings.Count(got.Body, "data: ")
				})
				for n := range events {
					run(t, fmt.Sprintf("%s/%s/%s/%d", stop, kind, fleet, n), fleet, tokenizer, func(t *testing.T, r *fakeengine.Router) {
						cut(r, n, reset)
						got := r.Send(t.Context(), q)
						if s := read(got.Body); s != want || got.Err != nil {
							t.Errorf("%+v\nwant %+v\n%v, legs %s, %q\n%s", s, want, got.Err, got.Legs(), got.Receipt.Notes, got.Body)
						}
						moved += len(got.Receipt.Continued)
					})
				}
				if moved < events/2-3 {
					t.Errorf("of %d streams %d went on elsewhere", events, moved)
				}
			}
		}
	}
}

// TestDrainedWorker: with a drain that moves, a stream goes on elsewhere when a place there is
// free, and stays where it is until then, or if it cannot be continued; no engine is to blame.
func TestDrainedWorker(t *testing.T) {
	for _, c := range []struct {
		name, fleet, more string
		at                int           // it is drained after so many pieces
		freed             time.Duration // when the place elsewhere is free; 0 for at once
		moved             bool
	}{
		{"at once", "2a", "", 5, 0, true},
		{"after the first token", "2a", "", 1, 0, true},
		{"with a pair", "1p2d", "", 5, 0, true},
		{"near the end", "2a", "", 33, 0, false},
		{"nobody else", "1a", "", 5, 0, false},
		{"seeded", "2a", `,"seed":7`, 5, 0, false},
		{"when there is a place", "2a", "", 5, 200 * ms, true},
		{"never a place", "2a", "", 5, time.Hour, false},
	} {
		set := plain
		if c.freed > 0 {
			set = func(s *settings.Config) { s.Routing.Busy.Requests, s.Timeouts.Response = 1, 2*time.Hour }
		}
		run(t, c.name, c.fleet, set, func(t *testing.T, r *fakeengine.Router) {
			other := make(chan *fakeengine.Got, 1)
			if other <- nil; c.freed > 0 {
				<-other
				r.Next("aggregated-0", fakeengine.Hangs())
				ctx, leave := context.WithTimeout(t.Context(), c.freed)
				defer leave()
				go func() { other <- r.Send(ctx, completion("")) }()
				synctest.Wait()
			}
			n, label := 0, ""
			q := completion(c.more)
			q.Piece = func([]byte) error {
				if n++; n == c.at {
					list := r.Requests("")
					label = list[len(list)-1].Worker
					r.Worker(label).State.SetMoving()
				}
				return nil
			}
			got := r.Send(t.Context(), q)
			<-other
			s, list := read(got.Body), got.Receipt.Continued
			if got.Err != nil || s.text != r.Text {
				t.Errorf("%s, want the text %q", got, r.Text)
			}
			if s.ids != 1 || s.done != 1 || s.odd != "" {
				t.Errorf("the stream has %d ids, %d ends, odd %q", s.ids, s.done, s.odd)
			}
			if moved := len(list) == 1; moved != c.moved {
				t.Errorf("moved: %v, want %v: %+v of %s", moved, c.moved, list, got.Legs())
			}
			for _, m := range list {
				if m.Reason != "moved" || m.From != label || m.Dropped != 0 || m.Tokens < c.at {
					t.Errorf("%+v of %s, want from %s after %d tokens or more", m, got.Legs(), label, c.at)
				}
			}
			if c.freed > 0 && c.moved && (list[0].Tokens < 18 || list[0].Tokens > 28) {
				t.Errorf("it went on elsewhere after %d tokens", list[0].Tokens)
			}
			if o := r.Outcomes(); strings.Contains(o, "error") || len(r.Events("worker_failing")) > 0 {
				t.Errorf("outcomes %q, events %q", o, r.Events("worker_failing"))
			}
		})
	}
}

// TestMoveNeedsLegs: a stream of a drained worker stays where it is while limits.legs has too
// few legs for the rest of it, which is no refusal, and moves when there are enough.
func TestMoveNeedsLegs(t *testing.T) {
	for _, c := range []struct {
		fleet string
		legs  int64 // with the stream's own
		moved bool
	}{
		{"2a", 1, false}, {"2a", 2, true},
		{"1p2d", 1, false}, {"1p2d", 2, false}, {"1p2d", 3, true},
	} {
		run(t, fmt.Sprintf("%s, %d legs", c.fleet, c.legs), c.fleet, plain, func(t *testing.T, r *fakeengine.Router) {
			n := 0
			q := completion("")
			q.Piece = func([]byte) error {
				if n++; n == 5 {
					r.Open.SetLimit(c.legs)
					list := r.Requests("")
					r.Worker(list[len(list)-1].Worker).State.SetMoving()
				}
				return nil
			}
			got := r.Send(t.Context(), q)
			if s := read(got.Body); got.Err != nil || s.text != r.Text || s.done != 1 {
				t.Errorf("%s by %s; %q", got, got.Legs(), got.Receipt.Notes)
			}
			if moved := len(got.Receipt.Continued) == 1; moved != c.moved || r.Open.Full() {
				t.Errorf("moved: %v, by %s; limits.legs counts a refusal: %v", moved, got.Legs(), r.Open.Full())
			}
			if o := r.Outcomes(); strings.Contains(o, "error") {
				t.Errorf("outcomes %q", o)
			}
		})
	}
}

// TestReaderLeavesAtTheMove: a client that takes no more pieces just as its stream is about to
// go on elsewhere leaves the place there free.
func TestReaderLeavesAtTheMove(t *testing.T) {
	gone := &upstream.ClientError{Err: errors.New("gone")}
	for at := 5; at < 9; at++ {
		run(t, fmt.Sprint(at), "2a", func(s *settings.Config) { s.Routing.Busy.Requests = 1 }, func(t *testing.T, r *fakeengine.Router) {
			q, n := completion(""), 0
			q.Piece = func([]byte) error {
				if n++; n == 5 {
					r.Worker("aggregated-0").State.SetMoving()
				}
				if n == at {
					return gone
				}
				return nil
			}
			if got := r.Send(t.Context(), q); got.Err == nil || got.Err.Code != "client_closed" {
				t.Errorf("%s", got)
			}
		})
	}
}

// TestPaced: of the streams that an engine leaves a rank computes as many at a time as it may.
// The others wait, and their clients get a comment every five seconds; a client that leaves,
// or takes no comment, gives its turn up.
func TestPaced(t *testing.T) {
	const streams, atOnce, slow = 9, 2, 6 * time.Second
	run(t, "all", "2a", func(c *settings.Config) {
		c.Continue.PerRank, c.Timeouts.Response, c.Routing.Busy.Requests = atOnce, time.Hour, 100
	}, func(t *testing.T, r *fakeengine.Router) {
		var mu sync.Mutex
		now, most := 0, 0
		// Each dies after the last has begun.
		r.Always("aggregated-0", func(q *fakeengine.Request) fakeengine.Answer {
			return r.Model.Answer(q).Then(5, fakeengine.Piece{Wait: 500 * ms, Fail: upstream.Reset})
		})
		r.Always("aggregated-1", func(q *fakeengine.Request) fakeengine.Answer {
			mu.Lock()
			now++
			most = max(most, now)
			mu.Unlock()
			time.AfterFunc(slow-ms, func() { mu.Lock(); now--; mu.Unlock() })
			return r.Model.Answer(q).After(slow)
		})
		r.Worker("aggregated-1").State.SetDraining(true)
		beats := make([]int, streams)
		got := make([]*fakeengine.Got, streams)
		leave := make([]context.CancelFunc, streams)
		var wg sync.WaitGroup
		for i := range streams {
			q := completion("")
			q.Beat = func(words string) error {
				if beats[i]++; !strings.Contains(words, "waits in the queue") {
					t.Errorf("%q", words)
				}
				if i == streams-1 {
					return errors.New("gone")
				}
				return nil
			}
			ctx, cancel := context.WithCancel(t.Context())
			leave[i] = cancel
			defer cancel()
			wg.Go(func() { got[i] = r.Send(ctx, q) })
			<-time.After(ms) // in this order
		}
		r.Worker("aggregated-1").State.SetDraining(false)
		time.AfterFunc(time.Second, leave[streams-2])
		wg.Wait()
		for i, g := range got[:streams-2] {
			// The turns are 6 s long: the third pair waits 12 s, with comments after 5 s and 10 s.
			if want := i / atOnce * 6 / 5; g.Err != nil || read(g.Body).text != r.Text || beats[i] != want {
				t.Errorf("stream %d: %d comments, want %d; %s", i, beats[i], want, g)
			}
		}
		for _, g := range got[streams-2:] {
			if g.Err == nil || len(g.Receipt.Legs) != 1 {
				t.Errorf("%s by %s", g, g.Legs())
			}
		}
		if most != atOnce {
			t.Errorf("%d rests were computed at a time, want %d", most, atOnce)
		}
		if o := r.Outcomes(); strings.Contains(o, "aggregated-1: server") {
			t.Errorf("outcomes %q", o)
		}
	})
}

// TestClientLeavesAtTheSeam: whenever a client leaves around the place at which its stream goes
// on elsewhere, both engines' legs end, and all is given back.
func TestClientLeavesAtTheSeam(t *testing.T) {
	for _, how := range []string{"dies", "moves"} {
		for _, fleet := range []string{"2a", "1p2d", "2p2d"} {
			for at := 30 * ms; at < 300*ms; at += 5 * ms {
				run(t, fmt.Sprintf("%s/%s/%v", how, fleet, at), fleet, plain, func(t *testing.T, r *fakeengine.Router) {
					if how == "dies" {
						cut(r, 5, fakeengine.Piece{Wait: 10 * ms, Fail: upstream.Reset})
					}
					serve := r.Serves
					if serve == nil {
						serve = r.Model.Answer
					}
					r.Serves = func(q *fakeengine.Request) fakeengine.Answer { return serve(q).After(20 * ms) }
					q, n := completion(""), 0
					q.Piece = func([]byte) error {
						if n++; n == 5 && how == "moves" {
							list := r.Requests("")
							r.Worker(list[len(list)-1].Worker).State.SetMoving()
						}
						return nil
					}
					ctx, leave := context.WithTimeout(t.Context(), at)
					defer leave()
					began := time.Now()
					got := r.Send(ctx, q)
					if took := time.Since(began); took != at || got.Err == nil || !strings.HasPrefix(r.Text, read(got.Body).text) {
						t.Errorf("after %v: %s", took, got)
					}
					if o := r.Outcomes(); strings.Count(o, "error") > 1 || how == "moves" && strings.Contains(o, "error") {
						t.Errorf("outcomes %q", o)
					}
				})
			}
		}
	}
}

// TestMemoryOfStreams: what is kept of a stream is taken out of limits.body_memory. Where that
// is used up, the stream goes on, cannot be continued, and says so.
func TestMemoryOfStreams(t *testing.T) {
	long := strings.Repeat("a", 2000)
	q := fakeengine.Ask{Path: "/v1/completions", Body: `{"model":"m","prompt":"` + long + `","max_tokens":100,"stream":true}`}
	for _, c := range []struct {
		limit int64
		cut   bool
	}{{2200, false}, {2200, true}, {1 << 20, true}} {
		run(t, fmt.Sprint(c), "2a", plain, func(t *testing.T, r *fakeengine.Router) {
			r.Bodies.SetLimit(c.limit)
			if r.Serves = func(q *fakeengine.Request) fakeengine.Answer {
				a := r.Model.Answer(q)
				if i := strings.Index(a.Pieces[0].Text, `"prompt_token_ids":`); i >= 0 { // ids are more than the text
					ids := slices.Repeat([]string{"1000"}, 2000)
					a.Pieces[0].Text = strings.Replace(a.Pieces[0].Text, "[1000,1001,1002,1003]", "["+strings.Join(ids, ",")+"]", 1)
				}
				return a
			}; c.cut {
				whole, done := r.Serves, false
				r.Serves = func(q *fakeengine.Request) fakeengine.Answer {
					if a := whole(q); !done {
						done = true
						return a.Then(5, reset)
					}
					return whole(q)
				}
			}
			got := r.Send(t.Context(), q)
			full, small := strings.Contains(strings.Join(got.Receipt.Notes, "\n"), "limits.body_memory"), c.limit < 1<<20
			if full != small || metric(t, r, "dynctl_streams_without_memory_total") > 0 != small {
				t.Errorf("%q", got.Receipt.Notes)
			}
			switch {
			case c.cut && small:
				if got.Err == nil || !strings.Contains(got.Err.Message, "limits.body_memory") || metric(t, r, `dynctl_streams_not_continued_total{why="memory"}`) != 1 {
					t.Errorf("%s", got)
				}
			case got.Err != nil || read(got.Body).text != r.Text || c.cut != (len(got.Receipt.Continued) == 1):
				t.Errorf("%s", got)
			}
		})
	}
}

// TestNothingIsKeptBeforeTheHead: a request that waits for the head of its answer holds its
// body, and nothing for another engine: of ten thousand that wait, each would hold its tools
// and its ids twice.
func TestNothingIsKeptBeforeTheHead(t *testing.T) {
	for _, fleet := range []string{"2a", "1p1d", "1p1d sglang"} {
		q := chat(`,"metadata":{"a":"` + strings.Repeat("long ", 100) + `"}`)
		run(t, fleet, fleet, plain, func(t *testing.T, r *fakeengine.Router) {
			r.Serves = func(e *fakeengine.Request) fakeengine.Answer {
				if n := r.Bodies.Used(); n != int64(len(q.Body)) {
					t.Errorf("%s is asked while %d bytes are taken, not the %d of the body", e.Worker, n, len(q.Body))
				}
				return r.Model.Answer(e)
			}
			if got := r.Send(t.Context(), q); got.Err != nil || read(got.Body).text != r.Text {
				t.Errorf("%s", got)
			}
		})
	}
}

// TestPanicBehindTheHead: a panic between the head of a stream and its first reader gives
// back all that the stream holds.
func TestPanicBehindTheHead(t *testing.T) {
	for _, fleet := range []string{"1a", "1p1d", "1p1d sglang"} {
		run(t, fleet, fleet, plain, func(t *testing.T, r *fakeengine.Router) {
			e, ok := r.Engine.(*resumed.Engine)
			if !ok {
				t.Fatalf("the engine is a %T", r.Engine)
			}
			e.Bodies = admission.NewMemory(1, func(bool, int64) { panic("by the test") })
			if got := r.Send(t.Context(), chat("")); got.Panic == nil || len(r.Requests("")) == 0 {
				t.Errorf("%s", got)
			}
			r.Balanced()
		})
	}
}
