package commands

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/rig/clitest"
)

// TestKubernetesTakesNoTimeOfOthers: what the packages that only Kubernetes needs allocate
// at the start of every command stays small. Allocations stand for the time, which they
// are most of: unlike it they are the same on every machine and under every load.
func TestKubernetesTakesNoTimeOfOthers(t *testing.T) {
	c := exec.Command(os.Args[0], "-test.run=^$")
	c.Env = append(os.Environ(), "GODEBUG=inittrace=1")
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	line := regexp.MustCompile(`(?m)^init (\S+) @\S+ ms, \S+ ms clock, (\d+) bytes, (\d+) allocs`)
	bytes, allocs, packages := 0, 0, 0
	for _, m := range line.FindAllSubmatch(out, -1) {
		if !strings.Contains(string(m[1]), "k8s.io/") && !strings.Contains(string(m[1]), "gnostic") {
			continue
		}
		b, errB := strconv.Atoi(string(m[2]))
		a, errA := strconv.Atoi(string(m[3]))
		if err := errors.Join(errB, errA); err != nil {
			t.Fatal(err)
		}
		bytes += b
		allocs += a
		packages++
	}
	if packages < 10 {
		t.Fatalf("found only %d packages of Kubernetes", packages)
	}
	t.Logf("%d packages: %d bytes in %d allocations", packages, bytes, allocs)
	if bytes > 1<<20 || allocs > 8_000 {
		t.Errorf("%d packages allocate %d bytes in %d allocations at the start of every command", packages, bytes, allocs)
	}
}

// TestServeAsksNoAPIServer: in a pod, and with a kubeconfig at hand, nothing is asked of
// an API server unless pods are looked for. With a selector it is, by the same ways.
func TestServeAsksNoAPIServer(t *testing.T) {
	var asked atomic.Int64
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var server sync.WaitGroup
	server.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			asked.Add(1)
			c.Close()
		}
	})
	t.Cleanup(func() { l.Close(); server.Wait() })
	host, port, _ := net.SplitHostPort(l.Addr().String())
	t.Setenv("KUBERNETES_SERVICE_HOST", host)
	t.Setenv("KUBERNETES_SERVICE_PORT", port)
	file := filepath.Join(t.TempDir(), "config")
	text := fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"c","contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}],
"users":[{"name":"u","user":{}}],"clusters":[{"name":"c","cluster":{"server":"http://%s"}}]}`, l.Addr())
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBECONFIG", file)
	defer http.DefaultClient.CloseIdleConnections()

	// run serves one chat and ends when it is asked to.
	run := func(more func() error, args ...string) {
		t.Helper()
		stderr := &clitest.Screen{}
		code := make(chan int, 1)
		go func() {
			code <- cli.Main(cli.Root(newServeCmd()), append([]string{"serve", "--sim", "1d", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"}, args...), strings.NewReader(""), io.Discard, stderr)
		}()
		clitest.Until(t, "an answer", func() error {
			m := routesOn.FindStringSubmatch(stderr.String())
			if m == nil {
				return fmt.Errorf("%q", stderr)
			}
			resp, err := http.Post(m[1]+"/v1/completions", "application/json", strings.NewReader(`{"model":"sim","max_tokens":2,"prompt":"go on"}`))
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				return errors.New(resp.Status)
			}
			return nil
		})
		clitest.Until(t, "what is to come", more)
		if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if c := <-code; c != 0 {
			t.Errorf("exit code %d: %s", c, stderr)
		}
	}
	run(func() error { return nil })
	if n := asked.Load(); n != 0 {
		t.Errorf("%d connections to the API server of a router that looks for no pods", n)
	}
	run(func() error {
		if asked.Load() == 0 {
			return errors.New("the API server is not asked")
		}
		return nil
	}, "--kube-selector", "app")
}
