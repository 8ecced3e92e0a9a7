package disagg

import (
	"fmt"
	"strconv"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// nixlPush is vLLM's NixlPushConnector (0.32): the decode engine sends the prefill
// engine over its side channel which blocks it has made room in, and the prefill engine
// writes the KV there. Both legs start at once when the prefill rank's address is
// known. Only an answer of the rank has it, so that the legs of the first transfer
// follow each other.
//
// The engines match the two legs by X-Request-Id, and a prefill engine keeps a
// finished prompt for a while (kv_lease_duration): a client that uses an id twice
// would get the KV of its other prompt. Both legs therefore carry an id that is
// new for each dispatch.
type nixlPush struct{ rand func() uint64 }

// modePush is the transfer_mode of an engine that pushes (vLLM since 0.32).
const modePush = "push"

func (n nixlPush) Begin(d Dispatch) (*Transfer, error) {
	// 16 digits: vLLM takes a last part of 8 hexadecimal ones for its own.
	fresh := fmt.Sprintf("%016x", n.rand())
	t := &Transfer{
		kind: workers.ConnectorNIXLPush, mode: Sequential, dispatch: d, check: checkPush,
		requestID: d.RequestID + "-" + fresh,
	}
	ask := append(append(make([]byte, 0, len(nixlRequest)+40), nixlRequest[:len(nixlRequest)-1]...), `,"transfer_id":"`...)
	t.prefill = oneToken(&d.Facts, api.Set(transferParams, append(append(ask, fresh...), `"}`...)))
	if d.Prefill.Rank == nil {
		return t, nil
	}
	if at := d.Prefill.Rank.PushAddress(); at != nil {
		t.mode, t.facts = Concurrent, Checked{PromptTokens: -1, CachedTokens: -1}
		t.used = at
		t.decode = registration(t, at)
		t.state.Store(stateReady)
	}
	return t, nil
}

// registration is what makes a decode engine wait for the KV that the rank at an
// address will push.
func registration(t *Transfer, at *workers.PushAddress) []api.Edit {
	b := append(make([]byte, 0, 320), `{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":`...)
	b = append(b, api.RawString(at.EngineID)...)
	b = append(append(b, `,"remote_host":`...), api.RawString(at.Host)...)
	b = strconv.AppendInt(append(b, `,"remote_port":`...), int64(at.Port), 10)
	b = append(append(b, `,"remote_request_id":`...), api.RawString(t.requestID)...)
	for _, size := range []struct {
		name  string
		value int
	}{{"tp_size", at.TP}, {"pp_size", at.PP}, {"dcp_size", at.DCP}} {
		b = append(append(append(b, `,"`...), size.name...), `":`...)
		b = strconv.AppendInt(b, int64(size.value), 10)
	}
	// The last 16 bytes of the id are those of this dispatch.
	b = append(append(append(b, `,"transfer_id":"`...), t.requestID[len(t.requestID)-16:]...), `"}`...)
	return []api.Edit{api.Set(transferParams, b)}
}

// checkPush judges the answer of a prefill engine that pushes and keeps the rank's
// address. In a concurrent transfer the decode engine was given an address before:
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
	at := workers.PushAddress{EngineID: f.EngineID, Host: f.Host, Port: f.Port, TP: size(fieldTP), PP: size(fieldPP), DCP: size(fieldDCP)}
	if rank := t.dispatch.Prefill.Rank; rank != nil {
		if was := rank.PushAddress(); was == nil || *was != at {
			rank.SetPushAddress(&at)
		}
	}
	if t.mode == Sequential {
		t.decode = registration(t, &at)
		return nil
	}
	if *t.used != at {
		return fmt.Errorf("%w: it is %s at %s:%d now, and the decode engine waits for %s at %s:%d",
			ErrRestarted, at.EngineID, at.Host, at.Port, t.used.EngineID, t.used.Host, t.used.Port)
	}
	return nil
}
