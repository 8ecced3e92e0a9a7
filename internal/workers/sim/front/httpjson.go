package front

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
)

// Error is a refusal.
type Error struct {
	// Status is the HTTP status.
	Status int
	// Message is for people, Kind the engine's word for the class of the error.
	Message, Kind string
	// Param names the field that is wrong, a string or nil.
	Param any
}

func (e *Error) Error() string { return e.Message }

// Write answers with the error in the dialect's form: nested from vLLM, flat from
// SGLang.
func (e *Error) Write(w http.ResponseWriter, flat bool) {
	if flat {
		WriteJSON(w, e.Status, flatError{"error", e.Message, e.Kind, e.Param, e.Status})
		return
	}
	WriteJSON(w, e.Status, nestedError{errorBody{e.Message, e.Kind, e.Param, e.Status}})
}

// badRequest is a 400 about a field, or about none (nil).
func badRequest(param any, format string, args ...any) *Error {
	return &Error{http.StatusBadRequest, fmt.Sprintf(format, args...), "BadRequestError", param}
}

type errorBody struct {
	Message string `json:"message"`
	Type    string `json:"type"`
	Param   any    `json:"param"`
	Code    int    `json:"code"`
}

type nestedError struct {
	Error errorBody `json:"error"`
}

type flatError struct {
	Object  string `json:"object"`
	Message string `json:"message"`
	Type    string `json:"type"`
	Param   any    `json:"param"`
	Code    int    `json:"code"`
}

// WriteJSON answers with v as JSON.
func WriteJSON(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	writeBody(w, status, "application/json", b)
}

// writeBody answers with b.
func writeBody(w http.ResponseWriter, status int, contentType string, b []byte) {
	w.Header().Set("Content-Type", contentType)
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	w.WriteHeader(status)
	_, _ = w.Write(b) // a client that is gone needs no answer
}

// readJSON reads the whole body into v, or says what is wrong with it.
func readJSON(r *http.Request, v any) *Error {
	b, err := io.ReadAll(r.Body)
	if err != nil {
		if big, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return &Error{http.StatusRequestEntityTooLarge, fmt.Sprintf("Request body is larger than %d bytes.", big.Limit), "BadRequestError", nil}
		}
		return badRequest(nil, "Request body could not be read.")
	}
	return decodeJSON(b, v)
}

func decodeJSON(b []byte, v any) *Error {
	err := json.Unmarshal(b, v)
	var wrong *json.UnmarshalTypeError
	var syntax *json.SyntaxError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &wrong):
		field := wrong.Field
		return &Error{http.StatusBadRequest, fmt.Sprintf("1 validation error:\n  {'type': '%s_type', 'loc': 'body.%s', 'msg': 'Input should be a valid %s', 'input': %s}",
			wrong.Type.Kind(), field, wrong.Type.Kind(), strconv.Quote(wrong.Value)), "Bad Request", "body." + field}
	case errors.As(err, &syntax):
		return &Error{http.StatusBadRequest, fmt.Sprintf("1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.%d', 'msg': 'JSON decode error', 'ctx': {'error': %s}}",
			syntax.Offset, strconv.Quote(syntax.Error())), "Bad Request", "body"}
	}
	return &Error{http.StatusBadRequest, "1 validation error:\n  " + err.Error(), "Bad Request", "body"}
}

// absent reports whether a field is missing or null.
func absent(raw json.RawMessage) bool {
	return len(raw) == 0 || bytes.Equal(bytes.TrimSpace(raw), []byte("null"))
}

// rawJSON is v as JSON.
func rawJSON(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		return nil // plain values marshal
	}
	return b
}
