package reference

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
)

// PrefillAnswer is the body with which vLLM answers the remote prefill of a prompt with that
// many tokens: name is the answer's, request the engine's own, life the engine's id. An engine
// that pushes lets no peer read its blocks, and one of Mooncake's names nothing.
func PrefillAnswer(name, request, life string, prompt int, c workers.Connector, o engine.Output) []byte {
	params := map[string]any{
		"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [][]int{o.Pinned}, "remote_engine_id": life,
		"remote_request_id": request, "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "remote_num_tokens": prompt,
	}
	switch c {
	case workers.ConnectorNIXLPush:
		params["transfer_mode"] = "push"
		delete(params, "remote_block_ids")
	case workers.ConnectorMooncake:
		params = nil
	}
	raw, err := json.Marshal(map[string]any{
		"id": name, "choices": []any{map[string]any{"index": 0, "text": " x", "finish_reason": o.Finish}},
		"usage":              map[string]any{"prompt_tokens": prompt, "completion_tokens": 1, "prompt_tokens_details": map[string]any{"cached_tokens": o.Cached}},
		"kv_transfer_params": params,
	})
	if err != nil {
		panic(err) // strings and numbers
	}
	return raw
}

// Pull reads what a decode engine of vLLM reads of the spliced parameters.
func Pull(edits []api.Edit) (*engine.Pull, error) {
	for _, e := range edits {
		if e.Key != "kv_transfer_params" {
			continue
		}
		var p struct {
			Blocks  [][]int `json:"remote_block_ids"`
			Engine  string  `json:"remote_engine_id"`
			Request string  `json:"remote_request_id"`
			Host    string  `json:"remote_host"`
			Port    int     `json:"remote_port"`
		}
		if err := json.Unmarshal(e.Value, &p); err != nil {
			return nil, err
		}
		if len(p.Blocks) != 1 {
			return nil, fmt.Errorf("%d groups of blocks", len(p.Blocks))
		}
		return &engine.Pull{EngineID: p.Engine, RequestID: p.Request, Host: p.Host, Port: p.Port, Blocks: p.Blocks[0]}, nil
	}
	return nil, errors.New("no transfer parameters")
}
