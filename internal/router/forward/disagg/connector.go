// Package disagg is the transfer of KV between engines. A table has for each connector the
// members of both legs, their order, who makes the id that joins them, and what the answer of
// a prefill must contain.
//
// Begin of a Connector starts one dispatch: every call makes new transfer ids, and
// the Transfer that it returns can feed one decode leg only.
package disagg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// Mode says how the two legs of a remote plan follow each other.
type Mode string

// The modes.
const (
	// Sequential: the decode leg starts when the prefill leg has answered and
	// CheckPrefill has passed.
	Sequential Mode = "sequential"
	// Concurrent: both legs start together; the prefill's answer is read to its end and
	// judged, its failure cancels the decode leg.
	Concurrent Mode = "concurrent"
	// Held: as Concurrent, but the decode leg is sent only when the prefill's request was
	// written completely, so that its engine waits for no prefill that no engine has. Both
	// engines meet at an address that the router keeps for the prefill rank. A transfer of a
	// rank without one, as after a failure, is Sequential. So is one of a rank that has no
	// sender to spare (workers.Senders).
	Held Mode = "held"
)

// Errors of a Transfer.
var (
	// ErrUsed: the transfer fed a decode leg before. A retry needs a new
	// prefill.
	ErrUsed = errors.New("transfer was used before: a retry needs a new prefill")
	// ErrUnchecked: a sequential transfer without a prefill answer that passed
	// CheckPrefill.
	ErrUnchecked = errors.New("transfer has no checked prefill answer")
	// ErrMissingParams: the prefill answered well but gave no transfer
	// parameters, so the decode engine would compute everything again.
	ErrMissingParams = errors.New("prefill answer has no transfer parameters")
	// ErrEnded: the prefill's first token ended the answer, so the engine kept no KV for
	// another one: vLLM 0.32 gives parameters when an answer ends by length or stop, older
	// ones by length only. Nothing is wrong with the engine; the decode engine computes the
	// prompt.
	ErrEnded = errors.New("the prefill's first token ended the answer, so there is no KV to move")
	// ErrBadParams: the parameters must not reach a decode engine. A
	// *ParamsError says which of them and why.
	ErrBadParams = errors.New("prefill answer has wrong transfer parameters")
	// ErrNoBootstrap: the bootstrap server of a prefill worker does not say where the rank is.
	ErrNoBootstrap = errors.New("the bootstrap server of the prefill worker does not name its engine")
	// ErrRestarted: the prefill engine is another one than the decode engine waits for.
	ErrRestarted = errors.New("the prefill engine was restarted")
	// ErrPrefillFailed: the prefill engine ended the request without the
	// prompt's KV.
	ErrPrefillFailed = errors.New("prefill did not finish")
)

// ParamsError is one wrong transfer parameter. It is an ErrBadParams.
type ParamsError struct {
	// Field is the member's name.
	Field string
	// Problem says what is wrong with it.
	Problem string
	// Harmless says that no known decode engine comes to harm by it.
	Harmless bool
}

func (e *ParamsError) Error() string {
	text := fmt.Sprintf("%v: %s: %s", ErrBadParams, e.Field, e.Problem)
	if e.Harmless {
		text += " (no known decode engine comes to harm by it; transfer_check=report on this worker uses such parameters)"
	}
	return text
}

// Is makes a ParamsError an ErrBadParams.
func (e *ParamsError) Is(target error) bool { return target == ErrBadParams }

// Options set up a connector.
type Options struct {
	// Rand makes transfer ids and rooms; nil uses the runtime's generator,
	// which is seeded by the system. A simulation passes a seeded one.
	Rand func() uint64
	// Decoders finds the receiver of a decode worker for LMCache; nil leaves
	// the workers' own.
	Decoders *DecoderRegistry
	// Query returns what Mooncake's bootstrap server at a URL answers to GET /query, at most
	// MaxBootstrap bytes of it; nil asks over HTTP.
	Query func(ctx context.Context, server string) ([]byte, error)
}

// Dispatch is one try to serve one request in two legs.
type Dispatch struct {
	// RequestID is sent as X-Request-Id on both legs.
	RequestID string
	Facts     api.Facts
	Prefill   workers.Peer
	Decode    workers.Peer
	// Check is how strictly the prefill's parameters are judged.
	Check workers.TransferCheck
}

// Connector is one way in which KV moves: a row of the table with its options.
type Connector struct {
	*kind
	o Options
	// asks is what all prefill legs carry alike; nil where it differs by transfer.
	asks []byte

	mu sync.Mutex // guards silent
	// silent has until when bootstrap servers, by URL, are not asked again.
	silent map[string]time.Time
}

// Transfer is the KV transfer of one dispatch. It gives the edits of the
// prefill leg, judges its answer, and gives the edits of the decode leg
// exactly once: a decode engine that is handed the parameters of another
// prompt, or the same ones twice, answers 200 with another prompt's text, or
// exits. It is safe for concurrent use.
type Transfer struct {
	of       *Connector
	mode     Mode
	dispatch Dispatch
	// room is SGLang's, 0 for others.
	room uint64
	// fresh is new for each transfer; "" where the engines make their own ids.
	fresh string
	// requestID is X-Request-Id of both legs where they may not carry the
	// request's own; "" elsewhere.
	requestID string
	prefill   []api.Edit
	decode    []api.Edit
	// params are the answer's transfer parameters; nil until it was judged.
	params rawjson.Value
	facts  Checked
	first  *FirstToken
	// at is where the engines meet; used says that the decode engine gets it before the
	// prefill has answered.
	at   workers.KVAddress
	used bool
	// engine is what the bootstrap server answered to what was sent at asked (zero for
	// never); unknown says why it is not known.
	engine  string
	unknown error
	asked   time.Time
	// met says that at has the engine that the prefill leg reached, and is not written any more.
	met atomic.Bool

	state atomic.Uint32
}

// The states of a transfer.
const (
	stateNew uint32 = iota
	stateChecking
	stateReady
	stateTaken
	stateBad
)

// Checked is what a prefill's answer said, for receipts and metrics.
type Checked struct {
	// PromptTokens and CachedTokens are from the answer's usage, -1 when it
	// did not say.
	PromptTokens, CachedTokens int
	// EngineID, RequestID, Host and Port name the KV on the prefill side.
	EngineID, RequestID, Host string
	Port                      int
	// Blocks is how many of the prefill engine's blocks hold the prompt, Groups how many
	// cache groups they are of: with several the parameters are judged strictly,
	// whatever was requested, since of what goes wrong with those too little is known.
	Blocks, Groups int
	// Odd are problems with the parameters that were let pass.
	Odd []string
}

// FirstToken is the token that the prefill has sampled and the client must get
// before the decode leg's answer.
type FirstToken struct{ Text string }

// Begin makes the transfer of one dispatch, with fresh ids.
func (c *Connector) Begin(d Dispatch) (*Transfer, error) {
	t := &Transfer{of: c, mode: c.order, dispatch: d}
	if c.ids != byEngine {
		// 16 digits: vLLM takes a last part of 8 hexadecimal ones for its own.
		t.fresh = fmt.Sprintf("%016x", c.o.Rand())
		if c.ids == byRouterInHeader {
			t.requestID = t.joined()
		}
	}
	if c.order == Held {
		t.mode = Sequential
		if r := d.Prefill.Rank; r != nil && r.KVAddress() != nil && (c.senders == 0 || r.Senders().Take(time.Now(), c.senders)) {
			t.mode, t.at, t.used = Held, *r.KVAddress(), true
		}
	}
	if err := c.legs(t); err != nil {
		t.PrefillEnded(false)
		return nil, err
	}
	if t.mode != Sequential {
		t.facts = Checked{PromptTokens: -1, CachedTokens: -1}
		t.state.Store(stateReady)
	}
	return t, nil
}

// legs makes the edits of the prefill leg, and of the decode leg where the row has its body.
func (c *Connector) legs(t *Transfer) error {
	if c.where != nil {
		if err := c.where(t); err != nil {
			return err
		}
	}
	if c.body != nil {
		return c.body(t)
	}
	t.prefill = oneToken(&t.dispatch.Facts)
	if c.senders > 0 {
		t.prefill = endless(t.prefill, t.dispatch.Facts.Kind)
	}
	ask := c.asks
	if ask == nil && c.prefill != nil {
		var err error
		if ask, err = t.object(c.prefill); err != nil {
			return err
		}
	}
	if ask != nil {
		t.prefill = append(t.prefill, api.Set(transferParams, ask))
	}
	return nil
}

// joined is the id of the transfer that holds that of the request.
func (t *Transfer) joined() string { return t.dispatch.RequestID + "-" + t.fresh }

// Kind is the connector that the transfer is of.
func (t *Transfer) Kind() workers.Connector { return t.of.name }

// Mode says how the legs follow each other.
func (t *Transfer) Mode() Mode { return t.mode }

// Leased reports whether the prefill engine keeps the KV for a limited time only, and the
// decode engine fetches it by block number, whatever the blocks hold by then. vLLM 0.32 does
// (kv_lease_duration): from when it has the request the decode engine extends the lease, and
// before that no engine does.
func (t *Transfer) Leased() bool { return t.of.leased }

// ID is the room of the transfer, 0 for a connector that has none.
func (t *Transfer) ID() uint64 { return t.room }

// RequestID is X-Request-Id of both legs.
func (t *Transfer) RequestID() string { return cmp.Or(t.requestID, t.dispatch.RequestID) }

// PrefillEdits are the changes of the client's body for the prefill leg. They
// must not be changed.
func (t *Transfer) PrefillEdits() []api.Edit { return t.prefill }

// Facts are what CheckPrefill has read.
func (t *Transfer) Facts() Checked { return t.facts }

// FirstToken is the token that the client must get first; ok is false when the
// decode leg gives all of them.
func (t *Transfer) FirstToken() (FirstToken, bool) {
	if t.first == nil {
		return FirstToken{}, false
	}
	return *t.first, true
}

// CheckPrefill judges the body of a prefill's 2xx answer; after an error the
// transfer is of no use. The decode leg of a transfer that is not Sequential does not wait
// for it and must be stopped by an error. The body must not change afterwards.
func (t *Transfer) CheckPrefill(body []byte) error {
	if t.mode != Sequential {
		if t.of.answer == nil {
			return checkDiscarded(body)
		}
		return t.judge(body)
	}
	if !t.state.CompareAndSwap(stateNew, stateChecking) {
		return ErrUsed
	}
	if err := t.judge(body); err != nil {
		t.state.Store(stateBad)
		return err
	}
	t.state.Store(stateReady)
	return nil
}

// judge reads a prefill's answer and decides whether it will do.
func (t *Transfer) judge(body []byte) error {
	a, err := parseAnswer(body)
	if err != nil {
		return err
	}
	t.facts.PromptTokens, t.facts.CachedTokens = a.promptTokens, a.cachedTokens
	if err := t.of.answer(t, a); err != nil || t.mode != Sequential {
		return err
	}
	t.params = a.params
	if !t.of.bootstrap { // else [Transfer.Meet] has what is missing
		return t.render()
	}
	return nil
}

// render makes the edits of the decode leg, where the connector's row has them.
func (t *Transfer) render() error {
	if t.of.decode == nil {
		return nil
	}
	raw, err := t.object(t.of.decode)
	if err != nil {
		return &ParamsError{Field: transferParams, Problem: err.Error()}
	}
	t.decode = []api.Edit{api.Set(transferParams, raw)}
	return nil
}

// Failed reports that a leg failed and another attempt may follow. Where the decode leg was
// given the address of its KV before the prefill had answered, that may have been wrong: the
// next transfer of the prefill rank waits for its answer.
func (t *Transfer) Failed() {
	if r := t.dispatch.Prefill.Rank; r != nil && (t.used || t.of.bootstrap) {
		r.SetKVAddress(nil)
	}
}

// Lost reports that the prefill engine has closed a connection that was kept, as one does that
// ends: what was known of it is forgotten. It must not run at the same time as Prepare or Meet.
func (t *Transfer) Lost() {
	if t.of.bootstrap {
		t.Failed()
		t.asked = time.Time{}
	}
}

// PrefillEnded reports once that the prefill leg of a Held transfer is over. lost says that the
// prefill engine has no KV for a decode engine that may have requested it.
func (t *Transfer) PrefillEnded(lost bool) {
	switch r := t.dispatch.Prefill.Rank; {
	case t.of.senders == 0 || t.mode != Held:
	case lost:
		r.Senders().Lose(time.Now().Add(senderTime))
	default:
		r.Senders().Free()
	}
}

// DecodeEdits are the changes of the client's body for the decode leg. Only
// the first call gets them; a second one is an ErrUsed.
func (t *Transfer) DecodeEdits() ([]api.Edit, error) {
	if t.state.CompareAndSwap(stateReady, stateTaken) {
		if t.decode == nil {
			if err := t.render(); err != nil {
				return nil, err
			}
		}
		return t.decode, nil
	}
	if t.state.Load() == stateTaken {
		return nil, ErrUsed
	}
	return nil, ErrUnchecked
}

// HandOver lets another decode rank have the KV, because the one that was given it has
// refused the request for want of room and so not read the parameters. It reports false
// where the KV is bound to the first rank, or the other one cannot fetch it.
func (t *Transfer) HandOver(to workers.Peer) bool {
	if !t.of.anyRank || t.facts.Host != "" && checkHost(t.facts.Host, workerURL(t.dispatch.Prefill), workerURL(to)) != nil {
		return false
	}
	if !t.state.CompareAndSwap(stateTaken, stateReady) {
		return false
	}
	t.dispatch.Decode = to
	return true
}

// oneToken are the edits that make a prefill leg of any engine of vLLM's kind:
// a short answer in one piece.
func oneToken(f *api.Facts, more ...api.Edit) []api.Edit {
	e := []api.Edit{api.Set("stream", api.RawFalse)}
	switch f.Kind {
	case api.Generate:
		e = append(e, api.Set("sampling_params.max_tokens", api.RawOne), api.Delete("sampling_params.min_tokens"))
	case api.Responses:
		// Nobody will ask the prefill engine for the response later on.
		e = append(e, api.Delete("stream_options"), api.Set("max_output_tokens", api.RawOne),
			api.Set("store", api.RawFalse), api.Delete("background"))
	case api.Messages:
		e = append(e, api.Delete("stream_options"), api.Set("max_tokens", api.RawOne))
		if f.ThinkingBudget {
			e = append(e, api.Set("thinking", adaptive))
		}
	default:
		e = append(e, api.Delete("stream_options"), api.Set("max_tokens", api.RawOne),
			api.Replace("max_completion_tokens", api.RawOne), api.Delete("min_tokens"), api.Delete("min_completion_tokens"))
	}
	return append(e, more...)
}

// endless adds what keeps an engine from ending the answer of a prefill leg by itself, where the
// endpoint has that: the answer is discarded, and the KV of one that did not end by its
// length is not kept.
func endless(e []api.Edit, k api.Kind) []api.Edit {
	switch k {
	case api.Generate:
		return append(e, api.Set("sampling_params.ignore_eos", api.RawTrue), api.Delete("sampling_params.stop"), api.Delete("sampling_params.stop_token_ids"))
	case api.Messages:
		return append(e, api.Delete("stop_sequences"))
	default:
		return append(e, api.Set("ignore_eos", api.RawTrue), api.Delete("stop"), api.Delete("stop_token_ids"))
	}
}

// adaptive lets the model think as it does by default, without a budget, which
// would have to be below the one token; the prompt is the same.
var adaptive = []byte(`{"type":"adaptive"}`)

const transferParams = "kv_transfer_params"

// sglangBody is SGLang's bootstrap: both legs carry the address of the prefill's
// rendezvous server and a room that no other request has.
func sglangBody(t *Transfer) error {
	d := &t.dispatch
	w := d.Prefill.Worker
	if w == nil || w.Bootstrap == nil && w.URL == nil {
		return fmt.Errorf("sglang: prefill worker %v has no bootstrap address", w)
	}
	host, port := "", api.RawNull
	if w.Bootstrap != nil {
		host = w.Bootstrap.Host
		if w.Bootstrap.Port > 0 {
			port = api.RawInt(int64(w.Bootstrap.Port))
		}
	}
	host = cmp.Or(host, hostname(w.URL))
	if host == "" {
		return fmt.Errorf("sglang: prefill worker %s has no bootstrap address", w.Name)
	}
	ranks, rank := 1, 0
	if len(w.Ranks) > 1 && d.Prefill.Rank != nil {
		ranks, rank = len(w.Ranks), d.Prefill.Rank.DP
	}
	rooms := make([]int, max(d.Facts.Prompts, 1))
	for i := range rooms {
		rooms[i] = int(room(t.of.o.Rand(), ranks, rank))
	}
	t.room = uint64(rooms[0])
	hosts, ids := api.RawString(bracketed(host)), api.RawInt(int64(rooms[0]))
	if len(rooms) > 1 { // one of each for each prompt
		hosts, port, ids = repeated(hosts, len(rooms)), repeated(port, len(rooms)), appendInts(nil, rooms)
	}
	t.prefill = []api.Edit{
		api.Set("bootstrap_host", hosts),
		api.Set("bootstrap_port", port),
		api.Set("bootstrap_room", ids),
	}
	t.decode = t.prefill
	if ranks > 1 {
		// The decode engine need not ask where the prompt was prefilled.
		t.decode = append(t.prefill[:3:3], api.Set("disagg_prefill_dp_rank", api.RawInt(int64(rank))))
	}
	return nil
}

// room makes a room number in [0, 2^63) with room ≡ rank (mod ranks), by which
// SGLang's prefill server finds the rank.
func room(draw uint64, ranks, rank int) uint64 {
	n, r := uint64(ranks), uint64(rank)
	v := draw >> 1
	v = v - v%n + r%n
	if v >= 1<<63 {
		v -= n
	}
	return v
}

// repeated is the list that holds a value n times.
func repeated(value []byte, n int) []byte {
	out := append(make([]byte, 0, n*(len(value)+1)+2), '[')
	for i := range n {
		if i > 0 {
			out = append(out, ',')
		}
		out = append(out, value...)
	}
	return append(out, ']')
}

// bracketed puts an IPv6 address between brackets.
func bracketed(host string) string {
	if strings.Contains(host, ":") && !strings.HasPrefix(host, "[") {
		return "[" + host + "]"
	}
	return host
}

// unbracketed is the other way round.
func unbracketed(host string) string { return strings.Trim(host, "[]") }

func hostname(u *url.URL) string {
	if u == nil {
		return ""
	}
	return u.Hostname()
}

// isLoopback reports whether a host name means this machine only.
func isLoopback(host string) bool {
	if strings.EqualFold(host, "localhost") {
		return true
	}
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return ip != nil && ip.IsLoopback()
}

func appendInts[T int | uint32](dst []byte, v []T) []byte {
	dst = append(dst, '[')
	for i, n := range v {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendInt(dst, int64(n), 10)
	}
	return append(dst, ']')
}
