package serving_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/rig/fakeengine"
	"github.com/dynctl/dynctl/internal/router/forward/pair"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// late has the engines of a phase answer after a while.
func late(r *fakeengine.Router, phase string, d time.Duration) {
	all(r, phase, func(q *fakeengine.Request) fakeengine.Answer { return r.Model.Answer(q).After(d) })
}

// TestClientLeaves: whenever a client leaves, before the decision, in line, while a leg is
// sent or its head is awaited, between any two pieces, its legs end at once, all is given
// back, and no engine is to blame.
func TestClientLeaves(t *testing.T) {
	for _, c := range []struct {
		fleet string
		set   func(r *fakeengine.Router)
		took  time.Duration // all of it, streamed
	}{
		{"1a", func(r *fakeengine.Router) { late(r, "a", 20*ms) }, 140 * ms},
		{"1p1d", func(r *fakeengine.Router) { late(r, "p", 20*ms); late(r, "d", 20*ms) }, 160 * ms},
		{"1p1d sglang", func(r *fakeengine.Router) { late(r, "p", 20*ms); late(r, "d", 30*ms) }, 150 * ms},
		{"1p1d sglang slow", func(r *fakeengine.Router) {
			r.Always("prefill-0", free(r, time.Hour))
			r.Always("decode-0", free(r, 20*ms))
		}, 140*ms + pair.Grace},
		{"2a retried", func(r *fakeengine.Router) {
			late(r, "a", 20*ms)
			r.Next("aggregated-0", fakeengine.JSON(429, words).After(20*ms))
		}, 160 * ms},
		{"1p1d lmcache", func(r *fakeengine.Router) { late(r, "p", 20*ms); late(r, "d", 20*ms) }, 150 * ms},
		{"1a in line", func(r *fakeengine.Router) { late(r, "a", 20*ms) }, 280 * ms},
	} {
		for _, stream := range []bool{true, false} {
			for at := time.Duration(0); at <= c.took+10*ms; at += 5 * ms {
				t.Run(fmt.Sprintf("%s/%v/%v", c.fleet, stream, at), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						r := fakeengine.New(t, strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(c.fleet, " slow"), " retried"), " in line"), func(s *settings.Config) {
							s.Timeouts.Prefill, s.Timeouts.Response = 2*time.Hour, 2*time.Hour
							if strings.HasSuffix(c.fleet, "in line") {
								s.Routing.Busy.Requests = 1
							}
						})
						c.set(r)
						first := make(chan *fakeengine.Got, 1)
						first <- nil
						if strings.HasSuffix(c.fleet, "in line") {
							<-first
							go func() { first <- r.Send(t.Context(), ask(stream, "")) }()
							synctest.Wait()
						}
						ctx, leave := context.WithCancel(t.Context())
						defer leave()
						if at == 0 {
							leave()
						} else {
							time.AfterFunc(at, leave)
						}
						began := time.Now()
						got := r.Send(ctx, ask(stream, ""))
						took := time.Since(began)
						gone := got.Err != nil && got.Err.Code == "client_closed"
						if !gone && !whole(got, stream) && !(strings.Contains(c.fleet, "lmcache") && got.Err == nil) {
							t.Errorf("%s", got)
						}
						if gone && (took != at || at > c.took) {
							t.Errorf("the client left after %v, and an answer of %v ended after %v: %s", at, c.took, took, got)
						}
						if stream && took > at && at < c.took {
							t.Errorf("the client left after %v, and the stream lasted %v: %s", at, took, got)
						}
						noFailure(t, r)
						if got := <-first; got != nil && !whole(got, stream) {
							t.Errorf("the request before: %s", got)
						}
						for _, q := range r.Requests("") {
							if q.Ended.IsZero() || q.Ended.Sub(began) > max(took, c.took) {
								t.Errorf("the request to %s ended after %v", q.Worker, q.Ended.Sub(began))
							}
						}
						if n := r.Queue.Waiting(); n != 0 {
							t.Errorf("%d requests wait", n)
						}
						// The next one is served as if nothing had been.
						if got := r.Send(t.Context(), ask(stream, "")); got.Err != nil || got.Status != 200 {
							t.Errorf("the request after: %s", got)
						}
					})
				})
			}
		}
	}
}

// TestReceiptOfWhoLeftTheQueue: a request that ends before it gets a rank has a receipt of what
// it was and how long it waited, if its client left the queue, and also if its header for the
// queue is invalid.
func TestReceiptOfWhoLeftTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := fakeengine.New(t, "1a", func(s *settings.Config) {
			s.Routing.Busy.Requests, s.Timeouts.Response, s.Routing.AllowHeaders = 1, time.Hour, true
		})
		r.Next("aggregated-0", fakeengine.Hangs())
		ctx, leave := context.WithCancel(t.Context())
		first := make(chan struct{})
		go func() { defer close(first); r.Send(ctx, ask(true, "")) }()
		synctest.Wait()
		gone, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		left, odd := r.Send(gone, ask(true, "")), ask(true, "")
		odd.Header = http.Header{"X-Dynctl-Priority": {"urgent"}}
		bad := r.Send(t.Context(), odd)
		leave()
		<-first
		for _, got := range []*fakeengine.Got{left, bad} {
			if c := got.Receipt; c.RequestID == "" || c.Endpoint != "completion" || c.Model != "m" {
				t.Errorf("%s: the receipt has request %q, endpoint %q, model %q", got, c.RequestID, c.Endpoint, c.Model)
			}
		}
		if c := left.Receipt; c.QueuedMS != 5000 || c.QueuedFor == "" {
			t.Errorf("it waited 5 s, and the receipt has %v ms for %q", c.QueuedMS, c.QueuedFor)
		}
		if bad.Status != http.StatusBadRequest {
			t.Errorf("%s", bad)
		}
	})
}

// TestTrialIsGivenBack: a request that was to try an ejected worker leaves the trial to the
// next one, where its client left, it panicked, or the other leg failed before.
func TestTrialIsGivenBack(t *testing.T) {
	for _, c := range []struct {
		fleet, worker string
		fails         string // the worker that does
		answers       []fakeengine.Answer
	}{
		{"2a", "aggregated-0", "aggregated-0", []fakeengine.Answer{fakeengine.Hangs(), {Panic: true}}},
		{"2p2d", "prefill-0", "prefill-0", []fakeengine.Answer{fakeengine.Hangs(), {Panic: true}}},
		{"2p2d", "decode-0", "decode-0", []fakeengine.Answer{fakeengine.Hangs(), {Panic: true}}},
		{"2p2d", "decode-0", "prefill-0", []fakeengine.Answer{fakeengine.Hangs(), fakeengine.JSON(400, words)}},
		{"2p2d sglang", "prefill-0", "prefill-0", []fakeengine.Answer{fakeengine.Hangs(), {Panic: true}}},
		{"2p2d sglang", "decode-0", "prefill-0", []fakeengine.Answer{fakeengine.Hangs(), fakeengine.JSON(400, words)}},
	} {
		for _, a := range c.answers {
			synctest.Test(t, func(t *testing.T) {
				r := fakeengine.New(t, c.fleet)
				e := &workers.Ejection{Since: time.Now(), Until: time.Now().Add(time.Hour), Reason: "by the test"}
				r.Worker(c.worker).State.SetEjection(e)
				e.OfferTrial()
				r.Next(c.fails, a)
				ctx, leave := context.WithTimeout(t.Context(), 500*ms)
				defer leave()
				if got := r.Send(ctx, ask(true, "")); len(r.Requests(c.fails)) != 1 {
					t.Fatalf("%s by %s", got, got.Legs())
				}
				if !e.TakeTrial() {
					t.Errorf("%+v: nobody may try %s any more", a, c.worker)
				}
			})
		}
	}
}

// TestPanics: a panic of the transport, in the head of an answer or in the middle of it, of
// either leg: all is given back, and what runs beside it has ended.
func TestPanics(t *testing.T) {
	first := fakeengine.Stream(`{"choices":[{"index":0,"text":"F"}]}`)
	for _, c := range []struct {
		name, fleet, worker string
		answer              fakeengine.Answer
		beside              bool // it is reported, and not the request's own
		status              int
	}{
		{"sending", "1a", "aggregated-0", fakeengine.Answer{Panic: true}, false, 0},
		{"in the head", "1a", "aggregated-0", first.Then(0, fakeengine.Piece{Panic: true}), false, 0},
		{"in the middle", "1a", "aggregated-0", first.Then(1, fakeengine.Piece{Wait: ms, Panic: true}), false, 200},
		{"a refusal's body", "1a", "aggregated-0", fakeengine.JSON(500, "").Then(0, fakeengine.Piece{Panic: true}), false, 0},
		{"prefill, sending", "1p1d", "prefill-0", fakeengine.Answer{Panic: true}, false, 0},
		{"prefill, in the answer", "1p1d", "prefill-0", fakeengine.JSON(200, "").Then(0, fakeengine.Piece{Panic: true}), false, 0},
		{"decode behind a prefill", "1p1d", "decode-0", fakeengine.Answer{Panic: true}, false, 0},
		{"prefill beside", "1p1d sglang", "prefill-0", fakeengine.Answer{Wait: 10 * ms, Panic: true}, true, 500},
		{"prefill beside, in the answer", "1p1d sglang", "prefill-0", fakeengine.JSON(200, "").Then(0, fakeengine.Piece{Wait: 10 * ms, Panic: true}), true, 500},
		{"decode beside", "1p1d sglang", "decode-0", fakeengine.Answer{Wait: 10 * ms, Panic: true}, false, 0},
		{"decode beside, in the middle", "1p1d sglang", "decode-0", first.Then(1, fakeengine.Piece{Wait: 10 * ms, Panic: true}), false, 200},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := fakeengine.New(t, c.fleet, func(s *settings.Config) { s.Retry.Attempts, s.Routing.PrefillFallback = 1, "error" })
				r.Always(c.worker, always(c.answer))
				got := r.Send(t.Context(), ask(true, ""))
				if c.beside == (got.Panic != nil) || c.beside != (len(r.Events("panic")) == 1) || got.Status != c.status {
					t.Errorf("%s, reported %q", got, r.Events("panic"))
				}
				for _, l := range got.Receipt.Legs {
					if l.Worker == c.worker && l.Error == "" && l.EndMS >= 0 {
						t.Errorf("the receipt has the leg that panicked as good: %+v", l)
					}
				}
				r.Balanced()
				r.Always(c.worker, nil)
				if got := r.Send(t.Context(), ask(true, "")); !whole(got, true) {
					t.Errorf("the request after: %s", got)
				}
			})
		})
	}
}

// TestReaders: an answer that nobody reads holds what it has and no more; closed at any
// place, with or without an error of the client, all is given back and no engine is to blame.
func TestReaders(t *testing.T) {
	gone := &upstream.ClientError{Err: errors.New("gone")}
	for _, fleet := range []string{"1a", "1p1d", "1p1d sglang"} {
		for n := range 14 {
			for _, wait := range []time.Duration{0, time.Hour} {
				synctest.Test(t, func(t *testing.T) {
					r := fakeengine.New(t, fleet)
					seen := 0
					q := ask(true, "")
					q.Piece = func([]byte) error {
						if seen++; seen <= n {
							return nil
						}
						<-time.After(wait)
						synctest.Wait() // until a prefill leg beside has ended
						if load := r.Ledger.Total(); r.Open.Used() != 1 || load.Requests != 1 || load.Answering != 1 {
							t.Errorf("%d legs, %d requests, %d of them answering, while nobody reads", r.Open.Used(), load.Requests, load.Answering)
						}
						// A leg beside may send the body until it ends; the next piece gives it back.
						if n := r.Bodies.Used(); n != 0 && (seen > 2 || !strings.HasSuffix(fleet, "sglang")) {
							t.Errorf("%d bytes while nobody reads", n)
						}
						return gone
					}
					got := r.Send(t.Context(), q)
					if n < 13 && (got.Err == nil || got.Err.Code != "client_closed") {
						t.Errorf("%s after %d pieces: %s", fleet, n, got)
					}
					noFailure(t, r)
				})
			}
		}
	}
}

// TestFormsOfAnswers: what is not a stream of tokens: HEAD, answers of any length, those that
// are no JSON, and the first token of an LMCache prefill.
func TestFormsOfAnswers(t *testing.T) {
	large := `{"text":"` + strings.Repeat("x", 5<<20) + `"}`
	for _, c := range []struct {
		name, fleet string
		q           fakeengine.Ask
		answer      fakeengine.Answer
		status      int
		body        string
		length      int64
	}{
		{"HEAD", "1a", fakeengine.Ask{Method: "HEAD", Path: "/v1/responses/resp_1"}, fakeengine.Answer{Status: 200, Header: []string{"Content-Type: application/json", "Content-Length: 1234"}}, 200, "", 1234},
		{"over 4 MiB", "1a", ask(false, ""), fakeengine.JSON(200, large), 200, large, int64(len(large))},
		{"over 4 MiB, cut", "1a", ask(false, ""), fakeengine.JSON(200, large).Then(0, fakeengine.Piece{Text: large[:1000]}, fakeengine.Piece{Fail: upstream.Reset}), 200, large[:1000], int64(len(large))},
		{"of unknown length", "1a", ask(false, ""), fakeengine.Answer{Status: 200, Header: []string{"Content-Type: application/json"}, Pieces: []fakeengine.Piece{{Text: `{"a":`}, {Text: "1}"}}}, 200, `{"a":1}`, -1},
		{"no JSON, of unknown length", "1a", ask(false, ""), fakeengine.Answer{Status: 200, Header: []string{"Content-Type: audio/wav"}, Pieces: []fakeengine.Piece{{Text: "ab"}, {Wait: ms, Text: "c"}}}, 200, "abc", -1},
		{"empty", "1a", ask(false, ""), fakeengine.JSON(204, ""), 204, "", 0},
		{"LMCache", "1p1d lmcache", ask(false, ""), fakeengine.Answer{}, 200, text, 0},
		{"LMCache, streamed", "1p1d lmcache", ask(true, ""), fakeengine.Answer{}, 200, text, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := fakeengine.New(t, c.fleet, func(s *settings.Config) { s.Timeouts.Write = time.Second })
				if c.answer.Status != 0 {
					r.Always("aggregated-0", always(c.answer))
				}
				got := r.Send(t.Context(), c.q)
				body := got.Body
				if c.body == text {
					if body = rawjson.Value(got.Body).Get("choices.0.text").String(); strings.HasPrefix(got.Body, "data:") {
						body = said(got.Body)
					}
				}
				if got.Status != c.status || body != c.body || (got.Err != nil) != strings.Contains(c.name, "cut") {
					t.Errorf("%.300s, want %d %.300s", got, c.status, c.body)
				}
				if n := got.Head.ContentLength; c.length != 0 && n != c.length {
					t.Errorf("length %d, want %d", n, c.length)
				}
				if o := r.Outcomes(); !strings.Contains(o, "success") {
					t.Errorf("outcomes %q", o)
				}
			})
		})
	}
}

// TestForwardedAnswersEnd: an answer that is no stream and goes on as it comes is cut where
// its pauses together are longer than timeouts.response, for which its engine is not blamed.
// The time in which the client reads is none of the engine's.
func TestForwardedAnswersEnd(t *testing.T) {
	for _, c := range []struct {
		name   string
		header string
		pauses time.Duration // of the engine, each
		reads  time.Duration // what the client takes for each piece
		cut    bool
	}{
		{"of unknown length", "Content-Type: audio/wav", 500 * ms, 0, true},
		{"long", "Content-Length: 5000000", 500 * ms, 0, true},
		{"in time", "Content-Type: audio/wav", 50 * ms, 0, false},
		{"to a slow client", "Content-Type: audio/wav", 50 * ms, time.Minute, false},
		{"a stream", "Content-Type: text/event-stream", 500 * ms, 0, false},
	} {
		for _, fleet := range []string{"1a", "1p1d", "1p1d sglang"} {
			t.Run(c.name+"/"+fleet, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := fakeengine.New(t, fleet)
					a := fakeengine.Answer{Status: 200, Header: []string{c.header}}
					for range 60 {
						a.Pieces = append(a.Pieces, fakeengine.Piece{Wait: c.pauses, Text: "data: {}\n\n"})
					}
					last := "decode-0"
					if fleet == "1a" {
						last = "aggregated-0"
					}
					r.Always(last, always(a))
					q := ask(false, "")
					q.Piece = func([]byte) error { <-time.After(c.reads); return nil }
					got := r.Send(t.Context(), q)
					if got.Status != 200 || (got.Err != nil) != c.cut || len(r.Requests(last)) != 1 {
						t.Errorf("%d requests: %s", len(r.Requests(last)), got)
					}
					if c.cut && got.Err.Status != http.StatusGatewayTimeout {
						t.Errorf("%+v", got.Err)
					}
					noFailure(t, r)
				})
			})
		}
	}
}

// TestStoredResponses: the id of a response is found in a whole answer and in the head of a
// stream, in however many pieces that comes.
func TestStoredResponses(t *testing.T) {
	event := "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_1\",\"object\":\"response\"}}\n\n"
	delta := "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"F\"}\n\n"
	for name, a := range map[string]fakeengine.Answer{
		"whole": fakeengine.JSON(200, `{"id":"resp_1","object":"response","status":"completed"}`), "stream": fakeengine.Stream(event, delta),
		"pieces": fakeengine.Stream(event, delta).Then(0, fakeengine.Piece{Text: event[:50]}, fakeengine.Piece{Wait: ms, Text: event[50:]}, fakeengine.Piece{Text: delta}),
	} {
		synctest.Test(t, func(t *testing.T) {
			r := fakeengine.New(t, "2a")
			r.Next("aggregated-0", a)
			got := r.Send(t.Context(), fakeengine.Ask{Path: "/v1/responses", Body: fmt.Sprintf(`{"model":"m","input":"x","stream":%v}`, name != "whole")})
			if at, _ := r.Stored.Get("resp_1"); got.Status != http.StatusOK || at.Worker != "aggregated-0" {
				t.Errorf("%s: %s, stored at %q", name, got, at.Worker)
			}
		})
	}
}

// TestCommentsOfEngines: comments of an engine before its first token reach the client as they
// come, also where another attempt follows; and no comment comes twice.
func TestCommentsOfEngines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := fakeengine.New(t, "2a")
		first := fakeengine.Stream(": one\n\n", ": two\n\n").Every(time.Second)
		r.Next("aggregated-0", first.Then(2, fakeengine.Piece{Fail: upstream.Reset}))
		r.Next("aggregated-1", fakeengine.Stream(": three\n\n", `{"choices":[{"index":0,"text":"F"}]}`, ": four\n\n", "[DONE]").Every(time.Second))
		began, heard := time.Now(), ""
		q := ask(true, "")
		q.Comment = func(p []byte) { heard += fmt.Sprintf("%v%s", time.Since(began), strings.TrimSpace(string(p))) }
		got := r.Send(t.Context(), q)
		if want := "data: {\"choices\":[{\"index\":0,\"text\":\"F\"}]}\n\n: four\n\ndata: [DONE]\n\n"; got.Body != want || got.Err != nil || heard != "0s: one1s: two1s: three" {
			t.Errorf("heard %q, then %s", heard, got)
		}
	})
}
