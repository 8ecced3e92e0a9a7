package router_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

func exact(c *settings.Config) { c.Continue.Mode = settings.ContinueExact }

// knife cuts the first stream of an engine after so many events and some bytes more, or
// has it say something else then. Everything else passes.
type knife struct {
	http.ResponseWriter
	events, more int
	last         string
	cut          *atomic.Bool
}

func (k *knife) Write(b []byte) (int, error) {
	for i := 0; k.events > 0; k.events-- {
		n := bytes.Index(b[i:], []byte("\n\n"))
		if n < 0 {
			return k.ResponseWriter.Write(b)
		}
		if i += n + 2; k.events == 1 {
			k.cut.Store(true) // before the client can have the last of it
			_, _ = k.ResponseWriter.Write(b[:min(len(b), i+k.more)])
			_, _ = io.WriteString(k.ResponseWriter, k.last)
			_ = http.NewResponseController(k.ResponseWriter).Flush()
			panic(http.ErrAbortHandler)
		}
	}
	return k.ResponseWriter.Write(b)
}

func (k *knife) Unwrap() http.ResponseWriter { return k.ResponseWriter }

func (k *knife) Flush() { _ = http.NewResponseController(k.ResponseWriter).Flush() }

// cutOnce has the next stream of completions cut after so many events, but for those of
// prefill engines; done reports whether that has happened.
func (p *tap) cutOnce(r *rig, events, more int) (done func() bool) {
	return p.endOnce(r, events, more, "")
}

// endOnce is cutOnce with something that the engine says before.
func (p *tap) endOnce(r *rig, events, more int, last string) (done func() bool) {
	var taken, cut atomic.Bool
	p.set(func(engine string, w http.ResponseWriter, q *http.Request, body []byte) bool {
		if strings.HasPrefix(engine, "prefill") || !slices.Contains([]string{"/v1/completions", "/v1/chat/completions", "/generate"}, q.URL.Path) ||
			!rawjson.Value(body).Get("stream").Bool() || !taken.CompareAndSwap(false, true) {
			return false
		}
		to := r.Sim.Named(engine).URL()
		at, err := http.NewRequest(http.MethodGet, to, nil)
		if err != nil {
			panic(err)
		}
		transport := &http.Transport{DisableCompression: true}
		defer transport.CloseIdleConnections()
		proxyTo(at.URL, transport).ServeHTTP(&knife{w, events, more, last, &cut}, q)
		return true
	})
	return cut.Load
}

// whole is the text and the rest of a stream that clients see.
type seen struct {
	text, finish, usage, roles string
	ids, created, kinds        map[string]bool
	choices                    int
	odd                        []string
}

func read(t *testing.T, body []byte) (s seen) {
	t.Helper()
	s.ids, s.created, s.kinds = map[string]bool{}, map[string]bool{}, map[string]bool{}
	if !bytes.HasSuffix(body, []byte("data: [DONE]\n\n")) {
		t.Errorf("the stream has no end: %.200q", body)
	}
	for _, e := range serverSent(string(body)) {
		v := rawjson.Value(e)
		if e == "[DONE]" {
			continue
		}
		s.ids[v.Get("id").String()], s.created[v.Get("created").String()] = true, true
		choices := len(slices.Collect(v.Get("choices").Elements()))
		if u := v.Get("usage"); u.Exists() && choices == 0 {
			s.usage += fmt.Sprintf("%s+%s=%s", u.Get("prompt_tokens"), u.Get("completion_tokens"), u.Get("total_tokens"))
		}
		if v.Get("error").Exists() {
			t.Errorf("the stream has an error: %s", e)
		}
		c := v.Get("choices.0")
		s.text += c.Get("text").String() + c.Get("delta.content").String()
		s.roles += c.Get("delta.role").String()
		s.kinds[fmt.Sprint(v.Get("object"), c.Get("text").Exists(), c.Get("delta").Exists())] = true
		if s.choices += choices; rawjson.IsArray(c.Get("token_ids")) || rawjson.IsArray(c.Get("prompt_token_ids")) || rawjson.IsArray(v.Get("prompt_token_ids")) {
			s.odd = append(s.odd, e)
		}
		if f := c.Get("finish_reason").String(); f != "" {
			s.finish += f
		}
	}
	return s
}

// TestNativeStreamGoesOnElsewhere: SGLang's own streams, cut after any event. Each event
// has the text and the ids so far, and with stop strings none ends with the beginning of
// one; where the client has ids of a character that was cut, and after one event only, the
// stream is refused by name.
func TestNativeStreamGoesOnElsewhere(t *testing.T) {
	t.Parallel()
	const n = 40
	r, p := tappedRig(t, "2a:engine=sglang,speed=4,answers=letters,model=two+1p2d:engine=sglang,speed=4,answers=letters,model=pair", exact, func(c *settings.Config) { c.Health.Interval = 1 << 40 })
	for _, model := range []string{"two", "pair"} {
		t.Run(model, func(t *testing.T) {
			r := r.in(t)
			p.set(nil)
			body := func(stop any) []byte {
				return encode(t, object{
					"model": model, "input_ids": ids(300, 1), "stream": true, "rid": "mine",
					"sampling_params": object{"max_new_tokens": n, "ignore_eos": true, "temperature": 0, "stop": stop},
				})
			}
			last := func(b []byte) rawjson.Value {
				all := serverSent(string(b))
				if len(all) < 2 || all[len(all)-1] != "[DONE]" {
					t.Fatalf("no end: %s", b)
				}
				was := ""
				for _, e := range all[:len(all)-1] {
					v := rawjson.Value(e)
					if text := v.Get("text").String(); !strings.HasPrefix(text, was) || fmt.Sprint(len(slices.Collect(v.Get("output_ids").Elements()))) != v.Get("meta_info.completion_tokens").String() || v.Get("meta_info.id").String() != "mine" || v.Get("meta_info.prompt_tokens").String() != "300" {
						t.Fatalf("after %q: %s", was, e)
					}
					was = v.Get("text").String()
				}
				return rawjson.Value(all[len(all)-2])
			}
			whole := []rune(last(r.send(http.MethodPost, "/generate", body(nil)).body).Get("text").String())
			if len(whole) < 25 {
				t.Fatalf("%q", string(whole))
			}
			sum := func(of map[string]int) (n int) {
				for _, k := range of {
					n += k
				}
				return n
			}
			cuts, all, ended, torn, alone := 0, 0, 0, 0, 0
			for _, stop := range []any{nil, "never in it", []string{string(whole[len(whole)/2:][:7]), "nor this"}, string(whole[len(whole)-5:][:4])} {
				p.set(nil)
				want := last(r.send(http.MethodPost, "/generate", body(stop)).body)
				refused, moved := map[string]int{}, 0
				for k := 1; ; k++ {
					for _, name := range []string{"aggregated-0", "aggregated-1", "decode-0", "decode-1", "prefill-0"} {
						r.Router.Heal(name)
					}
					cut := p.cutOnce(r, k, 30)
					a := r.send(http.MethodPost, "/generate", body(stop))
					if !cut() {
						break
					}
					c := r.receipt(a.header.Get("X-Dynctl-Decision"))
					if why := c.Outcome.NotContinued; why != "" {
						if refused[why]++; len(c.Continued) > 0 || !strings.Contains(string(a.body), why) {
							t.Errorf("%+v %s", c, a.body)
						}
						continue
					}
					got := last(a.body)
					for _, part := range []string{"text", "output_ids", "meta_info.finish_reason"} {
						if !bytes.Equal(got.Get(part), want.Get(part)) {
							t.Fatalf("stop %q, cut after %d events: %s\n%s\nwant\n%s", stop, k, part, got.Get(part), want.Get(part))
						}
					}
					if k == 1 && len(c.Continued) > 0 {
						t.Errorf("stop %q: a stream of one event went on elsewhere: %+v", stop, c.Continued)
					}
					moved += len(c.Continued)
				}
				const within, single = "the client requested token ids and has those of an incomplete character", "it is unknown which tokens the client's text ends with"
				if stop == nil && refused[single] > 1 || refused[single]+refused[within] != sum(refused) {
					t.Errorf("stop %q: %d streams went on elsewhere, refused %v", stop, moved, refused)
				}
				if all += moved; want.Get("meta_info.finish_reason.type").String() == "stop" {
					ended += moved
				}
				cuts, torn, alone = cuts+moved+sum(refused), torn+refused[within], alone+refused[single]
				if list, is := stop.([]string); is && (want.Get("meta_info.finish_reason.matched").String() != list[0] || strings.Contains(want.Get("text").String(), list[0])) {
					t.Errorf("stop %q did not end %s", stop, want)
				}
				t.Logf("stop %q: %d streams went on elsewhere, refused %v", stop, moved, refused)
			}
			// On a slow machine events have many tokens, and are few: then not every kind of cut occurs.
			if cuts > 40 && (all < 3 || min(ended, torn, alone) == 0) {
				t.Errorf("of %d streams %d went on elsewhere, %d to a stop string; %d were cut within a character, %d where the tokens of the text are unknown", cuts, all, ended, torn, alone)
			}
		})
	}
}

// TestTwoHundredStreamsMove: an engine of four dies with two hundred streams. All go
// on, none with another text, and no rank computes more of them at once than it may.
func TestTwoHundredStreamsMove(t *testing.T) {
	t.Parallel()
	const n = 200
	r, _ := tappedRig(t, "4a:speed=4,answers=letters,max_seqs=1024", exact, func(c *settings.Config) {
		c.Continue.PerRank = 2
		c.Routing.AllowHeaders = true
	})
	body := func(i int) object {
		return object{"model": "sim", "prompt": ids(300, i), "max_tokens": 120, "ignore_eos": true, "stream": true}
	}
	var mu sync.Mutex
	began := 0
	want, got, decisions := make([]string, n), make([]string, n), make([]string, n)
	all := func(out []string) {
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() {
				resp, err := r.open(t.Context(), http.MethodPost, "/v1/completions", encode(t, body(i)))
				if err != nil {
					t.Error(err)
					return
				}
				defer resp.Body.Close()
				decisions[i] = resp.Header.Get("X-Dynctl-Decision")
				mu.Lock()
				began++
				mu.Unlock()
				b, err := io.ReadAll(resp.Body)
				if err != nil {
					t.Error(err)
				}
				out[i] = streamed(t, b)
			})
		}
		wg.Wait()
	}
	all(want)
	began = 0
	if err := r.Sim.Engine(0).SetFaults(fault.Set{Slow: 20}); err != nil { // none ends before the last has begun
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); all(got) }()
	r.eventually("all streams", func() error {
		mu.Lock()
		defer mu.Unlock()
		if began < n {
			return fmt.Errorf("%d have begun", began)
		}
		return nil
	})
	r.Sim.Engine(0).Kill()
	<-done
	moved := 0
	for i := range n {
		if got[i] != want[i] {
			t.Errorf("stream %d: %q, want %q", i, got[i], want[i])
		}
		moved += len(r.receipt(decisions[i]).Continued)
	}
	if moved < n/8 {
		t.Errorf("%d streams went on elsewhere", moved)
	}
	list, err := r.Admin.Workers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var sum admin.Moves
	waiting := 0
	for _, w := range list.Workers {
		m := w.Ranks[0].Moves
		if sum.Away, sum.Onto, waiting = sum.Away+m.Away, sum.Onto+m.Onto, waiting+*m.Waiting; w.Name == r.Sim.Engine(0).Name() && m.Away != uint64(moved) {
			t.Errorf("%s lost %d streams by its own account, %d by the receipts", w.Name, m.Away, moved)
		}
	}
	if sum.Away != uint64(moved) || sum.Onto < sum.Away || waiting != 0 {
		t.Errorf("%+v, %d wait, by the receipts %d", sum, waiting, moved)
	}
	t.Logf("%d streams went on elsewhere; %v waited for their turn", moved, r.metric(`dynctl_stage_seconds_count{stage="move"}`))
}

// TestTokensDoNotWaitForTheNextEngine: an engine sends tokens, then its error, and ends its
// answer, all at once. What the client gets of it goes out at once (invariant 9), and not only
// when another engine has answered.
func TestTokensDoNotWaitForTheNextEngine(t *testing.T) {
	r, p := tappedRig(t, "2a:speed=4,answers=letters", exact)
	event := func(text, more string) string {
		return `data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"sim","choices":[{"index":0,"text":"` + text + `","finish_reason":null,"token_ids":[65]` + more + `}]}` + "\n\n"
	}
	seen := make(chan struct{})
	first, late := true, false
	p.set(func(engine string, w http.ResponseWriter, q *http.Request, body []byte) bool {
		if q.URL.Path != "/v1/completions" {
			return false
		}
		if first {
			first = false
			w.Header().Set("Content-Type", "text/event-stream")
			_ = http.NewResponseController(w).Flush() // no Content-Length
			_, _ = io.WriteString(w, event("a", `,"prompt_token_ids":[1,2,3]`)+event("b", "")+event("c", "")+"data: {\"error\":{\"message\":\"the engine is dead\"}}\n\n")
			return true
		}
		select { // the next engine computes the prompt
		case <-seen:
		case <-time.After(30 * time.Second):
			late = true
		}
		return false
	})
	resp, err := r.open(t.Context(), http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": []int{1, 2, 3}, "max_tokens": 20, "ignore_eos": true, "stream": true}))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	_ = readEvents(t, resp.Body, 3)
	close(seen)
	rest, err := io.ReadAll(resp.Body)
	c := r.receipt(resp.Header.Get("X-Dynctl-Decision"))
	if len(c.Continued) != 1 {
		t.Errorf("%v %q %+v", err, rest, c.Outcome)
	}
	if late {
		t.Error("three tokens that the router had, with the head of the answer, reached the client only when the next engine answered")
	}
}

// TestStreamOfKnownLength: an event stream whose engine announces its length reaches the
// client whole, although the router takes token ids out of it.
func TestStreamOfKnownLength(t *testing.T) {
	r, p := tappedRig(t, "1a:speed=4,answers=letters", exact)
	p.set(func(_ string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.URL.Path != "/v1/completions" {
			return false
		}
		all := `data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"sim","choices":[{"index":0,"text":"a","finish_reason":"length","token_ids":[65],"prompt_token_ids":[1,2,3]}]}` + "\n\ndata: [DONE]\n\n"
		w.Header().Set("Content-Type", "text/event-stream")
		w.Header().Set("Content-Length", strconv.Itoa(len(all)))
		_, _ = io.WriteString(w, all)
		return true
	})
	resp, err := r.open(t.Context(), http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": []int{1, 2, 3}, "max_tokens": 1, "stream": true}))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if s := read(t, got); err != nil || s.text != "a" || !strings.HasSuffix(string(got), "data: [DONE]\n\n") || strings.Contains(string(got), "[1,2,3]") {
		t.Errorf("%d bytes, announced as %d, %v: %s", len(got), resp.ContentLength, err, got)
	}
	if c := r.receipt(resp.Header.Get("X-Dynctl-Decision")); c.Outcome.Error != "" {
		t.Errorf("the receipt has the error %q", c.Outcome.Error)
	}
}
