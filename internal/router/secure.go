package router

import (
	"errors"
	"fmt"
	"net"
	"strings"

	"github.com/dynctl/dynctl/internal/router/admin"
	"github.com/dynctl/dynctl/internal/router/certs"
	"github.com/dynctl/dynctl/internal/router/eventlog"
	"github.com/dynctl/dynctl/internal/router/quicksock"
	"github.com/dynctl/dynctl/internal/router/state"
	"github.com/dynctl/dynctl/internal/settings"
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
	r.engineTLS = r.opts.EngineTLS
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
	r.engineTLS = r.engineCert.Client()
	return nil
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
	return over(r.dataCert, quicksock.Listen(ln))
}

// AdminListener is DataListener for the admin API.
func (r *Router) AdminListener(ln net.Listener) net.Listener { return over(r.adminCert, ln) }

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
		},
		Admin: admin.ListenerAccess{
			Listen: c.o.AdminName, Loopback: settings.Loopback(c.o.AdminName), TLS: c.adminCert != nil, ClientCertificates: s.AdminTLS.ClientCAFile != "",
			Token: c.o.TokenFile != "",
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
		{"data plane", a.Data, "set tls.cert_file, and tls.client_ca_file for certificates of clients; or let only a proxy that knows its clients reach it"},
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
