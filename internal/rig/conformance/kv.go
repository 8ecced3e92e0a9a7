package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/zmtp"
)

// events: what the engine publishes names the blocks of a prompt, and the replay socket
// sends the same.
func (s *suite) events(t *testing.T) {
	var sources map[string]struct {
		Endpoint string
		Replay   *string `json:"replay_endpoint"`
		Topic    string
		Kind     string `json:"publisher"`
	}
	s.get(t, "/kv_event_sources").into(t, &sources)
	src, ok := sources["0"]
	if !ok || src.Kind != "zmq" || !strings.HasPrefix(src.Endpoint, "tcp://") {
		t.Fatalf("sources %+v", sources)
	}
	ctx, cancel := context.WithTimeout(t.Context(), s.Timeout)
	defer cancel()
	sub, err := zmtp.DialSub(ctx, src.Endpoint, zmtp.Options{Topics: []string{src.Topic}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Close() }() // the test is over
	prompt := s.prompt(4*s.blockSize+3, "events")
	// The first batches may be lost while the subscription is on its way, so
	// the prompt is sent under new salts until its events come.
	type batch struct {
		seq     uint64
		payload []byte
	}
	got := make(chan batch, 256)
	fail := make(chan error, 1)
	go func() {
		var m zmtp.Message
		for {
			if err := sub.Recv(&m); err != nil {
				fail <- err
				return
			}
			_, seq, payload, err := kvevent.ParseLive(m.Frames())
			if err != nil {
				fail <- err
				return
			}
			select {
			case got <- batch{seq, slices.Clone(payload)}:
			case <-ctx.Done():
				fail <- ctx.Err()
				return
			}
		}
	}()
	defer func() {
		cancel()
		if err := <-fail; err == nil {
			t.Error("the subscription ended without a reason")
		}
	}()
	wait := time.NewTicker(500 * time.Millisecond)
	defer wait.Stop()
	var d kvevent.Decoder
	var b kvevent.Batch
	stored := 0
	var first, last uint64
	seen := false
	for try := 0; stored < len(prompt)/s.blockSize; try++ {
		if try == 20 {
			t.Fatal("no event has the prompt's blocks")
		}
		salt := s.salt + "-events-" + string(rune('a'+try))
		s.do(t, http.MethodPost, s.URL+"/v1/completions", object{"model": s.model, "prompt": prompt, "max_tokens": 1, "cache_salt": salt}, "X-data-parallel-rank", "0")
		stored = 0
	collect:
		for stored < len(prompt)/s.blockSize {
			select {
			case m := <-got:
				if seen && m.seq != last+1 {
					t.Errorf("sequence %d after %d", m.seq, last)
				}
				if !seen {
					first, seen = m.seq, true
				}
				last = m.seq
				if err := d.Decode(m.payload, &b); err != nil || b.Skipped+b.Unknown > 0 {
					t.Fatalf("batch: %v %v", err, b.Reason)
				}
				if b.Rank != 0 || b.TS < 1e9 {
					t.Errorf("rank %d at %v", b.Rank, b.TS)
				}
				for _, e := range b.Events {
					if e.Kind == kvevent.Removed && len(e.Hashes) != 1 {
						t.Errorf("%d hashes in one removal", len(e.Hashes))
					}
					if e.Kind != kvevent.Stored || int(e.BlockSize) != s.blockSize || len(e.Tokens) != len(e.Hashes)*s.blockSize {
						continue
					}
					if !e.HasParent && e.Salt == salt && int(e.Tokens[0]) == prompt[0] {
						for i, tok := range e.Tokens {
							if int(tok) != prompt[i] {
								t.Fatalf("token %d is %d, want %d", i, tok, prompt[i])
							}
						}
						stored = len(e.Hashes)
					} else if e.HasParent && stored > 0 && len(e.Tokens) > 0 && stored*s.blockSize < len(prompt) && int(e.Tokens[0]) == prompt[stored*s.blockSize] {
						stored += len(e.Hashes)
					}
				}
			case err := <-fail:
				fail <- err
				t.Fatal(err)
			case <-wait.C:
				break collect
			}
		}
	}
	if src.Replay == nil {
		return
	}
	c, err := zmtp.DialDealer(ctx, *src.Replay, zmtp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }() // the test is over
	if err := c.Send(kvevent.ReplayRequest(first)...); err != nil {
		t.Fatal(err)
	}
	next := first
	var m zmtp.Message
	for {
		if err := c.Recv(&m); err != nil {
			t.Fatal(err)
		}
		seq, payload, end, err := kvevent.ParseReplay(m.Frames())
		if err != nil {
			t.Fatal(err)
		}
		if end {
			break
		}
		if seq != next {
			t.Errorf("replay sends %d, want %d", seq, next)
		}
		next++
		if err := d.Decode(payload, &b); err != nil {
			t.Error(err)
		}
	}
	if next < last+1 {
		t.Errorf("replay ends before %d, live reached %d", next, last)
	}
}

// prefillParams is the object by which a prefill engine keeps its blocks.
var prefillParams = object{"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": nil, "remote_block_ids": nil, "remote_host": nil, "remote_port": nil}

// prefill runs a prefill leg and returns what it hands over.
func (s *suite) prefill(t *testing.T, prompt []int) object {
	t.Helper()
	var c completion
	s.do(t, http.MethodPost, s.Prefill+"/v1/completions", object{"model": s.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": true, "kv_transfer_params": prefillParams}).into(t, &c)
	var p object
	if err := json.Unmarshal(c.KV, &p); err != nil || p == nil {
		t.Fatalf("kv_transfer_params %s", c.KV)
	}
	return p
}

// otherAPI: an endpoint that is neither chat nor completions takes both legs. Its
// limit of tokens has another name, and so has an end by that limit.
func (s *suite) otherAPI(t *testing.T, path, limit, input, end, ended string) {
	words := path + s.salt + strings.Repeat(" some words that fill a few blocks of the cache", 3*s.blockSize/8)
	body := func(tokens int, params any) object {
		b := object{"model": s.model, input: []object{{"role": "user", "content": words}}, limit: tokens, "temperature": 0}
		if params != nil {
			b["kv_transfer_params"] = params
		}
		return b
	}
	type reply struct {
		ID     string
		KV     object `json:"kv_transfer_params"`
		Usage  map[string]any
		Output []struct{ Content []struct{ Text string } }
		// Content is that of a message.
		Content []struct{ Text string }
	}
	tokens := func(r *reply) (n float64) {
		for _, k := range []string{"input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"} {
			if v, ok := r.Usage[k].(float64); ok {
				n += v
			}
		}
		return n
	}
	text := func(r *reply) string {
		if len(r.Output) > 0 {
			r.Content = r.Output[0].Content
		}
		if len(r.Content) == 0 {
			t.Fatalf("no text in %+v", r)
		}
		return r.Content[0].Text
	}
	var alone, prefill, decode reply
	a := s.do(t, http.MethodPost, s.Prefill+path, body(1, prefillParams), "X-Request-Id", "other-api-"+s.salt)
	a.into(t, &prefill)
	var top map[string]any
	a.into(t, &top)
	n := tokens(&prefill)
	if top[end] != ended || n < float64(3*s.blockSize) || prefill.KV["remote_num_tokens"] != n || prefill.KV["do_remote_prefill"] != true {
		t.Fatalf("prefill answer %s", a.body)
	}
	// The engine's request is named after the answer.
	if id, ok := prefill.KV["remote_request_id"].(string); !ok || !strings.HasPrefix(id, prefill.ID) {
		t.Errorf("remote_request_id %v of answer %s", prefill.KV["remote_request_id"], prefill.ID)
	}
	if named := strings.Contains(prefill.ID, "other-api-"+s.salt); named != (path == "/v1/messages") {
		t.Errorf("answer %s to request other-api-%s", prefill.ID, s.salt)
	}
	s.do(t, http.MethodPost, s.Prefill+path, body(6, nil)).into(t, &alone)
	if d := s.grows(t, s.Decode, n, func() {
		s.do(t, http.MethodPost, s.Decode+path, body(6, prefill.KV)).into(t, &decode)
	}, "vllm:prompt_tokens_by_source_total", `source="external_kv_transfer"`); d != n {
		t.Errorf("external tokens grow by %v, want %v", d, n)
	}
	if text(&decode) != text(&alone) {
		t.Errorf("decode says %q, one engine %q", text(&decode), text(&alone))
	}
	if path == "/v1/responses" {
		if a := s.do(t, http.MethodPost, s.Decode+path, object{"model": s.model, "input": "x", "previous_response_id": "resp_nobody"}); a.status != http.StatusNotFound {
			t.Errorf("an unknown earlier response: %d %s", a.status, a.body)
		}
		return
	}
	b := body(1, nil)
	b["thinking"] = object{"type": "enabled", "budget_tokens": 1024}
	if a := s.do(t, http.MethodPost, s.Prefill+path, b); a.status != http.StatusBadRequest {
		t.Errorf("a thinking budget over the limit: %d %s", a.status, a.body)
	}
}

// transfer: prefill on one engine, decode on the other.
func (s *suite) transfer(t *testing.T) {
	n := 5*s.blockSize + 7
	prompt := s.prompt(n, "transfer")
	// First contact between two engines may take seconds; it is not judged.
	warm := s.prompt(s.blockSize+1, "first contact")
	s.complete(t, s.Decode, warm, 1, object{"kv_transfer_params": s.prefill(t, warm)})

	params := s.prefill(t, prompt)
	for _, key := range []string{
		"do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id",
		"remote_host", "remote_port", "tp_size", "remote_num_tokens",
	} {
		if _, ok := params[key]; !ok {
			t.Errorf("no %s in %v", key, params)
		}
	}
	if params["do_remote_prefill"] != true || params["do_remote_decode"] != false || params["remote_num_tokens"] != float64(n) {
		t.Errorf("params %v", params)
	}
	groups, ok := params["remote_block_ids"].([]any)
	if !ok || len(groups) != 1 {
		t.Fatalf("remote_block_ids %v", params["remote_block_ids"])
	}
	if b, ok := groups[0].([]any); !ok || len(b) != 6 {
		t.Errorf("%v blocks for %d tokens", groups[0], n)
	}
	want, _ := s.complete(t, s.Prefill, prompt, 8, nil)
	var got string
	var u usage
	if d := s.grows(t, s.Decode, float64(n), func() {
		got, u = s.complete(t, s.Decode, prompt, 8, object{"kv_transfer_params": params})
	}, "vllm:prompt_tokens_by_source_total", `source="external_kv_transfer"`); d != float64(n) {
		t.Errorf("external tokens grow by %v, want %d", d, n)
	}
	if got != want {
		t.Errorf("decode says %q, one engine %q", got, want)
	}
	if u.Details != nil && u.Details.Cached != 0 {
		t.Errorf("pulled tokens are counted as cached: %+v", u.Details)
	}
	t.Run("hits are counted", func(t *testing.T) {
		p := s.prompt(n, "hits")
		q := s.prefill(t, p)
		if d := s.grows(t, s.Decode, float64(n), func() {
			s.complete(t, s.Decode, p, 1, object{"kv_transfer_params": q})
		}, "vllm:external_prefix_cache_hits_total"); d != float64(n) {
			t.Errorf("external hits grow by %v, want %d", d, n)
		}
	})
	t.Run("without params it computes", func(t *testing.T) {
		p := s.prompt(n, "local")
		if d := s.grows(t, s.Decode, float64(n), func() {
			s.complete(t, s.Decode, p, 1, object{"kv_transfer_params": nil})
		}, "vllm:prompt_tokens_by_source_total", `source="local_compute"`); d != float64(n) {
			t.Errorf("local tokens grow by %v, want %d", d, n)
		}
	})
	t.Run("a stop string in the first token", func(t *testing.T) {
		// A first token may be blank, and another prompt's is another one.
		var p []int
		stop := ""
		for i := 0; stop == ""; i++ {
			if i == 20 {
				t.Fatal("the first token of 20 prompts is blank")
			}
			p = s.prompt(n, fmt.Sprint("stop ", i))
			first, _ := s.complete(t, s.Prefill, p, 1, nil)
			stop = strings.TrimSpace(first)
		}
		var c completion
		s.do(t, http.MethodPost, s.Prefill+"/v1/completions", object{"model": s.model, "prompt": p, "max_tokens": 1, "temperature": 0, "stop": stop, "kv_transfer_params": prefillParams}).into(t, &c)
		if c.finish() != "stop" || len(c.KV) < len("null")+1 {
			t.Errorf("finish_reason %q, params %s", c.finish(), c.KV)
		}
	})
	t.Run("messages", func(t *testing.T) {
		s.otherAPI(t, "/v1/messages", "max_tokens", "messages", "stop_reason", "max_tokens")
	})
	t.Run("responses", func(t *testing.T) {
		s.otherAPI(t, "/v1/responses", "max_output_tokens", "input", "status", "incomplete")
	})
	bad := func(p []int) object {
		q := s.prefill(t, p)
		q["remote_engine_id"] = "00000000-0000-0000-0000-000000000000"
		return q
	}
	const failed = `{"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}`
	t.Run("a failed load", func(t *testing.T) {
		p := s.prompt(n, "failed")
		a := s.do(t, http.MethodPost, s.Decode+"/v1/completions", object{"model": s.model, "prompt": p, "max_tokens": 4, "kv_transfer_params": bad(p)})
		var e struct{ Error struct{ Message string } }
		if err := json.Unmarshal(a.body, &e); err != nil || a.status != 500 || e.Error.Message != "Internal server error" {
			t.Errorf("status %d: %s", a.status, a.body)
		}
	})
	t.Run("a failed load, streamed", func(t *testing.T) {
		p := s.prompt(n, "failed stream")
		events := s.do(t, http.MethodPost, s.Decode+"/v1/completions", object{"model": s.model, "prompt": p, "max_tokens": 4, "stream": true, "kv_transfer_params": bad(p)}).sse(t)
		if !slices.Equal(events, []string{failed, "[DONE]"}) {
			t.Errorf("events %q", events)
		}
	})
	t.Run("a failed load, chat streamed", func(t *testing.T) {
		p := s.prompt(n, "failed chat")
		events := s.do(t, http.MethodPost, s.Decode+"/v1/chat/completions", object{"model": s.model, "messages": []object{{"role": "user", "content": "hello " + s.salt}}, "max_tokens": 4, "stream": true, "kv_transfer_params": bad(p)}).sse(t)
		if len(events) != 3 || !strings.Contains(events[0], `"role":"assistant"`) || events[1] != failed || events[2] != "[DONE]" {
			t.Errorf("events %q", events)
		}
	})
}
