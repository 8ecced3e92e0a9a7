package routing

import (
	"net/http"

	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// sessionNames are where known clients name their session: a header in its canonical form,
// or a field of the body. They are read in this order, between routing.session_header and
// routing.session_field; configuration.md lists them from here. The headers are those that
// Dynamo's frontend reads (ai-dynamo/dynamo at 1cd9f3c, docs/agents/session-ids.md); the
// field is of OpenAI's API.
var sessionNames = [...]struct{ Header, Field, Clients string }{
	{Header: "X-Dynamo-Session-Id", Clients: "clients of Dynamo"},
	// A child agent has a prompt of its own, and its parent's session beside its name.
	{Header: "X-Claude-Code-Agent-Id", Clients: "Claude Code, for a child agent"},
	{Header: "X-Claude-Code-Session-Id", Clients: "Claude Code"},
	{Header: "Session-Id", Clients: "Codex"},
	{Header: "X-Session-Id", Clients: "OpenCode"},
	{Field: "prompt_cache_key", Clients: "clients of OpenAI's API"},
}

// maxSession is the longest session id in bytes.
const maxSession = 1024

// FindSession sets the session of a request: name, which comes from
// routing.session_header, or the first of sessionNames in the headers or the body, or
// routing.session_field of the body. It passes over empty ids, and over ids of more than
// 1,024 bytes.
func (q *Request) FindSession(name string, h http.Header, v *api.View) {
	q.Run.Criteria.Session = selector.HashSession(q.sessionID(name, h, v))
}

func (q *Request) sessionID(name string, h http.Header, v *api.View) string {
	if usable(name) {
		return name
	}
	for i := range sessionNames {
		switch s := &sessionNames[i]; {
		case s.Field != "":
			name = field(v, s.Field)
		case len(h[s.Header]) > 0: // Get would look the name up again
			name = h[s.Header][0]
		}
		if usable(name) {
			return name
		}
	}
	return field(v, q.Settings.Routing.SessionField)
}

func usable(id string) bool { return id != "" && len(id) <= maxSession }

// field is the id in a field of the body; empty for one that is absent, too long or no
// text.
func field(v *api.View, name string) string {
	if name == "" {
		return ""
	}
	if raw, ok := v.Get(name); !ok || len(raw) > maxSession {
		return ""
	}
	id, _ := v.String(name)
	return id
}
