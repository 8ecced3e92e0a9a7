package routing

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/settings/effective"
)

// TestFindSession: the name from the settings' own header wins, then that of known clients
// in their order, then the settings' own field. Names that are empty, too long or no text
// are passed over.
func TestFindSession(t *testing.T) {
	s := &effective.Settings{}
	s.Routing.SessionField = "user"
	q := Request{Details: Details{Settings: s}}
	find := func(name string, h http.Header, body string) uint64 {
		t.Helper()
		v := &api.View{}
		if body != "" {
			v = parse(t, api.Completion, body)
		}
		q.FindSession(name, h, v)
		return q.Run.Criteria.Session
	}
	long := strings.Repeat("x", maxSession)
	header := func(pairs ...string) http.Header {
		h := http.Header{}
		for i := 0; i < len(pairs); i += 2 {
			h.Set(pairs[i], pairs[i+1])
		}
		return h
	}
	for _, c := range []struct {
		name   string
		header http.Header
		body   string // members
		want   string
	}{
		{name: "own", header: header("x-dynamo-session-id", "dynamo"), body: `"user":"u"`, want: "own"},
		{name: long, want: long},
		{name: long + "x", header: header("x-dynamo-session-id", "dynamo"), want: "dynamo"},
		{header: header("x-dynamo-session-id", "", "x-claude-code-session-id", "claude"), want: "claude"},
		{header: header("x-claude-code-session-id", "claude", "x-claude-code-agent-id", "child"), want: "child"},
		{header: header("session-id", "codex"), body: `"prompt_cache_key":"k"`, want: "codex"},
		{header: header("x-session-id", "open"), want: "open"},
		{header: header("x-parent-session-id", "parent"), want: ""},
		{body: `"user":"u","prompt_cache_key":"k"`, want: "k"},
		{body: `"user":"u","prompt_cache_key":7`, want: "u"},
		{body: `"user":"u","prompt_cache_key":"` + long + `"`, want: "u"},
		{body: `"user":"` + long + `"`, want: ""},
		{body: `"user":""`, want: ""},
		{want: ""},
	} {
		body := c.body
		if body != "" {
			body = `{"model":"m","prompt":"p",` + body + `}`
		}
		if got := find(c.name, c.header, body); got != selector.HashSession(c.want) {
			t.Errorf("%.20q, headers %v, %.40s: %x, want that of %.20q", c.name, c.header, c.body, got, c.want)
		}
	}
	s.Routing.SessionField = ""
	if find("", nil, `{"model":"m","prompt":"p","user":"u"}`) != 0 {
		t.Error("a member of the body that is not asked for")
	}
}

// TestSessionNames: each name of the table is found, in a request that has no other.
func TestSessionNames(t *testing.T) {
	q := Request{Details: Details{Settings: &effective.Settings{}}}
	for _, s := range sessionNames {
		h, body := http.Header{}, `{"model":"m","prompt":"p"}`
		switch {
		case s.Header != "" && s.Field == "" && s.Header == http.CanonicalHeaderKey(s.Header):
			h.Set(s.Header, "id")
		case s.Field != "" && s.Header == "":
			body = fmt.Sprintf(`{"model":"m","prompt":"p",%q:"id"}`, s.Field)
		default:
			t.Errorf("%+v: want a canonical header or a field", s)
		}
		if q.FindSession("", h, parse(t, api.Completion, body)); q.Run.Criteria.Session != selector.HashSession("id") || s.Clients == "" {
			t.Errorf("%+v is not found", s)
		}
	}
}

// TestNoSessionIsFree: a request without a session allocates nothing for the search.
func TestNoSessionIsFree(t *testing.T) {
	s := &effective.Settings{}
	s.Routing.SessionField = "user"
	q := Request{Details: Details{Settings: s}}
	v := parse(t, api.Completion, `{"model":"m","prompt":"p","max_tokens":7}`)
	h := http.Header{"Content-Type": {"application/json"}, "Authorization": {"Bearer x"}}
	if n := testing.AllocsPerRun(100, func() { q.FindSession("", h, v) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func FuzzFindSession(f *testing.F) {
	f.Add("", "", "", `{"model":"m","prompt":"p","user":"u","prompt_cache_key":"k"}`)
	f.Add("own", "X-Session-Id", "open", `{}`)
	f.Fuzz(func(t *testing.T, name, header, id, body string) {
		s := &effective.Settings{}
		s.Routing.SessionField = "user"
		q := Request{Details: Details{Settings: s}}
		var v api.View
		if v.Parse([]byte(body), api.Completion, api.Limits{}) != nil {
			return
		}
		h := http.Header{header: {id}}
		if got := q.sessionID(name, h, &v); len(got) > maxSession {
			t.Errorf("a session id of %d bytes", len(got))
		}
		q.FindSession(name, h, &v)
		first := q.Run.Criteria.Session
		if q.FindSession(name, h, &v); q.Run.Criteria.Session != first {
			t.Error("the same request has two sessions")
		}
	})
}
