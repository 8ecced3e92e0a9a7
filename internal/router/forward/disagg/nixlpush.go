package disagg

import (
	"fmt"

	"github.com/dynctl/dynctl/internal/workers"
)

// modePush is the transfer_mode of an engine that pushes (vLLM since 0.32).
const modePush = "push"

// checkPush judges the answer of a prefill engine that pushes and keeps the rank's
// address. In a held transfer the decode engine was given an address before:
// with another one (the engine was restarted) it would wait for nothing.
func checkPush(t *Transfer, a *answer) error {
	p, err := readParams(t, a)
	if err != nil {
		return err
	}
	if mode := word(p.m[fieldMode]); mode != modePush {
		return &ParamsError{Field: fieldNames[fieldMode], Problem: fmt.Sprintf("%q, but connector=nixl-push was stated; an engine that is read from has connector=nixl", clip(mode))}
	}
	f := &t.facts
	f.Odd = p.odd
	size := func(field int) int {
		if n, ok := p.m[field].Int(); ok && n > 0 {
			return n
		}
		return 1
	}
	at := workers.KVAddress{EngineID: f.EngineID, Host: f.Host, Port: f.Port, TP: size(fieldTP), PP: size(fieldPP), DCP: size(fieldDCP)}
	t.keep(at)
	if !t.used {
		t.at = at
		return nil
	}
	if t.at != at {
		return fmt.Errorf("%w: it is %s at %s:%d now, and the decode engine waits for %s at %s:%d",
			ErrRestarted, at.EngineID, at.Host, at.Port, t.at.EngineID, t.at.Host, t.at.Port)
	}
	return nil
}

// keep keeps where the prefill rank is for its next transfers.
func (t *Transfer) keep(at workers.KVAddress) {
	if rank := t.dispatch.Prefill.Rank; rank != nil {
		if was := rank.KVAddress(); was == nil || *was != at {
			rank.SetKVAddress(&at)
		}
	}
}
