package serving_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/rig/fakeengine"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// all has every worker whose name has a prefix do the same.
func all(r *fakeengine.Router, prefix string, play func(*fakeengine.Request) fakeengine.Answer) {
	for _, w := range r.Registry.Snapshot().Workers {
		if strings.HasPrefix(w.Name, prefix) {
			r.Always(w.Name, play)
		}
	}
}

func always(a fakeengine.Answer) func(*fakeengine.Request) fakeengine.Answer {
	return func(*fakeengine.Request) fakeengine.Answer { return a }
}

// names are the workers of requests.
func names(list []*fakeengine.Request) (out []string) {
	for _, q := range list {
		out = append(out, q.Worker)
	}
	return out
}

// notes are those of a receipt.
func notes(got *fakeengine.Got) string { return strings.Join(got.Receipt.Notes, "\n") }

// TestAllEnginesFail: how many engines a request that fails everywhere gets to, what the
// client gets, and against whom it counts: no engine, where two broke on the request.
func TestAllEnginesFail(t *testing.T) {
	own := fakeengine.JSON(429, words, "Retry-After: 7")
	for _, c := range []struct {
		name, fleet, fails string
		answer             fakeengine.Answer
		dead               bool // an engine that failed gives no sign of life
		asked              int  // requests to those that fail
		status             int
		why                string // no further attempt
		blamed             bool
	}{
		{"error", "5a", "a", fakeengine.JSON(500, words), false, 3, 500, attempt.NoMoreTry, true},
		{"reset", "5a", "a", fakeengine.Fails(upstream.Reset, true), true, 2, 502, attempt.NoMoreLost, true},
		{"no answer", "5a", "a", fakeengine.Hangs(), true, 2, 504, attempt.NoMoreLost, true},
		{"engine dead", "5a", "a", fakeengine.JSON(500, `{"message":"EngineCore encountered an issue"}`), true, 2, 500, attempt.NoMoreLost, true},
		{"refused", "5a", "a", fakeengine.Fails(upstream.Connect, false), true, 8, 502, attempt.NoAttempts, false},
		{"full", "5a", "a", own, false, 8, 429, attempt.NoAttempts, false},
		{"loop", "3a", "a", fakeengine.JSON(508, words), false, 8, 508, attempt.NoAttempts, false},
		{"one engine of one", "1a", "a", fakeengine.JSON(500, words), false, 1, 500, "", false},
		{"one full engine of one", "1a", "a", own, false, 1, 429, "", false},
		{"idle closes", "2a", "a", fakeengine.Stale(), true, 3, 502, attempt.NoMoreLost, true},
		{"decodes break, remote", "4p4d", "decode", fakeengine.Fails(upstream.Reset, true), true, 2, 502, attempt.NoMoreLost, true},
		{"prefills break", "4p4d", "prefill", fakeengine.Fails(upstream.Reset, true), true, 2, 502, attempt.NoMoreLost, true},
		{"prefills are full", "2p1d", "prefill", own, false, 8, 429, attempt.NoAttempts, false},
		{"decodes are full", "1p2d", "decode", own, false, 8, 429, attempt.NoAttempts, false},
		{"both break at the same time", "4p4d sglang", "", fakeengine.Fails(upstream.Reset, true), true, 2, 502, attempt.NoMoreLost, false},
		{"one pair, decode errors", "1p1d", "decode", fakeengine.JSON(500, words), false, 8, 500, attempt.NoAttempts, false},
		{"one pair, both suspects", "1p1d sglang", "decode", fakeengine.JSON(500, words), false, 8, 500, attempt.NoAttempts, false},
	} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/%v", c.name, stream), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := fakeengine.New(t, c.fleet, func(s *settings.Config) {
						s.Retry.Attempts, s.Routing.PrefillFallback = 8, "error"
					})
					all(r, c.fails, always(c.answer))
					r.Alive = func(w *workers.Worker) bool { return !c.dead || !slices.Contains(names(r.Requests(c.fails)), w.Name) }
					got := r.Send(t.Context(), ask(stream, ""))
					asked := names(r.Requests(c.fails))
					if len(asked) != c.asked || got.Status != c.status || !strings.Contains(notes(got), c.why) {
						t.Errorf("%s by %q, want %d requests and status %d: %q", got, asked, c.asked, c.status, got.Receipt.Notes)
					}
					if answered := c.status == 429 || c.status == 500 && c.why != attempt.NoMoreLost; answered && got.Body != words {
						t.Errorf("%s, want the engine's body %s", got, words)
					}
					if blamed := len(r.Events("request_broke_engines")) == 1 && strings.Contains(notes(got), "counts against no engine"); blamed != c.blamed {
						t.Errorf("the request is blamed: %v, %q", blamed, got.Receipt.Notes)
					}
					attempts := map[int]bool{}
					for _, l := range got.Receipt.Legs {
						attempts[l.Attempt] = true
					}
					if n := int(r.Traffic.Retries.Load()); n != len(attempts)-1 {
						t.Errorf("%d attempts sent a leg, and %d retries are counted", len(attempts), n)
					}
					taken := len(attempts) - 1
					if c.name == "loop" {
						taken = 0
					}
					if n := r.Retries(); c.name != "idle closes" && n != taken {
						t.Errorf("%d attempts took %d retries out of the budget, want %d", len(attempts), n, taken)
					}
				})
			})
		}
	}
}

// TestNoEngineHasTheModel: where every engine of a phase has unloaded the model, the client gets
// 404, in the words of an engine, and none of them failed.
func TestNoEngineHasTheModel(t *testing.T) {
	const text = `{"error":{"message":"The model ` + "`m`" + ` does not exist.","type":"NotFoundError","param":"model","code":404}}`
	for _, c := range []struct {
		fleet, lacks string
		answer       fakeengine.Answer
	}{
		{"2a", "aggregated", fakeengine.JSON(404, text)},
		{"2a", "aggregated", fakeengine.Stream(text, "[DONE]")},
		{"2p1d", "prefill", fakeengine.JSON(404, text)},
		{"1p2d", "decode", fakeengine.JSON(404, text)},
		{"1p2d", "decode", fakeengine.Stream(text, "[DONE]")},
		{"2p1d sglang", "prefill", fakeengine.JSON(404, text)},
		{"1p2d sglang", "decode", fakeengine.Stream(text, "[DONE]")},
	} {
		for _, stream := range []bool{false, true} {
			if !stream && c.answer.Status == 200 {
				continue
			}
			t.Run(fmt.Sprintf("%s/%s/%d/%v", c.fleet, c.lacks, c.answer.Status, stream), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := fakeengine.New(t, c.fleet, func(s *settings.Config) { s.Routing.PrefillFallback = "error" })
					all(r, c.lacks, always(c.answer))
					got := r.Send(t.Context(), ask(stream, ""))
					if words := got.Body + got.String(); got.Status != 404 || !strings.Contains(words, "does not exist") {
						t.Errorf("%s by %s", got, got.Legs())
					}
					for _, w := range []string{c.lacks + "-0", c.lacks + "-1"} {
						if !slices.Contains(names(r.Requests(c.lacks)), w) {
							t.Errorf("%s was not tried: %s", w, got.Legs())
						}
					}
					if o := r.Outcomes(); strings.Contains(strings.ReplaceAll(o, "client error", ""), "error") || strings.Contains(o, "refusal") {
						t.Errorf("outcomes %q", o)
					}
					if n := r.Retries(); n != 0 {
						t.Errorf("%d retries are taken out of the budget", n)
					}
				})
			})
		}
	}
}

// TestTroubleThatMoves: an engine fails a request, then so does the only other one, by when
// the first is well again.
func TestTroubleThatMoves(t *testing.T) {
	for _, c := range []struct{ fleet, fails string }{{"2a", "aggregated"}, {"1p2d", "decode"}, {"2p1d sglang", "prefill"}, {"1p2d sglang", "decode"}} {
		t.Run(c.fleet, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := fakeengine.New(t, c.fleet, func(s *settings.Config) { s.Retry.Attempts = 4 })
				r.Next(c.fails+"-0", fakeengine.JSON(500, words))
				r.Next(c.fails+"-1", fakeengine.JSON(500, words))
				got := r.Send(t.Context(), ask(false, ""))
				if asked := names(r.Requests(c.fails)); !whole(got, false) || len(asked) != 3 || asked[0] == asked[1] || asked[2] != asked[0] {
					t.Errorf("%s, by %q: %q", got, asked, got.Receipt.Notes)
				}
				// The receipt has each decision, also that which found nobody.
				if e := got.Receipt.Earlier; c.fleet == "2a" {
					if len(e) != 3 || e[2].Decode.Verdict == "chosen" {
						t.Fatalf("%d earlier decisions, want 3, the last without a rank: %+v", len(e), e)
					}
					if e[0].Decode.Eligible != 2 || e[1].Decode.Eligible != 1 {
						t.Errorf("%d, then %d ranks were eligible, want 2, then 1", e[0].Decode.Eligible, e[1].Decode.Eligible)
					}
					if e[0].Decode.Chosen != "aggregated-0/dp0" || e[1].Path != "local" {
						t.Errorf("first %s, then the path %s", e[0].Decode.Chosen, e[1].Path)
					}
				}
				var text strings.Builder
				if err := got.Receipt.Explain(&text); err != nil {
					t.Error(err)
				}
				if words := []string{"attempt 1\n", "attempt 2\n", "attempt 3\n", "failed in this request"}; slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(text.String(), w) }) {
					t.Errorf("explain says:\n%s", text.String())
				}
				if last := []string{"every rank is excluded", "attempt 4, the last\n"}; c.fleet == "2a" && slices.ContainsFunc(last, func(w string) bool { return !strings.Contains(text.String(), w) }) {
					t.Errorf("explain does not say why there was another attempt:\n%s", text.String())
				}
			})
		})
	}
}

// TestPoisonAndBrokenEngines: a request that every engine breaks on ejects none, however
// often it comes; engines that fail all requests are ejected, and no client gets an error.
func TestPoisonAndBrokenEngines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := fakeengine.New(t, "4a", func(s *settings.Config) { s.Retry.Attempts = 8 })
		failing := map[string]bool{}
		all(r, "", func(q *fakeengine.Request) fakeengine.Answer {
			if failing[q.Worker] || rawjson.Value(q.Body).Get("user").String() == "poison" {
				return fakeengine.JSON(500, words)
			}
			return r.Model.Answer(q)
		})
		// Six failures of each engine at least, where five in a row eject; and with the budget
		// used up each of the last requests meets one engine.
		for i := range 9 {
			got := r.Send(t.Context(), ask(false, `,"user":"poison"`))
			if n := len(got.Receipt.Legs); got.Status != 500 || n != 3 && i < 5 || !strings.Contains(notes(got), "counts against no engine") {
				t.Fatalf("request %d: %s after %d legs: %q", i, got, n, got.Receipt.Notes)
			}
		}
		if e, b := r.Events("outlier_ejected"), r.Events("request_broke_engines"); len(e) != 0 || len(b) != 1 {
			t.Errorf("ejections %q, blamed %q", e, b)
		}
		r.Budget = attempt.Budget{}
		failing["aggregated-0"], failing["aggregated-1"] = true, true
		for i := 0; len(r.Events("outlier_ejected")) < 2; i++ {
			if i == 100 {
				t.Fatal("two failing engines beside two that are well are not ejected")
			}
			r.Budget.Request(r.Requests("")[0].At)
			if r.Budget = (attempt.Budget{}); !whole(r.Send(t.Context(), ask(false, fmt.Sprintf(`,"user":"%d"`, i))), false) {
				t.Fatalf("request %d failed", i)
			}
		}
		for _, e := range r.Events("outlier_ejected") {
			if !strings.Contains(e, "aggregated-0") && !strings.Contains(e, "aggregated-1") {
				t.Error(e)
			}
		}
	})
}

// TestRouterKeyIsRefused: a worker whose engine refuses the router's key costs no client
// anything while there are others, and is ejected; alone it is named, and no client reads
// that its own key is wrong. What an engine makes of a client's own key is the client's.
func TestRouterKeyIsRefused(t *testing.T) {
	for _, c := range []struct{ fleet, refuses, key string }{{"2a", "aggregated-0", "k"}, {"2p2d", "decode-0", "k"}, {"2p2d", "prefill-0", "k"}, {"1a", "aggregated-0", "k"}, {"1a", "aggregated-0", ""}} {
		for _, status := range []int{401, 403} {
			t.Run(fmt.Sprint(c, status), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := fakeengine.New(t, c.fleet)
					specs := fakeengine.Specs(t, c.fleet)
					for i := range specs {
						specs[i].APIKey = c.key
					}
					r.Apply(specs)
					r.Always(c.refuses, always(fakeengine.JSON(status, words)))
					if len(specs) == 1 {
						got := r.Send(t.Context(), ask(false, ""))
						if c.key == "" && (got.Status != status || got.Body != words) {
							t.Errorf("%s, want the engine's %d", got, status)
						} else if c.key != "" && (got.Status != 502 || !strings.Contains(got.Err.Message, "aggregated-0: it refuses the router's key")) {
							t.Errorf("%s, want a 502 that names the engine", got)
						}
						return
					}
					for i := range 20 {
						if got := r.Send(t.Context(), ask(false, "")); !whole(got, false) {
							t.Fatalf("request %d: %s", i, got)
						}
						r.Budget = attempt.Budget{}
					}
					e, f := r.Events("outlier_ejected"), r.Events("worker_failing")
					if len(e) != 1 || !strings.Contains(e[0], c.refuses) || len(f) == 0 || !strings.Contains(f[0], "refuses the router's key") {
						t.Errorf("events %q %q", e, f)
					}
				})
			})
		}
	}
}

// TestKVGoesToAnotherRank: where a decode engine has no room, another one fetches the KV that
// a prefill engine has computed; one whose stream has begun may have fetched it.
func TestKVGoesToAnotherRank(t *testing.T) {
	event := `{"error":{"message":"The request queue is full."}}`
	for _, c := range []struct {
		name     string
		answer   fakeengine.Answer
		prefills int
	}{{"status", fakeengine.JSON(429, words), 1}, {"event", fakeengine.Stream(event), 2}, {"error", fakeengine.JSON(500, words), 2}} {
		synctest.Test(t, func(t *testing.T) {
			r := fakeengine.New(t, "2p2d", func(s *settings.Config) { s.Routing.PrefillFallback = "error" })
			r.Next("decode-0", c.answer)
			got := r.Send(t.Context(), ask(true, ""))
			d := r.Requests("decode")
			if n := len(r.Requests("prefill")); !whole(got, true) || n != c.prefills || len(d) != 2 || got.Receipt.Path != "remote" {
				t.Errorf("%s: %s after %d prefills and %d decodes", c.name, got, n, len(d))
			}
			params := []string{rawjson.Value(d[0].Body).Get("kv_transfer_params").String(), rawjson.Value(d[1].Body).Get("kv_transfer_params").String()}
			if params[0] == "" || params[1] == "" {
				t.Errorf("%s: parameters %q", c.name, params)
			}
			if e := r.Events("worker_failing"); c.prefills == 1 && len(e) > 0 {
				t.Error(e)
			}
		})
	}
}

// TestInvariant04BrokenPrefills: every way in which all prefills fail ends, by policy, in an error or in
// a counted local prefill, and in an error where two engines may have died of the request.
// No decode leg carries parameters of a prefill that failed.
func TestInvariant04BrokenPrefills(t *testing.T) {
	good := fakeengine.Prefilled("r1", 64, `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3,4]],"remote_engine_id":"e","remote_request_id":"r1","remote_host":"h","remote_port":1,"tp_size":1}`)
	edit := func(old, new string) fakeengine.Answer {
		if !strings.Contains(good, old) {
			t.Fatal(old)
		}
		return fakeengine.JSON(200, strings.Replace(good, old, new, 1))
	}
	for name, a := range map[string]fakeengine.Answer{
		"500": fakeengine.JSON(500, words), "429": fakeengine.JSON(429, words), "302": fakeengine.JSON(302, ""), "refused": fakeengine.Fails(upstream.Connect, false),
		"no params": fakeengine.JSON(200, fakeengine.Prefilled("r1", 64, "null")), "empty": fakeengine.JSON(200, ""), "not JSON": fakeengine.JSON(200, "<html>"),
		"cut JSON": fakeengine.JSON(200, good[:len(good)-9]), "few blocks": edit("[[1,2,3,4]]", "[[1]]"), "odd blocks": edit("[[1,2,3,4]]", `"1,2"`), "odd port": edit(`port":1`, `port":"http"`),
		"no engine": edit(`"e"`, "null"), "no request": edit(`id":"r1","remote_h`, `id":null,"remote_h`),
		"reset": fakeengine.Fails(upstream.Reset, true), "cut off": edit("", "").Then(1, fakeengine.Piece{Fail: upstream.Reset}), "timeout": fakeengine.Hangs(),
	} {
		lost := slices.Contains([]string{"reset", "cut off", "timeout"}, name)
		for _, policy := range []string{"error", "local"} {
			t.Run(name+"/"+policy, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := fakeengine.New(t, "2p1d", func(s *settings.Config) {
						s.Routing.PrefillFallback, s.Routing.MissingParams, s.Retry.Attempts = policy, policy, 4
					})
					all(r, "prefill", always(a))
					got := r.Send(t.Context(), ask(false, ""))
					decodes, fallbacks := r.Requests("decode"), r.Traffic.Fallbacks.Load()
					switch {
					case policy == "local" && !lost:
						if !whole(got, false) || len(decodes) != 1 || rawjson.Value(decodes[0].Body).Get("kv_transfer_params").Exists() {
							t.Errorf("%s by %d decode engines, want one without a prefill's parameters", got, len(decodes))
						}
						if got.Receipt.Path != "local" || got.Receipt.Reason != "prefill_failed" || fallbacks != 1 {
							t.Errorf("%s because %s, %d fallbacks", got.Receipt.Path, got.Receipt.Reason, fallbacks)
						}
					case name == "429":
						if got.Status != 429 || len(decodes) != 0 {
							t.Errorf("%s after %d decode legs", got, len(decodes))
						}
					case got.Err == nil || got.Status != 502 && got.Status != 504 || got.Err.Code != "prefill_failed" || !strings.Contains(got.Err.Message, "prefill-") || len(decodes) != 0 || lost != strings.Contains(notes(got), attempt.NoMoreLost):
						t.Errorf("%s after %d decode legs: %q", got, len(decodes), got.Receipt.Notes)
					}
					for _, l := range got.Receipt.Legs {
						if l.Kind == "prefill" && l.Error == "" {
							t.Error("a failed prefill leg has no error in the receipt")
						}
					}
				})
			})
		}
	}
}

// TestPredictions: ranks are predicted to have the prompts that they were sent, but for those
// that they had no room for. A prompt has four blocks.
func TestPredictions(t *testing.T) {
	for _, c := range []struct {
		fleet, worker string
		answer        fakeengine.Answer
		blocks        int
	}{
		{"2a", "", fakeengine.Answer{}, 4},
		{"2a", "aggregated-0", fakeengine.JSON(429, words), 4},
		{"2a", "aggregated-0", fakeengine.JSON(500, words), 8},
		{"1p1d", "", fakeengine.Answer{}, 8},
		{"2p1d", "prefill-0", fakeengine.JSON(429, words), 8},
		{"1p2d", "decode-0", fakeengine.JSON(429, words), 8},
		{"1p2d sglang", "decode-0", fakeengine.JSON(500, words), 12},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := fakeengine.New(t, c.fleet)
			r.Next(c.worker, c.answer)
			if got := r.Send(t.Context(), ask(false, "")); !whole(got, false) || r.Predicted.Blocks() != c.blocks {
				t.Errorf("%+v: %d blocks are predicted: %s", c, r.Predicted.Blocks(), got)
			}
		})
	}
}

// TestAttemptsSeeTheFleetOfNow: what follows a failure is decided from the workers of then.
func TestAttemptsSeeTheFleetOfNow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := fakeengine.New(t, "2a")
		r.Always("aggregated-0", func(*fakeengine.Request) fakeengine.Answer {
			specs := fakeengine.Specs(t, "3a")
			r.Apply(slices.Delete(specs, 1, 2))
			return fakeengine.JSON(500, words)
		})
		if got := r.Send(t.Context(), ask(false, "")); !whole(got, false) || got.Legs() != "aggregated-0: status_5xx, aggregated-2" {
			t.Errorf("%s by %s", got, got.Legs())
		}
	})
}

// TestSmallRules: requests without a body are never the same request; a lone worker that
// refuses everything takes nothing of the budget; limits.legs refuses at once, but not
// instead of what an engine has said.
func TestSmallRules(t *testing.T) {
	run := func(name, fleet string, set func(*settings.Config), f func(t *testing.T, r *fakeengine.Router)) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { f(t, fakeengine.New(t, fleet, set)) })
		})
	}
	run("no body", "3a", func(s *settings.Config) { s.Retry.Attempts = 1 }, func(t *testing.T, r *fakeengine.Router) {
		all(r, "", always(fakeengine.JSON(500, words)))
		for range 3 {
			if got := r.Send(t.Context(), fakeengine.Ask{Method: "GET", Path: "/version"}); got.Status != 500 || got.Body != words {
				t.Errorf("%s", got)
			}
		}
		if e := r.Events("request_broke_engines"); len(e) > 0 {
			t.Error(e)
		}
	})
	run("a lone worker", "1a", func(s *settings.Config) { s.Retry.Budget = 0 }, func(t *testing.T, r *fakeengine.Router) {
		all(r, "", always(fakeengine.JSON(429, words)))
		for i := range 20 {
			if got := r.Send(t.Context(), ask(false, "")); strings.Contains(notes(got), "budget") {
				t.Fatalf("request %d: %q", i, got.Receipt.Notes)
			}
		}
		if n := r.Retries(); n != 0 {
			t.Errorf("%d retries are taken out of the budget", n)
		}
	})
	run("the budget is used up", "2a", func(s *settings.Config) { s.Retry.Budget = 0 }, func(t *testing.T, r *fakeengine.Router) {
		r.Retries()
		r.Next("aggregated-0", fakeengine.JSON(429, words))
		if got := r.Send(t.Context(), ask(false, "")); got.Status != 429 || !strings.Contains(notes(got), attempt.NoBudget) {
			t.Errorf("%s: %q", got, got.Receipt.Notes)
		}
	})
	for _, c := range []struct {
		fleet string
		legs  int64
	}{{"2a", 0}, {"1p1d", 1}, {"1p1d sglang", 1}} {
		run("limits.legs of "+c.fleet, c.fleet, func(s *settings.Config) { s.Routing.PrefillFallback = "error" }, func(t *testing.T, r *fakeengine.Router) {
			r.Open.SetLimit(c.legs)
			got := r.Send(t.Context(), ask(true, ""))
			if got.Status != 503 || !strings.Contains(got.Err.Message, "limits.legs") || got.Err.RetryAfter == 0 {
				t.Errorf("%s", got)
			}
			if o := r.Outcomes(); strings.Contains(o, "error") || strings.Contains(o, "refusal") {
				t.Errorf("outcomes %q", o)
			}
		})
	}
	run("limits.legs after an answer", "2a", func(*settings.Config) {}, func(t *testing.T, r *fakeengine.Router) {
		r.Always("aggregated-0", func(*fakeengine.Request) fakeengine.Answer {
			r.Open.SetLimit(0)
			return fakeengine.JSON(429, words)
		})
		if got := r.Send(t.Context(), ask(false, "")); got.Status != 429 || got.Body != words {
			t.Errorf("%s", got)
		}
	})
	for _, alive := range []bool{true, false} {
		run(fmt.Sprint("an idle close of an engine that is alive: ", alive), "3a", func(s *settings.Config) { s.Retry.Attempts = 8 }, func(t *testing.T, r *fakeengine.Router) {
			r.Alive = func(*workers.Worker) bool { return alive }
			r.Next("aggregated-0", fakeengine.Stale(), fakeengine.Fails(upstream.Connect, false))
			r.Next("aggregated-1", fakeengine.Fails(upstream.Reset, true))
			if got := r.Send(t.Context(), ask(false, "")); whole(got, false) != alive || strings.Contains(notes(got), attempt.NoMoreLost) == alive {
				t.Errorf("%s: %q", got, got.Receipt.Notes)
			}
		})
	}
	run("a request that was served between its failures", "2a", func(s *settings.Config) { s.Retry.Attempts = 1 }, func(t *testing.T, r *fakeengine.Router) {
		r.Next("aggregated-0", fakeengine.JSON(500, words))
		for i, want := range []int{500, 200, 200, 500} {
			if i == 2 {
				r.Next("aggregated-1", fakeengine.JSON(500, words))
			}
			if got := r.Send(t.Context(), ask(false, "")); got.Status != want {
				t.Errorf("%d: %s", i, got)
			}
		}
		if e := r.Events("request_broke_engines"); len(e) > 0 {
			t.Error(e)
		}
	})
	run("failures of a rank", "1a", func(*settings.Config) {}, func(t *testing.T, r *fakeengine.Router) {
		for _, c := range []struct {
			status int
			events int
		}{{400, 0}, {429, 0}, {500, 1}} {
			r.Always("aggregated-0", always(fakeengine.JSON(c.status, words)))
			if got := r.Send(t.Context(), ask(false, "")); got.Status != c.status || len(r.Events("worker_failing")) != c.events || len(r.Events("request_broke_engines")) > 0 {
				t.Errorf("%d: %s, events %q", c.status, got, r.Events("worker_failing"))
			}
		}
	})
}
