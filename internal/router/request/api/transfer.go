package api

import (
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// extraArgs is the member of sampling parameters by which vLLM takes others, transfer
// parameters among them.
const extraArgs = "extra_args"

// isArgs reports whether a field's JSON may hold transfer parameters.
func isArgs(name string) bool {
	return name == keyNames[keySamplingParams] || name == keyNames[keyXArgs] || name == extraArgs
}

// steering judges the name of a field of a form or a query, in which brackets or dots may
// stand for members. steers reports whether it names what [isTransferField] does, args
// whether its value is an object in JSON of which members could.
func steering(name string) (steers, args bool) {
	path := strings.FieldsFunc(name, func(c rune) bool { return c == '.' || c == '[' || c == ']' })
	steers = slices.ContainsFunc(path, func(part string) bool { return isTransferField([]byte(part)) })
	return steers, len(path) > 0 && isArgs(path[len(path)-1])
}

// CheckQuery refuses a query that names what a client must not steer. The error is an
// [*Error].
func CheckQuery(query string) error {
	for field := range strings.FieldsFuncSeq(query, func(c rune) bool { return c == '&' || c == ';' }) {
		raw, _, _ := strings.Cut(field, "=")
		name, err := url.QueryUnescape(raw)
		if err != nil {
			return BadRequest("", "the query has a name with an invalid escape: %q; write a percent sign as %%25", Clip(raw))
		}
		if steers, args := steering(name); steers || args {
			return BadRequest(name, "the query has %q, by which clients could steer transfers of KV; leave it out", Clip(name))
		}
	}
	return nil
}

// stripArgs is the value of a field for which [isArgs] holds, as JSON text, without what a
// client must not steer, in pieces.
func stripArgs(name string, value []byte) (pieces [][]byte, changed bool, err error) {
	s := rawjson.NewScanner(value, DefaultDepth)
	start := s.Space(0)
	if start == len(value) {
		return nil, false, nil
	}
	end := s.Value(start)
	switch {
	case end < 0:
		return nil, false, BadRequest(name, "%q is not valid JSON: %s; send a JSON object", name, problem(&s, value, "its "))
	case s.Space(end) < len(value) || value[start] != '{' && value[start] != 'n':
		return nil, false, BadRequest(name, "%q must be a JSON object and nothing else", name)
	}
	edits := stripIn(nil, value, "", Span{start, end}, 0)
	if len(edits) == 0 {
		return nil, false, nil
	}
	out := splicer{body: value}
	out.keep(Span{0, start})
	out.value(Span{start, end}, cut(edits))
	out.keep(Span{end, len(value)})
	out.flush()
	return out.out, true, nil
}

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
				dst = stripIn(dst, v.Body, v.keyName(f)+".", f.Value, 0)
			}
		}
	}
	return dst
}

// stripIn appends the edits for the parameters at a place of a body. The keys of the edits
// begin with prefix.
func stripIn(dst []Edit, body []byte, prefix string, at Span, depth int) []Edit {
	switch body[at.Start] {
	case '{':
		eachMember(body, at, func(name []byte, value Span) bool {
			switch {
			case isTransferField(name):
				dst = append(dst, Delete(prefix+string(name)))
			case depth == 0 && string(name) == extraArgs:
				dst = stripIn(dst, body, prefix+extraArgs+".", value, depth+1)
			}
			return true
		})
	case '[':
		eachElement(body, at, func(_ int, el Span) bool {
			if body[el.Start] == '{' {
				dst = stripIn(dst, body, prefix, el, depth)
			}
			return true
		})
	}
	return dst
}

// PlainJSON reports whether the headers of a request say that its body is JSON in UTF-8, as
// the router reads it, or say nothing.
func PlainJSON(h http.Header) bool {
	types := h["Content-Type"]
	switch {
	case len(types) == 0:
		return true
	case len(types) > 1:
		return false
	case types[0] == MediaJSON:
		return true
	}
	media, params, err := mime.ParseMediaType(types[0])
	charset := params["charset"]
	return err == nil && !strings.Contains(types[0], "*") && (media == MediaJSON || strings.HasSuffix(media, "+json")) &&
		(charset == "" || strings.EqualFold(charset, utf8Name))
}

// MediaJSON is the media type of JSON.
const MediaJSON = "application/json"

// ForwardRequestHeader reports whether a client's request header goes to an
// engine. The key must be in canonical form, as in [http.Header]. These do not:
//
//   - hop-by-hop headers, and those of the message (Host, Content-Length)
//   - those between the router and its client or its engines (X-Dynctl-*,
//     X-Data-Parallel-Rank, Endpoint-Load-Metrics-Format)
//   - those that name the hops before ([ForwardedHeader])
//   - Accept-Encoding, so that event streams are not compressed
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

// ForwardResponseHeader reports whether an engine's response header goes to
// the client. The key must be in canonical form.
func ForwardResponseHeader(key string) bool {
	switch key {
	case "Content-Length", "Endpoint-Load-Metrics", "X-Request-Id":
		return false
	}
	return !hopByHop(key) && !ours(key) && !originHeader(key)
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
