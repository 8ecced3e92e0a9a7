package commands

import (
	"context"
	"crypto/tls"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rig/certtest"
	"github.com/dynctl/dynctl/internal/rig/loopbacktest"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/settings"
)

// readyRouter is a router that can serve, until the test ends.
func readyRouter(t *testing.T, o loopback.Options) *loopback.Rig {
	t.Helper()
	g := loopbacktest.Start(t, o)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := g.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	return g
}

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
	g := readyRouter(t, loopback.Options{
		Fleet: "1a:profile=instant", TLS: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: ca.Pool(), Certificates: []tls.Certificate{pair}},
		Configure: func(c *settings.Config) {
			c.Routing.AllowHeaders = true
			c.TLS = settings.ServerTLS{CertFile: cert, KeyFile: key, ClientCAFile: trust}
			c.AdminTLS = c.TLS
		},
	})
	all := []string{"--router", g.AdminURL, "--tls-ca", trust, "--tls-cert", mine, "--tls-key", mineKey}
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{append([]string{"workers", "list"}, all...), cli.ExitOK, "healthy"},
		{append([]string{"top", "--once", "-o", "json"}, all...), cli.ExitOK, `"routers"`},
		{append([]string{"doctor"}, all...), cli.ExitOK, "TLS, this machine only, with a client certificate"},
		{append([]string{"explain", "--prompt", "hello"}, all...), cli.ExitOK, "aggregated-0"},
		{[]string{"workers", "list", "--router", g.AdminURL}, cli.ExitUnreachable, "certificate"},
		{[]string{"workers", "list", "--router", g.AdminURL, "--tls-ca", trust}, cli.ExitUnreachable, "certificate"},
		{[]string{"top", "--once", "--router", g.AdminURL, "--tls-ca", trust, "--tls-cert", mine}, cli.ExitUsage, "--tls-cert and --tls-key go together"},
		{[]string{"doctor", "--router", g.AdminURL, "--tls-ca", mineKey}, cli.ExitUsage, "holds no certificate"},
		{[]string{"workers", "list", "--router", strings.Replace(g.AdminURL, "https", "http", 1)}, cli.ExitUsage, "HTTPS server"},
	} {
		if code, out, stderr := typed(c.args...); code != c.code || !strings.Contains(out+stderr, c.want) {
			t.Errorf("dynctl %s: exit code %d, want %d and %q\n%s%s", strings.Join(c.args, " "), code, c.code, c.want, out, stderr)
		}
	}
}

// TestKeysOfCommands: keys that dynctl makes let its own commands in, and the file
// has none of them.
func TestKeysOfCommands(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "keys.yaml")
	dynctl := func(want int, args ...string) (stdout, all string) {
		t.Helper()
		code, out, stderr := typed(args...)
		if code != want {
			t.Errorf("dynctl %s: exit code %d, want %d\n%s%s", strings.Join(args, " "), code, want, out, stderr)
		}
		return out, out + stderr
	}
	keep := func(name, secret string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(secret), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	user, _ := dynctl(cli.ExitOK, "keys", "new", "bench", "--tenant", "us", "--file", file)
	ops, _ := dynctl(cli.ExitOK, "keys", "new", "ops", "--role", "operate", "--file", file)
	if _, text := dynctl(cli.ExitUsage, "keys", "new", "ops", "--file", file); !strings.Contains(text, "another key has this name") {
		t.Error(text)
	}
	if _, text := dynctl(cli.ExitUsage, "keys", "new", "x", "--role", "root", "--file", file); !strings.Contains(text, "not one of use, read, operate, admin") {
		t.Error(text)
	}
	raw, err := os.ReadFile(file)
	if err != nil || len(user) < 40 || strings.Contains(string(raw), strings.TrimSpace(user)) {
		t.Fatalf("%v: %s in %s", err, user, raw)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info.Mode(), err)
	}
	if out, _ := dynctl(cli.ExitOK, "keys", "check", file); !strings.Contains(out, "us") || !strings.Contains(out, "operate") {
		t.Error(out)
	}
	if _, text := dynctl(cli.ExitInvalid, "keys", "check", keep("bad.yaml", "keys: [{name: a}]")); !strings.Contains(text, `key "a": sha256 is not`) {
		t.Error(text)
	}
	g := readyRouter(t, loopback.Options{
		Fleet: "1a:profile=instant", Admin: router.AdminOptions{TokenFile: keep("token", "the-token-of-the-rig-itself")},
		Configure: func(c *settings.Config) {
			c.Routing.AllowHeaders = true
			c.Keys = settings.APIKeys{File: file, Required: true, Admin: true}
		},
	})
	opsFile, userFile := keep("ops.key", ops), keep("user.key", user)
	if _, text := dynctl(cli.ExitOK, "doctor", "--router", g.AdminURL, "--token-file", opsFile, "--api-key-file", userFile); !strings.Contains(text, "with an API key") {
		t.Error(text)
	}
	if _, text := dynctl(cli.ExitInvalid, "doctor", "--passive", "--router", g.AdminURL, "--token-file", opsFile); !strings.Contains(text, "requires an API key, and none was given") {
		t.Error(text)
	}
	if _, text := dynctl(cli.ExitRuntime, "workers", "list", "--router", g.AdminURL, "--token-file", userFile); !strings.Contains(text, "lacks") && !strings.Contains(text, "needs the role read") {
		t.Error(text)
	}
	if _, text := dynctl(cli.ExitRuntime, "workers", "remove", g.Sim.Engines()[0].Name(), "--router", g.AdminURL, "--token-file", opsFile); !strings.Contains(text, "needs the role admin") {
		t.Error(text)
	}
}
