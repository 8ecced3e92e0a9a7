package router_test

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// TestSGLangPairs: a decode engine of SGLang's takes no request by itself, so
// that everything goes to a pair or is refused before an engine is asked.
func TestSGLangPairs(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "2p2d:profile=instant,engine=sglang,model=dp1+1p:profile=instant,engine=sglang,dp=3,model=dp3+1d:profile=instant,engine=sglang,model=dp3")
	for _, dp := range []int{1, 3} {
		model := fmt.Sprint("dp", dp)
		t.Run(model, func(t *testing.T) {
			r := r.in(t).of(model)
			carries(t, r)
			prompts := [][]int{ids(90, 1), ids(130, 2), ids(40, 3)}
			for _, stream := range []bool{false, true} {
				p.reset()
				a := r.post("/v1/completions", object{"model": model, "prompt": prompts, "max_tokens": 5, "stream": stream})
				if got := a.header.Get("X-Dynctl-Path"); got != "remote" {
					t.Errorf("stream %v: path %q", stream, got)
				}
				if stream && strings.Contains(string(a.body), `"error"`) {
					t.Errorf("%s", a)
				}
				if !stream {
					for i, prompt := range prompts {
						if got, want := rawjson.Value(a.body).Get(fmt.Sprintf("choices.%d.text", i)).String(), r.right(prompt); got == "" || !strings.HasPrefix(want, got) {
							t.Errorf("answer %d: %q, want the beginning of %q", i, got, want)
						}
					}
				}
				rooms := map[int]int{}
				elements := func(v rawjson.Value) []rawjson.Value { return slices.Collect(v.Elements()) }
				for _, leg := range p.legs() {
					if !leg.generation() {
						continue
					}
					list := elements(rawjson.Value(leg.body).Get("bootstrap_room"))
					if len(list) != len(prompts) || len(elements(rawjson.Value(leg.body).Get("bootstrap_host"))) != len(prompts) || len(elements(rawjson.Value(leg.body).Get("bootstrap_port"))) != len(prompts) {
						t.Errorf("%s: %.300s", leg.engine, leg.body)
					}
					for _, v := range list {
						first, _ := list[0].Int()
						room, _ := v.Int()
						rooms[room]++
						if room%dp != first%dp {
							t.Error("the rooms of one request lead to several prefill ranks")
						}
					}
				}
				if len(rooms) != len(prompts) {
					t.Errorf("rooms %v", rooms)
				}
			}
			p.reset()
			text := func(n int) string { return strings.Repeat("a prompt of words ", n) }
			a := r.post("/generate", object{"model": model, "text": []string{text(20), text(30)}, "sampling_params": object{"max_new_tokens": 4}})
			if len(slices.Collect(rawjson.Value(a.body).Elements())) != 2 || a.header.Get("X-Dynctl-Path") != "remote" {
				t.Errorf("/generate: %s", a)
			}

			p.reset()
			chat := []object{{"role": "user", "content": text(40)}}
			for name, c := range map[string]struct {
				path string
				body object
			}{
				"several answers":            {"/v1/chat/completions", object{"model": model, "messages": chat, "n": 2}},
				"several answers, completed": {"/v1/completions", object{"model": model, "prompt": prompts, "n": 2}},
				"responses":                  {"/v1/responses", object{"model": model, "input": text(40)}},
				"messages":                   {"/v1/messages", object{"model": model, "max_tokens": 5, "messages": chat}},
			} {
				a := r.send(http.MethodPost, c.path, encode(t, c.body))
				if a.status != http.StatusBadRequest || !strings.Contains(string(a.body), "cannot be split") {
					t.Errorf("%s: %s", name, a)
				}
			}
			for _, leg := range p.legs() {
				if leg.generation() {
					t.Errorf("%s was asked: %.200s", leg.engine, leg.body)
				}
			}
		})
	}
}

// TestShortStreamDoesNotWaitForThePrefill: a short stream of a pair goes out at once, and not when the
// prefill leg, which has not answered yet, was given up.
func TestShortStreamDoesNotWaitForThePrefill(t *testing.T) {
	r, p := tappedRig(t, "1p1d:engine=sglang,speed=4,answers=letters")
	seen, gaveUp := make(chan struct{}), make(chan bool, 1)
	p.set(func(engine string, w http.ResponseWriter, q *http.Request, body []byte) bool {
		if q.URL.Path != "/v1/completions" {
			return false
		}
		if strings.HasPrefix(engine, "prefill") {
			select {
			case <-seen:
				gaveUp <- false
			case <-q.Context().Done():
				gaveUp <- true
			}
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, "{}")
			return true
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_ = http.NewResponseController(w).Flush()
		_, _ = io.WriteString(w, "data: {\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n")
		return true
	})
	resp, err := r.open(t.Context(), http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(300, 1), "max_tokens": 1, "stream": true}))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	_ = readEvents(t, resp.Body, 2)
	close(seen)
	_, _ = io.ReadAll(resp.Body)
	if path := resp.Header.Get("X-Dynctl-Path"); path != "remote" {
		t.Fatalf("path %q", path)
	}
	<-gaveUp
	late := false
	for _, l := range r.receipt(resp.Header.Get("X-Dynctl-Decision")).Legs {
		late = late || l.Kind == "prefill" && l.RetryReason == "canceled"
	}
	if late {
		t.Error("the client got the whole answer, head included, only after the prefill leg had been given its second and was canceled")
	}
}
