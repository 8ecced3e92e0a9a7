package api

import (
	"fmt"
	"net/http"
)

// BadRequest is the error for a parameter that is not understood; param may be
// empty.
func BadRequest(param, format string, args ...any) error {
	return &Error{Status: http.StatusBadRequest, Code: CodeInvalidRequest, Param: param, Message: fmt.Sprintf(format, args...)}
}

// Clip shortens what a client sent, for a message that tells it back.
func Clip(s string) string {
	if len(s) > 100 {
		return s[:100] + "..."
	}
	return s
}
