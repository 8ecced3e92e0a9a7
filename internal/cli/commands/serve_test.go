package commands

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/rig/clitest"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

var routesOn = regexp.MustCompile(`routes on (http://[^\s,]+), admin API and /metrics on (http://[^\s",]+)`)

// server is a serve command that runs in this process, on ports of its own.
type server struct {
	t              *testing.T
	data, admin    string // URLs
	stdout, stderr *clitest.Screen
	code           chan int
	ended          bool
}

// startServe runs serve and waits for its addresses. It ends with the test at the latest.
func startServe(t *testing.T, args ...string) *server {
	t.Helper()
	s := &server{t: t, stdout: &clitest.Screen{}, stderr: &clitest.Screen{}, code: make(chan int, 1)}
	args = append([]string{"serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"}, args...)
	go func() { s.code <- cli.Main(cli.Root(newServeCmd()), args, strings.NewReader(""), s.stdout, s.stderr) }()
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		if !s.ended {
			_ = syscall.Kill(os.Getpid(), syscall.SIGTERM)
			<-s.code
		}
	})
	clitest.Until(t, "the banner", func() error {
		m := routesOn.FindStringSubmatch(s.stderr.String())
		if m == nil {
			return fmt.Errorf("%q", s.stderr)
		}
		s.data, s.admin = m[1], m[2]
		return nil
	})
	return s
}

// ready waits until the router is.
func (s *server) ready() {
	s.t.Helper()
	clitest.Until(s.t, "a worker", func() error {
		resp, err := http.Get(s.data + "/readyz")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				err = errors.New(resp.Status)
			}
		}
		return err
	})
}

// long is a request whose answer takes minutes at the simulator's own pace.
const long = `{"model":"sim","max_tokens":30000,"ignore_eos":true,"stream":true,"prompt":"go on"}`

// post asks for a completion, and returns the answer as it begins.
func (s *server) post(ctx context.Context, body string) *http.Response {
	s.t.Helper()
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, s.data+"/v1/completions", strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	q.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(q)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { resp.Body.Close() })
	return resp
}

// terminate sends SIGTERM, to the whole process.
func (s *server) terminate() {
	s.t.Helper()
	if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
		s.t.Fatal(err)
	}
}

// ends waits for serve to end with an exit code.
func (s *server) ends(want int) {
	s.t.Helper()
	select {
	case c := <-s.code:
		if s.ended = true; c != want {
			s.t.Errorf("exit code %d, want %d: %s", c, want, s.stderr)
		}
	case <-time.After(20 * time.Second):
		s.t.Fatalf("serve does not end: %s", s.stderr)
	}
}

// drain is what the admin API shows of a router that drains.
func (s *server) drain(c *admin.Client, reason string) *admin.DrainState {
	s.t.Helper()
	st, err := c.Status(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	if st.State != "draining" || st.Drain == nil || !strings.Contains(strings.Join(st.Reasons, " "), reason) {
		s.t.Fatalf("status %q, drain %+v, reasons %q, want one with %q", st.State, st.Drain, st.Reasons, reason)
	}
	return st.Drain
}

// client is a client of the admin API.
func (s *server) client() *admin.Client {
	s.t.Helper()
	c, err := admin.NewClient(s.admin, admin.Options{})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(c.Close)
	return c
}

// TestServeFromSignalToSignal runs serve as a user does: it answers, is
// reloaded by SIGHUP (wholly or, with a bad file, not at all), is asked by the
// other commands, and ends well by SIGTERM. It is not parallel: signals go to
// the whole process.
func TestServeFromSignalToSignal(t *testing.T) {
	file := filepath.Join(t.TempDir(), "dynctl.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("routing:\n  threshold: 100000\n")
	s := startServe(t, "--config", file, "--sim", "1p1d", "--access-log", "json")
	client, stderr := s.client(), s.stderr
	clitest.Until(t, "the fleet", func() error {
		s, err := client.Status(t.Context())
		if err == nil && s.Workers.Usable != 2 {
			err = fmt.Errorf("%v", s.Reasons)
		}
		return err
	})
	ask := func(words string) (path, decision string) {
		t.Helper()
		resp := s.post(t.Context(), fmt.Sprintf(`{"model":"sim","max_tokens":3,"prompt":%q}`, strings.Repeat(words+" ", 50)))
		b, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("%d %s %v", resp.StatusCode, b, err)
		}
		return resp.Header.Get("X-Dynctl-Path"), resp.Header.Get("X-Dynctl-Decision")
	}
	if path, _ := ask("below"); path != "local" {
		t.Errorf("below the threshold: %s", path)
	}

	hup := func(kind string) {
		t.Helper()
		count := func() (n int) {
			l, err := client.Events(t.Context(), 0, 1000, 0)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range l.Events {
				if e.Kind == kind {
					n++
				}
			}
			return n
		}
		was := count()
		if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		clitest.Until(t, kind, func() error {
			if count() == was {
				return fmt.Errorf("no event")
			}
			return nil
		})
	}
	write("routing:\n  threshold: 0\naliases:\n  - {name: also, model: sim}\n")
	hup("config_reloaded")
	for _, change := range []string{"routing.threshold: 100000 -> 0", "aliases: [] -> [{also sim}]"} {
		if !strings.Contains(stderr.String(), change) {
			t.Errorf("the reload does not say %q: %s", change, stderr)
		}
	}
	if path, _ := ask("always"); path != "remote" {
		t.Errorf("after the reload: %s", path)
	}
	for _, bad := range []string{"routing:\n  threshold: 5\n  polcy: kv\n", "routing: [", "receipts: 99\nrouting:\n  threshold: 100000\n"} {
		write(bad)
		hup("config_refused")
		s, err := client.Status(t.Context())
		if err != nil || s.ConfigRevision != 2 || s.ThresholdTokens != 0 {
			t.Errorf("%q left revision %d with threshold %d (%v)", bad, s.ConfigRevision, s.ThresholdTokens, err)
		}
	}
	path, decision := ask("still")
	if path != "remote" {
		t.Errorf("after refused reloads: %s", path)
	}

	// The other commands against it.
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"explain", decision}, cli.ExitOK, "remote"},
		{[]string{"explain", "--prompt", "some words to route", "--model", "sim"}, cli.ExitOK, "decode-0"},
		{[]string{"explain", "nothing-like-it"}, cli.ExitRuntime, ""},
		{[]string{"workers", "list"}, cli.ExitOK, "prefill-0"},
		{[]string{"workers", "list", "-o", "json"}, cli.ExitOK, `"decode-0"`},
		{[]string{"workers", "drain", "prefill-0"}, cli.ExitOK, ""},
		{[]string{"workers", "resume", "prefill-0"}, cli.ExitOK, ""},
		{[]string{"workers", "drain", "prefil-0"}, cli.ExitRuntime, ""},
		{[]string{"workers", "add", "http://127.0.0.1:9,name=spare"}, cli.ExitOK, ""},
		{[]string{"workers", "remove", "spare"}, cli.ExitOK, ""},
	} {
		got, stdout, errs := typed(append(c.args, "--router", s.admin)...)
		if !strings.Contains(errs, "warning: no other prefill worker is usable") && c.args[1] == "drain" && got == cli.ExitOK {
			t.Errorf("the drain of the last prefill worker has no warning: %s", errs)
		}
		if got != c.code || !strings.Contains(stdout, c.says) || got != cli.ExitOK && errs == "" {
			t.Errorf("dynctl %s: exit %d\n%s%s", strings.Join(c.args, " "), got, stdout, errs)
		}
	}
	if _, stdout, _ := typed("workers", "list", "-o", "json", "--router", s.admin); !json.Valid([]byte(stdout)) {
		t.Errorf("not JSON: %s", stdout)
	}
	if _, stdout, _ := typed("__complete", "workers", "--router", s.admin, "drain", ""); !strings.Contains(stdout, "decode-0") {
		t.Errorf("completion offers no workers: %s", stdout)
	}

	s.terminate()
	s.ends(cli.ExitOK)
	// Standard output has a line for each request, and nothing else.
	lines := strings.Split(strings.TrimSpace(s.stdout.String()), "\n")
	var last struct {
		Decision string
		Status   int
	}
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &last); err != nil || len(lines) != 3 || last.Decision != decision || last.Status != 200 {
		t.Errorf("%v: of 3 requests, the last by %s, %q", err, decision, lines)
	}
}

// TestServeIntroducesItsFleetInOneLine: twelve workers are one line, which says how to
// watch them.
func TestServeIntroducesItsFleetInOneLine(t *testing.T) {
	s := startServe(t, "--sim", "4p8d")
	stderr := s.stderr
	clitest.Until(t, "the line of the fleet", func() error {
		if !strings.Contains(stderr.String(), "12 of 12 workers ready (4 prefill, 8 decode; 12 ranks; models: sim); see them with dynctl top --router http://") {
			return fmt.Errorf("%q", stderr)
		}
		return nil
	})
	s.terminate()
	s.ends(cli.ExitOK)
	for _, kind := range []string{"worker_added", "worker_changed", "health_changed", "feed_live"} {
		if n := strings.Count(stderr.String(), kind); n > 0 {
			t.Errorf("%d lines of %s", n, kind)
		}
	}
}

// TestByRole: every role is counted, and one that nobody has is left out.
func TestByRole(t *testing.T) {
	for want, n := range map[string][4]int{"1 prefill, 2 decode, 3 aggregated, 4 either": {1, 2, 3, 4}, "2 either": {3: 2}} {
		if got := byRole(n[0], n[1], n[2], n[3]); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestServeDrainTimeout: a drain through the admin API ends when its own time is
// up, not the configured one, and the status says until when.
func TestServeDrainTimeout(t *testing.T) {
	s := startServe(t, "--sim", "1d", "--drain-timeout", "10m")
	s.ready()
	// Well over the drain's own time, and well under the configured one.
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	resp := s.post(ctx, long)
	c := s.client()
	begun := time.Now()
	if err := c.Drain(t.Context(), 2*time.Second); err != nil {
		t.Fatal(err)
	}
	if d := s.drain(c, "1 request(s) may finish until"); d.Inflight != 1 || d.Until.Sub(d.Since) != 2*time.Second {
		t.Errorf("drain %+v", d)
	}
	clitest.Until(t, "an answer that ends its connection", func() error {
		resp, err := http.Get(s.data + "/readyz")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if !resp.Close {
			return errors.New("clients keep connections to a router that drains")
		}
		return nil
	})
	body, err := io.ReadAll(resp.Body)
	if took := time.Since(begun); err != nil || took < time.Second || !strings.Contains(string(body[max(0, len(body)-500):]), `"code":"draining"`) {
		t.Errorf("the stream ended after %s: %v, %.300s", took, err, body[max(0, len(body)-300):])
	}
	s.ends(cli.ExitRuntime)
}

// TestServeLeaves: after the signal the router is not ready, but for timeouts.leave it
// serves what comes on connections that are there and on new ones, each answer as the
// last of its connection; so nothing is lost of clients that send a request once.
func TestServeLeaves(t *testing.T) {
	s := startServe(t, "--sim", "1d", "--leave-time", "1h")
	ask := func(c net.Conn, in *bufio.Reader, method, path, body string) (*http.Response, error) {
		if _, err := fmt.Fprintf(c, "%s %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", method, path, len(body), body); err != nil {
			return nil, err
		}
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			return nil, err
		}
		_, err = io.Copy(io.Discard, resp.Body)
		return resp, err
	}
	dial := func() (net.Conn, *bufio.Reader) {
		t.Helper()
		c, err := net.Dial("tcp", strings.TrimPrefix(s.data, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c, bufio.NewReader(c)
	}
	ready := func(want int) {
		t.Helper()
		c, in := dial()
		clitest.Until(t, fmt.Sprintf("/readyz says %d", want), func() error {
			resp, err := ask(c, in, http.MethodGet, "/readyz", "")
			if err != nil {
				c, in = dial()
				return err
			}
			if resp.StatusCode != want {
				return errors.New(resp.Status)
			}
			return nil
		})
	}
	const prompt = `{"model":"sim","max_tokens":4,"ignore_eos":true,"stream":true,"prompt":"go on"}`
	ready(http.StatusOK)
	kept, keptIn := dial()
	if resp, err := ask(kept, keptIn, http.MethodPost, "/v1/completions", prompt); err != nil || resp.StatusCode != http.StatusOK || resp.Close {
		t.Fatalf("%v, %v", resp, err)
	}
	s.terminate()
	ready(http.StatusServiceUnavailable)
	fresh, freshIn := dial()
	for name, c := range map[string]struct {
		net.Conn
		in *bufio.Reader
	}{"kept": {kept, keptIn}, "new": {fresh, freshIn}} {
		resp, err := ask(c, c.in, http.MethodPost, "/v1/completions", prompt)
		if err != nil || resp.StatusCode != http.StatusOK || !resp.Close {
			t.Fatalf("on a %s connection of a router that leaves: %v, %v", name, resp, err)
		}
		if _, err := c.in.ReadByte(); err != io.EOF {
			t.Errorf("the %s connection goes on: %v", name, err)
		}
	}
	if d := s.drain(s.client(), "new ones are served until"); d.Closes.Sub(d.Since) != time.Hour || d.Until.Sub(d.Closes) != 30*time.Second {
		t.Errorf("drain %+v", d)
	}
	// A second signal does not wait for the rest of the hour.
	s.terminate()
	s.ends(cli.ExitOK)
}

// TestServeLeavesThenDrains: when timeouts.leave is over, new requests are refused and
// the stream that runs goes on.
func TestServeLeavesThenDrains(t *testing.T) {
	s := startServe(t, "--sim", "1d", "--leave-time", "50ms", "--drain-timeout", "10m")
	s.ready()
	resp := s.post(t.Context(), long)
	s.terminate()
	clitest.Until(t, "a request that is refused", func() error {
		resp, err := http.Post(s.data+"/v1/completions", "application/json", strings.NewReader(`{"model":"sim","max_tokens":1,"prompt":"go on"}`))
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err == nil && (resp.StatusCode != http.StatusServiceUnavailable || !strings.Contains(string(body), `"code":"draining"`)) {
			err = fmt.Errorf("%s: %s", resp.Status, body)
		}
		return err
	})
	if _, err := io.ReadFull(resp.Body, make([]byte, 2000)); err != nil {
		t.Errorf("the stream does not go on: %v", err)
	}
	s.terminate()
	s.ends(cli.ExitInterrupted)
}

// TestServeSecondSignal: the first signal lets streams finish, the second ends
// them with an error event, never with a silent cut.
func TestServeSecondSignal(t *testing.T) {
	s := startServe(t, "--sim", "1d")
	s.ready()
	resp := s.post(t.Context(), long)
	body := &clitest.Screen{}
	read := make(chan error, 1)
	go func() {
		_, err := io.Copy(body, resp.Body)
		read <- err
	}()
	clitest.Until(t, "the first token", func() error {
		if !strings.Contains(body.String(), "data: ") {
			return errors.New("nothing yet")
		}
		return nil
	})
	s.terminate()
	clitest.Until(t, "the drain", func() error {
		if !strings.Contains(s.stderr.String(), "the router drains: 1 request(s)") {
			return fmt.Errorf("%s", s.stderr)
		}
		return nil
	})
	select {
	case <-read:
		t.Fatalf("the first signal ended the stream: %s", body)
	case c := <-s.code:
		s.ended = true
		t.Fatalf("the first signal ended serve with %d", c)
	default:
	}
	s.terminate()
	if err := <-read; err != nil || !strings.Contains(body.String(), `"code":"draining"`) {
		t.Errorf("the stream ended without a word: %v, %.300s", err, body.String()[max(0, len(body.String())-300):])
	}
	s.ends(cli.ExitInterrupted)
}

// TestServeHelpInGroups: the everyday flags come first, and each flag stands in one group.
func TestServeHelpInGroups(t *testing.T) {
	code, out, errs := typed("serve", "--help")
	if code != cli.ExitOK || errs != "" {
		t.Fatalf("code %d %s", code, errs)
	}
	_, everyday, ok := strings.Cut(out, "\nEveryday flags:\n")
	first, others, more := strings.Cut(everyday, "\n\n")
	if lines := strings.Split(first, "\n"); !ok || !more || len(lines) != 10 || !strings.HasPrefix(strings.TrimSpace(lines[0]), "--listen ") {
		t.Errorf("the everyday flags are\n%s", first)
	}
	if !strings.HasPrefix(others, "Other flags:\n") || !strings.Contains(others, "\nFlags of the section routing:\n") {
		t.Errorf("the others are\n%s", others)
	}
	newServeCmd().Flags().VisitAll(func(f *pflag.Flag) {
		n := 0
		for line := range strings.Lines(out) {
			if name, ok := strings.CutPrefix(strings.TrimSpace(line), "--"); ok && (name == f.Name || strings.HasPrefix(name, f.Name+" ")) {
				n++
			}
		}
		if n != 1 {
			t.Errorf("--%s stands in %d lines", f.Name, n)
		}
	})
}
