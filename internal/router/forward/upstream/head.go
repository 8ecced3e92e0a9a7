package upstream

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/dynctl/dynctl/internal/router/request/api"
)

var headPool = sync.Pool{New: func() any { b := make([]byte, 0, joinBelow); return &b }}

// keepHeadBuffer gives back the buffer that came from headPool as at and has
// perhaps grown to b.
func keepHeadBuffer(at *[]byte, b []byte) {
	if cap(b) <= 4*joinBelow {
		*at = b[:0]
		headPool.Put(at)
	}
}

// appendHead writes the head of a request.
func appendHead(b []byte, leg *Leg) ([]byte, error) {
	base := strings.TrimSuffix(leg.Base.EscapedPath(), "/")
	if !isToken(leg.Method) {
		return b, fmt.Errorf("method %q is not a token", leg.Method)
	}
	if leg.Path == "" || leg.Path[0] != '/' || !isTarget(leg.Path) || !isTarget(base) {
		return b, fmt.Errorf("path %q cannot be sent", base+leg.Path)
	}
	if leg.Base.Host == "" || !isTarget(leg.Base.Host) {
		return b, fmt.Errorf("host %q cannot be sent", leg.Base.Host)
	}
	b = append(b, leg.Method...)
	b = append(b, ' ')
	b = append(b, base...)
	b = append(b, leg.Path...)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	b = append(b, leg.Base.Host...)
	b = append(b, '\r', '\n')
	var named map[string]bool
	if len(leg.Header["Connection"]) > 0 {
		api.ConnectionTokens(leg.Header, func(key string) {
			if named == nil {
				named = make(map[string]bool, 4)
			}
			named[key] = true
		})
	}
	var err error
	for key, values := range leg.Header {
		if !api.ForwardRequestHeader(key) || named[key] || (key == "Authorization" && leg.APIKey != "") || isSet(leg.Set, key) {
			continue
		}
		for _, v := range values {
			if b, err = appendField(b, key, v); err != nil {
				return b, err
			}
		}
	}
	for _, f := range leg.Set {
		if b, err = appendField(b, f.Key, f.Value); err != nil {
			return b, err
		}
	}
	if leg.APIKey != "" {
		if b, err = appendField(b, "Authorization", "Bearer "+leg.APIKey); err != nil {
			return b, errors.New("the worker's API key cannot be sent in a header")
		}
	}
	if n := api.Size(leg.Body); n > 0 || (leg.Method != http.MethodGet && leg.Method != http.MethodHead) {
		b = append(b, "Content-Length: "...)
		b = strconv.AppendInt(b, int64(n), 10)
		b = append(b, '\r', '\n')
	}
	return append(b, '\r', '\n'), nil
}

func isSet(set []HeaderField, key string) bool {
	for i := range set {
		if set[i].Key == key {
			return true
		}
	}
	return false
}

func appendField(b []byte, key, value string) ([]byte, error) {
	if !isToken(key) {
		return b, fmt.Errorf("header name %q is not a token", key)
	}
	for i := range len(value) {
		if c := value[i]; c < ' ' && c != '\t' || c == 0x7f {
			return b, fmt.Errorf("header %s: control character in the value", key)
		}
	}
	b = append(b, key...)
	b = append(b, ':', ' ')
	b = append(b, value...)
	return append(b, '\r', '\n'), nil
}

var tokenChar = func() (t [256]bool) {
	for c := range 256 {
		t[c] = c > ' ' && c < 0x7f && !strings.ContainsRune("\"(),/:;<=>?@[\\]{}", rune(c))
	}
	return t
}()

func isToken(s string) bool {
	for i := range len(s) {
		if !tokenChar[s[i]] {
			return false
		}
	}
	return s != ""
}

func isTarget(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] == 0x7f {
			return false
		}
	}
	return true
}

// Header are the headers of an answer in their order. Keys are canonical.
type Header struct {
	keys, values []string
	hops         []string // keys that the Connection header names
}

// Add appends a header line. The key must be in canonical form.
func (h *Header) Add(key, value string) {
	h.keys, h.values = append(h.keys, key), append(h.values, value)
}

// Get is the first value of a header; "" if it is missing. The key must be in canonical form.
func (h *Header) Get(key string) string {
	for i, k := range h.keys {
		if k == key {
			return h.values[i]
		}
	}
	return ""
}

// Len is the number of header lines.
func (h *Header) Len() int { return len(h.keys) }

// At is header line i.
func (h *Header) At(i int) (key, value string) { return h.keys[i], h.values[i] }

// CopyTo adds to dst the headers that a client gets: those of the answer, not those of the
// connection.
func (h *Header) CopyTo(dst http.Header) {
	for i, k := range h.keys {
		if !api.ForwardResponseHeader(k) || len(h.hops) > 0 && slices.Contains(h.hops, k) {
			continue
		}
		if old := dst[k]; old != nil {
			dst[k] = append(old, h.values[i])
		} else {
			dst[k] = h.values[i : i+1 : i+1]
		}
	}
}

// readHead reads the head of the answer, skipping interim ones (1xx).
func (r *Response) readHead(leg *Leg) error {
	r.buf = smallBuffer()
	for interim := 0; ; interim++ {
		end := -1
		for scanned := r.r; end < 0; {
			if end = headEnd(r.buf[scanned:r.w]); end >= 0 {
				end += scanned
				break
			}
			scanned = max(r.r, r.w-3)
			if r.w-r.r >= maxHead {
				return errHeadSize
			}
			moved := r.r
			if err := r.read(); err != nil {
				return err
			}
			if r.r == 0 { // the rest was moved to the front
				scanned -= moved
			}
		}
		if end-r.r > maxHead {
			return errHeadSize
		}
		head := r.buf[r.r:end]
		r.r = end
		if err := r.parseHead(head, leg.Method); err != nil {
			return err
		}
		if r.Status >= 200 {
			return nil
		}
		if r.Status == http.StatusSwitchingProtocols {
			return malformed("answer 101 to a request without an upgrade")
		}
		if interim == 8 {
			return malformed("more than 8 interim answers")
		}
	}
}

// headEnd is the index after the empty line that ends a head, or -1.
func headEnd(b []byte) int {
	for i := 0; ; {
		k := bytes.IndexByte(b[i:], '\n')
		if k < 0 {
			return -1
		}
		i += k + 1
		if i < len(b) && b[i] == '\n' {
			return i + 1
		}
		if i+1 < len(b) && b[i] == '\r' && b[i+1] == '\n' {
			return i + 2
		}
	}
}

// parseHead reads a complete head: status line, headers, framing.
func (r *Response) parseHead(head []byte, method string) error {
	text := string(head) // the one copy; keys and values are parts of it
	line, text := cutLine(text)
	if len(line) < 12 || line[:7] != "HTTP/1." || (line[7] != '0' && line[7] != '1') || line[8] != ' ' || (len(line) > 12 && line[12] != ' ') {
		return malformed(fmt.Sprintf("status line %.60q", line))
	}
	status, err := strconv.ParseUint(line[9:12], 10, 16)
	if err != nil || status < 100 {
		return malformed(fmt.Sprintf("status line %.60q", line))
	}
	r.Status = int(status)
	lines := strings.Count(text, "\n")
	backing := make([]string, 2*lines)
	h := Header{keys: backing[:0:lines], values: backing[lines : lines : 2*lines]}
	length, chunked := int64(-1), false
	closes, keeps := false, line[7] == '1'
	for {
		line, text = cutLine(text)
		if line == "" {
			break
		}
		colon := strings.IndexByte(line, ':')
		if colon <= 0 || !isToken(line[:colon]) {
			return malformed(fmt.Sprintf("header line %.60q", line))
		}
		key, value := textproto.CanonicalMIMEHeaderKey(line[:colon]), strings.Trim(line[colon+1:], " \t")
		for i := range len(value) {
			if c := value[i]; c < ' ' && c != '\t' || c == 0x7f {
				return malformed("control character in header " + key)
			}
		}
		switch key {
		case "Content-Length":
			n, err := strconv.ParseUint(value, 10, 63)
			if err != nil || value[0] == '+' || (length >= 0 && length != int64(n)) {
				return malformed(fmt.Sprintf("Content-Length %.40q", value))
			}
			length = int64(n)
		case "Transfer-Encoding":
			if chunked || !strings.EqualFold(value, "chunked") {
				return malformed(fmt.Sprintf("Transfer-Encoding %.40q", value))
			}
			chunked = true
		case "Connection":
			for word := range strings.SplitSeq(value, ",") {
				word = strings.Trim(word, " \t")
				switch {
				case strings.EqualFold(word, "close"):
					closes = true
				case strings.EqualFold(word, "keep-alive"):
					keeps = true
				case word != "":
					h.hops = append(h.hops, textproto.CanonicalMIMEHeaderKey(word))
				}
			}
		}
		h.Add(key, value)
	}
	r.Header = h
	r.frame(method, length, chunked, closes || !keeps)
	return nil
}

// frame decides how the body ends (RFC 9112, 6.3).
func (r *Response) frame(method string, length int64, chunked, closes bool) {
	r.broken = r.broken || closes || (chunked && length >= 0)
	r.ContentLength = length
	switch {
	case method == http.MethodHead || r.Status < 200 || r.Status == http.StatusNoContent || r.Status == http.StatusNotModified:
		r.state, r.left = bodyDone, 0
	case chunked:
		r.state, r.left, r.ContentLength = chunkSize, 0, -1
	case length == 0:
		r.state, r.left = bodyDone, 0
	case length > 0:
		r.state, r.left = bodyLength, length
	default:
		r.state, r.broken = bodyToEnd, true
	}
}

func cutLine(s string) (line, rest string) {
	i := strings.IndexByte(s, '\n')
	if i < 0 {
		return s, ""
	}
	return strings.TrimSuffix(s[:i], "\r"), s[i+1:]
}
