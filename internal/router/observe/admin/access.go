package admin

import (
	"strings"
)

// ListenerAccesses are who may come in at the two listeners.
type ListenerAccesses struct {
	Data  ListenerAccess `json:"data"`
	Admin ListenerAccess `json:"admin"`
}

// ListenerAccess is who may come in at a listener.
type ListenerAccess struct {
	Listen string `json:"listen"`
	// Loopback says that it is reached from the router's machine only.
	Loopback bool `json:"loopback"`
	// TLS says that it speaks nothing else, ClientCertificates that clients must
	// show one.
	TLS                bool `json:"tls"`
	ClientCertificates bool `json:"client_certificates"`
	// Token says that a bearer token lets users in, Keys that API keys do; one of
	// those that are true must be shown.
	Token bool `json:"token"`
	Keys  bool `json:"keys"`
}

// Who is in words who is let in.
func (a *ListenerAccess) Who() string {
	words := []string{"in the clear"}
	if a.TLS {
		words[0] = "TLS"
	}
	for _, w := range []struct {
		is   bool
		text string
	}{{a.Loopback, "this machine only"}, {a.ClientCertificates, "with a client certificate"}, {a.Token, "with a token"}, {a.Keys, "with an API key"}} {
		if w.is {
			words = append(words, w.text)
		}
	}
	return strings.Join(words, ", ")
}

// Exposed says in words what is wrong with a listener that other machines reach;
// empty for nothing.
func (a *ListenerAccess) Exposed() string {
	switch {
	case a.Loopback || a.Listen == "":
		return ""
	case !a.ClientCertificates && !a.Token && !a.Keys:
		return "other machines reach it, and it does not authenticate them"
	case !a.TLS:
		return "other machines reach it without TLS: tokens, keys, prompts and answers cross the network in the clear"
	}
	return ""
}
