package disagg

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// worker makes a worker with one rank; dp more than 1 makes several.
func worker(name string, role workers.Role, c workers.Connector, dp int) *workers.Worker {
	u, err := url.Parse("http://127.0.0.1:8" + fmt.Sprint(100+len(name)))
	if err != nil {
		panic(err)
	}
	w := &workers.Worker{Facts: workers.Facts{Engine: workers.VLLM, Role: role, Connector: c, BlockSize: 32}, Name: name, URL: u, State: &workers.State{}}
	for i := range dp {
		w.Ranks = append(w.Ranks, &workers.Rank{WorkerName: name, DP: i, Label: fmt.Sprintf("%s/dp%d", name, i)})
	}
	return w
}

// captured is the answer of a real vLLM 0.32.0 prefill engine (block size 32)
// to a prompt of 200 token ids.
const captured = `{"id":"cmpl-810f561d65b277a9","object":"text_completion","created":1795261515,"model":"small",
"choices":[{"index":0,"text":".com","logprobs":null,"finish_reason":"length","stop_reason":null}],
"usage":{"prompt_tokens":200,"total_tokens":201,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}},
"kv_transfer_params":{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[700, 699, 698, 697, 696, 695, 694]],
"remote_engine_id": "23e3e443-45fd-4472-b476-5bf4cd33f119", "remote_request_id": "cmpl-810f561d65b277a9-0-bb15515f",
"remote_host": "127.0.0.1", "remote_port": 18200, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 200,
"remote_blocks_expiry_time": null, "transfer_mode": "pull", "remote_prefill_cached_tokens": 0}}`

func dispatch(c workers.Connector) Dispatch {
	p, d := worker("prefill-0", workers.Prefill, c, 1), worker("decode-0", workers.Decode, c, 1)
	return Dispatch{
		RequestID: "810f561d65b277a9", Prefill: workers.Peer{Worker: p, Rank: p.Ranks[0]}, Decode: workers.Peer{Worker: d, Rank: d.Ranks[0]},
		Facts: api.Facts{Kind: api.Completion, Splittable: true, ISL: 200, Source: route.FromIDs, N: 1, Prompts: 1, MaxTokens: 8, MaxTokensKey: "max_tokens", MinTokens: -1},
	}
}

func begin(t testing.TB, kind workers.Connector, o Options, d Dispatch) *Transfer {
	t.Helper()
	c, err := NewConnector(kind, o)
	if err != nil {
		t.Fatal(err)
	}
	tr, err := c.Begin(d)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// spliced is a client's body after edits.
func spliced(t testing.TB, kind api.Kind, body string, edits []api.Edit) string {
	t.Helper()
	var v api.View
	if err := v.Parse([]byte(body), kind, api.Limits{}); err != nil {
		t.Fatal(err)
	}
	return string(api.Splice(nil, &v, edits))
}

// decodeBody is a client's body as a transfer sends it to the decode engine.
func decodeBody(t testing.TB, tr *Transfer, kind api.Kind, body string) string {
	t.Helper()
	edits, err := tr.DecodeEdits()
	if err != nil {
		t.Fatal(err)
	}
	return spliced(t, kind, body, edits)
}

func sameJSON(t testing.TB, want, got string) {
	t.Helper()
	var w, g any
	if err := json.Unmarshal([]byte(want), &w); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(got), &g); err != nil {
		t.Fatalf("%v in %s", err, got)
	}
	if d := gocmp.Diff(w, g); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

// A1: the prefill body.
func TestA1PrefillBody(t *testing.T) {
	tr := begin(t, workers.ConnectorNIXL, Options{}, dispatch(workers.ConnectorNIXL))
	for _, tt := range []struct{ name, body, want string }{
		{
			"everything", `{"model":"m","prompt":[1,2],"stream":true,"stream_options":{"include_usage":true},"max_tokens":50,"max_completion_tokens":60,"min_tokens":5,"n":1,"x":18446744073709551615}`,
			`{"model":"m","prompt":[1,2],"stream":false,"max_tokens":1,"max_completion_tokens":1,"n":1,"x":18446744073709551615,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}`,
		},
		{
			"nothing but a prompt", `{"prompt":"a"}`,
			`{"prompt":"a","stream":false,"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}`,
		},
		{
			"the newer name alone", `{"prompt":"a","max_completion_tokens":7}`,
			`{"prompt":"a","stream":false,"max_tokens":1,"max_completion_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}`,
		},
		{
			"the client's own transfer fields", `{"prompt":"a","kv_transfer_params":{"do_remote_prefill":true,"remote_host":"evil"}}`,
			`{"prompt":"a","stream":false,"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}`,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := spliced(t, api.Completion, tt.body, tr.PrefillEdits())
			sameJSON(t, tt.want, got)
			if strings.Contains(tt.body, "18446744073709551615") && !strings.Contains(got, `"x":18446744073709551615`) {
				t.Error("a big number changed")
			}
		})
	}
	d := dispatch(workers.ConnectorNIXL)
	d.Facts.Kind = api.Generate
	got := spliced(t, api.Generate, `{"token_ids":[1,2],"sampling_params":{"max_tokens":9,"min_tokens":3,"seed":1}}`, begin(t, workers.ConnectorNIXL, Options{}, d).PrefillEdits())
	sameJSON(t, `{"token_ids":[1,2],"sampling_params":{"max_tokens":1,"seed":1},"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}`, got)
}

// The prefill bodies of the other chat endpoints: one token under the name that
// each has for it, no stream, nothing kept.
func TestPrefillBodyOfMessagesAndResponses(t *testing.T) {
	for _, tt := range []struct {
		name       string
		kind       api.Kind
		connector  workers.Connector
		budget     bool
		body, want string
	}{
		{
			"messages", api.Messages, workers.ConnectorNIXL, true,
			`{"messages":[],"max_tokens":4000,"stream":true,"thinking":{"type":"enabled","budget_tokens":1024},"stop_sequences":["x"]}`,
			`{"messages":[],"max_tokens":1,"stream":false,"thinking":{"type":"adaptive"},"stop_sequences":["x"],"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}`,
		},
		{
			"messages over shared storage", api.Messages, workers.ConnectorSharedStorage, false,
			`{"messages":[],"max_tokens":4000,"thinking":{"type":"disabled"}}`, `{"messages":[],"max_tokens":1,"stream":false,"thinking":{"type":"disabled"}}`,
		},
		{
			"responses", api.Responses, workers.ConnectorNIXL, false,
			`{"input":"a","max_output_tokens":9,"stream":true,"stream_options":{"include_obfuscation":false},"store":true,"background":true}`,
			`{"input":"a","max_output_tokens":1,"stream":false,"store":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}`,
		},
		{"responses, no transfer parameters", api.Responses, workers.ConnectorSharedStorage, false, `{"input":"a"}`, `{"input":"a","max_output_tokens":1,"stream":false,"store":false}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := dispatch(tt.connector)
			d.Facts.Kind, d.Facts.ThinkingBudget = tt.kind, tt.budget
			sameJSON(t, tt.want, spliced(t, tt.kind, tt.body, begin(t, tt.connector, Options{}, d).PrefillEdits()))
		})
	}
}

// A2: the decode body is the client's, byte for byte, and the prefill's
// parameters, byte for byte.
func TestA2DecodeBody(t *testing.T) {
	tr := begin(t, workers.ConnectorNIXL, Options{}, dispatch(workers.ConnectorNIXL))
	if err := tr.CheckPrefill([]byte(captured)); err != nil {
		t.Fatal(err)
	}
	body := `{ "prompt":[1, 2] ,"stream" :true,"big":1e400, "unknown":{"b":1,"a":2}}`
	params := captured[strings.Index(captured, `{"do_remote`) : len(captured)-1]
	want := strings.TrimSuffix(body, "}") + `,"kv_transfer_params":` + params + "}"
	if got := decodeBody(t, tr, api.Completion, body); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	want2 := Checked{PromptTokens: 200, CachedTokens: 0, EngineID: "23e3e443-45fd-4472-b476-5bf4cd33f119", RequestID: "cmpl-810f561d65b277a9-0-bb15515f", Host: "127.0.0.1", Port: 18200, Blocks: 7, Groups: 1}
	if d := gocmp.Diff(want2, tr.Facts()); d != "" {
		t.Error(d)
	}
}

// TestHandOver: after a refusal another decode rank gets the KV, with the same edits, once,
// if the decode engine fetches it by itself from a host that it can reach.
func TestHandOver(t *testing.T) {
	elsewhere := func(host string) workers.Peer {
		w := worker("decode-1", workers.Decode, workers.ConnectorNIXL, 1)
		w.URL = &url.URL{Scheme: "http", Host: host}
		return workers.Peer{Worker: w, Rank: w.Ranks[0]}
	}
	near, far := elsewhere("127.0.0.1:9"), elsewhere("10.0.0.7:9")
	for _, c := range []struct {
		kind workers.Connector
		to   workers.Peer
		want bool
	}{
		{workers.ConnectorNIXL, near, true},
		{workers.ConnectorNIXL, far, false}, // the KV is at 127.0.0.1
		{workers.ConnectorSharedStorage, near, false},
		{workers.ConnectorLMCache, near, false},
		{workers.ConnectorSGLang, near, false},
	} {
		d := dispatch(c.kind)
		d.Decode.Worker.LMCache = &workers.LMCacheDecoder{Host: "d", InitPorts: []int{1}, AllocPorts: []int{2}}
		tr := begin(t, c.kind, Options{}, d)
		if tr.HandOver(c.to) {
			t.Errorf("%s: handed over before the prefill", c.kind)
		}
		if err := tr.CheckPrefill([]byte(captured)); err != nil {
			t.Fatal(err)
		}
		if tr.Mode() == Sequential && tr.HandOver(c.to) {
			t.Errorf("%s: handed over before a decode leg has had it", c.kind)
		}
		first, err := tr.DecodeEdits()
		if err != nil {
			t.Fatal(err)
		}
		if got := tr.HandOver(c.to); got != c.want {
			t.Errorf("%s to %s: handed over %v, want %v", c.kind, c.to.Worker.URL, got, c.want)
		}
		again, err := tr.DecodeEdits()
		if c.want != (err == nil) || c.want && gocmp.Diff(first, again) != "" {
			t.Errorf("%s to %s: %v, %v", c.kind, c.to.Worker.URL, again, err)
		}
		if c.want && tr.HandOver(c.to) != true {
			t.Errorf("%s: not handed over after a second refusal", c.kind)
		}
	}
}

// Invariant 1: one prefill, one decode, also when many try at once.
func TestTransferIsUsedOnce(t *testing.T) {
	for _, kind := range []workers.Connector{workers.ConnectorNIXL, workers.ConnectorSGLang, workers.ConnectorLMCache, workers.ConnectorSharedStorage} {
		t.Run(string(kind), func(t *testing.T) {
			d := dispatch(kind)
			d.Decode.Worker.LMCache = &workers.LMCacheDecoder{Host: "d", InitPorts: []int{1}, AllocPorts: []int{2}}
			tr := begin(t, kind, Options{}, d)
			if tr.Mode() == Sequential {
				if _, err := tr.DecodeEdits(); !errors.Is(err, ErrUnchecked) {
					t.Errorf("before the check: %v", err)
				}
			}
			if err := tr.CheckPrefill([]byte(captured)); err != nil {
				t.Fatal(err)
			}
			if err := tr.CheckPrefill([]byte(captured)); tr.Mode() == Sequential && !errors.Is(err, ErrUsed) {
				t.Errorf("a second answer: %v", err)
			}
			var got, used atomic.Int64
			var wg sync.WaitGroup
			for range 16 {
				wg.Go(func() {
					switch _, err := tr.DecodeEdits(); {
					case err == nil:
						got.Add(1)
					case errors.Is(err, ErrUsed):
						used.Add(1)
					}
				})
			}
			wg.Wait()
			if got.Load() != 1 || used.Load() != 15 {
				t.Errorf("%d got the edits, %d heard that they are used", got.Load(), used.Load())
			}
		})
	}
}

func TestSGLang(t *testing.T) {
	d := dispatch(workers.ConnectorSGLang)
	d.Prefill.Worker = worker("prefill-0", workers.Prefill, workers.ConnectorSGLang, 4)
	d.Prefill.Worker.Bootstrap = &workers.Bootstrap{Host: "fd00::7", Port: 8998}
	d.Prefill.Rank = d.Prefill.Worker.Ranks[3]
	seen := map[uint64]bool{}
	for range 100 {
		tr := begin(t, workers.ConnectorSGLang, Options{}, d)
		if tr.Mode() != Concurrent || tr.ID()%4 != 3 || tr.ID() >= 1<<63 || seen[tr.ID()] {
			t.Fatalf("mode %s, room %d (seen: %v)", tr.Mode(), tr.ID(), seen[tr.ID()])
		}
		seen[tr.ID()] = true
	}
	tr := begin(t, workers.ConnectorSGLang, Options{}, d)
	body := `{"messages":[],"stream":true,"max_tokens":50}`
	common := fmt.Sprintf(`{"messages":[],"stream":true,"max_tokens":50,"bootstrap_host":"[fd00::7]","bootstrap_port":8998,"bootstrap_room":%d`, tr.ID())
	if got := spliced(t, api.Chat, body, tr.PrefillEdits()); got != common+"}" {
		t.Errorf("prefill %s", got)
	}
	if got := decodeBody(t, tr, api.Chat, body); got != common+`,"disagg_prefill_dp_rank":3}` {
		t.Errorf("decode %s", got)
	}
	if err := tr.CheckPrefill([]byte(`{"error":{"message":"x"}}`)); !errors.Is(err, ErrPrefillFailed) {
		t.Errorf("a failed prefill answer: %v", err)
	}
	for body, want := range map[string]error{
		"data: {\"choices\":[{\"delta\":{}}]}\n\ndata: {\"choices\":[{\"finish_reason\":\"length\"}]}\r\n\r\ndata: [DONE]\n\n": nil,
		"data: {\"choices\":[]}\n\ndata: {\"error\":{\"message\":\"gone\"}}\n\ndata: [DONE]\n\n":                               ErrPrefillFailed,
		"data: {\"choices\":[{\"finish_reason\":\"abort\"}]}\n\n":                                                              ErrPrefillFailed,
		"data: {\"choices\n\n": ErrPrefillFailed,
		"<html>":               ErrPrefillFailed,
		"":                     ErrPrefillFailed,
	} {
		if err := tr.CheckPrefill([]byte(body)); !errors.Is(err, want) {
			t.Errorf("prefill answer %q: %v, want %v", body, err, want)
		}
	}
	d.Prefill.Worker.Bootstrap = nil
	got := spliced(t, api.Chat, body, begin(t, workers.ConnectorSGLang, Options{}, d).PrefillEdits())
	if !strings.Contains(got, `"bootstrap_host":"127.0.0.1","bootstrap_port":null`) {
		t.Errorf("without a stated address: %s", got)
	}
}

// TestSGLangReadsTheBodies: what both legs carry is what SGLang's own package reads from
// them, for one prompt and for several. DYNCTL_SGLANG names a Python that has the package.
func TestSGLangReadsTheBodies(t *testing.T) {
	interpreter := os.Getenv("DYNCTL_SGLANG")
	if interpreter == "" {
		t.Skip("skipped: DYNCTL_SGLANG names no Python with SGLang's package (e2e/engines.py sglang installs one)")
	}
	type triple struct {
		Host any `json:"bootstrap_host"`
		Port any `json:"bootstrap_port"`
		Room any `json:"bootstrap_room"`
		From any `json:"disagg_prefill_dp_rank"`
		At   any `json:"routed_dp_rank"`
	}
	var in bytes.Buffer
	var sent []string
	for _, address := range []*workers.Bootstrap{{Host: "fd00::7", Port: 8998}, {Host: "10.0.0.7", Port: 1}, nil} {
		for _, c := range []struct {
			model string
			kind  api.Kind
			body  string
		}{
			{"ChatCompletionRequest", api.Chat, `{"model":"m","messages":[{"role":"user","content":"a"}],"stream":true,"max_tokens":50}`},
			{"CompletionRequest", api.Completion, `{"model":"m","prompt":"a","max_tokens":50}`},
		} {
			d := dispatch(workers.ConnectorSGLang)
			d.Prefill.Worker = worker("prefill-0", workers.Prefill, workers.ConnectorSGLang, 4)
			d.Prefill.Worker.Bootstrap, d.Prefill.Rank = address, d.Prefill.Worker.Ranks[3]
			tr := begin(t, workers.ConnectorSGLang, Options{}, d)
			for _, body := range []string{spliced(t, c.kind, c.body, tr.PrefillEdits()), decodeBody(t, tr, c.kind, c.body)} {
				sent = append(sent, body)
				fmt.Fprintf(&in, "[%q,%s]\n", c.model, body)
			}
		}
	}
	cmd := exec.Command(interpreter, filepath.Join("testdata", "sglang_bodies.py"))
	var stderr strings.Builder
	cmd.Stdin, cmd.Stderr = &in, &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, stderr.String())
	}
	dec := json.NewDecoder(bytes.NewReader(out))
	dec.UseNumber()
	for _, body := range sent {
		var want triple
		own := json.NewDecoder(strings.NewReader(body))
		own.UseNumber()
		var got struct {
			Read    triple
			Unknown []string
		}
		if err := cmp.Or(own.Decode(&want), dec.Decode(&got)); err != nil {
			t.Fatal(err)
		}
		if got.Read != want || got.Read.Host == nil || got.Read.Room == nil || len(got.Unknown) > 0 {
			t.Errorf("%s: read %+v, unknown %v", body, got.Read, got.Unknown)
		}
	}
}

func TestRoomRange(t *testing.T) {
	for _, draw := range []uint64{0, 1, 2, 1<<64 - 1, 1<<64 - 2, 1 << 63} {
		for ranks := 1; ranks <= 9; ranks++ {
			for rank := range ranks {
				if v := room(draw, ranks, rank); v >= 1<<63 || v%uint64(ranks) != uint64(rank) {
					t.Errorf("room(%d, %d, %d) = %d", draw, ranks, rank, v)
				}
			}
		}
	}
}

func TestSharedStorage(t *testing.T) {
	tr := begin(t, workers.ConnectorSharedStorage, Options{}, dispatch(workers.ConnectorSharedStorage))
	sameJSON(t, `{"prompt":"a","stream":false,"max_tokens":1}`, spliced(t, api.Completion, `{"prompt":"a","stream":true,"max_tokens":9}`, tr.PrefillEdits()))
	if err := tr.CheckPrefill([]byte(`{"choices":[{"finish_reason":"length"}],"usage":{"prompt_tokens":5}}`)); err != nil {
		t.Fatal(err)
	}
	if edits, err := tr.DecodeEdits(); err != nil || len(edits) != 0 {
		t.Errorf("decode edits %v, %v", edits, err)
	}
	if got := tr.Facts().PromptTokens; got != 5 {
		t.Errorf("prompt tokens %d", got)
	}
}

func TestNewConnectorUnknown(t *testing.T) {
	if _, err := NewConnector("pigeon", Options{}); err == nil || !strings.Contains(err.Error(), "nixl") {
		t.Errorf("got %v, want an error that lists the kinds", err)
	}
}

func BenchmarkBeginCheck(b *testing.B) {
	d := dispatch(workers.ConnectorNIXL)
	body := []byte(captured)
	c, err := NewConnector(workers.ConnectorNIXL, Options{})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		tr, err := c.Begin(d)
		if err != nil {
			b.Fatal(err)
		}
		if err := tr.CheckPrefill(body); err != nil {
			b.Fatal(err)
		}
	}
}
