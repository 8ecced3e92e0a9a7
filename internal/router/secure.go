package router

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/netip"
	"strings"

	"github.com/dynctl/dynctl/internal/certs"
	"github.com/dynctl/dynctl/internal/router/forward/quicksock"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/state"
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/router/request/access"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// readCerts reads the certificates that the config names.
func (r *Router) readCerts(c *settings.Config) (err error) {
	options := func(name, cert, key, ca string) certs.Options {
		return certs.Options{Name: name, Cert: cert, Key: key, CA: ca, Event: r.event, Loaded: func(result string) { r.metrics.Certificate(name, result) }}
	}
	server := func(name, section string, t settings.ServerTLS) (*certs.Store, error) {
		if t.CertFile == "" {
			return nil, nil
		}
		s, err := certs.NewServer(options(name, t.CertFile, t.KeyFile, t.ClientCAFile))
		return s, inSection(section, err)
	}
	if r.dataCert, err = server("data", "tls", c.TLS); err != nil {
		return err
	}
	if r.adminCert, err = server("admin", "admin_tls", c.AdminTLS); err != nil {
		return err
	}
	if sim := r.opts.EngineTLS; sim != nil {
		r.engineTLS = func() *tls.Config { return sim }
	}
	e := c.EngineTLS
	if e == (settings.EngineTLS{}) {
		return nil
	}
	if r.engineTLS != nil {
		return errors.New("engine_tls: simulated engines with tls=on have certificates of their own; leave engine_tls out")
	}
	o := options("engines", e.CertFile, e.KeyFile, e.CAFile)
	o.ServerName = e.ServerName
	if r.engineCert, err = certs.NewClient(o); err != nil {
		return inSection("engine_tls", err)
	}
	r.engineTLS = r.engineCert.Client
	return nil
}

// readKeys reads the keys that the config names.
func (r *Router) readKeys(c *settings.Config) (err error) {
	if c.Keys.File == "" {
		return nil
	}
	r.keys, err = access.NewStore(access.Options{Path: c.Keys.File, Event: r.event, Loaded: r.metrics.Keys})
	return inSection("keys.file", err)
}

// identify finds out whose the request is, and whether it may begin. Nothing behind
// it sees the key.
func (x *exchange) identify() error {
	shown := access.Shown(x.req.Header)
	access.Hide(x.req.Header)
	if shown == "" {
		if x.d.Settings.Keys.Required {
			return x.refuse("key", &api.Error{Status: http.StatusUnauthorized, Code: api.CodeUnauthorized, Message: "this router asks for an API key: send it as Authorization: Bearer KEY"})
		}
		return nil
	}
	k := x.r.keys.Find(shown)
	switch {
	case k == nil:
		return x.refuse("key", &api.Error{Status: http.StatusUnauthorized, Code: api.CodeUnauthorized, Message: "the API key is not known here: it is wrong, or was taken back"})
	case !k.Has(access.Use):
		return x.refuse("key", &api.Error{Status: http.StatusForbidden, Code: api.CodeForbidden, Message: fmt.Sprintf("the API key %q is for the admin API only: it lacks the role use", k.Name)})
	}
	if wait := k.Take(x.start); wait > 0 {
		return x.refuse("rate", &api.Error{
			Status: http.StatusTooManyRequests, Code: api.CodeRateLimited, RetryAfter: wait,
			Message: fmt.Sprintf("the API key %q may begin %d requests a minute; try again later", k.Name, k.Rate),
		})
	}
	x.key = k
	return nil
}

// mayAsk refuses a model that the request's key is not for, whether it exists or
// not.
func (x *exchange) mayAsk() error {
	if x.key == nil || x.ep.Kind == api.ResponseObject || x.key.May(x.asked, x.model) {
		return nil
	}
	return &api.Error{
		Status: http.StatusForbidden, Code: api.CodeForbidden, Param: "model",
		Message: fmt.Sprintf("the API key %q is not for the model %q; it is for %q", x.key.Name, api.Clip(x.asked), x.key.Models),
	}
}

func inSection(section string, err error) error {
	if err == nil {
		return nil
	}
	return &settings.Problem{Key: section, Err: err}
}

// certs are those that there are.
func (r *Router) certs() (list []*certs.Store) {
	for _, c := range []*certs.Store{r.dataCert, r.adminCert, r.engineCert} {
		if c != nil {
			list = append(list, c)
		}
	}
	return list
}

// DataListener makes connections of the data plane of those of ln, over TLS where
// that is configured.
func (r *Router) DataListener(ln net.Listener) net.Listener {
	return over(r.dataCert, r.addresses.Listen(quicksock.Listen(ln)))
}

// AdminListener is DataListener for the admin API.
func (r *Router) AdminListener(ln net.Listener) net.Listener {
	return over(r.adminCert, r.addresses.Listen(ln))
}

// ServerLog is the log of a server's own errors, which go on to l: the metrics count
// the failed handshakes among them, of which net/http tells nobody else.
func (r *Router) ServerLog(of string, l *log.Logger) *log.Logger {
	return log.New(&handshakes{of: of, metrics: r.metrics, next: l}, "", 0)
}

type handshakes struct {
	of      string
	metrics *telemetry.Metrics
	next    *log.Logger
}

// Write takes one message.
func (h *handshakes) Write(b []byte) (int, error) {
	if bytes.HasPrefix(b, []byte("http: TLS handshake error")) {
		h.metrics.Handshake(h.of)
	}
	return len(b), h.next.Output(0, string(b))
}

// connectionsOf is how many connections an address may have.
func (r *Router) connectionsOf(a netip.Addr) int {
	s := r.settings.Load()
	if a.IsLoopback() || s.TrustsAddr(a) {
		return 0
	}
	return s.Limits.ClientConnections
}

// addressFull tells of an address that wants more connections than it may have.
func (r *Router) addressFull(a netip.Addr, limit int) {
	r.event(eventlog.Event{
		Kind: "client_connections_full", Severity: eventlog.Warn,
		Text: fmt.Sprintf("%s has %d connections, and more are closed at once (limits.client_connections); if it is a proxy, name it in trusted_proxies", a, limit),
	})
}

// saltTenant keeps the request's blocks apart from those of other tenants, in the
// engine and in the index: whatever salt the client sends is its tenant's own. Where
// an engine takes no salt, the prompt must not reach it.
func (x *exchange) saltTenant() error {
	switch x.ep.Kind {
	case api.Chat, api.Completion, api.Responses, api.Generate:
	case api.Messages, api.Embeddings, api.Rerank, api.Score, api.Classify, api.Pooling, api.SGLangGenerate:
		if why := x.takesNoSalt(); why != "" {
			return x.refuse("key", &api.Error{
				Status: http.StatusForbidden, Code: api.CodeForbidden,
				Message: fmt.Sprintf("this router keeps tenants apart in the engines' caches (keys.salt), which %s has no cache_salt for (%s); use /v1/chat/completions, /v1/completions or /v1/responses", x.req.URL.Path, why),
			})
		}
	default: // no prompt of it gets into a cache
		return nil
	}
	x.view.CacheSalt = access.Salt(x.owner(), x.view.CacheSalt)
	x.salted = true
	return nil
}

// takesNoSalt says why the prompt of an endpoint beside the most common ones could not be
// salted; empty if it can. vLLM's Messages and pooling endpoints have had the field for
// sure since 0.32; an engine that does not know it would drop it without a word.
func (x *exchange) takesNoSalt() string {
	if x.ep.Kind == api.SGLangGenerate || x.req.URL.Path == "/v2/embed" {
		return "it is no member of the body there"
	}
	for _, w := range x.d.List {
		if w.WireEngine() != workers.VLLM || !w.VersionAtLeast(0, 32) {
			return fmt.Sprintf("worker %s is not known to be vLLM 0.32 or later", w.Name)
		}
	}
	return ""
}

func over(c *certs.Store, ln net.Listener) net.Listener {
	if c == nil {
		return ln
	}
	return c.Listen(ln)
}

// Schemes are those of the URLs under which the data plane and the admin API are
// reached.
func (r *Router) Schemes() (data, ctrl string) { return scheme(r.dataCert), scheme(r.adminCert) }

func scheme(c *certs.Store) string {
	if c == nil {
		return "http"
	}
	return "https"
}

// Certificates are the certificates in force.
func (r facts) Certificates() (list []state.Certificate) {
	for _, c := range r.certs() {
		if at, ok := c.Expires(); ok {
			list = append(list, state.Certificate{Of: c.Name(), Expires: at})
		}
	}
	return list
}

// access is who may come in at the two listeners. loopback tells of an address
// whether it is reached from this machine only.
func (c *console) access() admin.ListenerAccesses {
	s := c.settings.Load()
	return admin.ListenerAccesses{
		Data: admin.ListenerAccess{
			Listen: c.o.Name, Loopback: settings.Loopback(c.o.Name), TLS: c.dataCert != nil, ClientCertificates: s.TLS.ClientCAFile != "",
			Keys: c.keys != nil && s.Keys.Required,
		},
		Admin: admin.ListenerAccess{
			Listen: c.o.AdminName, Loopback: settings.Loopback(c.o.AdminName), TLS: c.adminCert != nil, ClientCertificates: s.AdminTLS.ClientCAFile != "",
			Token: c.o.TokenFile != "", Keys: s.Keys.Admin,
		},
	}
}

// warnOfExposure tells, loudly, of listeners that let everybody in.
func (c *console) warnOfExposure() {
	a := c.access()
	for _, l := range []struct {
		name   string
		access admin.ListenerAccess
		advice string
	}{
		{"data plane", a.Data, "set tls.cert_file, and keys.file for API keys or tls.client_ca_file for certificates of clients; or let only a proxy that knows its clients reach it"},
		{"admin API", a.Admin, "set admin_tls.cert_file, or listen on loopback"},
	} {
		if why := l.access.Exposed(); why != "" {
			c.event(eventlog.Event{
				Kind: "listener_exposed", Severity: eventlog.Warn,
				Text: fmt.Sprintf("THE %s LISTENS ON %s: %s; %s (docs/security.md)", strings.ToUpper(l.name), l.access.Listen, why, l.advice),
			})
		}
	}
}

// Keys is the number of API keys in force; -1 without a file of them.
func (r facts) Keys() int {
	if r.keys == nil {
		return -1
	}
	return r.keys.Count()
}
