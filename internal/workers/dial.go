package workers

import (
	"context"
	"crypto/tls"
	"net"
)

// DialTLS makes TLS connections to workers for an http.Transport, each as conf says at
// that time; nil is the system's roots.
func DialTLS(d *net.Dialer, conf func() *tls.Config) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		to := tls.Dialer{NetDialer: d, Config: &tls.Config{MinVersion: tls.VersionTLS12}}
		if conf != nil {
			to.Config = conf()
		}
		return to.DialContext(ctx, network, addr)
	}
}
