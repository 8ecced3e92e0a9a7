package adminserver

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/request/access"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// needs is the role that a route asks of keys.
func needs(pattern string) access.Role {
	method, path, _ := strings.Cut(pattern, " ")
	switch {
	case strings.HasSuffix(path, "/drain") && path != "/admin/v1/drain", strings.HasSuffix(path, "/resume"), path == "/admin/v1/route":
		return access.Operate
	case path == "/admin/v1/stream": // has prompts as tokens
		return access.Admin
	case method == http.MethodGet:
		return access.Read
	}
	return access.Admin // what changes the router, its profiler, simulated engines
}

// user is who asks.
type user struct {
	name string
	key  *access.Key // nil for one that may do everything
}

// userKey is the key of the user in a request's context.
type userKey struct{}

// seesTexts reports whether a request's user may see texts that can quote a prompt.
func seesTexts(q *http.Request) bool {
	u, _ := q.Context().Value(userKey{}).(*user)
	return u == nil || u.may(access.Operate)
}

// may reports whether the user has a role.
func (u *user) may(r access.Role) bool { return u.key == nil || u.key.Has(r) }

// identify finds out who asks; nil where what was shown lets nobody in.
func (s *server) identify(q *http.Request) *user {
	if s.a.Token == nil && s.a.Keys == nil {
		if q.TLS != nil && len(q.TLS.PeerCertificates) > 0 {
			return &user{name: fmt.Sprintf("the certificate of %q", q.TLS.PeerCertificates[0].Subject.CommonName)}
		}
		return &user{name: "an unauthenticated client"}
	}
	shown := access.Shown(q.Header)
	if shown == "" {
		return nil
	}
	sum := sha256.Sum256([]byte(shown))
	if s.a.Token != nil && subtle.ConstantTimeCompare(sum[:], s.token[:]) == 1 {
		return &user{name: "the admin token"}
	}
	if s.a.Keys != nil {
		if k := s.a.Keys.Find(shown); k != nil {
			return &user{name: fmt.Sprintf("the key %q", k.Name), key: k}
		}
	}
	return nil
}

// guard identifies the user, checks the role, and reads the whole body before h runs. Where
// no token is needed it refuses what a web page could have sent (see fromPage). Changes, and
// attempts at them, are events that name the user.
func (s *server) guard(h http.Handler, role access.Role) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		u := s.identify(q)
		asked := s.a.Token != nil || s.a.Keys != nil
		access.Hide(q.Header)
		switch why := ""; {
		case u == nil:
			w.Header().Set("WWW-Authenticate", `Bearer realm="dynctl"`)
			message := "the admin API needs the bearer token of --admin-token-file"
			if s.a.Keys != nil {
				message = "the admin API needs an API key with a role, or the bearer token of --admin-token-file"
			}
			api.WriteError(w, q, &api.Error{Status: http.StatusUnauthorized, Code: api.CodeUnauthorized, Message: message})
			return
		case !u.may(role):
			s.audit(q, u, http.StatusForbidden, eventlog.Event{
				Kind: "admin_denied", Severity: eventlog.Warn, Text: fmt.Sprintf("%s may not %s %s: it lacks the role %s", u.name, q.Method, api.Clip(q.URL.Path), role),
			})
			api.WriteError(w, q, &api.Error{Status: http.StatusForbidden, Code: api.CodeForbidden, Message: fmt.Sprintf("%s %s needs the role %s, which %s does not have", q.Method, q.URL.Path, role, u.name)})
			return
		case !asked:
			if why = s.fromPage(q); why != "" {
				api.WriteError(w, q, &api.Error{Status: http.StatusForbidden, Code: api.CodeForbidden, Message: why})
				return
			}
		}
		q = q.WithContext(context.WithValue(q.Context(), userKey{}, u))
		if q.ContentLength != 0 {
			body, err := api.ReadBody(q, maxBody, s.bodies)
			if err != nil {
				api.WriteError(w, q, err)
				return
			}
			defer body.Release()
			api.UnboundBody(w, q)
			q.Body = io.NopCloser(bytes.NewReader(body.B))
		}
		if s.c == nil || q.Method == http.MethodGet || q.Method == http.MethodHead || q.URL.Path == "/admin/v1/route" {
			h.ServeHTTP(w, q)
			return
		}
		sw := &statusWriter{ResponseWriter: w, status: http.StatusOK}
		h.ServeHTTP(sw, q)
		s.audit(q, u, sw.status, eventlog.Event{
			Kind: "admin_change", Text: fmt.Sprintf("%s %s by %s from %s: status %d", q.Method, api.Clip(q.URL.Path), u.name, q.RemoteAddr, sw.status),
		})
	})
}

// audit logs who did, or wanted to do, what.
func (s *server) audit(q *http.Request, u *user, status int, e eventlog.Event) {
	e.Fields = map[string]any{"who": u.name, "from": q.RemoteAddr, "method": q.Method, "path": api.Clip(q.URL.Path), "status": status}
	s.r.Events().Add(e)
}

// statusWriter keeps the status of an answer.
type statusWriter struct {
	http.ResponseWriter
	status int
}

// WriteHeader implements http.ResponseWriter.
func (w *statusWriter) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap is for http.ResponseController.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
