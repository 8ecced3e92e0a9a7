package rewrite

import (
	"net/http"
	"strings"

	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// appendForwarded adds the headers that say where a request came from. They are made
// anew unless the peer is a trusted proxy, whose own are then continued: anybody else
// could claim to be anybody.
func appendForwarded(set []upstream.HeaderField, q *Client, proxies Proxies) []upstream.HeaderField {
	peer := q.Remote
	if i := strings.LastIndexByte(peer, ':'); i >= 0 {
		peer = strings.TrimSuffix(strings.TrimPrefix(peer[:i], "["), "]")
	}
	chain, proto, host := peer, "http", q.Host
	if q.TLS {
		proto = "https"
	}
	if proxies.Trusts(peer) {
		set = appendHops(set, q.Header, peer)
		if before := q.Header["X-Forwarded-For"]; len(before) > 0 {
			chain = strings.Join(before, ", ") + ", " + peer
		}
		proto = first(q.Header["X-Forwarded-Proto"], proto)
		host = first(q.Header["X-Forwarded-Host"], host)
	}
	set = append(set, upstream.HeaderField{Key: "X-Forwarded-For", Value: chain}, upstream.HeaderField{Key: "X-Forwarded-Proto", Value: proto})
	if host != "" {
		set = append(set, upstream.HeaderField{Key: "X-Forwarded-Host", Value: host})
	}
	return set
}

// appendHops passes on what else a trusted proxy says of the hops before it, and
// adds this one to the standard header where there is one.
func appendHops(set []upstream.HeaderField, h http.Header, peer string) []upstream.HeaderField {
	for key, values := range h {
		switch {
		case !api.ForwardedHeader(key), key == "X-Forwarded-For", key == "X-Forwarded-Proto", key == "X-Forwarded-Host":
		case key == "Forwarded":
			if strings.Contains(peer, ":") {
				peer = `"[` + peer + `]"`
			}
			set = append(set, upstream.HeaderField{Key: key, Value: strings.Join(values, ", ") + ", for=" + peer})
		default:
			for _, v := range values {
				set = append(set, upstream.HeaderField{Key: key, Value: v})
			}
		}
	}
	return set
}

func first(values []string, or string) string {
	if len(values) > 0 {
		return values[0]
	}
	return or
}
