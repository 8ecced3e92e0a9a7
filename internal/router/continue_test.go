package router_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"unicode/utf8"

	"github.com/tidwall/gjson"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
	"github.com/dynctl/dynctl/internal/workers/sim/vocab"
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
			!gjson.GetBytes(body, "stream").Bool() || !taken.CompareAndSwap(false, true) {
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
		v := gjson.Parse(e)
		if e == "[DONE]" {
			continue
		}
		s.ids[v.Get("id").String()], s.created[v.Get("created").String()] = true, true
		if u := v.Get("usage"); u.Exists() && v.Get("choices.#").Int() == 0 {
			s.usage += fmt.Sprintf("%d+%d=%d", u.Get("prompt_tokens").Int(), u.Get("completion_tokens").Int(), u.Get("total_tokens").Int())
		}
		if v.Get("error").Exists() {
			t.Errorf("the stream has an error: %s", e)
		}
		c := v.Get("choices.0")
		s.text += c.Get("text").String() + c.Get("delta.content").String()
		s.roles += c.Get("delta.role").String()
		s.kinds[fmt.Sprint(v.Get("object"), c.Get("text").Exists(), c.Get("delta").Exists())] = true
		if s.choices += int(v.Get("choices.#").Int()); c.Get("token_ids").IsArray() || c.Get("prompt_token_ids").IsArray() || v.Get("prompt_token_ids").IsArray() {
			s.odd = append(s.odd, e)
		}
		if f := c.Get("finish_reason").String(); f != "" {
			s.finish += f
		}
	}
	return s
}

// TestStreamGoesOnElsewhere: a stream that is cut after any of its events is to the
// client the stream of an engine that lives: text, count of tokens, id; with
// characters of several tokens, wherever the prefill is done.
func TestStreamGoesOnElsewhere(t *testing.T) {
	t.Parallel()
	for _, fleet := range []string{"2a:speed=15,answers=letters", "1p2d:speed=15,answers=letters"} {
		t.Run(fleet, func(t *testing.T) {
			t.Parallel()
			r, p := tappedRig(t, fleet, exact, func(c *settings.Config) { c.Health.Interval = 1 << 40 })
			for _, kind := range []struct {
				path string
				n    int
			}{{"/v1/completions", 3}, {"/v1/completions", 40}, {"/v1/chat/completions", 40}} {
				path, n := kind.path, kind.n
				text := strings.Repeat("Tell me about the river. ", 12)
				body := object{"model": "sim", "max_tokens": n, "ignore_eos": true, "stream": true, "stream_options": object{"include_usage": true}}
				if body["prompt"] = text; strings.Contains(path, "chat") {
					delete(body, "prompt")
					delete(body, "max_tokens")
					body["max_completion_tokens"], body["messages"] = n, []object{{"role": "user", "content": text}}
				}
				p.set(nil)
				want := read(t, r.post(path, body).body)
				if n > 3 && utf8.RuneCountInString(want.text) == len(want.text) || want.usage == "" {
					t.Fatalf("%q %s", want.text, want.usage)
				}
				moved, rounds := 0, 1
			cuts:
				for k := 1; ; k++ {
					for _, more := range []int{0, 30} {
						cut := p.cutOnce(r, k, more)
						for _, name := range []string{"aggregated-0", "aggregated-1", "decode-0", "decode-1", "prefill-0"} {
							r.Router.Heal(name)
						}
						a := r.send(http.MethodPost, path, encode(t, body))
						if c := r.receipt(a.header.Get("X-Dynctl-Decision")); cut() && c.Outcome.NotContinued == "nothing was said yet, and the first tokens may be a parser's" {
							continue
						}
						got := read(t, a.body)
						if got.text != want.text || got.usage != want.usage || got.finish != want.finish || got.roles != want.roles || len(got.kinds) != len(want.kinds) || len(got.ids) != 1 || len(got.created) != 1 || len(got.odd) > 0 {
							t.Fatalf("cut after %d events and %d bytes:\n%q %s %s\nwant\n%q %s %s\n%v %v %v\n%s", k, more, got.text, got.usage, got.finish, want.text, want.usage, want.finish, got.ids, got.odd, got.kinds, a.body)
						}
						c := r.receipt(a.header.Get("X-Dynctl-Decision"))
						if cut() && len(c.Continued) == 1 {
							moved++
							if c.Continued[0].Tokens > n || c.Outcome.Status != 200 || c.Outcome.Error != "" {
								t.Errorf("%+v, %+v", c.Continued, c.Outcome)
							}
						} else if cut() && c.Outcome.Finish == "" {
							t.Fatalf("cut, and no continuation: %+v", c)
						}
						if !cut() {
							if k > 1 && (n <= 3 || moved >= 3) {
								break cuts
							}
							// On a busy machine one event has many tokens, and there is little to cut.
							if rounds++; rounds > 50 {
								t.Fatalf("%d streams went on elsewhere, of %d events", moved, k)
							}
							k = 0
							continue cuts
						}
					}
				}
				t.Logf("%s, %d tokens: %d streams went on elsewhere", path, n, moved)
			}
			if len(r.events("stream_continued")) == 0 {
				t.Error("no event")
			}
		})
	}
}

// TestNativeStreamGoesOnElsewhere: SGLang's own streams, cut after any event. Each event
// has the text and the ids so far, and with stop strings none ends with the beginning of
// one; where the client has ids of a character that was cut, and after one event only, the
// stream is refused by name.
func TestNativeStreamGoesOnElsewhere(t *testing.T) {
	t.Parallel()
	const n = 40
	for _, fleet := range []string{"2a:engine=sglang,speed=4,answers=letters", "1p2d:engine=sglang,speed=4,answers=letters"} {
		t.Run(fleet, func(t *testing.T) {
			t.Parallel()
			r, p := tappedRig(t, fleet, exact, func(c *settings.Config) { c.Health.Interval = 1 << 40 })
			body := func(stop any) []byte {
				return encode(t, object{
					"input_ids": ids(300, 1), "stream": true, "rid": "mine",
					"sampling_params": object{"max_new_tokens": n, "ignore_eos": true, "temperature": 0, "stop": stop},
				})
			}
			last := func(b []byte) gjson.Result {
				all := serverSent(string(b))
				if len(all) < 2 || all[len(all)-1] != "[DONE]" {
					t.Fatalf("no end: %s", b)
				}
				was := ""
				for _, e := range all[:len(all)-1] {
					v := gjson.Parse(e)
					if text := v.Get("text").String(); !strings.HasPrefix(text, was) || v.Get("output_ids.#").Int() != v.Get("meta_info.completion_tokens").Int() || v.Get("meta_info.id").String() != "mine" || v.Get("meta_info.prompt_tokens").Int() != 300 {
						t.Fatalf("after %q: %s", was, e)
					}
					was = v.Get("text").String()
				}
				return gjson.Parse(all[len(all)-2])
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
						if got.Get(part).Raw != want.Get(part).Raw {
							t.Fatalf("stop %q, cut after %d events: %s\n%s\nwant\n%s", stop, k, part, got.Get(part).Raw, want.Get(part).Raw)
						}
					}
					if k == 1 && len(c.Continued) > 0 {
						t.Errorf("stop %q: a stream of one event went on elsewhere: %+v", stop, c.Continued)
					}
					moved += len(c.Continued)
				}
				const within, single = "the client asked for ids and has some of a character that is not whole", "which tokens the sent text belongs to is not known"
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
			// On a slow machine events have many tokens, and are few.
			if all < 3 || cuts > 40 && (ended == 0 || torn == 0 || alone == 0) {
				t.Errorf("of %d streams %d went on elsewhere, %d to a stop string; %d were cut within a character, %d where the tokens of the text are unknown", cuts, all, ended, torn, alone)
			}
		})
	}
}

// TestStreamThatIsNotContinued: a stream that cannot be continued for certain is refused by
// name, in the receipt, the client's error and a metric.
func TestStreamThatIsNotContinued(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "2a:speed=30,answers=letters", exact, func(c *settings.Config) { c.Health.Interval = 1 << 40 })
	// broken sends a request until the engine breaks off within the answer: on a slow
	// machine the answer may come in one event, or break off before it is read.
	broken := func(body object, events int, last string, begin func()) (a *answer, rec *receipt.Receipt, cut bool) {
		for range 20 {
			begin()
			for _, name := range []string{"aggregated-0", "aggregated-1"} {
				r.Router.Heal(name)
			}
			done := p.endOnce(r, events, 0, last)
			got := r.send(http.MethodPost, "/v1/completions", encode(t, body))
			c := r.receipt(got.header.Get("X-Dynctl-Decision"))
			if a, rec, cut = got, &c, done(); cut && (c.Outcome.Finish == "" || len(c.Continued) > 0) {
				break
			}
		}
		return a, rec, cut
	}
	for _, c := range []struct {
		more  object
		label string
	}{
		{object{"presence_penalty": 0.5}, "penalties"},
		{object{"frequency_penalty": -1}, "penalties"},
		{object{"seed": 7}, "seed"},
		{object{"n": 2}, "several_answers"},
		{object{"best_of": 2}, "several_answers"},
		{object{"logprobs": 0}, "logprobs"},
		{object{"echo": true}, "echo"},
		{object{"stop": "the"}, "stop_strings"},
		{object{"response_format": object{"type": "json_object"}}, "guided_decoding"},
		{object{"structured_outputs": object{"regex": "a"}}, "guided_decoding"},
		{object{"bad_words": []string{"x"}}, "other_field"},
		{object{"prompt": []string{"one", "two"}}, "several_answers"},
	} {
		for _, last := range []string{"", "data: {\"error\":{\"message\":\"the engine is dead\"}}\n\n"} {
			body := object{"model": "sim", "prompt": "words", "max_tokens": 300, "ignore_eos": true, "stream": true}
			for k, v := range c.more {
				body[k] = v
			}
			name := fmt.Sprintf("dynctl_streams_not_continued_total{why=%q}", c.label)
			var before float64 // the last try; those before it may have been counted, too
			a, rec, cut := broken(body, 1, last, func() { before = max(0, r.metric(name)) })
			if !cut || rec.Outcome.NotContinued == "" || len(rec.Continued) > 0 || !strings.Contains(string(a.body), "not continued elsewhere: "+rec.Outcome.NotContinued) || strings.Count(string(a.body), `"error"`) != 1 {
				t.Errorf("%v, %q: cut %v, %q, %s", c.more, last, cut, rec.Outcome.NotContinued, a.body)
			}
			if r.metric(name) != before+1 {
				t.Errorf("%v, %q: counted %v times as %s", c.more, last, r.metric(name)-before, c.label)
			}
		}
	}
	// What is harmless is continued: greedy seeds, penalties of nothing, null.
	body := object{
		"model": "sim", "prompt": "words", "max_tokens": 300, "ignore_eos": true, "stream": true, "seed": 7, "temperature": 0, "presence_penalty": 0.0,
		"stop": nil, "repetition_penalty": 1.1, "nothing": nil,
	}
	if a, rec, cut := broken(body, 2, "", func() {}); !cut || len(rec.Continued) != 1 {
		t.Errorf("%+v %s", rec.Outcome, a.body)
	}
}

// TestTwoHundredStreamsMove: an engine of four dies with two hundred streams. All go
// on, none with another text, and no rank computes more of them at once than it may.
func TestTwoHundredStreamsMove(t *testing.T) {
	t.Parallel()
	const n = 200
	r, _ := tappedRig(t, "4a:speed=4,answers=letters,max_seqs=1024", exact, func(c *settings.Config) {
		c.Continue.AtOnce = 2
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

// TestStreamWithoutMemory: what is kept of a stream is taken out of limits.body_memory.
// Where that is used up, the stream goes on, cannot be continued, and says so.
func TestStreamWithoutMemory(t *testing.T) {
	t.Parallel()
	const memory = 64 << 10
	r, p := tappedRig(t, "2a:speed=30,answers=letters", exact, func(c *settings.Config) {
		c.Limits.BodyBytes, c.Limits.BodyMemory, c.Health.Interval = memory, memory, 1<<40
	})
	whole := 0
	var send func(prompt any, cut bool) (seen, *receipt.Receipt)
	send = func(prompt any, cut bool) (seen, *receipt.Receipt) {
		done := func() bool { return true }
		if p.set(nil); cut {
			done = p.cutOnce(r, 2, 0)
		}
		for _, name := range []string{"aggregated-0", "aggregated-1"} {
			r.Router.Heal(name)
		}
		a := r.post("/v1/completions", object{"model": "sim", "prompt": prompt, "max_tokens": 300, "ignore_eos": true, "stream": true})
		c := r.receipt(a.header.Get("X-Dynctl-Decision"))
		switch {
		case !done() && whole < 20:
			// All its tokens came in one event or two: a slow machine.
			whole++
			return send(prompt, cut)
		case !done():
			t.Fatal("not cut")
		case cut && len(c.Continued) == 0 && len(c.Legs) > 1 && c.Outcome.NotContinued == "":
			// What was cut off had not been read, so that it was tried again: a slow machine.
			return send(prompt, cut)
		case cut && len(c.Continued) == 0 && strings.Contains(strings.Join(c.Notes, "\n"), "after the last token") && whole < 20:
			// All its tokens came in the events before the cut: a slow machine.
			whole++
			return send(prompt, cut)
		case cut && len(c.Continued) == 0:
			return seen{}, &c
		}
		return read(t, a.body), &c
	}
	// The ids of a prompt of text are more than the text: this one fits, its ids do not.
	long := strings.Repeat("a", 40<<10)
	if s, c := send(long, false); s.text == "" || len(c.Notes) == 0 || !strings.Contains(strings.Join(c.Notes, "\n"), "limits.body_memory") || r.metric("dynctl_streams_without_memory_total") != 1 {
		t.Errorf("%q %q %v", s.text, c.Notes, r.metric("dynctl_streams_without_memory_total"))
	}
	if _, c := send(long, true); !strings.Contains(c.Outcome.NotContinued, "limits.body_memory") || r.metric(`dynctl_streams_not_continued_total{why="memory"}`) != 1 {
		t.Errorf("%+v", c.Outcome)
	}
	// A short one is continued all the same, and all memory is given back in the end.
	if _, c := send("short", true); len(c.Continued) != 1 || len(c.Notes) != 0 {
		t.Errorf("%+v %q", c.Outcome, c.Notes)
	}
	r.eventually("memory is given back", func() error {
		if n := r.Router.BodyMemory(); n != 0 {
			return fmt.Errorf("%d bytes", n)
		}
		return nil
	})
}

// vocabFile writes the simulated engines' vocabulary as a tokenizer.json that decodes as
// they do. It has no merges: they are asked for the ids of texts.
func vocabFile(t *testing.T) string {
	t.Helper()
	alphabet, next := map[byte]rune{}, rune(256)
	for b := range 256 {
		if alphabet[byte(b)] = rune(b); b < '!' || b > '~' && b < 0xa1 || b == 0xad {
			alphabet[byte(b)] = next
			next++
		}
	}
	v, tokens, added := vocab.New(), map[string]uint32{}, []object{}
	for id := uint32(0); v.Text(id) != fmt.Sprintf("⟨%d⟩", id); id++ {
		if text := v.Text(id); id <= vocab.End {
			added = append(added, object{"id": id, "content": text, "special": true})
		} else {
			var token strings.Builder
			for _, b := range []byte(text) {
				token.WriteRune(alphabet[b])
			}
			tokens[token.String()] = id
		}
	}
	path := filepath.Join(t.TempDir(), "tokenizer.json")
	file := encode(t, object{
		"added_tokens": added, "pre_tokenizer": object{"type": "ByteLevel", "add_prefix_space": false}, "decoder": object{"type": "ByteLevel"},
		"model": object{"type": "BPE", "vocab": tokens, "merges": []string{}},
	})
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestStopStringsGoOnElsewhere: a stream with stop strings that is cut after any of its
// events ends where it would have, with the same text, reason and count, local and remote.
func TestStopStringsGoOnElsewhere(t *testing.T) {
	t.Parallel()
	const n = 40
	path := vocabFile(t)
	for _, fleet := range []string{"2a:speed=6,answers=letters", "1p2d:speed=6,answers=letters"} {
		t.Run(fleet, func(t *testing.T) {
			t.Parallel()
			r, p := tappedRig(t, fleet, exact, func(c *settings.Config) { c.Health.Interval, c.Tokens.Path = 1<<40, path })
			for _, path := range []string{"/v1/completions", "/v1/chat/completions"} {
				text := strings.Repeat("Tell me about the river. ", 12)
				body := object{"model": "sim", "max_tokens": n, "ignore_eos": true, "stream": true, "stream_options": object{"include_usage": true}}
				if body["prompt"] = text; strings.Contains(path, "chat") {
					delete(body, "prompt")
					body["messages"] = []object{{"role": "user", "content": text}}
				}
				p.set(nil)
				whole := []rune(read(t, r.post(path, body).body).text)
				if len(whole) < 30 {
					t.Fatalf("%q", string(whole))
				}
				cuts, moved, ended := 0, 0, 0
				for _, stop := range []string{"never in it", string(whole[len(whole)/2:][:7]), string(whole[len(whole)*3/4:][:12])} {
					body["stop"] = []string{stop, "nor this"}
					p.set(nil)
					want := read(t, r.post(path, body).body)
					for k := 1; ; k++ {
						for _, name := range []string{"aggregated-0", "aggregated-1", "decode-0", "decode-1", "prefill-0"} {
							r.Router.Heal(name)
						}
						cut := p.cutOnce(r, k, 30)
						a := r.send(http.MethodPost, path, encode(t, body))
						c := r.receipt(a.header.Get("X-Dynctl-Decision"))
						if c.Outcome.NotContinued == "nothing was said yet, and the first tokens may be a parser's" {
							continue
						}
						got := read(t, a.body)
						if got.text != want.text || got.usage != want.usage || got.finish != want.finish || got.roles != want.roles || len(got.kinds) != len(want.kinds) || len(got.ids) != 1 || len(got.odd) > 0 || c.Outcome.NotContinued != "" || c.Outcome.Error != "" {
							t.Fatalf("stop %q, cut after %d events:\n%q %s %s\nwant\n%q %s %s\n%+v\n%s", stop, k, got.text, got.usage, got.finish, want.text, want.usage, want.finish, c.Outcome, a.body)
						}
						if moved += len(c.Continued); want.finish == "stop" {
							ended += len(c.Continued)
						}
						if !cut() {
							break
						}
						cuts++
					}
				}
				// How many events there are to cut after depends on the machine: a slow one has
				// several tokens in each.
				if moved < cuts/4 || moved == 0 || ended == 0 {
					t.Errorf("of %d streams %d went on elsewhere, %d to a stop string", cuts, moved, ended)
				}
				t.Logf("%s: of %d streams %d went on elsewhere, %d to a stop string", path, cuts, moved, ended)
			}
		})
	}
}
