package commands

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rig/loopbacktest"
)

// TestDataPlaneAsRouter: whoever gives the data plane as --router learns it in a line,
// by every command that asks a router.
func TestDataPlaneAsRouter(t *testing.T) {
	g := loopbacktest.Start(t, loopback.Options{Fleet: "1a:profile=instant"})
	for _, args := range []string{"doctor", "workers list", "bench", "bench --sweep", "explain --prompt x", "workers drain a"} {
		code, _, stderr := typed(append(strings.Fields(args), "--router", g.URL)...)
		if code != cli.ExitUsage || !strings.Contains(stderr, g.URL+" is the data plane of a router; the admin API is at ") || len(stderr) > 300 {
			t.Errorf("%s: code %d, %q", args, code, stderr)
		}
	}
}

// TestAdminAPIBesideTheDataPlane: its address is named when the router there says
// that this is its data plane, and not otherwise.
func TestAdminAPIBesideTheDataPlane(t *testing.T) {
	serve := func(ln net.Listener, status int, body string) {
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			fmt.Fprint(w, body)
		}))
		s.Listener.Close()
		s.Listener = ln
		s.Start()
		t.Cleanup(s.Close)
	}
	for _, its := range []bool{true, false} {
		var data, beside net.Listener
		for range 50 { // until the next port is free, too
			var err error
			if data, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
				t.Fatal(err)
			}
			next := data.Addr().(*net.TCPAddr).Port + 1
			if beside, err = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", next)); err == nil {
				break
			}
			data.Close()
		}
		listen := data.Addr().String()
		if !its {
			listen = "127.0.0.1:1"
		}
		serve(data, http.StatusNotFound, `{"error":{"message":"no such path","code":"admin_path"}}`)
		serve(beside, http.StatusOK, fmt.Sprintf(`{"listen":%q}`, listen))
		want := "the admin API is at http://" + beside.Addr().String()
		if !its {
			want = "the admin API is at the address of its --admin-listen"
		}
		if code, _, stderr := typed("workers", "list", "--router", "http://"+data.Addr().String()); code != cli.ExitUsage || !strings.Contains(stderr, want) {
			t.Errorf("code %d, %q, want %q", code, stderr, want)
		}
	}
}
