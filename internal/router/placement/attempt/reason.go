package attempt

import (
	"bytes"
	"net/http"
	"strings"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers/health"
)

// Reason is why a leg failed before the client got a byte: a closed set, fit for
// metric labels.
type Reason string

// The reasons. Those of a leg that got no answer, in the words of package upstream:
const (
	Connect Reason = "connect"
	Timeout Reason = "timeout"
	// TooLong: the time for an answer was up, and the engine is alive: it works on the answer,
	// which another engine would have to begin again.
	TooLong Reason = "too_long"
	Reset   Reason = "reset"
	// Silent: its worker showed no sign of life, and another one could take the request.
	Silent   Reason = "silent"
	Protocol Reason = "protocol"
	// Stale: the engine had closed the connection as idle when the request was
	// sent, as far as is known. No worker is at fault.
	Stale Reason = "stale_connection"
	// Canceled: no client waits for the leg any more.
	Canceled Reason = "canceled"
	// Invalid: the leg itself cannot be sent.
	Invalid Reason = "invalid"
)

// Those of an answer that is none:
const (
	Status5xx Reason = "status_5xx"
	// Overloaded: the engine is well and has no room for the request now.
	Overloaded Reason = "overloaded"
	// EngineDead: what serves HTTP is still there, and says that the engine behind it
	// has died.
	EngineDead Reason = "engine_dead"
	Status4xx  Reason = "status_4xx"
	// UnknownModel: the engine does not serve the model or adapter, which another one may.
	UnknownModel Reason = "unknown_model"
	// Unauthorized: the engine refuses the key that the router has for it, which no
	// client can fix.
	Unauthorized Reason = "worker_unauthorized"
	// Status3xx: a redirect is no prefill, and none of the client's business.
	Status3xx Reason = "status_3xx"
	// Loop: the worker is a router that leads back to this one. Its engines may be well.
	Loop Reason = "loop"
	// StreamError: the engine's stream begins with an error, or its prefill's answer of
	// status 200 is one.
	StreamError Reason = "stream_error"
)

// Those of a prefill whose KV cannot move although its answer is good:
const (
	// MissingParams: it says nothing of where its KV is.
	MissingParams Reason = "missing_params"
	// BadParams: what it says does not fit the prompt.
	BadParams Reason = "bad_params"
	// Restarted: it is of another process than the one that the decode leg waits for.
	Restarted Reason = "restarted"
	// Ended: its first token ended the answer, which leaves no KV to move. No
	// worker is at fault.
	Ended = Reason(route.ReasonEnded)
)

// Those of a leg that was not sent:
const (
	// Moved: the rest of its stream is to come from elsewhere, because the worker is
	// drained. No worker is at fault.
	Moved Reason = "moved"
	// Ejected: between the choice and the dispatch the worker was ejected.
	Ejected Reason = "ejected"
	// NoConnector: the transfer could not be begun.
	NoConnector Reason = "no_connector"
)

// Meaning is what a reason says, for the policy and for the health of the worker.
type Meaning struct {
	// Final: no other worker would do better.
	Final bool
	// Broke: if the leg was sent, the engine had taken the request on, and
	// answered with an error of its own, broke off, or did not answer in time.
	Broke bool
	// Lost: if the leg was sent, the engine may have died of the request, or hang.
	Lost bool
	// Mutual: it may have failed so because of the other leg's worker. KV that cannot be
	// fetched, or a rendezvous without a second party, is reported as an internal error or not
	// at all.
	Mutual bool
	// Unsent: no leg went out, so that what an engine answered before still counts.
	Unsent bool
	// Outcome is how the leg ended, for the health of its worker.
	Outcome health.Outcome
}

// meanings is the one place that says what a failure means.
var meanings = map[Reason]Meaning{
	Connect:  {Outcome: health.ConnectError},
	Timeout:  {Broke: true, Lost: true, Mutual: true, Outcome: health.Timeout},
	TooLong:  {Final: true, Outcome: health.Canceled},
	Reset:    {Broke: true, Lost: true, Outcome: health.ServerError},
	Silent:   {Lost: true, Outcome: health.Canceled}, // probes judge silence
	Protocol: {Broke: true, Outcome: health.ServerError},
	Canceled: {Final: true, Outcome: health.Canceled},
	Stale:    {Outcome: health.Canceled},
	Invalid:  {Final: true, Outcome: health.Canceled},

	Status5xx:    {Broke: true, Mutual: true, Outcome: health.ServerError},
	Overloaded:   {Outcome: health.Refused},
	EngineDead:   {Broke: true, Lost: true, Outcome: health.ServerError},
	Status4xx:    {Final: true, Outcome: health.ClientError},
	UnknownModel: {Outcome: health.ClientError},
	Unauthorized: {Outcome: health.ServerError},
	Status3xx:    {Outcome: health.ServerError},
	Loop:         {Outcome: health.ClientError},
	StreamError:  {Broke: true, Mutual: true, Outcome: health.ServerError},

	MissingParams: {Outcome: health.Success},
	BadParams:     {Outcome: health.Success},
	Restarted:     {Outcome: health.Success},
	Ended:         {Outcome: health.Success},

	Moved:       {Outcome: health.Canceled},
	Ejected:     {Unsent: true, Outcome: health.Canceled},
	NoConnector: {Unsent: true, Outcome: health.Canceled},
}

// OfStatus is why the leg of a phase has failed that was answered with a status that is
// not 2xx. retryAfter is the answer's header Retry-After, "" without one. keyed says that
// the leg had the router's key for the worker in the place of what the client showed.
func OfStatus(phase route.Phase, status int, retryAfter string, body []byte, keyed bool) Reason {
	switch {
	case keyed && (status == http.StatusUnauthorized || status == http.StatusForbidden):
		return Unauthorized
	case status == http.StatusLoopDetected:
		return Loop
	case status == http.StatusTooManyRequests, status == statusOverloaded:
		return Overloaded
	case status == http.StatusServiceUnavailable && retryAfter != "":
		return Overloaded
	case status >= 500:
		return ofWords(body, Status5xx)
	case phase == route.Prefill && status < 400:
		return Status3xx
	case status == http.StatusNotFound && rawjson.Value(body).Get("error.code").String() == string(api.CodeModelNotFound),
		(status == http.StatusNotFound || status == http.StatusBadRequest) && ofWords(body, Status4xx) == UnknownModel:
		return UnknownModel
	}
	return Status4xx // the request's own fault; nobody else will like it better
}

// OfEvent returns the reason for a stream whose first event is this error.
func OfEvent(data string) Reason { return ofWords([]byte(data), StreamError) }

// statusOverloaded is what Anthropic's API answers, and Dynamo (DYN_HTTP_OVERLOAD_STATUS_CODE),
// where every worker is full.
const statusOverloaded = 529

// words are how the messages of errors begin by which engines say more than their status
// does.
var words = []struct {
	engine string
	begin  string
	reason Reason
}{
	// --max-queued-requests; 503, and in streams an event after a 200.
	{"SGLang", "The request queue is full", Overloaded},
	{"SGLang", "The request is aborted by a higher priority request", Overloaded},
	{"TGI", "Model is overloaded", Overloaded},
	// 404; 400 for adapters.
	{"vLLM", "The model `", UnknownModel},
	{"SGLang", "The following requested LoRA adapters are not loaded", UnknownModel},
	// EngineDeadError: the engine's process has ended, and the server ends next.
	{"vLLM", "EngineCore encountered an issue", EngineDead},
}

// ofWords is the reason that the message of an error stands for, or otherwise. An error
// that quotes its request may have the same words further on.
func ofWords(body []byte, otherwise Reason) Reason {
	if i := bytes.IndexByte(body, '{'); i > 0 { // in an event, or after words
		body = body[i:]
	}
	for _, path := range []string{"error.message", "message", "error"} {
		m := rawjson.Value(body).Get(path)
		for _, w := range words {
			if rawjson.IsString(m) && strings.HasPrefix(m.String(), w.begin) {
				return w.reason
			}
		}
	}
	// In the words of Anthropic's API, which vLLM 0.33 uses for /v1/messages (503, and in
	// streams an event).
	if rawjson.Value(body).Get("error.type").String() == "overloaded_error" {
		return Overloaded
	}
	return otherwise
}

// Means is what a reason says. An unknown reason says that another worker may do better, and
// that no worker's health is concerned.
func (r Reason) Means() Meaning {
	if m, ok := meanings[r]; ok {
		return m
	}
	return Meaning{Outcome: health.Canceled}
}
