package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

// Code is the machine-readable name of an error, in the "code" key.
type Code string

// The codes that clients may branch on.
const (
	CodeInvalidJSON      Code = "invalid_json"
	CodeInvalidRequest   Code = "invalid_request"
	CodeDuplicateKey     Code = "duplicate_key"
	CodeContextLength    Code = "context_length_exceeded" // OpenAI's name
	CodeBodyTooLarge     Code = "body_too_large"
	CodeUnsupportedMedia Code = "unsupported_media_type"
	CodeUnknownPath      Code = "unknown_path"
	CodeAdminPath        Code = "admin_path"
	CodeMethodNotAllowed Code = "method_not_allowed"
	CodeHTTPVersion      Code = "http_version_not_supported"
	CodeModelNotFound    Code = "model_not_found"
	CodeWorkerNotFound   Code = "worker_not_found"
	CodeUnauthorized     Code = "unauthorized"
	CodeForbidden        Code = "forbidden"
	CodeRateLimited      Code = "rate_limited"
	CodeRequestTimeout   Code = "request_timeout"
	CodeOverloaded       Code = "overloaded"
	CodeNoPrefillWorker  Code = "no_prefill_worker"
	CodeNoDecodeWorker   Code = "no_decode_worker"
	CodeUpstreamError    Code = "upstream_error"
	CodePrefillFailed    Code = "prefill_failed"
	CodeTimeout          Code = "timeout"
	CodeDraining         Code = "draining"
	CodeLoop             Code = "loop_detected"
	CodeClientClosed     Code = "client_closed"
	CodeInternal         Code = "internal_error"
)

// StatusClientClosed is the status of a request whose client went away. It is
// for logs, metrics and receipts only; no client is there to read it.
const StatusClientClosed = 499

// Error is an error that a client is sent. It marshals to OpenAI's shape.
type Error struct {
	// Status is the HTTP status.
	Status int
	Code   Code
	// Message says what is wrong, where, and what to do about it.
	Message string
	// Param is the path of the request member at fault; "" for none.
	Param string
	// RetryAfter, when above 0, is sent as the Retry-After header.
	RetryAfter time.Duration
	// Allow is the Allow header of a 405.
	Allow string
	// AcceptEncoding is the Accept-Encoding header of a 415.
	AcceptEncoding string
	// Err is the cause, for logs; the client never sees it.
	Err error
}

// Error is the message with its code.
func (e *Error) Error() string {
	s := string(e.Code) + ": " + e.Message
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap is the cause.
func (e *Error) Unwrap() error { return e.Err }

// Type is the class of the error in OpenAI's vocabulary.
func (e *Error) Type() string {
	switch {
	case e.Status == http.StatusUnauthorized:
		return "authentication_error"
	case e.Status == http.StatusForbidden:
		return "permission_error"
	case e.Status == http.StatusTooManyRequests:
		return "rate_limit_error"
	case e.Status == http.StatusServiceUnavailable:
		return "service_unavailable_error"
	case e.Status >= 500:
		return "server_error"
	default:
		return "invalid_request_error"
	}
}

var anthropicTypes = map[int]string{
	http.StatusUnauthorized:          "authentication_error",
	http.StatusForbidden:             "permission_error",
	http.StatusNotFound:              "not_found_error",
	http.StatusRequestEntityTooLarge: "request_too_large",
	http.StatusTooManyRequests:       "rate_limit_error",
	http.StatusServiceUnavailable:    "overloaded_error",
	http.StatusGatewayTimeout:        "timeout_error",
}

// anthropicType is the class of the error in Anthropic's vocabulary.
func (e *Error) anthropicType() string {
	if t, ok := anthropicTypes[e.Status]; ok {
		return t
	}
	if e.Status >= 500 {
		return "api_error"
	}
	return "invalid_request_error"
}

// openAI is the shape {"error":{"message","type","code","param"}}.
type openAI struct {
	Error openAIBody `json:"error"`
}

type openAIBody struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Code    Code    `json:"code"`
	Param   *string `json:"param"`
}

type anthropic struct {
	Type  string        `json:"type"`
	Error anthropicBody `json:"error"`
}

type anthropicBody struct {
	Type    string `json:"type"`
	Message string `json:"message"`
	Code    Code   `json:"code"`
}

func (e *Error) param() *string {
	if e.Param == "" {
		return nil
	}
	return &e.Param
}

// MarshalJSON writes OpenAI's shape.
func (e *Error) MarshalJSON() ([]byte, error) {
	return json.Marshal(openAI{openAIBody{e.Message, e.Type(), e.Code, e.param()}})
}

// JSON is the body of the error as clients of an endpoint of this kind expect
// it: Anthropic's shape for messages, OpenAI's for everything else.
func (e *Error) JSON(k Kind) []byte {
	var v any = e
	if k == Messages || k == CountTokens {
		v = anthropic{"error", anthropicBody{e.anthropicType(), e.Message, e.Code}}
	}
	b, err := json.Marshal(v)
	if err != nil { // strings and numbers only: cannot happen
		return []byte(`{"error":{"message":"internal error","type":"server_error","code":"internal_error","param":null}}`)
	}
	return b
}

// StreamEvent is the error as the last event of a stream that has begun, in
// the framing of the endpoint's kind. OpenAI's and SGLang's streams are closed
// with [DONE], as vLLM does.
func (e *Error) StreamEvent(k Kind) []byte {
	switch k {
	case Messages:
		return []byte("event: error\ndata: " + string(e.JSON(k)) + "\n\n")
	case Responses, ResponseObject:
		b, _ := json.Marshal(struct {
			Type    string  `json:"type"`
			Code    Code    `json:"code"`
			Message string  `json:"message"`
			Param   *string `json:"param"`
		}{"error", e.Code, e.Message, e.param()})
		return []byte("event: error\ndata: " + string(b) + "\n\n")
	default:
		return []byte("data: " + string(e.JSON(k)) + "\n\ndata: [DONE]\n\n")
	}
}

// apiErrorer is an error of another package that says what the client gets.
type apiErrorer interface{ APIError() *Error }

// FromError maps any error to what the client is sent: an [*Error] in the
// chain is taken as it is, an error with a method APIError() *Error answers.
// A cancelled context is a client that left, a deadline is 504. Everything else is an
// internal error that hides its cause.
func FromError(err error) *Error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	var a apiErrorer
	if errors.As(err, &a) {
		return a.APIError()
	}
	switch {
	case errors.Is(err, context.Canceled):
		return &Error{Status: StatusClientClosed, Code: CodeClientClosed, Message: "the client closed the connection", Err: err}
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return &Error{Status: http.StatusGatewayTimeout, Code: CodeTimeout, Message: "the request took longer than its time limit", Err: err}
	case errors.Is(err, io.ErrUnexpectedEOF):
		return &Error{Status: http.StatusBadRequest, Code: CodeInvalidRequest, Message: "the request ended before its body was complete", Err: err}
	}
	return &Error{Status: http.StatusInternalServerError, Code: CodeInternal, Message: "internal error of the router", Err: err}
}

// Ended is what the client is sent for an error of a request whose context has ended: the
// client has left, or the router has stopped. begun says that the client has a part of the
// answer. What is the request's own fault stays so: net/http ends the context also for a
// body that came too slowly or ended early.
func Ended(err error, left, stopped, begun bool) *Error {
	e := FromError(err)
	switch {
	case e.Status < StatusClientClosed:
	case stopped:
		e = &Error{Status: http.StatusServiceUnavailable, Code: CodeDraining, Message: "this router stopped before the request was done; send it to another one", RetryAfter: time.Second, Err: err}
	case left && !begun:
		e = &Error{Status: StatusClientClosed, Code: CodeClientClosed, Message: "the client closed the connection", Err: err}
	}
	return e
}

// lastEvent is how long a stream's last event may wait for the client.
const lastEvent = 5 * time.Second

// EndStream writes the error as the last event of a stream of an endpoint's kind, after the
// beginning of another one where that is cut off. It reports whether the event was written.
func (e *Error) EndStream(w http.ResponseWriter, k Kind, cut bool) bool {
	rc := http.NewResponseController(w)
	_ = rc.SetWriteDeadline(time.Now().Add(lastEvent))
	event := e.StreamEvent(k)
	if cut {
		event = append([]byte("\n\n"), event...)
	}
	_, err := w.Write(event)
	return err == nil && rc.Flush() == nil
}

// errorKind is the kind whose error shape a path has.
func errorKind(path string) Kind {
	if path == "/v1/messages" || strings.HasPrefix(path, "/v1/messages/") {
		return Messages
	}
	return Chat
}

// WriteError answers a request whose response has not begun. It sets the
// status, Content-Type, Retry-After and Allow, leaves other headers that the
// caller set (X-Request-Id), and writes nothing when the client is gone. What is
// left of the request's body gets a moment to arrive.
func WriteError(w http.ResponseWriter, r *http.Request, err error) {
	e := FromError(err)
	if e == nil || e.Status == StatusClientClosed {
		return
	}
	BoundBody(w, r, time.Now().Add(refusedBody))
	body := append(e.JSON(errorKind(r.URL.Path)), '\n')
	h := w.Header()
	h.Del("Content-Encoding")
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	if e.RetryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(int((e.RetryAfter+time.Second-1)/time.Second)))
	}
	if e.Allow != "" {
		h.Set("Allow", e.Allow)
	}
	if e.AcceptEncoding != "" {
		h.Set("Accept-Encoding", e.AcceptEncoding)
	}
	if e.Status == http.StatusRequestEntityTooLarge || e.Status == http.StatusRequestTimeout {
		// The rest of the body is not read; the connection cannot be reused.
		h.Set("Connection", "close")
	}
	w.WriteHeader(e.Status)
	if r.Method != http.MethodHead {
		_, _ = w.Write(body) // a client that is gone is no news here
	}
}

// BadRequest is the error for a parameter that is not understood; param may be
// empty.
func BadRequest(param, format string, args ...any) *Error {
	return &Error{Status: http.StatusBadRequest, Code: CodeInvalidRequest, Param: param, Message: fmt.Sprintf(format, args...)}
}
