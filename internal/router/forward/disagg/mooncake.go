package disagg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/workers"
)

const (
	// mooncakePort is that of the bootstrap server (VLLM_MOONCAKE_BOOTSTRAP_PORT).
	mooncakePort = 8998
	// MaxBootstrap is the largest answer of a bootstrap server in bytes.
	MaxBootstrap = 1 << 20
	// bootstrapTime bounds asking it.
	bootstrapTime = 2 * time.Second
	// startTime is less than any engine takes to start.
	startTime = time.Second
	// senderTime is how long a sender waits in vain (VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT).
	senderTime = 480 * time.Second
)

// bootstrapOf is the bootstrap server of the prefill worker.
func bootstrapOf(t *Transfer) (err error) {
	t.at.Host, t.at.Port, err = stated(t, mooncakePort)
	return err
}

// serverURL is where the engines meet as a URL. Decode engines need the scheme.
func (t *Transfer) serverURL() string {
	return "http://" + net.JoinHostPort(unbracketed(t.at.Host), strconv.Itoa(t.at.Port))
}

// Meet finds the engine of the prefill rank where a bootstrap server knows it: of a
// Sequential transfer before the prefill leg is sent, of a Held one before the decode leg. Without
// fresh the prefill's request went over a connection that was there, to the engine that is known.
// Over a fresh one that engine counts only if it was seen within startTime, and so does the answer
// to [Transfer.Prepare]. A second call has no effect, unless the engine was forgotten since, as by
// [Transfer.Lost].
func (t *Transfer) Meet(ctx context.Context, fresh bool) error {
	if !t.of.bootstrap || t.met.Load() && !t.forgotten() {
		return nil
	}
	if t.known(fresh) {
		t.met.Store(true)
		return nil
	}
	if t.asked.IsZero() || time.Since(t.asked) > startTime {
		t.ask(ctx)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if t.unknown != nil {
		return t.unknown
	}
	if t.engine != t.at.EngineID || t.at.Life == nil {
		t.at.EngineID, t.at.Life = t.engine, new(workers.Life)
	}
	t.at.Life.Sign(t.asked)
	if t.used && t.kept() != nil { // no leg has failed meanwhile
		t.keep(t.at)
	}
	t.met.Store(true)
	return nil
}

// known takes over what is kept of the rank's engine, which other requests may have found since
// this one began, and reports whether the prefill leg's connection leads there. A fresh one does
// if the engine was seen within startTime, because an engine that restarts needs far longer until
// it takes a connection. It was seen when it answered a prefill leg, and when the bootstrap server
// was asked for it.
func (t *Transfer) known(fresh bool) bool {
	at := t.kept()
	if at == nil || at.Host != t.at.Host || at.Port != t.at.Port || fresh && time.Since(at.Life.Last()) > startTime {
		return false
	}
	t.at = *at
	return true
}

// forgotten reports whether what was taken over is not kept any more.
func (t *Transfer) forgotten() bool {
	at := t.kept()
	return t.asked.IsZero() && (at == nil || at.Life != t.at.Life)
}

// kept is what the router keeps of the rank's engine; nil for nothing.
func (t *Transfer) kept() *workers.KVAddress {
	if r := t.dispatch.Prefill.Rank; r != nil {
		return r.KVAddress()
	}
	return nil
}

// Prepare queries the bootstrap server where Meet would have to, while the prefill leg's
// connection is made. It must not run at the same time as Meet.
func (t *Transfer) Prepare(ctx context.Context) {
	if t.of.bootstrap && !t.known(true) {
		t.ask(ctx)
	}
}

// ask queries the bootstrap server for the engine of the prefill rank.
func (t *Transfer) ask(ctx context.Context) {
	rank, at := 0, t.serverURL()
	if r := t.dispatch.Prefill.Rank; r != nil {
		rank = r.DP
	}
	t.asked = time.Now()
	body, err := t.of.query(ctx, at)
	if err != nil {
		t.unknown = fmt.Errorf("%w: %s/query: %w. Engines with NixlConnector have no such server: state connector=nixl for them; bootstrap=host:port states another address", ErrNoBootstrap, at, err)
		return
	}
	if t.engine, err = engineOf(body, rank); err != nil {
		err = fmt.Errorf("%w: %s/query: %w", ErrNoBootstrap, at, err)
	}
	t.unknown = err
}

// errSilent: a bootstrap server took no connection, or gave no answer.
var errSilent = errors.New("no answer in " + bootstrapTime.String())

// query asks a bootstrap server. One that gave no answer is not asked again for as long as
// that took: each request would wait for it.
func (c *Connector) query(ctx context.Context, server string) ([]byte, error) {
	c.mu.Lock()
	until := c.silent[server]
	c.mu.Unlock()
	if time.Now().Before(until) {
		return nil, fmt.Errorf("%w, and no new request was sent", errSilent)
	}
	limited, cancel := context.WithTimeoutCause(ctx, bootstrapTime, errSilent)
	defer cancel()
	body, err := c.o.Query(limited, server)
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		now := time.Now()
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.silent == nil {
			c.silent = map[string]time.Time{}
		}
		maps.DeleteFunc(c.silent, func(_ string, until time.Time) bool { return now.After(until) })
		c.silent[server] = now.Add(bootstrapTime)
		return nil, errSilent
	}
	return body, err
}

// engineOf reads the engine id of a rank from the answer of a bootstrap server of vLLM 0.33:
//
//	{"0": {"engine_id": "…", "worker_addr": {"<tp rank>": {"<pp rank>": "tcp://…"}}}, …}
//
// A rank that has not registered yet is not there.
func engineOf(body []byte, rank int) (string, error) {
	want, n := strconv.Itoa(rank), 0
	var entry rawjson.Value
	if !rawjson.ReadObject(body, maxDepth, func(key, value []byte) {
		if n++; string(key) == want {
			entry = value
		}
	}) {
		return "", errors.New("the answer is not a JSON object, so that this is no bootstrap server of Mooncake's")
	}
	if !entry.Exists() {
		return "", fmt.Errorf("rank %d has not registered; %d ranks have", rank, n)
	}
	id := word(entry.Get("engine_id"))
	if id == "" || len(id) > maxNameBytes || !printable(id) {
		return "", fmt.Errorf("the entry of rank %d has no engine_id", rank)
	}
	return id, nil
}

// checkMooncake judges a prefill's answer. The connector gives no parameters, and keeps no KV
// of an answer that ended by itself, for which the decode engine would wait in vain.
func checkMooncake(t *Transfer, a *answer) error {
	if a.params.Get("remote_block_ids").Exists() {
		return &ParamsError{Field: transferParams, Problem: "they are NIXL's, but connector=mooncake was stated: state connector=nixl on the worker and on the decode workers beside it"}
	}
	if a.ended() {
		return fmt.Errorf("%w (finish_reason %q)", ErrEnded, clip(a.finish))
	}
	if err := checkCount(t, a); err != nil {
		return err
	}
	if t.met.Load() { // else Meet may be writing the address now
		t.facts.EngineID, t.facts.Host, t.facts.Port = t.at.EngineID, t.at.Host, t.at.Port
		t.at.Life.Sign(time.Now())
		if !t.used && !t.asked.IsZero() {
			t.keep(t.at)
		}
	}
	return nil
}

// bootstraps asks bootstrap servers. They are servers of their own, so that what is set for
// engines (TLS, API keys) is not for them.
var bootstraps = upstream.New(upstream.Options{DialTimeout: bootstrapTime})

// overHTTP is the default of Options.Query.
func overHTTP(ctx context.Context, server string) ([]byte, error) {
	base, err := url.Parse(server)
	if err != nil {
		return nil, err
	}
	r, err := bootstraps.Do(ctx, &upstream.Leg{Base: base, Path: "/query", Method: http.MethodGet})
	if err != nil {
		return nil, cmp.Or(errors.Unwrap(err), err) // the address is named with it
	}
	defer r.Close()
	if r.Status != http.StatusOK {
		return nil, fmt.Errorf("HTTP %d", r.Status)
	}
	return r.ReadAll(MaxBootstrap)
}
