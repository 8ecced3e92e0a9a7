package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/certs/certtest"
	"github.com/dynctl/dynctl/internal/router/routertest"
	"github.com/dynctl/dynctl/internal/settings"
)

// TestCommandsOverTLS: every command that asks a router does it over TLS with the
// same flags, shows its certificate, and says what is wrong without them.
func TestCommandsOverTLS(t *testing.T) {
	ca := certtest.NewAuthority(t, "ours")
	cert, key := ca.Pair(t, "router.test", time.Hour)
	mine, mineKey := ca.Pair(t, "operator.test", time.Hour)
	pair, err := tls.LoadX509KeyPair(mine, mineKey)
	if err != nil {
		t.Fatal(err)
	}
	trust := ca.File(t)
	g, err := routertest.Start(t.Context(), routertest.Options{
		Fleet: "1a:profile=instant", TLS: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: ca.Pool(), Certificates: []tls.Certificate{pair}},
		Configure: func(c *settings.Config) {
			c.Routing.AllowHeaders = true
			c.TLS = settings.ServerTLS{CertFile: cert, KeyFile: key, ClientCAFile: trust}
			c.AdminTLS = c.TLS
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = g.Close(ctx) // requests that a test left are cut
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := g.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	all := []string{"--router", g.AdminURL, "--tls-ca", trust, "--tls-cert", mine, "--tls-key", mineKey}
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{append([]string{"workers", "list"}, all...), exitOK, "healthy"},
		{append([]string{"top", "--once", "-o", "json"}, all...), exitOK, `"routers"`},
		{append([]string{"doctor"}, all...), exitOK, "TLS, this machine only, with a client certificate"},
		{append([]string{"explain", "--prompt", "hello"}, all...), exitOK, "aggregated-0"},
		{[]string{"workers", "list", "--router", g.AdminURL}, exitUnreachable, "certificate"},
		{[]string{"workers", "list", "--router", g.AdminURL, "--tls-ca", trust}, exitUnreachable, "certificate"},
		{[]string{"top", "--once", "--router", g.AdminURL, "--tls-ca", trust, "--tls-cert", mine}, exitUsage, "--tls-cert and --tls-key go together"},
		{[]string{"doctor", "--router", g.AdminURL, "--tls-ca", mineKey}, exitUsage, "holds no certificate"},
		{[]string{"workers", "list", "--router", strings.Replace(g.AdminURL, "https", "http", 1)}, exitUsage, "HTTPS server"},
	} {
		var out, stderr bytes.Buffer
		if code := runMain(c.args, strings.NewReader(""), &out, &stderr); code != c.code || !strings.Contains(out.String()+stderr.String(), c.want) {
			t.Errorf("dynctl %s: exit code %d, want %d and %q\n%s%s", strings.Join(c.args, " "), code, c.code, c.want, &out, &stderr)
		}
	}
}
