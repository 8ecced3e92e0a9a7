package front

import (
	"bytes"
	"encoding/json"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
)

// lmcache is what an LMCache prefill gets (disagg_spec, ret_first_tok).
type lmcache struct {
	// First asks for the first token in the answer.
	First bool
	// Host is where the KV goes to, empty for nowhere, InitPorts its ports, one for
	// each of its processes.
	Host      string
	InitPorts []int
}

// transferAsked is what the transfer parameters of a request ask for.
type transferAsked struct {
	// Pin keeps the prompt's blocks for whoever pulls them.
	Pin bool
	// Offer is the name under which the prompt's full blocks are kept for a decode.
	Offer string
	// Transfer is the name under which a decode asks for the blocks (Mooncake).
	Transfer string
	// Pulls bring the KV of each prompt from elsewhere; empty for none.
	Pulls []*engine.Pull
	// LMCache is nil but with that connector.
	LMCache *lmcache
}

// readTransfer reads the kv_transfer_params of a request with so many prompts.
func readTransfer(connector workers.Connector, raw json.RawMessage, prompts int) (a transferAsked, err *Error) {
	raw = bytes.TrimSpace(raw)
	if absent(raw) {
		return a, nil
	}
	if raw[0] != '{' {
		return a, &Error{
			Status: http.StatusBadRequest, Kind: "Bad Request", Param: "body.kv_transfer_params",
			Message: "1 validation error:\n  {'type': 'dict_type', 'loc': 'body.kv_transfer_params', 'msg': 'Input should be a valid dictionary', 'input': " + quotePy(raw) + "}",
		}
	}
	var p map[string]json.RawMessage
	if json.Unmarshal(raw, &p) != nil {
		return a, badRequest("body.kv_transfer_params", "kv_transfer_params is not valid JSON.")
	}
	switch connector {
	case workers.ConnectorNIXL, workers.ConnectorOffloadP2P, workers.ConnectorNIXLOffload:
		nixl := connector != workers.ConnectorOffloadP2P
		a.Pin = nixl && truthy(p["do_remote_decode"])
		if connector != workers.ConnectorNIXL {
			a.Offer = parseOffer(p["remote_decoder"]).RequestID
		}
		switch q := parseOffer(p["remote_prefiller"]); {
		case nixl && truthy(p["do_remote_prefill"]): // the first connector that has the KV brings it
			for range prompts {
				a.Pulls = append(a.Pulls, parsePull(p))
			}
		case connector != workers.ConnectorNIXL && q.RequestID != "" && q.Host != "" && q.Port != 0:
			for range prompts {
				a.Pulls = append(a.Pulls, q)
			}
		}
	case workers.ConnectorNIXLPush:
		a.Pin = truthy(p["do_remote_decode"])
		if truthy(p["do_remote_prefill"]) {
			for range prompts {
				a.Pulls = append(a.Pulls, parseRegistration(p))
			}
		}
	case workers.ConnectorMooncake:
		return readMooncake(p, prompts)
	case workers.ConnectorLMCache:
		a.LMCache = parseSpec(p)
	case workers.ConnectorNone, workers.ConnectorSGLang, workers.ConnectorSharedStorage:
	}
	return a, nil
}

// readMooncake reads the members of MooncakeConnector (vLLM 0.33). That looks at the flags and
// at what they need; here all others are refused, so that a body with too much shows.
func readMooncake(p map[string]json.RawMessage, prompts int) (a transferAsked, err *Error) {
	bad := func(format string, args ...any) (transferAsked, *Error) {
		return transferAsked{}, badRequest("body.kv_transfer_params", "MooncakeConnector: "+format, args...)
	}
	decodes, prefills := string(p["do_remote_decode"]), string(p["do_remote_prefill"])
	names := []string{"do_remote_decode", "do_remote_prefill", "transfer_id"}
	switch {
	case decodes == "true" && prefills == "false":
	case decodes == "false" && prefills == "true":
		names = append(names, "remote_engine_id", "remote_bootstrap_addr")
	default:
		return bad("do_remote_decode is %q and do_remote_prefill is %q, of which one must be true and the other false", decodes, prefills)
	}
	text := map[string]string{}
	for _, name := range names {
		if _, ok := p[name]; !ok {
			return bad("%s is missing", name)
		}
	}
	for name, raw := range p {
		var s string
		switch {
		case !slices.Contains(names, name):
			return bad("%s is not for this leg", name)
		case strings.HasPrefix(name, "do_"):
		case json.Unmarshal(raw, &s) != nil || s == "":
			return bad("%s is no text", name)
		default:
			text[name] = s
		}
	}
	if prompts != 1 {
		return bad("one transfer_id is for one prompt, not for %d", prompts)
	}
	if decodes == "true" {
		return transferAsked{Pin: true, Transfer: text["transfer_id"]}, nil
	}
	server := text["remote_bootstrap_addr"]
	if u, err := url.Parse(server); err != nil || u.Scheme != "http" || u.Port() == "" || u.Path != "" {
		return bad("remote_bootstrap_addr is %q, not http://HOST:PORT", server)
	}
	return transferAsked{Pulls: []*engine.Pull{{Push: true, EngineID: text["remote_engine_id"], RequestID: text["transfer_id"], Server: server}}}, nil
}

// asksRemoteDecode reports whether transfer parameters ask for a remote decode.
func asksRemoteDecode(raw json.RawMessage) bool {
	var p map[string]json.RawMessage
	return json.Unmarshal(raw, &p) == nil && truthy(p["do_remote_decode"])
}

func quotePy(raw []byte) string {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return "'" + text + "'"
	}
	return string(raw)
}

// truthy is Python's idea of it, for what JSON can hold.
func truthy(raw json.RawMessage) bool {
	return !slices.Contains([]string{"", "null", "false", "0", `""`, "[]", "{}"}, string(bytes.TrimSpace(raw)))
}

// parsePull reads what the NIXL connector reads. It never fails: what is
// wrong shows later, as in vLLM 0.32.
func parsePull(p map[string]json.RawMessage) *engine.Pull {
	q := parseRemote(p)
	var groups [][]int
	if absent(p["remote_block_ids"]) || json.Unmarshal(p["remote_block_ids"], &groups) != nil || len(groups) != 1 {
		q.Broken = true
	} else {
		q.Blocks = groups[0]
	}
	return q
}

// parseOffer reads what the peer-to-peer tier reads of one side. A member that is not
// there leaves the tier out, as in vLLM 0.32.
func parseOffer(raw json.RawMessage) *engine.Pull {
	var d struct {
		Name string `json:"kv_request_id"`
		Host string `json:"remote_host"`
		Port int    `json:"remote_port"`
	}
	_ = json.Unmarshal(raw, &d) // what cannot be read is not there
	return &engine.Pull{Offer: true, RequestID: d.Name, Host: d.Host, Port: d.Port}
}

// parseRegistration reads what the push form of the NIXL connector reads. As in
// vLLM 0.32, tp_size must be there, too, and block ids are not looked at.
func parseRegistration(p map[string]json.RawMessage) *engine.Pull {
	q := parseRemote(p)
	q.Push, q.Incomplete = true, q.Incomplete || absent(p["tp_size"])
	return q
}

// parseRemote reads where a remote prefill is.
func parseRemote(p map[string]json.RawMessage) *engine.Pull {
	q := &engine.Pull{}
	text := func(key string, dst *string) {
		if json.Unmarshal(p[key], dst) != nil || *dst == "" {
			q.Incomplete = true
		}
	}
	text("remote_engine_id", &q.EngineID)
	text("remote_request_id", &q.RequestID)
	text("remote_host", &q.Host)
	if absent(p["remote_port"]) || json.Unmarshal(p["remote_port"], &q.Port) != nil {
		q.Incomplete = true
	}
	if !absent(p["tp_size"]) && json.Unmarshal(p["tp_size"], &q.TPSize) != nil {
		q.TPSize = -1
	}
	return q
}

func parseSpec(p map[string]json.RawMessage) *lmcache {
	spec := &lmcache{First: truthy(p["ret_first_tok"])}
	var d struct {
		ReceiverHost string `json:"receiver_host"`
		ReceiverInit []int  `json:"receiver_init_port"`
	}
	if !absent(p["disagg_spec"]) && json.Unmarshal(p["disagg_spec"], &d) == nil {
		spec.Host, spec.InitPorts = d.ReceiverHost, d.ReceiverInit
	}
	return spec
}

// transferParams is what a NIXL prefill hands to the router, in vLLM's order.
type transferParams struct {
	DoRemotePrefill           bool     `json:"do_remote_prefill"`
	DoRemoteDecode            bool     `json:"do_remote_decode"`
	RemoteBlockIDs            [][]int  `json:"remote_block_ids"`
	RemoteEngineID            string   `json:"remote_engine_id"`
	RemoteRequestID           string   `json:"remote_request_id"`
	RemoteHost                string   `json:"remote_host"`
	RemotePort                int      `json:"remote_port"`
	TPSize                    int      `json:"tp_size"`
	DCPSize                   int      `json:"dcp_size"`
	PPSize                    int      `json:"pp_size"`
	RemoteNumTokens           int      `json:"remote_num_tokens"`
	RemoteBlocksExpiryTime    *float64 `json:"remote_blocks_expiry_time"`
	TransferMode              string   `json:"transfer_mode"`
	RemotePrefillCachedTokens int      `json:"remote_prefill_cached_tokens"`
	// RemoteRegistrationGeneration is there since 0.33.
	RemoteRegistrationGeneration *int `json:"remote_registration_generation,omitempty"`
}

// WithoutNulls are the parameters without those that are null, which /v1/messages leaves
// out of its answers.
func (p *transferParams) WithoutNulls() map[string]any {
	var m map[string]any
	if json.Unmarshal(rawJSON(p), &m) != nil {
		return nil // an object
	}
	maps.DeleteFunc(m, func(_ string, v any) bool { return v == nil })
	return m
}
