package disagg

import (
	"fmt"
)

// p2pPort is the port of the tier's first rank (VLLM_P2P_SIDE_CHANNEL_PORT). The
// others count up from it by their place in the deployment.
const p2pPort = 5710

// tierOf is where the peer-to-peer tier of the prefill rank listens.
func tierOf(t *Transfer) error {
	p := t.dispatch.Prefill
	host, port, err := stated(t, p2pPort)
	if err != nil {
		return err
	}
	port += p.Worker.DPStart
	if p.Rank != nil {
		port += p.Rank.DP
	}
	if port > 65535 {
		return fmt.Errorf("%s: port %d is no address of worker %s: state bootstrap=host:port", t.of.name, port, p.Worker.Name)
	}
	t.at.Host, t.at.Port = host, port
	return nil
}

// stated is the bootstrap address of the prefill worker: what was stated of it, else its own
// host, and a port where none was stated.
func stated(t *Transfer, otherwise int) (host string, port int, err error) {
	w := t.dispatch.Prefill.Worker
	if w == nil {
		return "", 0, fmt.Errorf("%s: no prefill worker", t.of.name)
	}
	port = otherwise
	if b := w.Bootstrap; b != nil {
		host = b.Host
		if b.Port > 0 {
			port = b.Port
		}
	}
	if host == "" {
		host = hostname(w.URL)
	}
	if host == "" {
		return "", 0, fmt.Errorf("%s: worker %s has no address: state bootstrap=host:port", t.of.name, w.Name)
	}
	return host, port, nil
}

// checkOffload judges a prefill's answer. It says only that the transfer was made: the
// connector gives no parameters.
func checkOffload(t *Transfer, a *answer) error {
	if a.params.Exists() {
		return &ParamsError{Field: transferParams, Problem: "an engine that offloads gives none; this one has another connector: state that (connector=nixl, nixl-push, or nixl-offload-p2p)"}
	}
	return checkCount(t, a)
}

// checkCount judges the prompt's length where both sides must have the same.
func checkCount(t *Transfer, a *answer) error {
	if f := &t.dispatch.Facts; exact(f) && a.promptTokens >= 0 && a.promptTokens != f.ISL {
		return &ParamsError{Field: "prompt_tokens", Problem: fmt.Sprintf("the prefill engine counts %d tokens, the prompt has %d", a.promptTokens, f.ISL)}
	}
	return nil
}
