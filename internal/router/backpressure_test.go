package router_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/settings"
)

// busyAnswers are the ways in which an engine says that it has no room: see attempt.OfStatus.
var busyAnswers = map[string]func(w http.ResponseWriter){
	"503 with Retry-After": func(w http.ResponseWriter) {
		w.Header().Set("Retry-After", "7")
		w.WriteHeader(http.StatusServiceUnavailable)
	},
	"503 in SGLang's words": func(w http.ResponseWriter) {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = w.Write([]byte(`{"object":"error","message":"The request queue is full.","type":"SERVICE_UNAVAILABLE","code":503}`))
	},
	"429": func(w http.ResponseWriter) { w.WriteHeader(http.StatusTooManyRequests) },
	"529": func(w http.ResponseWriter) { w.WriteHeader(529) },
	"an event in SGLang's words": func(w http.ResponseWriter) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = w.Write([]byte("data: {\"error\":{\"object\":\"error\",\"message\":\"The request queue is full.\",\"code\":503}}\n\ndata: [DONE]\n\n"))
	},
}

// TestDeadlyRequest: a request that every engine dies of takes down two of them, also where
// each attempt reaches two engines at once, and connections were used before.
func TestDeadlyRequest(t *testing.T) {
	t.Parallel()
	r := start(t, "4p4d:profile=instant,engine=sglang,deadly=boom,model=sglang+4p4d:profile=instant,deadly=boom,model=vllm+6a:profile=instant,deadly=boom,model=alone", func(c *settings.Config) {
		c.Routing.Threshold.Tokens, c.Routing.Policy = 1, "round_robin"
		c.Retry = settings.Retry{Attempts: 6, Budget: 1}
	})
	for _, model := range []string{"sglang", "vllm", "alone"} {
		t.Run(model, func(t *testing.T) {
			r := r.in(t)
			before := map[string]bool{}
			for i := range 16 {
				if a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": model, "prompt": ids(100, i), "max_tokens": 2})); a.status != http.StatusOK {
					t.Fatal(a)
				}
			}
			died := func() (names []string) {
				for _, e := range r.Sim.Engines() {
					if e.Exits() > 0 && !before[e.Name()] {
						names = append(names, e.Name())
					}
				}
				return names
			}
			for _, name := range died() {
				before[name] = true
			}
			a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": model, "prompt": ids(100, 99), "user": "boom", "max_tokens": 2}))
			if a.status < 500 {
				t.Errorf("%s", a)
			}
			if err := loopback.Wait(waitCtx(t), "the engines that die", func() error {
				if n := len(died()); n < 2 {
					return fmt.Errorf("%d died so far", n)
				}
				return nil
			}); err != nil {
				t.Error(err)
			}
			// Another one would have had the request before the client got its answer.
			if names := died(); len(names) > attempt.MaxLost {
				t.Errorf("%v died of one request: %q", names, r.receipt(a.header.Get("X-Dynctl-Decision")).Notes)
			}
		})
	}
}

// TestRefusedByAFullEngine: a request that an engine refuses for want of room is tried
// elsewhere, in both phases, streamed and not, and that is no fault of the engine. A
// prefill's KV goes to the next decode rank: it is not computed again. Where every engine
// refuses, the client gets the engine's status and Retry-After.
func TestRefusedByAFullEngine(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "2p2d:profile=instant", func(c *settings.Config) {
		c.Routing.Threshold.Tokens, c.Routing.Policy, c.Routing.PrefillFallback = 1, "round_robin", "error"
		c.Retry = settings.Retry{Attempts: 3, Budget: 1}
	})
	prompt := 0
	for name, refuse := range busyAnswers {
		for _, stream := range []bool{false, true} {
			if strings.HasPrefix(name, "an event") && !stream {
				continue
			}
			t.Run(fmt.Sprintf("%s, stream %v", name, stream), func(t *testing.T) {
				r := r.in(t)
				var mu sync.Mutex
				full, all := "", false
				refused := map[string]bool{}
				p.set(func(engine string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
					mu.Lock()
					defer mu.Unlock()
					if q.URL.Path != "/v1/completions" || full == "" || !strings.HasPrefix(engine, full) || !all && refused[full] {
						return false
					}
					refused[full] = true
					refuse(w)
					return true
				})
				send := func(phase string, every bool) *answer {
					prompt++
					mu.Lock()
					full, all = phase, every
					clear(refused)
					mu.Unlock()
					p.reset()
					return r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(100, prompt), "max_tokens": 3, "stream": stream}))
				}
				phases := []string{"decode", "prefill"}
				if strings.HasPrefix(name, "an event") {
					phases = phases[:1] // a prefill's answer is no stream
				}
				for _, phase := range phases {
					a := send(phase, false)
					prefills, decodes := 1, 2
					switch {
					case phase == "prefill":
						prefills, decodes = 2, 1
					case strings.HasPrefix(name, "an event"): // the engine may have fetched the KV
						prefills = 2
					}
					if got := [2]int{len(p.legsOf("prefill")), len(p.legsOf("decode"))}; a.status != http.StatusOK || got != [2]int{prefills, decodes} {
						t.Errorf("one full %s engine: %s after %d prefill and %d decode legs, want %d and %d; %q",
							phase, a, got[0], got[1], prefills, decodes, r.receipt(a.header.Get("X-Dynctl-Decision")).Notes)
					}
					if a.header.Get("X-Dynctl-Path") != "remote" {
						t.Errorf("one full %s engine: the answer came by the path %s", phase, a.header.Get("X-Dynctl-Path"))
					}
					a = send(phase, true)
					want := map[string]int{"429": 429, "529": 529}[name]
					if want == 0 {
						want = http.StatusServiceUnavailable
					}
					if a.status != want {
						t.Errorf("all %s engines are full: %s, want %d", phase, a, want)
					}
					if strings.Contains(name, "Retry-After") && a.header.Get("Retry-After") != "7" {
						t.Errorf("all %s engines are full: Retry-After is %q, want the engine's", phase, a.header.Get("Retry-After"))
					}
				}
				for _, kind := range []string{"worker_failing", "outlier_ejected", "request_blamed"} {
					if e := r.events(kind); len(e) != 0 {
						t.Errorf("%s: %s", kind, e[0].Text)
					}
				}
			})
		}
	}
}
