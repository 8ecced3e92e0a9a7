package disagg

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// pushed is the answer of a vLLM 0.32.0 prefill engine with NixlPushConnector to
// leg 7's id, for a prompt of 200 tokens.
const pushed = `{"id":"cmpl-810f561d65b277a9-0000000000000007","object":"text_completion","created":1795408800,"model":"small",
"choices":[{"index":0,"text":".com","logprobs":null,"finish_reason":"length","stop_reason":null}],
"usage":{"prompt_tokens":200,"total_tokens":201,"completion_tokens":1},
"kv_transfer_params":{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]],
"remote_engine_id": "4988d483-16cb-4afe-b9b0-fec995fa4b4f", "remote_request_id": "cmpl-810f561d65b277a9-0000000000000007-0-a96ac67c",
"remote_host": "127.0.0.1", "remote_port": 18200, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 200,
"transfer_mode": "push", "remote_prefill_cached_tokens": 0}}`

// legs counts up from 7.
func legs() Options {
	n := uint64(6)
	return Options{Rand: func() uint64 { n++; return n }}
}

// registered is what the decode engine gets for leg n.
func registered(n string) string {
	return `{"prompt":"a","max_tokens":8,"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,
"remote_engine_id":"4988d483-16cb-4afe-b9b0-fec995fa4b4f","remote_host":"127.0.0.1","remote_port":18200,
"remote_request_id":"810f561d65b277a9-000000000000000` + n + `","tp_size":1,"pp_size":1,"dcp_size":1,"transfer_id":"000000000000000` + n + `"}}`
}

const pushBody = `{"prompt":"a","max_tokens":8}`

// TestNIXLPush: the first transfer of a rank waits for its answer, which says where
// the rank is; the next ones do not wait, and each has an id of its own.
func TestNIXLPush(t *testing.T) {
	d := dispatch(workers.ConnectorNIXLPush)
	c, err := NewConnector(workers.ConnectorNIXLPush, legs())
	if err != nil {
		t.Fatal(err)
	}
	first, err := c.Begin(d)
	if err != nil {
		t.Fatal(err)
	}
	if first.Mode() != Sequential || first.RequestID() != "810f561d65b277a9-0000000000000007" {
		t.Fatalf("the first transfer is %s as %s", first.Mode(), first.RequestID())
	}
	sameJSON(t, `{"prompt":"a","max_tokens":1,"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,
"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null,"transfer_id":"0000000000000007"}}`,
		spliced(t, api.Completion, pushBody, first.PrefillEdits()))
	if _, err := first.DecodeEdits(); !errors.Is(err, ErrUnchecked) {
		t.Errorf("edits before the answer: %v", err)
	}
	if err := first.CheckPrefill([]byte(pushed)); err != nil {
		t.Fatal(err)
	}
	sameJSON(t, registered("7"), decodeBody(t, first, api.Completion, pushBody))
	first.Failed()
	if d.Prefill.Rank.KVAddress() == nil {
		t.Error("a failed decode leg that got what the prefill had answered says nothing of the address")
	}

	second, err := c.Begin(d)
	if err != nil {
		t.Fatal(err)
	}
	edits, err := second.DecodeEdits()
	if second.Mode() != Held || err != nil {
		t.Fatalf("the second transfer is %s: %v", second.Mode(), err)
	}
	sameJSON(t, registered("8"), spliced(t, api.Completion, pushBody, edits))
	answer := strings.ReplaceAll(pushed, "0000000000000007", "0000000000000008")
	if err := second.CheckPrefill([]byte(answer)); err != nil {
		t.Errorf("the answer that the decode engine waits for: %v", err)
	}
	if f := second.Facts(); f.EngineID == "" || f.PromptTokens != 200 {
		t.Errorf("facts %+v", f)
	}
	second.Failed()
	if third, err := c.Begin(d); err != nil || third.Mode() != Sequential {
		t.Errorf("after a failed decode leg the transfer is %s (%v)", third.Mode(), err)
	}
}

// TestNIXLPushRestart: a prefill engine that is another one than the decode engine
// waits for is named, and its address learned.
func TestNIXLPushRestart(t *testing.T) {
	d := dispatch(workers.ConnectorNIXLPush)
	d.Prefill.Rank.SetKVAddress(&workers.KVAddress{EngineID: "old", Host: "127.0.0.1", Port: 18200, TP: 1, PP: 1, DCP: 1})
	tr := begin(t, workers.ConnectorNIXLPush, legs(), d)
	if err := tr.CheckPrefill([]byte(pushed)); !errors.Is(err, ErrRestarted) {
		t.Errorf("answer of another engine: %v", err)
	}
	if at := d.Prefill.Rank.KVAddress(); at == nil || at.EngineID != "4988d483-16cb-4afe-b9b0-fec995fa4b4f" {
		t.Errorf("the address is %+v", at)
	}
}

func TestCheckPush(t *testing.T) {
	for _, tt := range []struct {
		name, from, to string
		want           error
		field          string
	}{
		{"as it is", "", "", nil, ""},
		{"an engine that is read from", `"push"`, `"pull"`, ErrBadParams, "transfer_mode"},
		{"an engine that does not say", `"transfer_mode": "push", `, ``, ErrBadParams, "transfer_mode"},
		{"no port", `"remote_port": 18200, `, ``, ErrBadParams, "remote_port"},
		{"an odd port", `18200`, `"18200"`, ErrBadParams, "remote_port"},
		{"no engine", `"remote_engine_id": "4988d483-16cb-4afe-b9b0-fec995fa4b4f", `, ``, ErrBadParams, "remote_engine_id"},
		{"another leg's answer", `0000000000000007-0-a96ac67c`, `0000000000000001-0-a96ac67c`, ErrBadParams, "remote_request_id"},
		{"a size that is none", `"tp_size": 1`, `"tp_size": 0`, ErrBadParams, "tp_size"},
		{"no parameters", `"kv_transfer_params":{`, `"kv_transfer_params":null,"x":{`, ErrMissingParams, ""},
		{"the answer's end", `"finish_reason":"length"`, `"finish_reason":"error"`, ErrPrefillFailed, ""},
	} {
		for _, known := range []bool{false, true} {
			d := dispatch(workers.ConnectorNIXLPush)
			if known {
				d.Prefill.Rank.SetKVAddress(&workers.KVAddress{EngineID: "4988d483-16cb-4afe-b9b0-fec995fa4b4f", Host: "127.0.0.1", Port: 18200, TP: 1, PP: 1, DCP: 1})
			}
			tr := begin(t, workers.ConnectorNIXLPush, legs(), d)
			answer := pushed
			if tt.from != "" {
				if answer = strings.Replace(pushed, tt.from, tt.to, 1); answer == pushed {
					t.Fatalf("%s changes nothing", tt.name)
				}
			}
			err := tr.CheckPrefill([]byte(answer))
			var p *ParamsError
			if errors.As(err, &p); !errors.Is(err, tt.want) || p != nil && p.Field != tt.field {
				t.Errorf("%s, address known: %v: %v", tt.name, known, err)
			}
		}
	}
	// Read from, an engine that pushes would match requests by the client's own ids.
	pull := begin(t, workers.ConnectorNIXL, Options{}, dispatch(workers.ConnectorNIXL))
	var p *ParamsError
	if err := pull.CheckPrefill([]byte(strings.Replace(captured, `"pull"`, `"push"`, 1))); !errors.As(err, &p) || p.Field != "transfer_mode" {
		t.Errorf("an engine that pushes, with connector=nixl: %v", err)
	}
}

// Whatever a prefill answers, the check does not panic, and what is made of it is
// valid JSON that names all that a decode engine needs.
func FuzzCheckPush(f *testing.F) {
	f.Add([]byte(pushed))
	f.Add([]byte(captured))
	f.Fuzz(func(t *testing.T, body []byte) {
		d := dispatch(workers.ConnectorNIXLPush)
		tr := begin(t, workers.ConnectorNIXLPush, legs(), d)
		if tr.CheckPrefill(body) != nil {
			return
		}
		var got struct {
			Params struct {
				EngineID string `json:"remote_engine_id"`
				Host     string `json:"remote_host"`
				Port     int    `json:"remote_port"`
				Request  string `json:"remote_request_id"`
				TP       int    `json:"tp_size"`
			} `json:"kv_transfer_params"`
		}
		if err := json.Unmarshal([]byte(decodeBody(t, tr, api.Completion, pushBody)), &got); err != nil {
			t.Fatal(err)
		}
		p := got.Params
		if p.EngineID == "" || p.Host == "" || p.Port == 0 || p.TP == 0 {
			t.Errorf("a decode engine would exit: %+v", p)
		}
		if p.Request != tr.RequestID() {
			t.Errorf("of request %q, want %q", p.Request, tr.RequestID())
		}
	})
}
