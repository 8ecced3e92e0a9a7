package disagg

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/router/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// worker makes a worker with one rank; dp more than 1 makes several.
func worker(name string, role workers.Role, c workers.Connector, dp int) *workers.Worker {
	u, err := url.Parse("http://127.0.0.1:8" + fmt.Sprint(100+len(name)))
	if err != nil {
		panic(err)
	}
	w := &workers.Worker{Name: name, URL: u, Engine: workers.VLLM, Role: role, Connector: c, BlockSize: 32, State: &workers.State{}}
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
		RequestID: "810f561d65b277a9", Prefill: Peer{p, p.Ranks[0]}, Decode: Peer{d, d.Ranks[0]},
		Facts: Facts{Kind: api.Completion, Splittable: true, ISL: 200, Source: FromIDs, N: 1, Prompts: 1, MaxTokens: 8, MaxTokensKey: "max_tokens", MinTokens: -1},
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

func sameJSON(t testing.TB, want, got string) {
	t.Helper()
	var w, g any
	if err := json.Unmarshal([]byte(want), &w); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(got), &g); err != nil {
		t.Fatalf("%v in %s", err, got)
	}
	if d := cmp.Diff(w, g); d != "" {
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
		{"responses, nothing told", api.Responses, workers.ConnectorSharedStorage, false, `{"input":"a"}`, `{"input":"a","max_output_tokens":1,"stream":false,"store":false}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := dispatch(tt.connector)
			d.Facts.Kind, d.Facts.ThinkingBudget = tt.kind, tt.budget
			sameJSON(t, tt.want, spliced(t, tt.kind, tt.body, begin(t, tt.connector, Options{}, d).PrefillEdits()))
		})
	}
}

// Answers of the other chat endpoints are judged by the same rules.
func TestCheckPrefillOfMessagesAndResponses(t *testing.T) {
	params := captured[strings.Index(captured, `"kv_transfer_params"`):]
	response := strings.Replace(params, "cmpl-810f561d65b277a9-0-bb15515f", "resp_b5f1_0-bb15515f", 1)
	for _, tt := range []struct {
		name   string
		kind   api.Kind
		body   string
		err    error
		tokens int
		cached int
	}{
		{"messages", api.Messages, `{"id":"chatcmpl-810f561d65b277a9","type":"message","role":"assistant","stop_reason":"max_tokens","usage":{"input_tokens":200,"output_tokens":1},` + params, nil, 200, -1},
		{"messages, some cached", api.Messages, `{"id":"x","type":"message","stop_reason":"max_tokens","usage":{"input_tokens":30,"cache_read_input_tokens":160,"cache_creation_input_tokens":10,"output_tokens":1},` + params, nil, 200, 160},
		{"messages, another count", api.Messages, `{"id":"x","type":"message","stop_reason":"max_tokens","usage":{"input_tokens":200,"cache_read_input_tokens":160,"output_tokens":1},` + params, ErrBadParams, 360, 160},
		{"messages, the end of the turn", api.Messages, `{"id":"x","type":"message","stop_reason":"end_turn","usage":{"input_tokens":200}}`, ErrEnded, 200, -1},
		{"messages, an end without a name", api.Messages, `{"id":"x","type":"message","usage":{"input_tokens":200}}`, ErrEnded, 200, -1},
		{"messages without a connector", api.Messages, `{"id":"x","type":"message","stop_reason":"max_tokens","usage":{"input_tokens":200}}`, ErrMissingParams, 200, -1},
		{"messages, an error", api.Messages, `{"type":"error","error":{"type":"api_error","message":"m"}}`, ErrPrefillFailed, 0, 0},
		{"responses", api.Responses, `{"id":"resp_b5f1","object":"response","status":"incomplete","error":null,"usage":{"input_tokens":200,"input_tokens_details":{"cached_tokens":32}},` + response, nil, 200, 32},
		{"responses, another's", api.Responses, `{"id":"resp_c","object":"response","status":"incomplete","usage":{"input_tokens":200},` + response, ErrBadParams, 200, -1},
		{"responses, complete with its first token", api.Responses, `{"id":"resp_b5f1","object":"response","status":"completed","usage":{"input_tokens":200},"kv_transfer_params":null}`, ErrEnded, 200, -1},
		{"responses without a connector", api.Responses, `{"id":"resp_b5f1","object":"response","status":"incomplete","usage":{"input_tokens":200},"kv_transfer_params":null}`, ErrMissingParams, 200, -1},
		{"responses, queued", api.Responses, `{"id":"resp_b5f1","object":"response","status":"queued","usage":null,"kv_transfer_params":null}`, ErrPrefillFailed, 0, 0},
		{"responses, failed", api.Responses, `{"id":"resp_b5f1","object":"response","status":"failed","error":{"code":"server_error"}}`, ErrPrefillFailed, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := dispatch(workers.ConnectorNIXL)
			d.Facts.Kind, d.Facts.Source = tt.kind, FromEngine
			tr := begin(t, workers.ConnectorNIXL, Options{}, d)
			if err := tr.CheckPrefill([]byte(tt.body)); !errors.Is(err, tt.err) {
				t.Fatalf("got %v, want %v", err, tt.err)
			}
			if f := tr.Facts(); f.PromptTokens != tt.tokens || f.CachedTokens != tt.cached {
				t.Errorf("facts %+v", f)
			}
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
	edits, err := tr.DecodeEdits()
	if err != nil {
		t.Fatal(err)
	}
	body := `{ "prompt":[1, 2] ,"stream" :true,"big":1e400, "unknown":{"b":1,"a":2}}`
	params := captured[strings.Index(captured, `{"do_remote`) : len(captured)-1]
	want := strings.TrimSuffix(body, "}") + `,"kv_transfer_params":` + params + "}"
	if got := spliced(t, api.Completion, body, edits); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	want2 := Checked{PromptTokens: 200, CachedTokens: 0, EngineID: "23e3e443-45fd-4472-b476-5bf4cd33f119", RequestID: "cmpl-810f561d65b277a9-0-bb15515f", Host: "127.0.0.1", Port: 18200, Blocks: 7, Groups: 1}
	if d := cmp.Diff(want2, tr.Facts()); d != "" {
		t.Error(d)
	}
}

// A3, A4 and the table of what a decode engine does with wrong parameters:
// every row that gives wrong text, hangs, or makes the engine exit is refused.
func TestCheckPrefill(t *testing.T) {
	sub := func(pairs ...string) string {
		out := captured
		for i := 0; i < len(pairs); i += 2 {
			was := out
			if out = strings.Replace(was, pairs[i], pairs[i+1], 1); out == was {
				panic("nothing to replace: " + pairs[i])
			}
		}
		return out
	}
	blocks := func(ids string) string { return sub("[[700, 699, 698, 697, 696, 695, 694]]", ids) }
	ids := func(n int) string {
		s := make([]string, n)
		for i := range s {
			s[i] = fmt.Sprint(700 - i)
		}
		return "[" + strings.Join(s, ",") + "]"
	}
	cut := captured[:strings.Index(captured, `,
"kv_transfer_params"`)]
	old := cut + `,"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":%s,"remote_engine_id":"e","remote_request_id":"cmpl-810f561d65b277a9-0","remote_host":"127.0.0.1","remote_port":5600}}`
	elsewhere := func(d *Dispatch) {
		d.Prefill.Worker.URL, _ = url.Parse("http://10.0.0.1:8000")
		d.Decode.Worker.URL, _ = url.Parse("http://[fd00::2]:8000")
	}
	for _, tt := range []struct {
		name   string
		body   string
		change func(*Dispatch)
		err    error
		field  string
	}{
		{"as captured", captured, nil, nil, ""},
		{"params absent", cut + "}", nil, ErrMissingParams, ""},
		{"params null", cut + `,"kv_transfer_params":null}`, nil, ErrMissingParams, ""},
		{"params empty", cut + `,"kv_transfer_params":{}}`, nil, ErrMissingParams, ""},
		{"params in other case", cut + `,"KV_TRANSFER_PARAMS":{"a":1}}`, nil, ErrMissingParams, ""},
		{"the first token ended the answer: stop", strings.Replace(cut, `"length"`, `"stop"`, 1) + `,"kv_transfer_params":null}`, nil, ErrEnded, ""},
		{"the first token ended the answer: repetition", strings.Replace(cut, `"length"`, `"repetition"`, 1) + `,"kv_transfer_params":{}}`, nil, ErrEnded, ""},
		{"the first token ended the answer: tool_calls", strings.Replace(cut, `"length"`, `"tool_calls"`, 1) + "}", nil, ErrEnded, ""},
		{"nobody says how the answer ended", strings.Replace(cut, `"length"`, `null`, 1) + "}", nil, ErrMissingParams, ""},
		{"params too large", sub(`"tp_size"`, `"more":"`+strings.Repeat("x", maxParamsBytes)+`","tp_size"`), nil, ErrBadParams, transferParams},
		{"one problem that does no harm before one that does", sub(`"remote_blocks_expiry_time": null`, `"remote_blocks_expiry_time": "soon"`, `"remote_request_id"`, `"request_id"`), nil, ErrBadParams, "remote_request_id"},
		{"params not an object", cut + `,"kv_transfer_params":[1]}`, nil, ErrBadParams, transferParams},
		{"an error in a 200", `{"error":{"message":"Internal server error","code":500}}`, nil, ErrPrefillFailed, ""},
		{"finish reason error", sub(`"length"`, `"error"`), nil, ErrPrefillFailed, ""},
		{"finish reason abort", sub(`"length"`, `"abort"`), nil, ErrPrefillFailed, ""},
		{"finish reason stop", sub(`"length"`, `"stop"`), nil, nil, ""},
		{"not JSON", `<html>`, nil, ErrPrefillFailed, ""},
		{"null", `null`, nil, ErrPrefillFailed, ""},
		{"cut off", captured[:len(captured)-2], nil, ErrPrefillFailed, ""},
		{"an event stream", "data: {}\n\n", nil, ErrPrefillFailed, ""},

		{"fewer block ids", blocks("[" + ids(6) + "]"), nil, ErrBadParams, "remote_block_ids"},
		{"more block ids", blocks("[" + ids(8) + "]"), nil, ErrBadParams, "remote_block_ids"},
		{"no block ids", blocks("[]"), nil, ErrBadParams, "remote_block_ids"},
		{"no block ids in a group", blocks("[[]]"), nil, ErrBadParams, "remote_block_ids"},
		{"block ids null", blocks("null"), nil, ErrBadParams, "remote_block_ids"},
		{"block ids missing", sub(`"remote_block_ids"`, `"remote_blocks"`), nil, ErrBadParams, "remote_block_ids"},
		{"a flat list from an engine of today", blocks(ids(7)), nil, ErrBadParams, "remote_block_ids"},
		{"strings", blocks(`[["700","699","698","697","696","695","694"]]`), nil, ErrBadParams, "remote_block_ids"},
		{"fractions", blocks(`[[700.5,699,698,697,696,695,694]]`), nil, ErrBadParams, "remote_block_ids"},
		{"negative", blocks(`[[-1,699,698,697,696,695,694]]`), nil, ErrBadParams, "remote_block_ids"},
		{"huge", blocks(`[[99999999999,699,698,697,696,695,694]]`), nil, ErrBadParams, "remote_block_ids"},
		{"one block twice", blocks(`[[700,700,698,697,696,695,694]]`), nil, ErrBadParams, "remote_block_ids"},
		{"mixed nesting", blocks(`[[700,699,698,697,696,695,694],3]`), nil, ErrBadParams, "remote_block_ids"},
		{"two groups, one a sliding window", blocks("[" + ids(7) + "," + ids(2) + "]"), nil, nil, ""},
		{"two groups, none in full", blocks("[" + ids(6) + "," + ids(2) + "]"), nil, ErrBadParams, "remote_block_ids"},
		{"another block size", captured, func(d *Dispatch) { d.Prefill.Worker.BlockSize = 64 }, ErrBadParams, "remote_block_ids"},
		{"block size not known", captured, func(d *Dispatch) { d.Prefill.Worker.BlockSize = 0 }, nil, ""},
		{"block size told by the engine", sub(`"tp_size": 1`, `"tp_size": 1, "remote_block_size": 32`), func(d *Dispatch) { d.Prefill.Worker.BlockSize = 64 }, nil, ""},
		{"vLLM 0.9: a flat list without the partial block", fmt.Sprintf(old, ids(6)), nil, nil, ""},
		{"vLLM 0.9: a flat list, too short", fmt.Sprintf(old, ids(5)), nil, ErrBadParams, "remote_block_ids"},
		{"vLLM 0.9: a flat list, too long", fmt.Sprintf(old, ids(8)), nil, ErrBadParams, "remote_block_ids"},

		{"params of a longer prompt", captured, func(d *Dispatch) { d.Facts.ISL = 199 }, ErrBadParams, "prompt_tokens"},
		{"params of a shorter prompt", captured, func(d *Dispatch) { d.Facts.ISL = 201 }, ErrBadParams, "prompt_tokens"},
		{"a prompt that the engine cuts", captured, func(d *Dispatch) { d.Facts.ISL, d.Facts.Truncated = 400, true }, nil, ""},
		{"/tokenize may count otherwise than the request", captured, func(d *Dispatch) { d.Facts.ISL, d.Facts.Source = 190, FromEngine }, nil, ""},
		{"our own count may differ", captured, func(d *Dispatch) { d.Facts.ISL, d.Facts.Source = 199, FromLocal }, nil, ""},
		{"blocks of our count where the engine has another", blocks("[" + ids(6) + "]"), func(d *Dispatch) { d.Facts.ISL, d.Facts.Source = 190, FromEngine }, ErrBadParams, "remote_block_ids"},
		{"blocks of the whole prompt where the engine cuts it", blocks("[" + ids(13) + "]"), func(d *Dispatch) { d.Facts.ISL, d.Facts.Truncated = 400, true }, ErrBadParams, "remote_block_ids"},
		{"fewer blocks than the engine counts, of an estimate", blocks("[" + ids(6) + "]"), func(d *Dispatch) { d.Facts.ISL, d.Facts.Source = 190, FromEstimate }, ErrBadParams, "remote_block_ids"},
		{"wrong remote_num_tokens", sub(`"remote_num_tokens": 200`, `"remote_num_tokens": 199`), nil, ErrBadParams, "remote_num_tokens"},
		{"remote_num_tokens a string", sub(`"remote_num_tokens": 200`, `"remote_num_tokens": "200"`), nil, ErrBadParams, "remote_num_tokens"},
		{
			"length told by nobody", strings.Replace(sub(`"remote_num_tokens": 200`, `"other": 200`), `"prompt_tokens":200`, `"other":200`, 1),
			func(d *Dispatch) { d.Facts.Source = FromEstimate }, ErrBadParams, "prompt_tokens",
		},

		{"engine id missing", sub(`"remote_engine_id"`, `"engine_id"`), nil, ErrBadParams, "remote_engine_id"},
		{"engine id null", sub(`"23e3e443-45fd-4472-b476-5bf4cd33f119"`, `null`), nil, ErrBadParams, "remote_engine_id"},
		{"engine id a number", sub(`"23e3e443-45fd-4472-b476-5bf4cd33f119"`, `7`), nil, ErrBadParams, "remote_engine_id"},
		{"request id missing", sub(`"remote_request_id"`, `"request_id"`), nil, ErrBadParams, "remote_request_id"},
		{"another request's id", sub("cmpl-810f561d65b277a9-0-bb15515f", "cmpl-b613c0807270e37a-0-b4dcea03"), nil, ErrBadParams, "remote_request_id"},
		{"not the answer's id", sub("cmpl-810f561d65b277a9-0-bb15515f", "cmpl-b613c0807270e37a-0-b4dcea03"), func(d *Dispatch) { d.RequestID = "" }, ErrBadParams, "remote_request_id"},
		{"the answer's id", captured, func(d *Dispatch) { d.RequestID = "" }, nil, ""},
		{"host missing", sub(`"remote_host"`, `"host"`), nil, ErrBadParams, "remote_host"},
		{"host empty", sub(`"127.0.0.1"`, `""`), nil, ErrBadParams, "remote_host"},
		{"host with a control character", sub(`"127.0.0.1"`, `"a\u0000b"`), nil, ErrBadParams, "remote_host"},
		{"host everywhere", sub(`"127.0.0.1"`, `"0.0.0.0"`), nil, ErrBadParams, "remote_host"},
		{"host a URL", sub(`"127.0.0.1"`, `"http://x/"`), nil, ErrBadParams, "remote_host"},
		{"vLLM's default host across machines", sub(`"127.0.0.1"`, `"localhost"`), elsewhere, ErrBadParams, "remote_host"},
		{"A8: IPv6 host across machines", sub(`"127.0.0.1"`, `"fd00::1"`), elsewhere, nil, ""},
		{"port missing", sub(`"remote_port"`, `"port"`), nil, ErrBadParams, "remote_port"},
		{"port 0", sub("18200", "0"), nil, ErrBadParams, "remote_port"},
		{"port too high", sub("18200", "65536"), nil, ErrBadParams, "remote_port"},
		{"port a string", sub("18200", `"18200"`), nil, ErrBadParams, "remote_port"},
		{"tp_size 0", sub(`"tp_size": 1`, `"tp_size": 0`), nil, ErrBadParams, "tp_size"},
		{"tp_size, pp_size, dcp_size missing", strings.NewReplacer(`"tp_size": 1, `, "", `"pp_size": 1, `, "", `"dcp_size": 1, `, "").Replace(captured), nil, nil, ""},
		{"an unknown key", sub(`"tp_size"`, `"news":{"a":[]},"tp_size"`), nil, nil, ""},
		{"asks for a remote decode", sub(`"do_remote_decode": false`, `"do_remote_decode": true`), nil, ErrBadParams, "do_remote_decode"},
		{"no remote prefill", sub(`"do_remote_prefill": true`, `"do_remote_prefill": false`), nil, ErrBadParams, "do_remote_prefill"},
		{"a duplicate key counts as the last", sub(`"remote_port": 18200`, `"remote_port": 18200, "remote_port": "x"`), nil, ErrBadParams, "remote_port"},
		{"a lease by a clock that is ahead of or behind ours", sub(`"remote_blocks_expiry_time": null`, `"remote_blocks_expiry_time": 1795261574.5`), nil, nil, ""},
		{"lease on the engine's own clock", sub(`"remote_blocks_expiry_time": null`, `"remote_blocks_expiry_time": 4711.2`), nil, nil, ""},
		{"lease a string", sub(`"remote_blocks_expiry_time": null`, `"remote_blocks_expiry_time": "soon"`), nil, ErrBadParams, "remote_blocks_expiry_time"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := dispatch(workers.ConnectorNIXL)
			if tt.change != nil {
				tt.change(&d)
			}
			tr := begin(t, workers.ConnectorNIXL, Options{}, d)
			err := tr.CheckPrefill([]byte(tt.body))
			if !errors.Is(err, tt.err) {
				t.Fatalf("got %v, want %v", err, tt.err)
			}
			var bad *ParamsError
			if errors.As(err, &bad) && bad.Field != tt.field {
				t.Errorf("the problem is with %s (%v), want %s", bad.Field, err, tt.field)
			}
			if errors.Is(err, ErrMissingParams) && errors.Is(err, ErrBadParams) {
				t.Error("missing and wrong are not told apart")
			}
			// Only what is said to do no harm may pass with transfer_check=report.
			d.Check = workers.TransferReport
			report := begin(t, workers.ConnectorNIXL, Options{}, d).CheckPrefill([]byte(tt.body))
			if harmless := bad != nil && bad.Harmless; (report == nil) != (err == nil || harmless) {
				t.Errorf("strict: %v, harmless %v; report: %v", err, harmless, report)
			} else if report != nil && report.Error() != err.Error() {
				t.Errorf("strict: %v; report: %v", err, report)
			}
			edits, decodeErr := tr.DecodeEdits()
			if err == nil && (decodeErr != nil || len(edits) != 1) || err != nil && (decodeErr == nil || edits != nil) {
				t.Errorf("check said %v, then DecodeEdits gave %v, %v", err, edits, decodeErr)
			}
		})
	}
}

// TestTransferCheckReport: what no known decode engine minds is used and told;
// what would make one exit, hang or mix texts is refused as before, and nothing
// that passes the strict check is told.
func TestTransferCheckReport(t *testing.T) {
	sub := func(pairs ...string) string { return strings.NewReplacer(pairs...).Replace(captured) }
	for _, tt := range []struct {
		name, body string
		odd        []string // nil: refused by both
	}{
		{"as captured", captured, []string{}},
		{"a size of another kind", sub(`"tp_size": 1`, `"tp_size": {"p":2}`), []string{`tp_size: {"p":2} is not a whole number from 1 to 65536`}},
		{"another count", sub(`"remote_num_tokens": 200`, `"remote_num_tokens": 199`), []string{"remote_num_tokens: 199, but the prompt has 200 tokens"}},
		{"a count of another kind, and a time", sub(`"remote_num_tokens": 200`, `"remote_num_tokens": [200]`, `"remote_blocks_expiry_time": null`, `"remote_blocks_expiry_time": "soon"`), []string{"remote_blocks_expiry_time: not a time", "remote_num_tokens: not a positive whole number"}},
		{"a count of another kind, and none beside it", sub(`"remote_num_tokens": 200`, `"remote_num_tokens": [200]`, `"prompt_tokens":200`, `"other":200`), []string{"remote_num_tokens: not a positive whole number"}},
		{"fewer blocks", sub("[700, 699", "[699"), nil},
		{"more blocks", sub("[700, 699", "[701, 700, 699"), nil},
		{"blocks of another shape", sub("[[700, 699, 698, 697, 696, 695, 694]]", `{"from":694,"to":700}`), nil},
		{"a flat list", sub("[[700, 699, 698, 697, 696, 695, 694]]", "[700, 699, 698, 697, 696, 695, 694]"), nil},
		{"no host", sub(`"remote_host"`, `"host"`), nil},
		{"no request", sub(`"remote_request_id"`, `"request"`), nil},
		{"another's request", sub("cmpl-810f561d65b277a9-0-bb15515f", "cmpl-b613c0807270e37a-0-b4dcea03"), nil},
		{"no port", sub(`"remote_port"`, `"port"`), nil},
		{"no engine", sub(`"remote_engine_id"`, `"engine"`), nil},
		{"another prompt's count", sub(`"prompt_tokens":200`, `"prompt_tokens":201`), nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := dispatch(workers.ConnectorNIXL)
			strict := begin(t, workers.ConnectorNIXL, Options{}, d).CheckPrefill([]byte(tt.body))
			if (strict == nil) != (tt.odd != nil && len(tt.odd) == 0) {
				t.Errorf("strict: %v", strict)
			}
			var bad *ParamsError
			if errors.As(strict, &bad); strict != nil && bad.Harmless != (tt.odd != nil) {
				t.Errorf("strict: %v, harmless %v", strict, bad.Harmless)
			}
			d.Check = workers.TransferReport
			tr := begin(t, workers.ConnectorNIXL, Options{}, d)
			if err := tr.CheckPrefill([]byte(tt.body)); (err == nil) != (tt.odd != nil) {
				t.Fatalf("report: %v", err)
			}
			if diff := cmp.Diff(append([]string{}, tt.odd...), append([]string{}, tr.Facts().Odd...)); tt.odd != nil && diff != "" {
				t.Errorf("told (-want +got)\n%s", diff)
			}
		})
	}
}

// Every prefill answer of the real engine passes, every decode body that was
// captured with it is what the edits make.
func TestCapturedExchanges(t *testing.T) {
	f, err := os.Open(filepath.FromSlash("../../../testdata/captures/pd-http-vllm-0.32.0.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	checked := 0
	sc := bufio.NewScanner(f)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		var x struct {
			Step    string
			Request struct {
				Path    string
				Headers map[string]string
				Body    struct {
					Prompt []uint32
				}
			}
			Response struct{ Body json.RawMessage }
		}
		if err := json.Unmarshal(sc.Bytes(), &x); err != nil {
			var t2 *json.UnmarshalTypeError
			if errors.As(err, &t2) {
				continue // another kind of prompt
			}
			t.Fatal(err)
		}
		if !strings.Contains(x.Step, "prefill leg") {
			continue
		}
		d := dispatch(workers.ConnectorNIXL)
		d.RequestID, d.Facts.ISL, d.Facts.Source = "", len(x.Request.Body.Prompt), FromIDs
		if d.Facts.ISL == 0 {
			d.Facts.Source = FromNothing
		}
		for k, v := range x.Request.Headers {
			if strings.EqualFold(k, "X-Request-Id") {
				d.RequestID = v
			}
		}
		tr := begin(t, workers.ConnectorNIXL, Options{}, d)
		if err := tr.CheckPrefill(x.Response.Body); err != nil {
			t.Errorf("%s: %v", x.Step, err)
		}
		checked++
	}
	if checked < 4 {
		t.Errorf("only %d prefill answers in the captures", checked)
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
				t.Errorf("%d got the edits, %d were told that they are used", got.Load(), used.Load())
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
	edits, err := tr.DecodeEdits()
	if err != nil {
		t.Fatal(err)
	}
	if got := spliced(t, api.Chat, body, edits); got != common+`,"disagg_prefill_dp_rank":3}` {
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
		t.Errorf("without a told address: %s", got)
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

// Restated tests 22 to 26 and 28.
func TestLMCacheSpec(t *testing.T) {
	static := &workers.LMCacheDecoder{Host: "static", InitPorts: []int{7300}, AllocPorts: []int{7400}}
	reg, err := ParseDecoderRegistry([]byte(`{"http://127.0.0.1:8108/":{"receiver_host":"d0","receiver_init_port":[1,2],"receiver_alloc_port":[3,4]}}`), static)
	if err != nil {
		t.Fatal(err)
	}
	ask := func(o Options, d Dispatch) string {
		t.Helper()
		tr := begin(t, workers.ConnectorLMCache, o, d)
		var v struct {
			Params json.RawMessage `json:"kv_transfer_params"`
		}
		if err := json.Unmarshal([]byte(spliced(t, api.Completion, `{"prompt":"a","min_tokens":3}`, tr.PrefillEdits())), &v); err != nil {
			t.Fatal(err)
		}
		return string(v.Params)
	}
	d := dispatch(workers.ConnectorLMCache) // decode-0 is at :8108
	const of = `{"ret_first_tok":false,"disagg_spec":{"req_id":"810f561d65b277a9","receiver_host":%s}}`
	registered := fmt.Sprintf(of, `"d0","receiver_init_port":[1,2],"receiver_alloc_port":[3,4]`)
	fixed := fmt.Sprintf(of, `"static","receiver_init_port":[7300],"receiver_alloc_port":[7400]`)
	t.Run("22: nixl has no spec", func(t *testing.T) {
		for _, e := range begin(t, workers.ConnectorNIXL, Options{Decoders: reg}, d).PrefillEdits() {
			if strings.Contains(string(e.Value), "disagg_spec") {
				t.Errorf("%s: %s", e.Key, e.Value)
			}
		}
	})
	t.Run("23: static without a registry", func(t *testing.T) { sameJSON(t, fixed, ask(Options{Decoders: NewDecoderRegistry(static, nil)}, d)) })
	t.Run("24 and 28: the chosen decoder's", func(t *testing.T) { sameJSON(t, registered, ask(Options{Decoders: reg}, d)) })
	t.Run("25: values are copied", func(t *testing.T) {
		s, err := reg.Spec(d.Decode.Worker)
		if err != nil {
			t.Fatal(err)
		}
		s.InitPorts[0], s.Host = 99, "changed"
		sameJSON(t, registered, ask(Options{Decoders: reg}, d))
		static.InitPorts[0] = 99
		defer func() { static.InitPorts[0] = 7300 }()
		other := d
		other.Decode.Worker = worker("decode-10", workers.Decode, workers.ConnectorLMCache, 1)
		sameJSON(t, fixed, ask(Options{Decoders: reg}, other))
	})
	t.Run("26: unknown decoder gives static", func(t *testing.T) {
		other := d
		other.Decode.Worker = worker("decode-10", workers.Decode, workers.ConnectorLMCache, 1)
		sameJSON(t, fixed, ask(Options{Decoders: reg}, other))
	})
	t.Run("no receiver at all", func(t *testing.T) {
		c, err := NewConnector(workers.ConnectorLMCache, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Begin(d); err == nil || !strings.Contains(err.Error(), "decode-0") {
			t.Errorf("got %v, want an error that names the worker", err)
		}
	})
}

func TestLMCacheFirstToken(t *testing.T) {
	d := dispatch(workers.ConnectorLMCache)
	d.Decode.Worker.LMCache = &workers.LMCacheDecoder{Host: "d", InitPorts: []int{1}, AllocPorts: []int{2}}
	d.Facts.TokenIDs, d.Facts.MinTokens = []uint32{5, 6, 4294967295}, 3
	const body = `{"prompt":"abc","max_tokens":8,"min_tokens":3,"stream":true}`
	answer := func(params, finish string) []byte {
		return []byte(`{"id":"x","choices":[{"text":" hi","finish_reason":"` + finish + `"}],"kv_transfer_params":` + params + `}`)
	}
	tr := begin(t, workers.ConnectorLMCache, Options{FirstToken: true}, d)
	sameJSON(t, `{"prompt":[5,6,4294967295],"max_tokens":1,"stream":false,"kv_transfer_params":{"ret_first_tok":true,"disagg_spec":{"req_id":"810f561d65b277a9","receiver_host":"d","receiver_init_port":[1],"receiver_alloc_port":[2]}}}`,
		spliced(t, api.Completion, body, tr.PrefillEdits()))
	if err := tr.CheckPrefill(answer(`{"first_tok":77}`, "length")); err != nil {
		t.Fatal(err)
	}
	edits, err := tr.DecodeEdits()
	if err != nil {
		t.Fatal(err)
	}
	sameJSON(t, `{"prompt":[5,6,4294967295,77],"max_tokens":7,"min_tokens":2,"stream":true}`, spliced(t, api.Completion, body, edits))
	if f, ok := tr.FirstToken(); !ok || f != (FirstToken{77, " hi"}) {
		t.Errorf("first token %+v, %v", f, ok)
	}
	for _, tt := range []struct {
		name, params, finish string
		want                 error
	}{
		{"missing", `null`, "length", ErrMissingParams},
		{"no token", `{}`, "length", ErrMissingParams},
		{"a string", `{"first_tok":"77"}`, "length", ErrBadParams},
		{"negative", `{"first_tok":-1}`, "length", ErrBadParams},
		{"ended at once", `{"first_tok":77}`, "stop", nil},
	} {
		tr := begin(t, workers.ConnectorLMCache, Options{FirstToken: true}, d)
		if err := tr.CheckPrefill(answer(tt.params, tt.finish)); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
		}
		if _, ok := tr.FirstToken(); ok {
			t.Errorf("%s: there is a first token", tt.name)
		}
	}
	// D3, D4: without a limit of its own, in a chat, or with logprobs, the
	// decode leg gets the client's body and gives every token.
	for name, change := range map[string]func(*Facts){
		"no max_tokens": func(f *Facts) { f.MaxTokens = -1 }, "max_tokens 1": func(f *Facts) { f.MaxTokens = 1 }, "chat": func(f *Facts) { f.Kind = api.Chat },
		"logprobs": func(f *Facts) { f.Logprobs = true }, "echo": func(f *Facts) { f.Echo = true }, "no ids": func(f *Facts) { f.TokenIDs = nil },
		"usage at the end of the stream": func(f *Facts) { f.StreamUsage = true },
	} {
		x := d
		change(&x.Facts)
		tr := begin(t, workers.ConnectorLMCache, Options{FirstToken: true}, x)
		if err := tr.CheckPrefill(answer(`null`, "length")); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if edits, err := tr.DecodeEdits(); err != nil || len(edits) != 0 {
			t.Errorf("%s: decode edits %v, %v", name, edits, err)
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
	if _, err := NewConnector("mooncake", Options{}); err == nil || !strings.Contains(err.Error(), "nixl") {
		t.Errorf("got %v, want an error that lists the kinds", err)
	}
}

func TestParseDecoderRegistryErrors(t *testing.T) {
	for text, want := range map[string]string{
		`[]`:                                   "decoder registry",
		`{} {}`:                                "follows",
		`{"u":{"receiver_host":"h","port":1}}`: "unknown field",
		`{"u":{"receiver_init_port":[1],"receiver_alloc_port":[2]}}`:                                "no receiver_host",
		`{"u":{"receiver_host":"h","receiver_init_port":[1],"receiver_alloc_port":[]}}`:             "1 init ports and 0 alloc ports",
		`{"u":{"receiver_host":"h","receiver_init_port":[70000],"receiver_alloc_port":[1]}}`:        "70000 is not a port",
		`{"a":{"receiver_host":""},"b":{"receiver_host":"h","receiver_init_port":[0,1]}}`:           "a: no receiver_host",
		`{"a":{"receiver_host":"h","receiver_init_port":["x"],"receiver_alloc_port":["receiver"]}}`: "decoder registry",
	} {
		if _, err := ParseDecoderRegistry([]byte(text), nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

// Whatever a prefill answers, the check does not panic, and what passes can be
// spliced into a body as valid JSON with the blocks of exactly this prompt.
func FuzzCheckPrefill(f *testing.F) {
	f.Add([]byte(captured))
	f.Add([]byte(`{"kv_transfer_params":{"remote_block_ids":[[1]]},"usage":{"prompt_tokens":1}}`))
	f.Add([]byte(`{"choices":[{}],"kv_transfer_params":{"first_tok":1}}`))
	f.Add([]byte(`{"choices":[null],"usage":null,"kv_transfer_params":[[]]}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		tr := begin(t, workers.ConnectorNIXL, Options{}, dispatch(workers.ConnectorNIXL))
		if tr.CheckPrefill(body) != nil {
			return
		}
		if n := tr.Facts().Blocks; n != 7 && n != 6 {
			if size := strings.Contains(string(body), "remote_block_size"); !size {
				t.Errorf("%d blocks passed for 200 tokens in blocks of 32", n)
			}
		}
		edits, err := tr.DecodeEdits()
		if err != nil {
			t.Fatal(err)
		}
		if got := spliced(t, api.Completion, `{"prompt":"a"}`, edits); !json.Valid([]byte(got)) {
			t.Errorf("not JSON: %s", got)
		}
	})
}

func FuzzParseDecoderRegistry(f *testing.F) {
	f.Add([]byte(`{"http://d:1":{"receiver_host":"h","receiver_init_port":[1],"receiver_alloc_port":[2]}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := ParseDecoderRegistry(text, nil)
		if err != nil {
			return
		}
		for u, s := range r.byURL {
			if checkSpec(&s) != nil {
				t.Errorf("%q: %+v passed", u, s)
			}
		}
	})
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
