package disagg

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestMulti: both legs carry what both connectors read, what NIXL's prefill has
// answered included, byte for byte.
func TestMulti(t *testing.T) {
	tr := begin(t, workers.ConnectorNIXLOffload, legs(), dispatch(workers.ConnectorNIXLOffload))
	if tr.Mode() != Sequential || !tr.Leased() {
		t.Errorf("%s, leased: %v", tr.Mode(), tr.Leased())
	}
	sameJSON(t, `{"prompt":"a","max_tokens":1,"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,
"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null,"remote_decoder":{"kv_request_id":"810f561d65b277a9-0000000000000007"}}}`,
		spliced(t, api.Completion, pushBody, tr.PrefillEdits()))
	if err := tr.CheckPrefill([]byte(captured)); err != nil {
		t.Fatal(err)
	}
	if f := tr.Facts(); f.EngineID != "23e3e443-45fd-4472-b476-5bf4cd33f119" || f.Blocks != 7 || f.PromptTokens != 200 {
		t.Errorf("facts %+v", f)
	}
	sameJSON(t, `{"prompt":"a","max_tokens":8,"kv_transfer_params":{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[700, 699, 698, 697, 696, 695, 694]],
"remote_engine_id": "23e3e443-45fd-4472-b476-5bf4cd33f119", "remote_request_id": "cmpl-810f561d65b277a9-0-bb15515f",
"remote_host": "127.0.0.1", "remote_port": 18200, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 200,
"remote_blocks_expiry_time": null, "transfer_mode": "pull", "remote_prefill_cached_tokens": 0,
"remote_prefiller":{"kv_request_id":"810f561d65b277a9-0000000000000007","remote_host":"127.0.0.1","remote_port":5710}}}`,
		decodeBody(t, tr, api.Completion, pushBody))
}

// TestMultiRefuses: what either connector refuses feeds no decode leg, nor does an
// answer with a member by which another connector of the union is recognised.
func TestMultiRefuses(t *testing.T) {
	for _, tt := range []struct {
		name, from, to string
		want           error
		field          string
	}{
		{"as it is", "", "", nil, ""},
		{"NIXL's blocks", `[[700, `, `[[`, ErrBadParams, "remote_block_ids"},
		{"no parameters", `"kv_transfer_params":{`, `"kv_transfer_params":null,"x":{`, ErrMissingParams, ""},
		{"a member of both", `"tp_size": 1`, `"remote_prefiller": {"remote_host": "elsewhere"}, "tp_size": 1`, ErrBadParams, transferParams},
		{"twice in the answer", `"tp_size": 1`, `"more": 1, "more": 2, "tp_size": 1`, ErrBadParams, transferParams},
	} {
		tr := begin(t, workers.ConnectorNIXLOffload, legs(), dispatch(workers.ConnectorNIXLOffload))
		err := tr.CheckPrefill([]byte(strings.Replace(captured, tt.from, tt.to, 1)))
		var p *ParamsError
		if errors.As(err, &p); !errors.Is(err, tt.want) || p != nil && p.Field != tt.field {
			t.Errorf("%s: %v", tt.name, err)
		}
		if _, e := tr.DecodeEdits(); (e == nil) != (tt.want == nil) {
			t.Errorf("%s: a decode leg: %v", tt.name, e)
		}
	}
}

// Whatever a prefill answers, what is made of it for a decode engine names each member
// once, and the tier that the router chose.
func FuzzCheckMulti(f *testing.F) {
	f.Add([]byte(captured))
	f.Add([]byte(offloaded))
	f.Fuzz(func(t *testing.T, body []byte) {
		tr := begin(t, workers.ConnectorNIXLOffload, legs(), dispatch(workers.ConnectorNIXLOffload))
		if tr.CheckPrefill(body) != nil {
			return
		}
		var got struct {
			Params struct {
				EngineID string `json:"remote_engine_id"`
				Tier     struct {
					Port int    `json:"remote_port"`
					Host string `json:"remote_host"`
				} `json:"remote_prefiller"`
			} `json:"kv_transfer_params"`
		}
		if err := json.Unmarshal([]byte(decodeBody(t, tr, api.Completion, pushBody)), &got); err != nil {
			t.Fatal(err)
		}
		if p := got.Params; p.EngineID == "" || p.Tier.Port != p2pPort || p.Tier.Host != "127.0.0.1" {
			t.Errorf("the decode engine gets %+v", p)
		}
	})
}
