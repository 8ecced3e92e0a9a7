package sim_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers/sim"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
)

// eventually polls until ok, or fails the test.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 10*time.Second)
	defer cancel()
	if !wait.Until(ctx, 2*time.Millisecond, ok) {
		t.Fatalf("never happened: %s", what)
	}
}

func counters(t *testing.T, e *sim.Engine) engine.Stats {
	t.Helper()
	s, err := e.Counters()
	if err != nil {
		t.Fatal(err)
	}
	return s[0]
}

func edit(p object, changes object) object {
	p = maps.Clone(p)
	for k, v := range changes {
		if v == "absent" {
			delete(p, k)
		} else {
			p[k] = v
		}
	}
	return p
}

func blockIDs(p object) []any { return p["remote_block_ids"].([]any)[0].([]any) }

// The rows of the table of what vLLM 0.32 does with bad kv_transfer_params.

func TestParamsThatAreHarmless(t *testing.T) {
	r := start(t, "1p1d:profile=instant")
	p, d := r.Engine(0), r.Engine(1)
	prompt := ids(100, 1)
	_, want, _ := complete(t, p, prompt, nil)
	// A link must exist for some rows.
	complete(t, d, ids(40, 2), prefill(t, p, ids(40, 2)))

	fresh := func(changes object) func() any {
		return func() any { return edit(prefill(t, p, prompt), changes) }
	}
	for name, params := range map[string]func() any{
		"null":                func() any { return nil },
		"empty object":        func() any { return object{} },
		"good":                fresh(nil),
		"unknown request id":  fresh(object{"remote_request_id": "cmpl-nobody-0-00000000"}),
		"sizes missing":       fresh(object{"tp_size": "absent", "pp_size": "absent", "dcp_size": "absent"}),
		"wrong token count":   fresh(object{"remote_num_tokens": 5}),
		"unknown keys":        fresh(object{"color": "blue"}),
		"linked: wrong tp":    fresh(object{"tp_size": 8}),
		"linked: wrong port":  fresh(object{"remote_port": 1}),
		"do_remote_prefill 0": fresh(object{"do_remote_prefill": false}),
	} {
		t.Run(name, func(t *testing.T) {
			if status, got, _ := complete(t, d, prompt, params()); status != 200 || got != want {
				t.Errorf("%d %q, want 200 %q", status, got, want)
			}
		})
	}
	if counters(t, p).LateNotes == 0 {
		t.Error("a pull under an unknown request id was not counted")
	}
	t.Run("not an object", func(t *testing.T) {
		if status, body, _ := complete(t, d, prompt, "x"); status != 400 || !strings.Contains(body, "dict_type") {
			t.Errorf("%d %s", status, body)
		}
	})
	t.Run("reused, by two decodes at once", func(t *testing.T) {
		prompt := ids(90, 77)
		params := prefill(t, p, prompt)
		_, want, _ := complete(t, p, prompt, nil)
		var wg sync.WaitGroup
		for range 2 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				status, b, err := tryPost(t.Context(), d.URL()+"/v1/completions", object{"prompt": prompt, "max_tokens": 12, "ignore_eos": true, "kv_transfer_params": params})
				if err != nil || status != 200 || !bytes.Contains(b, []byte(want)) {
					t.Errorf("%v %d %s", err, status, b)
				}
			}()
		}
		wg.Wait()
		if status, got, _ := complete(t, d, prompt, params); status != 200 || got != want {
			t.Errorf("%d %q, want %q", status, got, want)
		}
	})
}

func TestParamsThatGiveWrongText(t *testing.T) {
	r := start(t, "1p1d:profile=instant,kv_blocks=64")
	p, d := r.Engine(0), r.Engine(1)
	prompt, other := ids(100, 1), ids(100, 2)
	_, want, _ := complete(t, p, prompt, nil)
	for name, params := range map[string]func() object{
		"another prompt's": func() object { return prefill(t, p, other) },
		"other block ids": func() object {
			q := prefill(t, p, prompt)
			b := blockIDs(q)
			b[0], b[1] = b[1], b[0]
			return q
		},
		"more block ids": func() object {
			q := prefill(t, p, prompt)
			return edit(q, object{"remote_block_ids": []any{append(blockIDs(q), 1)}})
		},
		"overwritten since": func() object {
			q := prefill(t, p, prompt)
			complete(t, d, prompt, q) // releases the blocks
			for i := range 20 {
				complete(t, p, ids(150, 100+i), nil)
			}
			return q
		},
	} {
		t.Run(name, func(t *testing.T) {
			q := params()
			post(t, d.URL()+"/reset_prefix_cache", nil)
			if status, got, _ := complete(t, d, prompt, q); status != 200 || got == want {
				t.Errorf("%d %q, want another text", status, got)
			}
			post(t, d.URL()+"/reset_prefix_cache", nil)
		})
	}
}

func TestExpiredLease(t *testing.T) {
	r := start(t, "1p1d:profile=instant,lease=30ms")
	p, d := r.Engine(0), r.Engine(1)
	prompt := ids(100, 1)
	_, want, _ := complete(t, p, prompt, nil)
	params := prefill(t, p, prompt)
	if counters(t, p).Pinned > 1 {
		t.Error("more pinned than asked for")
	}
	eventually(t, "the lease ends", func() bool { s := counters(t, p); return s.Expired == 1 && s.Pinned == 0 })
	if status, got, _ := complete(t, d, prompt, params); status != 200 || got != want {
		t.Errorf("%d %q, want %q", status, got, want)
	}
	if s := counters(t, p); s.LateNotes != 1 {
		t.Errorf("%d notifications after expiry, want 1", s.LateNotes)
	}
}

func TestParamsThatFail(t *testing.T) {
	// What fails at once does not wait for as long as a dead peer is tried.
	const patience, atOnce = 2 * time.Second, 2 * time.Second
	r := start(t, "1p1d:profile=instant,patience=2s")
	p, d := r.Engine(0), r.Engine(1)
	prompt := ids(100, 1)
	link := func() { complete(t, d, ids(40, 9), prefill(t, p, ids(40, 9))) }
	link()
	fail := func(name string, params object, atLeast, atMost time.Duration) {
		t.Run(name, func(t *testing.T) {
			began := time.Now()
			status, body, _ := complete(t, d, prompt, params)
			took := time.Since(began)
			if status != 500 || !strings.Contains(body, `"Internal server error"`) {
				t.Errorf("%d %s", status, body)
			}
			if took < atLeast || took > atMost {
				t.Errorf("took %v, want %v to %v", took, atLeast, atMost)
			}
			if up, why := d.Running(); !up {
				t.Fatalf("decode is down: %s", why)
			}
		})
	}
	nobody := "00000000-0000-0000-0000-000000000000"
	fail("unknown engine", edit(prefill(t, p, prompt), object{"remote_engine_id": nobody}), 0, atOnce)
	fail("unknown engine, dead port", edit(prefill(t, p, prompt), object{"remote_engine_id": nobody, "remote_port": 1}), patience, time.Minute)
	fail("ids out of range", edit(prefill(t, p, prompt), object{"remote_block_ids": []any{[]any{100000, 100001, 100002, 100003, 100004, 100005, 100006}}}), 0, atOnce)
	fail("first contact: wrong tp", edit(prefill(t, p, prompt), object{"remote_engine_id": "x", "tp_size": 8}), 0, atOnce)

	old := prefill(t, p, prompt)
	restart(t, p)
	fail("prefill restarted", old, 0, atOnce)
	t.Run("params of the restarted prefill", func(t *testing.T) {
		_, want, _ := complete(t, p, prompt, nil)
		if status, got, _ := complete(t, d, prompt, prefill(t, p, prompt)); status != 200 || got != want {
			t.Errorf("%d %q, want %q", status, got, want)
		}
	})
	old = prefill(t, p, ids(100, 3))
	prompt = ids(100, 3)
	p.Kill()
	fail("prefill killed", old, 0, atOnce)

	for path, body := range map[string]object{
		"/v1/completions":      {"prompt": prompt, "max_tokens": 4, "stream": true, "kv_transfer_params": old},
		"/v1/chat/completions": {"messages": []object{{"role": "user", "content": strings.Repeat("hello world ", 5)}}, "max_tokens": 4, "stream": true, "kv_transfer_params": old},
	} {
		status, b := post(t, d.URL()+path, body)
		events := strings.Split(strings.TrimSpace(string(b)), "\n\n")
		if status != 200 {
			t.Fatalf("%s: %d %s", path, status, b)
		}
		want := 2
		if strings.Contains(path, "chat") {
			want = 3
			if !strings.Contains(events[0], `"role":"assistant"`) {
				t.Errorf("%s: first event %s", path, events[0])
			}
		}
		if len(events) != want || events[want-1] != "data: [DONE]" || events[want-2] != `data: {"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}` {
			t.Errorf("%s: %q", path, events)
		}
	}
}

func TestParamsThatKillTheDecode(t *testing.T) {
	r := start(t, "1p1d:profile=instant")
	p, d := r.Engine(0), r.Engine(1)
	prompt := ids(100, 1)
	revive := func(t *testing.T, exits int) {
		t.Helper()
		eventually(t, "the decode engine exits", func() bool { up, _ := d.Running(); return !up && d.Exits() == exits })
		if _, _, err := tryPost(t.Context(), d.URL()+"/tokenize", object{"prompt": "x"}); err == nil {
			t.Error("a dead engine answers")
		}
		restart(t, d)
		_, want, _ := complete(t, p, prompt, nil)
		if status, got, _ := complete(t, d, prompt, prefill(t, p, prompt)); status != 200 || got != want {
			t.Errorf("after the restart: %d %q", status, got)
		}
	}
	exits := 0
	for name, change := range map[string]any{
		"fewer": []any{[]any{1, 2, 3}}, "empty": []any{}, "null": nil, "flat": []any{1, 2, 3, 4, 5, 6, 7},
		"strings": []any{[]any{"1", "2", "3", "4", "5", "6", "7"}},
	} {
		t.Run(name, func(t *testing.T) {
			post(t, d.URL()+"/reset_prefix_cache", nil)
			status, body, _ := complete(t, d, prompt, edit(prefill(t, p, prompt), object{"remote_block_ids": change}))
			if status != 500 || !strings.Contains(body, "EngineCore encountered an issue") {
				t.Errorf("%d %s", status, body)
			}
			exits++
			revive(t, exits)
		})
	}
	t.Run("a longer prompt", func(t *testing.T) {
		if status, body, _ := complete(t, d, ids(200, 5), prefill(t, p, prompt)); status != 500 || !strings.Contains(body, "EngineCore") {
			t.Errorf("%d %s", status, body)
		}
		exits++
		revive(t, exits)
	})
	for _, key := range []string{"remote_host", "remote_request_id"} {
		t.Run("without "+key, func(t *testing.T) {
			params := edit(prefill(t, p, prompt), object{key: "absent"})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			done := make(chan error, 1)
			go func() {
				_, _, err := tryPost(ctx, d.URL()+"/v1/completions", object{"prompt": prompt, "max_tokens": 4, "kv_transfer_params": params})
				done <- err
			}()
			eventually(t, "the request hangs", func() bool { return counters(t, d).Deferred == 1 })
			if up, _ := d.Running(); !up {
				t.Error("the engine is gone before the client left")
			}
			cancel()
			if err := <-done; err == nil {
				t.Error("the request was answered")
			}
			exits++
			revive(t, exits)
		})
	}
}

func TestClientLeavesDuringPull(t *testing.T) {
	dir := t.TempDir() + "/slow.yaml"
	write(t, dir, "prefill_ms: [0, 0, 0]\ndecode_ms: [0, 0, 0]\ntransfer_ms: [60000, 0]\n")
	r := start(t, "1p:profile=instant+1d:profile="+dir)
	p, d := r.Engine(0), r.Engine(1)
	prompt := ids(100, 1)
	params := prefill(t, p, prompt)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _, _ = tryPost(ctx, d.URL()+"/v1/completions", object{"prompt": prompt, "max_tokens": 4, "kv_transfer_params": params})
	}()
	eventually(t, "the pull runs", func() bool { return counters(t, d).Transfers == 1 })
	cancel()
	<-done
	eventually(t, "prefill frees its blocks", func() bool { s := counters(t, p); return s.Pinned == 0 && s.UsedBlocks == 0 })
	if up, why := d.Running(); !up {
		t.Errorf("decode is down: %s", why)
	}
	_, want, _ := complete(t, p, ids(50, 2), nil)
	if status, got, _ := complete(t, d, ids(50, 2), nil); status != 200 || got != want {
		t.Errorf("%d %q", status, got)
	}
}

func TestRecomputePolicy(t *testing.T) {
	r := start(t, "1p1d:profile=instant,policy=recompute,patience=100ms")
	p, d := r.Engine(0), r.Engine(1)
	prompt := ids(100, 1)
	_, want, _ := complete(t, p, prompt, nil)
	nobody := object{"remote_engine_id": "nobody"}
	for name, change := range map[string]object{
		"unknown engine": nobody,
		"out of range":   {"remote_block_ids": []any{[]any{100000, 100001, 100002, 100003, 100004, 100005, 100006}}},
		"dead port":      {"remote_engine_id": "nobody", "remote_port": 1},
	} {
		post(t, d.URL()+"/reset_prefix_cache", nil)
		if status, got, _ := complete(t, d, prompt, edit(prefill(t, p, prompt), change)); status != 200 || got != want {
			t.Errorf("%s: %d %q, want %q", name, status, got, want)
		}
	}
	s := counters(t, d)
	if s.External != 0 || s.Local != 300 || s.FailedTransfers != 3 {
		t.Errorf("external %d, local %d, failed %d", s.External, s.Local, s.FailedTransfers)
	}
	params := prefill(t, p, prompt)
	p.Kill()
	post(t, d.URL()+"/reset_prefix_cache", nil)
	if status, got, _ := complete(t, d, prompt, params); status != 200 || got != want {
		t.Errorf("killed: %d %q", status, got)
	}
}

func TestStreamedPrefillHasNoParams(t *testing.T) {
	r := start(t, "1p:profile=instant")
	status, b := post(t, r.Engine(0).URL()+"/v1/completions", object{"prompt": ids(50, 1), "max_tokens": 1, "stream": true, "kv_transfer_params": prefillParams})
	if status != 200 || bytes.Contains(b, []byte("remote_block_ids")) {
		t.Errorf("%d %s", status, b)
	}
	if counters(t, r.Engine(0)).Pinned != 1 {
		t.Error("the blocks are not pinned")
	}
}

// The prefill's parameters have the keys of the captured ones, in their order.
func TestParamsLookLikeTheCapture(t *testing.T) {
	r := start(t, "1p:profile=instant")
	resp, err := http.Post(r.Engine(0).URL()+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"one two three","max_tokens":1,"kv_transfer_params":{"do_remote_decode":true}}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	c := decode[completion](t, b)
	dec := json.NewDecoder(bytes.NewReader(c.KV))
	var keys []string
	for depth, key := 0, true; ; {
		tok, err := dec.Token()
		if err != nil {
			break
		}
		switch v := tok.(type) {
		case json.Delim:
			if v == '{' || v == '[' {
				depth++
			} else {
				depth--
			}
			key = true
		default:
			if s, ok := v.(string); ok && depth == 1 && key {
				keys = append(keys, s)
				key = false
			} else {
				key = true
			}
		}
	}
	want := "do_remote_prefill do_remote_decode remote_block_ids remote_engine_id remote_request_id remote_host remote_port tp_size dcp_size pp_size remote_num_tokens remote_blocks_expiry_time transfer_mode remote_prefill_cached_tokens"
	if got := strings.Join(keys, " "); got != want {
		t.Errorf("keys\n%s, want\n%s", got, want)
	}
}

// TestOffloadParams: what a decode engine with a peer-to-peer tier does with its
// parameters. Blocks that do not come are computed, which takes time and changes no text.
func TestOffloadParams(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		// params is what the decode gets instead, or another prompt that is prefilled.
		params object
		other  bool
		moved  uint64
		failed bool
	}{
		{name: "as it should be", moved: 96},
		{name: "another name", params: object{"kv_request_id": "nobody"}, failed: true},
		{name: "a port at which nobody listens", params: object{"remote_port": 1}, failed: true},
		{name: "a name with another prompt's blocks", other: true, failed: true},
		{name: "no port", params: object{"remote_port": "absent"}},
		{name: "no host", params: object{"remote_host": "absent"}},
		{name: "an empty name", params: object{"kv_request_id": ""}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := start(t, "1p1d:profile=instant,connector=offload-p2p,patience=50ms,block=32")
			p, d := r.Engine(0), r.Engine(1)
			_, want, _ := complete(t, p, ids(100, 1), nil)
			first := ids(100, 1)
			if tt.other {
				first = ids(100, 2)
			}
			status, _, a := complete(t, p, first, object{"remote_decoder": object{"kv_request_id": "one"}})
			if status != 200 || string(a.KV) != "null" {
				t.Fatalf("%d, parameters %s", status, a.KV)
			}
			w := p.Worker()
			params := edit(object{"kv_request_id": "one", "remote_host": w.Bootstrap.Host, "remote_port": w.Bootstrap.Port}, tt.params)
			if status, got, _ := complete(t, d, ids(100, 1), object{"remote_prefiller": params}); status != 200 || got != want {
				t.Errorf("%d %q, want 200 %q", status, got, want)
			}
			c := counters(t, d)
			if c.External != tt.moved || c.FailedTransfers > 0 != tt.failed || c.External+c.Local != 100 || counters(t, p).Pinned != 0 {
				t.Errorf("%d tokens came, %d were computed, %d transfers failed; %d prompts are pinned", c.External, c.Local, c.FailedTransfers, counters(t, p).Pinned)
			}
			// A name serves once.
			if tt.moved > 0 {
				if status, got, _ := complete(t, d, ids(100, 1), object{"remote_prefiller": params}); status != 200 || got != want {
					t.Errorf("again: %d %q, want 200 %q", status, got, want)
				}
			}
		})
	}
}
