package disagg

import (
	"cmp"
	"fmt"
	"strconv"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// offloadP2P is vLLM's OffloadingConnector with a peer-to-peer tier (0.32): the prefill
// engine keeps the prompt's blocks in the host's memory under a name, and the decode
// engine fetches them by that name from the tier's port. The decode leg starts behind
// the prefill leg: an engine that waits for blocks gives up after half a minute.
//
// The name is new for each dispatch, since two prompts of one name would be mixed up.
// Blocks are asked for by the hashes of their tokens, so that a wrong name costs time
// and never gives another prompt's text.
type offloadP2P struct {
	rand func() uint64
	// among says that another connector of the same engines gives transfer parameters.
	among bool
}

// p2pPort is the port of the tier's first rank (VLLM_P2P_SIDE_CHANNEL_PORT). The
// others count up from it by their place in the deployment.
const p2pPort = 5710

func (o offloadP2P) Begin(d Dispatch) (*Transfer, error) {
	host, port, err := tierOf(d.Prefill)
	if err != nil {
		return nil, err
	}
	name := api.RawString(fmt.Sprintf("%s-%016x", d.RequestID, o.rand()))
	object := func(role string, more func([]byte) []byte) []byte {
		b := append(append(make([]byte, 0, 256), `{"`...), role...)
		b = more(append(append(b, `":{"kv_request_id":`...), name...))
		return append(b, "}}"...)
	}
	t := &Transfer{kind: workers.ConnectorOffloadP2P, mode: Sequential, dispatch: d, check: o.check}
	t.prefill = oneToken(&d.Facts, api.Set(transferParams, object("remote_decoder", func(b []byte) []byte { return b })))
	t.decode = []api.Edit{api.Set(transferParams, object("remote_prefiller", func(b []byte) []byte {
		b = append(append(b, `,"remote_host":`...), api.RawString(host)...)
		return strconv.AppendInt(append(b, `,"remote_port":`...), int64(port), 10)
	}))}
	return t, nil
}

// tierOf is where the tier of a prefill rank listens.
func tierOf(p workers.Peer) (host string, port int, err error) {
	w := p.Worker
	if w == nil {
		return "", 0, fmt.Errorf("%s: no prefill worker", workers.ConnectorOffloadP2P)
	}
	port = p2pPort
	if b := w.Bootstrap; b != nil {
		host, port = b.Host, cmp.Or(b.Port, p2pPort)
	}
	port += w.DPStart
	if p.Rank != nil {
		port += p.Rank.DP
	}
	if host = cmp.Or(host, hostname(w.URL)); host == "" || port > 65535 {
		return "", 0, fmt.Errorf("%s: %q port %d is no address of worker %s: state bootstrap=host:port", workers.ConnectorOffloadP2P, host, port, w.Name)
	}
	return host, port, nil
}

// check judges a prefill's answer. It says only that the transfer was made: the
// connector gives no parameters.
func (o offloadP2P) check(t *Transfer, a *answer) error {
	if a.params.Exists() && !o.among {
		return &ParamsError{Field: transferParams, Problem: "an engine that offloads gives none; this one has another connector: state that (connector=nixl, nixl-push, or nixl-offload-p2p)"}
	}
	if f := &t.dispatch.Facts; exact(f) && a.promptTokens >= 0 && a.promptTokens != f.ISL {
		return &ParamsError{Field: "prompt_tokens", Problem: fmt.Sprintf("the prefill engine counts %d tokens, the prompt has %d", a.promptTokens, f.ISL)}
	}
	return nil
}
