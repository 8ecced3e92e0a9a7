package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/wait"
)

// need skips a test that was not asked for.
func need(t *testing.T) {
	t.Helper()
	if os.Getenv("DYNCTL_E2E") == "" {
		t.Skip("skipped: end-to-end tests run with make e2e (DYNCTL_E2E=1)")
	}
}

// engine is one entry of what the engines' start script prints.
type engine struct {
	Name, Role, Model, URL, Log string
	PID                         int
}

// enginesHome is the folder that real engines are installed in, if they are.
func enginesHome() string {
	if home := os.Getenv("DYNCTL_ENGINES_HOME"); home != "" {
		return home
	}
	dir, _ := os.UserHomeDir()
	return filepath.Join(dir, ".cache", "dynctl-engines")
}

const enginesScript = "./engines.py"

// startEngines starts real engines and stops them when the test ends. The flags are those
// of engines.py up; what follows "--" goes to the engines.
func startEngines(t *testing.T, spec string, flags ...string) []engine {
	t.Helper()
	need(t)
	if _, err := os.Stat(filepath.Join(enginesHome(), "venv")); err != nil {
		t.Skipf("skipped: real engines are not installed; run make engines (%v)", err)
	}
	down := func() {
		if out, err := exec.Command(enginesScript, "down").CombinedOutput(); err != nil {
			t.Logf("engines down: %v\n%s", err, out)
		}
	}
	down()
	cmd := exec.Command(enginesScript, append([]string{"up", spec}, flags...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	start := time.Now()
	out, err := cmd.Output()
	t.Cleanup(down)
	if err != nil {
		t.Fatalf("engines up %s: %v\n%s", spec, err, stderr.String())
	}
	var list []engine
	if err := json.Unmarshal(out, &list); err != nil {
		t.Fatalf("engines up %s printed %q: %v", spec, out, err)
	}
	t.Logf("engines %s are up after %s", spec, time.Since(start).Round(time.Second))
	return list
}

var build = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "dynctl-e2e")
	if err != nil {
		return "", err
	}
	bin := filepath.Join(dir, "dynctl")
	out, err := exec.Command("go", "build", "-o", bin, "../cmd/dynctl").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return bin, nil
})

// router is a running dynctl serve.
type router struct {
	t       *testing.T
	url     string
	metrics string // the URL that has /metrics
	admin   *admin.Client
	process *os.Process
	killed  bool
	ended   chan struct{} // closed when the process has ended
}

// kill ends the router as kill -9 does.
func (r *router) kill() {
	r.t.Helper()
	r.killed = true
	if err := r.process.Kill(); err != nil {
		r.t.Fatal(err)
	}
}

func freeAddr(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// built is the path of the binary.
func built(t *testing.T) string {
	t.Helper()
	bin, err := build()
	if err != nil {
		t.Fatal(err)
	}
	return bin
}

// serve runs the binary until the test ends and waits until it is ready.
func serve(t *testing.T, args ...string) *router {
	t.Helper()
	return serveUntil(t, "the router is ready", func(r *router) bool {
		s, err := r.admin.Status(t.Context())
		return err == nil && s.State == "ready"
	}, args...)
}

// serveUntil is serve with something else to wait for.
func serveUntil(t *testing.T, what string, ok func(*router) bool, args ...string) *router {
	t.Helper()
	return serveBy(t, nil, what, ok, args...)
}

// serveBy is serveUntil with a command that runs the binary.
func serveBy(t *testing.T, by []string, what string, ok func(*router) bool, args ...string) *router {
	t.Helper()
	bin := built(t)
	data, adm := freeAddr(t), freeAddr(t)
	r := launch(t, data, adm, admin.Options{}, slices.Concat(by, []string{bin, "serve", "--listen", data, "--admin-listen", adm}, args))
	r.until(what, func() bool { return ok(r) })
	return r
}

// launch runs a command that serves at two addresses until the test ends.
func launch(t *testing.T, data, adm string, o admin.Options, words []string) *router {
	t.Helper()
	cmd := exec.Command(words[0], words[1:]...)
	log, err := os.Create(filepath.Join(t.TempDir(), "serve.log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr, cmd.Stdout = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r := &router{t: t, url: "http://" + data, metrics: "http://" + adm, process: cmd.Process, ended: make(chan struct{})}
	var failed error
	go func() {
		defer close(r.ended)
		failed = cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		<-r.ended
		if failed != nil && !r.killed {
			t.Errorf("serve ended with %v", failed)
		}
		if t.Failed() {
			raw, _ := os.ReadFile(log.Name())
			t.Logf("log of serve:\n%s", raw[max(0, len(raw)-8000):])
		}
	})
	if r.admin, err = admin.NewClient(adm, o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.admin.Close)
	return r
}

// until polls a condition for up to a minute.
func (r *router) until(what string, ok func() bool) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
	defer cancel()
	if !wait.Until(ctx, 20*time.Millisecond, ok) {
		s, _ := r.admin.Status(r.t.Context())
		r.t.Fatalf("not in a minute: %s; status %+v", what, s)
	}
}

// waitIdle waits until every feed is live and no batch has come for a while.
func (r *router) waitIdle() {
	r.t.Helper()
	var last string
	var since time.Time
	r.until("the KV event feeds are idle", func() bool {
		l, err := r.admin.Ranks(r.t.Context())
		if err != nil {
			return false
		}
		now := ""
		for _, k := range l.Ranks {
			if k.Feed.State != "live" || k.ActiveRequests > 0 {
				return false
			}
			if k.Engine != nil && (k.Engine.Running != nil && *k.Engine.Running > 0) {
				last = "" // the scrape is older than the answer
				return false
			}
			now += fmt.Sprint(k.Label, k.Feed.Batches, ";")
		}
		if now != last {
			last, since = now, time.Now()
		}
		return time.Since(since) >= 150*time.Millisecond
	})
}

// answer is what a client gets.
type answer struct {
	status int
	header http.Header
	body   []byte
	text   string
	prompt int
	cached int
}

// post sends a body, with headers in pairs.
func post(t *testing.T, url, path string, body any, header ...string) answer {
	t.Helper()
	raw, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+path, bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatalf("POST %s%s: %v", url, path, err)
	}
	defer resp.Body.Close()
	a := answer{status: resp.StatusCode, header: resp.Header, cached: -1}
	if a.body, err = io.ReadAll(resp.Body); err != nil {
		t.Fatalf("POST %s%s: %v", url, path, err)
	}
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		for line := range strings.SplitSeq(string(a.body), "\n") {
			if data, ok := strings.CutPrefix(line, "data: "); ok && data != "[DONE]" {
				a.add([]byte(data))
			}
		}
	} else {
		a.add(a.body)
	}
	return a
}

func (a *answer) add(raw []byte) {
	var v struct {
		Choices []struct {
			Text    string
			Message struct{ Content string }
			Delta   struct{ Content string }
		}
		Usage *struct {
			Prompt  int `json:"prompt_tokens"`
			Details *struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
		// The APIs of messages and responses. A delta of theirs is of another
		// shape, so that it is read by itself.
		Type    string
		Content []struct{ Text string }
		Output  []struct{ Content []struct{ Text string } }
	}
	if json.Unmarshal(raw, &v) != nil {
		return
	}
	switch v.Type {
	case "content_block_delta":
		var d struct{ Delta struct{ Text string } }
		if json.Unmarshal(raw, &d) == nil {
			a.text += d.Delta.Text
		}
	case "response.output_text.delta":
		var d struct{ Delta string }
		if json.Unmarshal(raw, &d) == nil {
			a.text += d.Delta
		}
	}
	for _, c := range v.Content {
		a.text += c.Text
	}
	for _, o := range v.Output {
		for _, c := range o.Content {
			a.text += c.Text
		}
	}
	for _, c := range v.Choices {
		a.text += c.Text + c.Message.Content + c.Delta.Content
	}
	if v.Usage != nil {
		a.prompt = v.Usage.Prompt
		if v.Usage.Details != nil {
			a.cached = v.Usage.Details.Cached
		}
	}
}

// must fails the test unless the answer is 200.
func (a answer) must(t *testing.T) answer {
	t.Helper()
	if a.status != http.StatusOK {
		t.Fatalf("status %d: %s", a.status, a.body)
	}
	return a
}

// counter sums the series of a metric on a page /metrics whose labels hold
// all given pieces. A page that is not ready in time is asked for again.
func counter(t *testing.T, url, name string, labels ...string) float64 {
	t.Helper()
	resp, err := http.Get(url + "/metrics")
	for end := time.Now().Add(time.Minute); err == nil && resp.StatusCode == http.StatusServiceUnavailable && time.Now().Before(end); {
		resp.Body.Close()
		resp, err = http.Get(url + "/metrics")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("%s/metrics: %s", url, resp.Status)
	}
	sum := 0.0
	for s := bufio.NewScanner(resp.Body); s.Scan(); {
		line := s.Text()
		rest, ok := strings.CutPrefix(line, name)
		if !ok || rest == "" || rest[0] != '{' && rest[0] != ' ' {
			continue
		}
		all := true
		for _, l := range labels {
			all = all && strings.Contains(rest, l)
		}
		if !all {
			continue
		}
		v, err := strconv.ParseFloat(rest[strings.LastIndexByte(rest, ' ')+1:], 64)
		if err != nil {
			t.Fatalf("%s: %q: %v", url, line, err)
		}
		sum += v
	}
	return sum
}

// explain fetches the receipt of an answer.
func (r *router) explain(a answer) receipt.Receipt {
	r.t.Helper()
	var c receipt.Receipt
	r.until("the receipt is final", func() bool {
		raw, err := r.admin.Decision(r.t.Context(), a.header.Get("X-Dynctl-Decision"))
		if err != nil {
			r.t.Fatal(err)
		}
		if err := json.Unmarshal(raw, &c); err != nil {
			r.t.Fatal(err)
		}
		return !c.Live
	})
	return c
}
