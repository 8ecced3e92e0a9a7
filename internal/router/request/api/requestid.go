package api

import (
	"encoding/hex"
	"math/rand/v2"
	"net/http"
)

// HeaderRequestID names a request; the router passes it to both legs and back
// to the client.
const HeaderRequestID = "X-Request-Id"

// maxRequestID is the longest request id in bytes that is taken from a client.
const maxRequestID = 128

// RequestID is the id of a request: the client's, when it is 1 to 128 visible
// ASCII characters, else a new one. Anything else could break a header, a log
// line or an engine's own names for its requests.
func RequestID(h http.Header) string {
	if ids := h[HeaderRequestID]; len(ids) == 1 && validID(ids[0]) {
		return ids[0]
	}
	return NewRequestID()
}

// NewRequestID is a fresh id of 32 hexadecimal digits.
func NewRequestID() string {
	var b [16]byte
	for i := 0; i < 16; i += 8 {
		x := rand.Uint64()
		for k := range 8 {
			b[i+k] = byte(x >> (8 * k))
		}
	}
	return hex.EncodeToString(b[:])
}

func validID(s string) bool {
	if len(s) == 0 || len(s) > maxRequestID {
		return false
	}
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}
