package api

import (
	"net/http"
	"strings"
)

// AppendStrip appends the edits that remove what a client must not steer; most
// requests need none.
func (v *View) AppendStrip(dst []Edit) []Edit {
	if v.transferIn > 0 {
		for i := range v.Fields {
			if v.Fields[i].id == keyTransfer {
				dst = append(dst, Delete(v.keyName(&v.Fields[i])))
			}
		}
	}
	if v.hasNested {
		for _, id := range [...]keyID{keySamplingParams, keyXArgs} {
			if k := v.seen[id]; k != 0 {
				f := &v.Fields[k-1]
				dst = v.stripIn(dst, v.keyName(f), f.Value, 0)
			}
		}
	}
	return dst
}

func (v *View) stripIn(dst []Edit, path string, at Span, depth int) []Edit {
	switch v.Body[at.Start] {
	case '{':
		eachMember(v.Body, at, func(name []byte, value Span) bool {
			switch {
			case isTransferField(name):
				dst = append(dst, Delete(path+"."+string(name)))
			case depth == 0 && string(name) == "extra_args":
				dst = v.stripIn(dst, path+".extra_args", value, depth+1)
			}
			return true
		})
	case '[':
		eachElement(v.Body, at, func(_ int, el Span) bool {
			if v.Body[el.Start] == '{' {
				dst = v.stripIn(dst, path, el, depth)
			}
			return true
		})
	}
	return dst
}

// ForwardRequestHeader reports whether a client's request header goes on to an
// engine. The key must be in canonical form, as in [http.Header]. Left out are
// hop-by-hop headers, those that belong to the message rather than to the
// request (Host, Content-Length), those by which the router speaks with its
// client or its engines (X-Dynctl-*, X-Data-Parallel-Rank,
// Endpoint-Load-Metrics-Format) or name the hops before ([ForwardedHeader]),
// and Accept-Encoding, so that event streams are not compressed. Authorization,
// traceparent, X-Request-Id and whatever else a client sends go on.
func ForwardRequestHeader(key string) bool {
	switch key {
	case "Host", "Content-Length", "Accept-Encoding", "Expect",
		"X-Data-Parallel-Rank", "Endpoint-Load-Metrics-Format", "Endpoint-Load-Metrics":
		return false
	}
	return !hopByHop(key) && !ours(key) && !ForwardedHeader(key)
}

// ForwardedHeader reports whether a request header says where the request came
// from before: an engine may believe it from the router alone.
func ForwardedHeader(key string) bool {
	const family = "X-Forwarded-"
	return key == "Forwarded" || key == "X-Real-Ip" || len(key) > len(family) && key[:len(family)] == family
}

// ForwardResponseHeader reports whether an engine's response header goes on to
// the client. The key must be in canonical form.
func ForwardResponseHeader(key string) bool {
	switch key {
	case "Content-Length", "Endpoint-Load-Metrics", "X-Request-Id":
		return false
	}
	return !hopByHop(key) && !ours(key)
}

func ours(key string) bool {
	return len(key) > 9 && key[:9] == "X-Dynctl-"
}

func hopByHop(key string) bool {
	switch key {
	case "Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection",
		"Te", "Trailer", "Transfer-Encoding", "Upgrade":
		return true
	}
	return false
}

// ConnectionTokens calls on for each header that the Connection header names
// as hop-by-hop, in canonical form.
func ConnectionTokens(h http.Header, on func(key string)) {
	for _, line := range h["Connection"] {
		for word := range strings.SplitSeq(line, ",") {
			if word = strings.Trim(word, " \t"); word != "" {
				on(http.CanonicalHeaderKey(word))
			}
		}
	}
}
