// Package rewrite makes the requests that engines get of the one that a client has sent:
// what of its body and its headers is changed for a leg, and nothing else.
package rewrite

import (
	"net/http"
	"strconv"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// Client is who sent a request, and how.
type Client struct {
	Method string
	// Host is the authority that was called, Remote the address and port of the peer.
	Host, Remote string
	TLS          bool
	Header       http.Header
}

// ClientOf is the sender of a request.
func ClientOf(q *http.Request) Client {
	return Client{Method: q.Method, Host: q.Host, Remote: q.RemoteAddr, TLS: q.TLS != nil, Header: q.Header}
}

// Proxies reports which peers, addresses without ports, are trusted proxies.
type Proxies interface{ Trusts(peer string) bool }

// Source is a client's request, with what the router has made of it.
type Source struct {
	Client   *Client
	Endpoint *api.Endpoint
	View     *api.View
	Form     *api.Form // nil unless the body is one
	// KeepTransferFields leaves the fields of transfers that a client has set.
	KeepTransferFields bool
	// Proxies are the peers whose word on the hops before them is believed.
	Proxies Proxies
	// IdleTimeout ends a leg whose engine sends nothing for so long.
	IdleTimeout time.Duration
	// Body are the bytes of the body, nil for none.
	Body []byte
	// RequestedModel is the model in the client's words, empty where it names none; Model is the
	// engines' name of it.
	RequestedModel, Model string
	// Hops are the routers that the request has passed, this one included.
	Hops string
	// Salted says that the view's salt is the router's.
	Salted bool
	// Usage requests the usage of a stream (stream_options.include_usage).
	Usage bool
}

// includeUsage is the member stream_options that requests usage.
var includeUsage = []byte(`{"include_usage":true}`)

// Scratch is the memory of the requests of one phase, which follow each other. The zero
// value is ready.
type Scratch struct {
	edits []api.Edit
	body  [][]byte
	set   []upstream.HeaderField
	leg   upstream.Leg
}

// Reset forgets the request and keeps the memory.
func (m *Scratch) Reset() {
	clear(m.edits)
	clear(m.body)
	clear(m.set)
	*m = Scratch{edits: m.edits[:0], body: m.body[:0], set: m.set[:0]}
	m.poison()
}

// Body is the body of a leg in pieces, with more edits than those that every leg gets;
// ids asks the engine for token ids. It is valid until the next request of the phase.
func (m *Scratch) Body(s *Source, p workers.Peer, ids bool, more []api.Edit) [][]byte {
	switch {
	case s.Form != nil:
		m.body = s.Form.Segments(m.body[:0], s.Body)
		return m.body
	case s.Endpoint.Body != api.JSONBody:
		return [][]byte{s.Body}
	}
	edits := m.edits[:0]
	if !s.KeepTransferFields {
		edits = s.View.AppendStrip(edits)
	}
	// SGLang's own endpoint has no such member: what a client puts there is for the router.
	if s.Model != s.RequestedModel && (s.RequestedModel != "" || s.Endpoint.Kind != api.SGLangGenerate) {
		edits = append(edits, api.Set("model", api.RawString(s.Model)))
	}
	for _, member := range s.View.Withheld {
		edits = append(edits, api.Delete(member))
	}
	if s.Salted {
		edits = append(edits, api.Set("cache_salt", api.RawString(s.View.CacheSalt)))
	}
	if len(p.Worker.Ranks) > 1 && p.Worker.WireEngine() == workers.SGLang && s.Endpoint.Streamable {
		edits = append(edits, api.Set("routed_dp_rank", api.RawInt(int64(p.Rank.DP))))
	}
	if s.Usage {
		edits = append(edits, api.Set("stream_options", includeUsage))
	}
	if ids {
		edits = append(edits, api.Set("return_token_ids", api.RawTrue))
	}
	m.edits = append(edits, more...)
	m.body = s.View.Segments(m.body[:0], m.edits)
	return m.body
}

// Leg is the HTTP call of a phase, which carries a request id, at a path. It is valid
// until the next request of the phase.
func (m *Scratch) Leg(s *Source, p workers.Peer, path, id string, body [][]byte, headTimeout time.Duration) *upstream.Leg {
	q := s.Client
	m.set = appendForwarded(append(m.set[:0], upstream.HeaderField{Key: api.HeaderRequestID, Value: id}, upstream.HeaderField{Key: api.HeaderHop, Value: s.Hops}), q, s.Proxies)
	if len(p.Worker.Ranks) > 1 {
		m.set = append(m.set, upstream.HeaderField{Key: "X-Data-Parallel-Rank", Value: strconv.Itoa(p.Rank.DP)})
	}
	if s.Endpoint.Body == api.JSONBody && !api.PlainJSON(q.Header) {
		// An engine that read the body as a form, or in another charset, would find other
		// fields in it than the router did.
		m.set = append(m.set, upstream.HeaderField{Key: "Content-Type", Value: api.MediaJSON})
	}
	m.leg = upstream.Leg{
		Base: p.Worker.URL, Path: path, Method: q.Method, Header: q.Header, Set: m.set, APIKey: p.Worker.APIKey,
		Body: body, HeadTimeout: headTimeout, IdleTimeout: s.IdleTimeout,
	}
	return &m.leg
}
