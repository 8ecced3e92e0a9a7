package control

import (
	"fmt"
	"strings"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/settings"
)

// Listeners are the addresses of the two, and whether the admin API has a token.
type Listeners struct {
	Data, Admin string
	Token       bool
}

// Accesses is who may come in at the listeners while c is in force.
func (s *Secure) Accesses(c *settings.Config, l Listeners) admin.ListenerAccesses {
	return admin.ListenerAccesses{
		Data: admin.ListenerAccess{
			Listen: l.Data, Loopback: settings.Loopback(l.Data), TLS: s.data != nil, ClientCertificates: c.TLS.ClientCAFile != "",
			Keys: s.keys != nil && c.Keys.Required,
		},
		Admin: admin.ListenerAccess{
			Listen: l.Admin, Loopback: settings.Loopback(l.Admin), TLS: s.admin != nil, ClientCertificates: c.AdminTLS.ClientCAFile != "",
			Token: l.Token, Keys: c.Keys.Admin,
		},
	}
}

// Exposed are the warnings of listeners that let everybody in.
func Exposed(a admin.ListenerAccesses) (list []eventlog.Event) {
	for _, l := range []struct {
		name   string
		access admin.ListenerAccess
		advice string
	}{
		{"data plane", a.Data, "set tls.cert_file, and keys.file for API keys or tls.client_ca_file for certificates of clients; or let only a proxy that knows its clients reach it"},
		{"admin API", a.Admin, "set admin_tls.cert_file, or listen on loopback"},
	} {
		if why := l.access.Exposed(); why != "" {
			list = append(list, eventlog.Event{
				Kind: "listener_exposed", Severity: eventlog.Warn,
				Text: fmt.Sprintf("THE %s LISTENS ON %s: %s; %s (docs/security.md)", strings.ToUpper(l.name), l.access.Listen, why, l.advice),
			})
		}
	}
	return list
}
