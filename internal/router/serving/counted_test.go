package serving_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/rig/fakeengine"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestInvariant03UsageOfPairs: an answer of a pair has the cached tokens of its prefill, and
// nothing else in it changes: on each API, streamed or not.
func TestInvariant03UsageOfPairs(t *testing.T) {
	openai := func(prompt, output string, cached int) string {
		return fmt.Sprintf(`{"%s_tokens":64,"%s_tokens":4,"%[1]s_tokens_details":{"cached_tokens":%[3]d}}`, prompt, output, cached)
	}
	chat := func(cached int) string { return openai("prompt", "completion", cached) }
	responses := func(cached int) string { return openai("input", "output", cached) }
	messages := func(cached int) string {
		return fmt.Sprintf(`{"input_tokens":%d,"output_tokens":4,"cache_read_input_tokens":%d}`, 64-cached, cached)
	}
	prompt := "[" + strings.TrimSuffix(strings.Repeat("1000,", 64), ",") + "]"
	long := strings.Repeat("word ", 200)
	for _, c := range []struct {
		name, path, body, answer string
		usage                    func(cached int) string
		events                   []string
	}{
		{"completion", completions, `"prompt":` + prompt, `{"choices":[{"index":0,"text":"F","finish_reason":"stop"}],"usage":%s}`, chat,
			[]string{`{"choices":[{"index":0,"text":"F"}]}`, `{"choices":[],"usage":%s}`, "[DONE]"}},
		{"chat", "/v1/chat/completions", `"messages":[{"role":"user","content":"` + long + `"}]`, `{"choices":[{"index":0,"message":{"content":"F"},"finish_reason":"stop"}],"usage":%s}`, chat,
			[]string{`{"choices":[{"index":0,"delta":{"content":"F"}}],"usage":%s}`, `{"choices":[],"usage":%s}`, "[DONE]"}},
		{"messages", "/v1/messages", `"messages":[{"role":"user","content":"` + long + `"}],"max_tokens":4`, `{"type":"message","content":[{"type":"text","text":"F"}],"usage":%s}`, messages,
			[]string{`{"type":"message_start","message":{"usage":%s}}`, `{"type":"content_block_delta","delta":{"text":"F"}}`, `{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":%s}`, `{"type":"message_stop"}`}},
		{"responses", "/v1/responses", `"input":"` + long + `"`, `{"id":"resp_1","object":"response","status":"completed","usage":%s}`, responses,
			[]string{`{"type":"response.output_text.delta","delta":"F"}`, `{"type":"response.completed","response":{"id":"resp_1","status":"completed","usage":%s}}`}},
	} {
		for _, stream := range []bool{false, true} {
			for _, keep := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, stream %v, the engine's count kept %v", c.name, stream, keep), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						r := fakeengine.New(t, "1p1d nixl", func(s *settings.Config) { s.Routing.PrefillUsage = !keep })
						for name := range strings.FieldsSeq("prefill-0 decode-0") {
							// Messages and Responses carry transfers since then.
							if _, err := r.Registry.Update(r.Worker(name), workers.Learned{Facts: workers.Facts{Models: []string{"m"}, Version: "0.32.0"}}); err != nil {
								t.Fatal(err)
							}
						}
						r.Always("prefill-0", func(q *fakeengine.Request) fakeengine.Answer {
							a := r.Model.Answer(q)
							for i, p := range a.Pieces {
								a.Pieces[i].Text = strings.Replace(p.Text, `"do_remote_decode":false`, `"do_remote_decode":false,"remote_prefill_cached_tokens":48`, 1)
							}
							a.Header = a.Header[:1] // of another length now
							return a
						})
						with := func(text string, cached int) string { return strings.ReplaceAll(text, "%s", c.usage(cached)) }
						events := func(cached int) (list []string) {
							for _, e := range c.events {
								list = append(list, with(e, cached))
							}
							return list
						}
						said, want := fakeengine.JSON(200, with(c.answer, 63)), with(c.answer, 48)
						if keep {
							want = with(c.answer, 63)
						}
						if stream {
							said, want = fakeengine.Stream(events(63)...), ""
							cached := 48
							if keep {
								cached = 63
							}
							for _, e := range events(cached) {
								want += "data: " + e + "\n\n"
							}
							// Each byte is a piece: a usage may come in any number of them.
							all := ""
							for _, p := range said.Pieces {
								all += p.Text
							}
							said.Pieces = nil
							for _, b := range []byte(all) {
								said.Pieces = append(said.Pieces, fakeengine.Piece{Wait: time.Millisecond, Text: string([]byte{b})})
							}
						}
						r.Always("decode-0", always(said))
						got := r.Send(t.Context(), fakeengine.Ask{Path: c.path, Body: fmt.Sprintf(`{"model":"m",%s,"stream":%v}`, c.body, stream)})
						if got.Receipt.Path != "remote" || got.Body != want || got.Err != nil {
							t.Errorf("path %s: %s\nwant %s", got.Receipt.Path, got, want)
						}
						cached := map[bool]int{false: 48, true: 63}[keep]
						if o := got.Receipt.Outcome; o.CachedTokens != cached {
							t.Errorf("the receipt has %d cached tokens, want %d", o.CachedTokens, cached)
						}
					})
				})
			}
		}
	}
}

// TestUsageOfLegsAtOnce: where the legs of a pair run beside each other, the count of the
// prefill is known with its answer. A decode engine that is done before keeps its own.
func TestUsageOfLegsAtOnce(t *testing.T) {
	for _, stream := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := fakeengine.New(t, "1p1d nixl-push")
			takes := time.Millisecond
			r.Always("prefill-0", func(q *fakeengine.Request) fakeengine.Answer {
				a := r.Model.Answer(q)
				for i, p := range a.Pieces {
					a.Pieces[i].Text = strings.Replace(p.Text, `"do_remote_decode":false`, `"do_remote_decode":false,"transfer_mode":"push","remote_prefill_cached_tokens":48`, 1)
				}
				a.Header = a.Header[:1] // of another length now
				return a.After(takes)
			})
			usage := `"usage":{"prompt_tokens":64,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":63}}`
			said := fakeengine.JSON(200, `{"choices":[{"index":0,"text":"F","finish_reason":"stop"}],`+usage+`}`)
			if stream {
				said = fakeengine.Stream(`{"choices":[{"index":0,"text":"F"}]}`, `{"choices":[],`+usage+`}`, "[DONE]")
			}
			r.Always("decode-0", always(said.After(20*time.Millisecond)))
			for i, cached := range []int{48, 48, 63} {
				if i == 2 {
					takes = 40 * time.Millisecond
				}
				got := r.Send(t.Context(), ask(stream, ""))
				if got.Err != nil || !strings.Contains(got.Body, fmt.Sprintf(`"cached_tokens":%d}`, cached)) {
					t.Errorf("stream %v, request %d: %s, want %d cached tokens", stream, i, got, cached)
				}
			}
		})
	}
}

// TestCacheLostInSilence: an engine that lacks three prefixes in a row which it is taken to hold
// has its rank rebuilt, once: that of the phase which computes the prompt, streamed or not.
func TestCacheLostInSilence(t *testing.T) {
	for fleet, rank := range map[string]string{"1a": "aggregated-0/dp0", "1p1d": "prefill-0/dp0", "1p1d nixl-push": "prefill-0/dp0"} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/%v", fleet, stream), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := fakeengine.New(t, fleet, func(s *settings.Config) { s.Routing.ThresholdOn = "isl" })
					var distrusted []string
					r.Distrusted = func(k *workers.Rank) { distrusted = append(distrusted, k.Label) }
					send := func(prompt, cached int) {
						t.Helper()
						counted := fmt.Sprintf(`"prompt_tokens":64,"prompt_tokens_details":{"cached_tokens":%d}`, cached)
						for _, w := range r.Registry.Snapshot().Workers {
							r.Always(w.Name, func(q *fakeengine.Request) fakeengine.Answer {
								a := r.Model.Answer(q)
								for i, p := range a.Pieces {
									text := strings.Replace(p.Text, `"prompt_tokens":64`, counted, 1)
									if strings.HasSuffix(fleet, "push") {
										text = strings.Replace(text, `"do_remote_decode":false`, `"do_remote_decode":false,"transfer_mode":"push"`, 1)
									}
									a.Pieces[i].Text = text
								}
								a.Header = a.Header[:1] // of another length now
								return a
							})
						}
						q := ask(stream, `,"stream_options":{"include_usage":true}`)
						q.Body = strings.ReplaceAll(q.Body, "1000", fmt.Sprint(1000+prompt))
						if got := r.Send(t.Context(), q); got.Status != 200 || got.Err != nil || got.Receipt.Outcome.CachedTokens != cached {
							t.Fatalf("prompt %d: %s, %d cached", prompt, got, got.Receipt.Outcome.CachedTokens)
						}
					}
					for prompt := range 6 {
						send(prompt, 0)
					}
					send(0, 48)
					for prompt := 1; prompt < 6; prompt++ {
						send(prompt, 0)
						want := ""
						if prompt >= 3 {
							want = rank
						}
						if got := strings.Join(distrusted, " "); got != want {
							t.Fatalf("after %d prefixes that are gone: %q, want %q", prompt, got, want)
						}
					}
				})
			})
		}
	}
}
