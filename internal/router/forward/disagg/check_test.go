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
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

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
		{"messages", api.Messages, `{"id":"chatcmpl-810f561d65b277a9","type":"message","role":"assistant","stop_reason":"max_tokens","usage":{"input_tokens":200,"output_tokens":1},` + params, nil, 200, 0}, // by its parameters
		{"messages, some cached", api.Messages, `{"id":"x","type":"message","stop_reason":"max_tokens","usage":{"input_tokens":30,"cache_read_input_tokens":160,"cache_creation_input_tokens":10,"output_tokens":1},` + params, nil, 200, 160},
		{"messages, another count", api.Messages, `{"id":"x","type":"message","stop_reason":"max_tokens","usage":{"input_tokens":200,"cache_read_input_tokens":160,"output_tokens":1},` + params, ErrBadParams, 360, 160},
		{"messages, the end of the turn", api.Messages, `{"id":"x","type":"message","stop_reason":"end_turn","usage":{"input_tokens":200}}`, ErrEnded, 200, -1},
		{"messages, an end without a name", api.Messages, `{"id":"x","type":"message","usage":{"input_tokens":200}}`, ErrEnded, 200, -1},
		{"messages without a connector", api.Messages, `{"id":"x","type":"message","stop_reason":"max_tokens","usage":{"input_tokens":200}}`, ErrMissingParams, 200, -1},
		{"messages, an error", api.Messages, `{"type":"error","error":{"type":"api_error","message":"m"}}`, ErrPrefillFailed, 0, 0},
		{"responses", api.Responses, `{"id":"resp_b5f1","object":"response","status":"incomplete","error":null,"usage":{"input_tokens":200,"input_tokens_details":{"cached_tokens":32}},` + response, nil, 200, 32},
		{"responses, another's", api.Responses, `{"id":"resp_c","object":"response","status":"incomplete","usage":{"input_tokens":200},` + response, ErrBadParams, 200, 0},
		{"responses, complete with its first token", api.Responses, `{"id":"resp_b5f1","object":"response","status":"completed","usage":{"input_tokens":200},"kv_transfer_params":null}`, ErrEnded, 200, -1},
		{"responses without a connector", api.Responses, `{"id":"resp_b5f1","object":"response","status":"incomplete","usage":{"input_tokens":200},"kv_transfer_params":null}`, ErrMissingParams, 200, -1},
		{"responses, queued", api.Responses, `{"id":"resp_b5f1","object":"response","status":"queued","usage":null,"kv_transfer_params":null}`, ErrPrefillFailed, 0, 0},
		{"responses, failed", api.Responses, `{"id":"resp_b5f1","object":"response","status":"failed","error":{"code":"server_error"}}`, ErrPrefillFailed, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := dispatch(workers.ConnectorNIXL)
			d.Facts.Kind, d.Facts.Source = tt.kind, route.FromEngine
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
		{"block size from the engine", sub(`"tp_size": 1`, `"tp_size": 1, "remote_block_size": 32`), func(d *Dispatch) { d.Prefill.Worker.BlockSize = 64 }, nil, ""},
		{"vLLM 0.9: a flat list without the partial block", fmt.Sprintf(old, ids(6)), nil, nil, ""},
		{"vLLM 0.9: a flat list, too short", fmt.Sprintf(old, ids(5)), nil, ErrBadParams, "remote_block_ids"},
		{"vLLM 0.9: a flat list, too long", fmt.Sprintf(old, ids(8)), nil, ErrBadParams, "remote_block_ids"},

		{"params of a longer prompt", captured, func(d *Dispatch) { d.Facts.ISL = 199 }, ErrBadParams, "prompt_tokens"},
		{"params of a shorter prompt", captured, func(d *Dispatch) { d.Facts.ISL = 201 }, ErrBadParams, "prompt_tokens"},
		{"a prompt that the engine cuts", captured, func(d *Dispatch) { d.Facts.ISL, d.Facts.Truncated = 400, true }, nil, ""},
		{"/tokenize may count otherwise than the request", captured, func(d *Dispatch) { d.Facts.ISL, d.Facts.Source = 190, route.FromEngine }, nil, ""},
		{"our own count may differ", captured, func(d *Dispatch) { d.Facts.ISL, d.Facts.Source = 199, route.FromLocal }, nil, ""},
		{"blocks of our count where the engine has another", blocks("[" + ids(6) + "]"), func(d *Dispatch) { d.Facts.ISL, d.Facts.Source = 190, route.FromEngine }, ErrBadParams, "remote_block_ids"},
		{"blocks of the whole prompt where the engine cuts it", blocks("[" + ids(13) + "]"), func(d *Dispatch) { d.Facts.ISL, d.Facts.Truncated = 400, true }, ErrBadParams, "remote_block_ids"},
		{"fewer blocks than the engine counts, of an estimate", blocks("[" + ids(6) + "]"), func(d *Dispatch) { d.Facts.ISL, d.Facts.Source = 190, route.FromEstimate }, ErrBadParams, "remote_block_ids"},
		{"wrong remote_num_tokens", sub(`"remote_num_tokens": 200`, `"remote_num_tokens": 199`), nil, ErrBadParams, "remote_num_tokens"},
		{"remote_num_tokens a string", sub(`"remote_num_tokens": 200`, `"remote_num_tokens": "200"`), nil, ErrBadParams, "remote_num_tokens"},
		{
			"length not stated", strings.Replace(sub(`"remote_num_tokens": 200`, `"other": 200`), `"prompt_tokens":200`, `"other":200`, 1),
			func(d *Dispatch) { d.Facts.Source = route.FromEstimate }, ErrBadParams, "prompt_tokens",
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
		{"what vLLM 0.33 added", sub(`"remote_blocks_expiry_time": null`, `"remote_blocks_expiry_time": null, "remote_registration_generation": 0`), nil, nil, ""},
		{"another generation", sub(`"remote_blocks_expiry_time": null`, `"remote_blocks_expiry_time": null, "remote_registration_generation": 7`), nil, nil, ""},
		{"a generation that is a string", sub(`"remote_blocks_expiry_time": null`, `"remote_blocks_expiry_time": null, "remote_registration_generation": "7"`), nil, ErrBadParams, "remote_registration_generation"},
		{"a generation that is null", sub(`"remote_blocks_expiry_time": null`, `"remote_blocks_expiry_time": null, "remote_registration_generation": null`), nil, ErrBadParams, "remote_registration_generation"},
		{"a generation below 0", sub(`"remote_blocks_expiry_time": null`, `"remote_blocks_expiry_time": null, "remote_registration_generation": -1`), nil, ErrBadParams, "remote_registration_generation"},
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
				t.Error("missing and wrong are not distinguished")
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
			if good := err == nil; (decodeErr == nil) != good || (len(edits) == 1) != good || !good && edits != nil {
				t.Errorf("check said %v, then DecodeEdits gave %v, %v", err, edits, decodeErr)
			}
		})
	}
}

// TestTransferCheckReport: what no known decode engine minds is used and reported;
// what would make one exit, hang or mix texts is refused as before, and nothing that
// passes the strict check is reported.
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
				t.Errorf("reported (-want +got)\n%s", diff)
			}
		})
	}
}

// Every prefill answer of the real engine passes, every decode body that was
// captured with it is what the edits make.
func TestCapturedExchanges(t *testing.T) {
	f, err := os.Open(filepath.FromSlash("../../../../testdata/captures/pd-http-vllm-0.32.0.jsonl"))
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
		d.RequestID, d.Facts.ISL, d.Facts.Source = "", len(x.Request.Body.Prompt), route.FromIDs
		if d.Facts.ISL == 0 {
			d.Facts.Source = route.FromNothing
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
		if got := decodeBody(t, tr, api.Completion, `{"prompt":"a"}`); !json.Valid([]byte(got)) {
			t.Errorf("not JSON: %s", got)
		}
	})
}
