//go:build unix

package router_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rig/external"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/settings"
)

// blockEngines lets every completion hang at its engine until the returned
// function is called.
func (p *tap) blockEngines() (reached chan struct{}, release func()) {
	reached, held := make(chan struct{}, 1024), make(chan struct{})
	p.set(func(_ string, _ http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.URL.Path == "/v1/completions" {
			reached <- struct{}{}
			select {
			case <-held:
			case <-q.Context().Done():
			}
		}
		return false
	})
	return reached, sync.OnceFunc(func() { close(held) })
}

// ask sends a completion and gives its answer when it comes, nil for none.
func (r *rig) ask(body string) <-chan *answer {
	got := make(chan *answer, 1)
	go func() {
		a, err := r.try(r.t.Context(), http.MethodPost, "/v1/completions", []byte(body))
		if err != nil {
			r.t.Error(err)
		}
		got <- a
	}()
	return got
}

// fillOnePlace sends a completion that stays with its engine until release, in the one place
// that the configuration has: what comes then waits in the queue.
func (r *rig) fillOnePlace(p *tap) (first <-chan *answer, release func()) {
	reached, release := p.blockEngines()
	first = r.ask(quickBody(0))
	<-reached
	return first, release
}

func (r *rig) queued(want int) {
	r.t.Helper()
	r.eventually(fmt.Sprintf("%d in the queue", want), func() error {
		if n := r.status().Traffic.Queued; n != want {
			return fmt.Errorf("%d wait", n)
		}
		return nil
	})
}

// quickBody is the body of a completion of two tokens.
func quickBody(tag int) string {
	return fmt.Sprintf(`{"model":"sim","prompt":[%d,301,302],"max_tokens":2}`, 300+tag)
}

// post is a request as a client writes it.
func rawPost(path, body string, header ...string) string {
	return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n%s\r\n%s", path, len(body), strings.Join(header, ""), body)
}

// clientsThatLeaveTheQueue: a client that hangs up while waiting frees its place
// at once, and never reaches an engine.
func clientsThatLeaveTheQueue(t *testing.T, r *rig, p *tap) {
	r.set(func(c *settings.Config) { c.Limits.Inflight, c.Limits.Queue = 1, 2 })
	const waits, full = `dynctl_stage_seconds_count{stage="queue"}`, `dynctl_rejections_total{reason="overload"}`
	waited, refused := max(0, r.metric(waits)), r.metric(full)
	first, release := r.fillOnePlace(p)
	defer release()
	var gone []net.Conn
	for i, head := range []string{"", "X-Long: " + strings.Repeat("x", 4000) + "\r\n"} {
		c := r.dial()
		fmt.Fprint(c, rawPost("/v1/completions", quickBody(1+i), head))
		gone = append(gone, c)
	}
	r.queued(2)
	for _, c := range gone {
		_ = c.Close()
	}
	r.queued(0)
	live := r.ask(quickBody(9))
	r.queued(1)
	release()
	for i, got := range []<-chan *answer{first, live} {
		a := <-got
		if a == nil || a.status != http.StatusOK {
			t.Fatalf("a client that waited got %v", a)
		}
		if c := r.receipt(a.header.Get("X-Dynctl-Decision")); (c.QueuedMS > 0) != (i == 1) {
			t.Errorf("client %d waited %v ms, says its receipt", i, c.QueuedMS)
		}
	}
	if n := r.metric(waits) - waited; n != 3 {
		t.Errorf("%v waits are counted, not 3", n)
	}
	if n := len(p.legs()); n != 2 {
		t.Errorf("the engine got %d requests, 2 clients were there", n)
	}
	if n := r.metric(full); n != refused {
		t.Errorf("%v clients count as refused, %v before", n, refused)
	}
}

// bodyTimeIsNotQueueTime: a body that was sent is not late because its
// request waited.
func bodyTimeIsNotQueueTime(t *testing.T, r *rig, p *tap) {
	const bodyTime = 2 * time.Second // in which the bodies that are sent at once must come
	r.set(func(c *settings.Config) {
		c.Limits.Inflight, c.Limits.Queue = 1, 4
		c.Timeouts.Body = bodyTime
	})
	first, release := r.fillOnePlace(p)
	defer release()
	// More than fits into the buffers of a server that has read the head only.
	second := r.ask(`{"model":"sim","max_tokens":2,"prompt":[` + strings.Repeat("301,", 3000) + `302]}`)
	r.queued(1)
	over := time.NewTimer(bodyTime + bodyTime/2)
	defer over.Stop()
	<-over.C
	release()
	for _, got := range []<-chan *answer{first, second} {
		if a := <-got; a == nil || a.status != http.StatusOK && !strings.Contains(string(a.body), "max_model_len") {
			t.Errorf("%v", a)
		}
	}
}

// badPath is a request that is refused, or answered, without its body.
type badPath struct {
	name, plane, head string
	status            int // 0: whatever
	header            string
}

// badPaths are the ways in which a request's body may be of no interest.
func badPaths() []badPath {
	return []badPath{
		{"unknown path", "data", "POST /nope", 404, ""},
		{"wrong method", "data", "PUT /v1/completions", 405, ""},
		{"answered by the router", "data", "GET /v1/models", 200, ""},
		{"probe", "data", "POST /healthz", 200, ""},
		{"no body expected", "data", "GET /version", 0, ""},
		{"compressed", "data", "POST /v1/completions", 415, "Content-Encoding: br\r\n"},
		{"body of interest", "data", "POST /v1/completions", 408, ""},
		{"multipart", "data", "POST /v1/audio/transcriptions", 408, "Content-Type: multipart/form-data; boundary=b\r\n"},
		{"no token", "admin", "POST /admin/v1/drain", 401, ""},
		{"no token, GET", "admin", "GET /admin/v1/status", 401, ""},
		{"unknown admin path", "admin", "POST /admin/nope", 404, ""},
		{"wrong admin method", "admin", "DELETE /healthz", 404, ""},
		{"admin probe", "admin", "GET /healthz", 200, ""},
		{"profiler", "admin", "POST /debug/pprof/symbol", 401, ""},
		{"admin body of interest", "admin", "POST /admin/v1/config", 408, "Authorization: Bearer " + badClientToken + "\r\n"},
		{"admin stream", "admin", "GET /admin/v1/events?wait=1s", 408, "Authorization: Bearer " + badClientToken + "\r\n"},
	}
}

const badClientToken = "a-long-enough-token-for-bad-clients"

// badBehaviour is what a client does with the body that it has announced.
type badBehaviour struct {
	name string
	// framing of the body that the head announces.
	framing string
	// send is called once the head is sent; it returns at the end of the
	// connection or before.
	send func(c net.Conn)
}

func never(net.Conn) {}

// trickle sends a byte now and then until the other end has had enough.
func trickle(piece string) func(net.Conn) {
	return func(c net.Conn) {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for range tick.C {
			if _, err := io.WriteString(c, piece); err != nil {
				return
			}
		}
	}
}

func badBehaviours() []badBehaviour {
	return []badBehaviour{
		{"never sent", "Content-Length: 1000\r\n", never},
		{"large, never sent", "Content-Length: 20000000\r\n", never},
		{"chunks, never sent", "Transfer-Encoding: chunked\r\n", never},
		{"slowly sent", "Content-Length: 100000\r\n", trickle(" ")},
		{"slow chunks", "Transfer-Encoding: chunked\r\n", trickle("1\r\n \r\n")},
		{"half a chunk", "Transfer-Encoding: chunked\r\n", func(c net.Conn) { _, _ = io.WriteString(c, "ffff\r\nabc") }},
		{"no end of chunks", "Transfer-Encoding: chunked\r\n", func(c net.Conn) { _, _ = io.WriteString(c, "2\r\n{}\r\n0\r\nX: ") }},
		{"leaves", "Content-Length: 1000\r\n", func(c net.Conn) { _ = c.Close() }},
		{"half closes", "Content-Length: 1000\r\n", func(c net.Conn) { _ = c.(*net.TCPConn).CloseWrite() }},
		{"wants to be asked", "Content-Length: 1000\r\nExpect: 100-continue\r\n", never},
	}
}

// quietProbes lets workers be asked once: the connections of probes that come and
// go would count among those that clients left.
func quietProbes(c *settings.Config) { c.Health.Interval, c.Health.Scrape = time.Hour, time.Hour }

// badRig is a router behind a tap that has little patience with bodies, and asks for a token.
func badRig(t *testing.T) (*rig, *tap) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(badClientToken), 0o600); err != nil {
		t.Fatal(err)
	}
	p := &tap{}
	r := startCold(t, loopback.Options{Fleet: "1a:profile=instant", Specs: p.specs(t), Admin: router.AdminOptions{TokenFile: file}}, quietProbes, func(c *settings.Config) {
		c.Timeouts.Body = 300 * time.Millisecond
	})
	r.eventually("a completion", func() error {
		a, err := r.try(t.Context(), http.MethodPost, "/v1/completions", []byte(quickBody(0)))
		if err == nil && a.status != http.StatusOK {
			err = errors.New(a.String())
		}
		return err
	})
	return r, p
}

func (r *rig) dialPlane(plane string) net.Conn {
	r.t.Helper()
	url := r.URL
	if plane == "admin" {
		url = r.AdminURL
	}
	c, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

// openFiles is the number of this process's descriptors, 0 where that is not
// known.
func openFiles() int {
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(list)
}

// left waits until no more goroutines and descriptors are there than before.
func (r *rig) left(goroutines, files int) {
	r.t.Helper()
	defer func() {
		if r.t.Failed() {
			_ = pprof.Lookup("goroutine").WriteTo(r.t.Output(), 1)
		}
	}()
	r.eventually("what the clients held to be free", func() error {
		r.Client.CloseIdleConnections()
		if g, f := runtime.NumGoroutine(), openFiles(); g > goroutines || f > files {
			return fmt.Errorf("%d goroutines were %d, %d descriptors were %d", g, goroutines, f, files)
		}
		return nil
	})
}

// held counts what a router at rest has, once it is at rest.
func (r *rig) held() (goroutines, files int) {
	if err := r.Ready(r.wait()); err != nil { // its feeds among others
		r.t.Fatal(err)
	}
	same := 0
	r.eventually("a quiet router", func() error {
		r.Client.CloseIdleConnections()
		g, f := runtime.NumGoroutine(), openFiles()
		if g != goroutines || f != files {
			goroutines, files, same = g, f, 0
		}
		if same++; same < 5 {
			return errors.New("it still changes")
		}
		return nil
	})
	return goroutines, files
}

// misbehave is one bad client. It returns the status that it was sent, 0 for
// none, once the server has ended the connection.
func misbehave(c net.Conn, p badPath, b badBehaviour) (status int, err error) {
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return 0, err
	}
	if _, err := fmt.Fprintf(c, "%s HTTP/1.1\r\nHost: 127.0.0.1\r\n%s%s\r\n", p.head, b.framing, p.header); err != nil {
		return 0, err
	}
	var wg sync.WaitGroup
	wg.Go(func() { b.send(c) })
	defer wg.Wait()
	in := bufio.NewReader(c)
	for {
		resp, err := http.ReadResponse(in, nil)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return status, fmt.Errorf("the connection is still held (after status %d)", status)
		case err != nil:
			return status, nil
		case resp.StatusCode >= 200:
			status = resp.StatusCode
		}
		_, err = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return status, fmt.Errorf("the answer %d does not end", status)
		}
	}
}

// TestBadClients: whatever is refused or answered without its body, and
// whatever the client does with that body, ends within a bound and leaves no
// goroutine, descriptor, place or memory behind. Not parallel: it counts those
// of the process.
func TestBadClients(t *testing.T) {
	r, p := badRig(t)
	goroutines, files := r.held()
	t.Run("all", func(t *testing.T) {
		var wg sync.WaitGroup
		defer wg.Wait()
		for _, path := range badPaths() {
			for _, b := range badBehaviours() {
				c := r.dialPlane(path.plane)
				wg.Go(func() {
					status, err := misbehave(c, path, b)
					if err != nil {
						t.Errorf("%s, %s: %v", path.name, b.name, err)
					}
					// Chunks that end badly may be noticed as such first; a
					// client that leaves gets no answer.
					if answered := slices.Contains([]string{"never sent", "large, never sent", "slowly sent", "slow chunks", "wants to be asked"}, b.name); answered && path.status != 0 && status != path.status {
						t.Errorf("%s, %s: got %d, want %d", path.name, b.name, status, path.status)
					}
				})
			}
		}
	})
	r.left(goroutines, files)
	t.Run("a thousand", func(t *testing.T) {
		var wg sync.WaitGroup
		defer wg.Wait()
		paths, how := badPaths(), badBehaviours()
		for i := range 1000 {
			p := paths[i%2*8] // an unknown path, no token
			c := r.dialPlane(p.plane)
			wg.Go(func() {
				if status, err := misbehave(c, p, how[i/2%2]); err != nil || status != p.status {
					t.Errorf("%s: %d %v", p.name, status, err)
				}
			})
		}
	})
	r.left(goroutines, files)
	r.unharmed()
	t.Run("who never read", func(t *testing.T) { clientsThatNeverRead(t, r.in(t), p) })
	t.Run("at random", func(t *testing.T) { badClientsAtRandom(t, r.in(t)) })
}

// clientsThatNeverRead: a client that sends request after request and reads no
// answer loses the connection, and what the last request held is free. Each
// answer fits into the buffers of a socket that is not full. Not parallel: it
// counts goroutines and descriptors of the process.
func clientsThatNeverRead(t *testing.T, r *rig, p *tap) {
	r.set(func(c *settings.Config) { c.Timeouts.Write = 300 * time.Millisecond })
	raw := []byte(`{"object":"text_completion","choices":[{"text":"` + strings.Repeat("x", 15<<10) + `"}]}`)
	p.set(func(_ string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.URL.Path != "/v1/completions" {
			return false
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Length", strconv.Itoa(len(raw)))
		_, _ = w.Write(raw)
		return true
	})
	goroutines, files := r.held()
	body := quickBody(0)
	var wg sync.WaitGroup
	// More than the unused connections of workers that may close meanwhile.
	for range 16 {
		c := r.dialPlane("data")
		if err := errors.Join(c.(*net.TCPConn).SetReadBuffer(4096), c.SetDeadline(time.Now().Add(patience))); err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			defer c.Close()
			for {
				if _, err := io.WriteString(c, rawPost("/v1/completions", body)); errors.Is(err, os.ErrDeadlineExceeded) {
					t.Error("the connection of a client that never reads is still held")
					return
				} else if err != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	r.left(goroutines, files)
	p.set(nil)
	r.unharmed()
}

// badClientsAtRandom mixes bad clients of every kind with good ones, who
// notice nothing, around a small queue and little memory.
func badClientsAtRandom(t *testing.T, r *rig) {
	seed := uint64(0x5eed)
	if text := os.Getenv("DYNCTL_BAD_CLIENTS"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("DYNCTL_BAD_CLIENTS=%d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	r.set(func(c *settings.Config) {
		c.Limits.Inflight, c.Limits.Queue, c.Limits.QueueTimeout = 4, 300, patience
		c.Limits.BodyBytes, c.Limits.BodyMemory = 1<<20, 8<<20
	})
	goroutines, files := r.held()
	paths, how := badPaths(), badBehaviours()
	// Those who send everything and leave while they wait or are served.
	how = append(how, badBehaviour{"sends all and leaves", "", func(c net.Conn) {
		_ = c.(*net.TCPConn).SetLinger(0)
		_ = c.Close()
	}})
	var wg sync.WaitGroup
	for i := range 300 {
		p, b := paths[rng.IntN(len(paths))], how[rng.IntN(len(how))]
		good := rng.IntN(4) == 0
		wg.Go(func() {
			switch {
			case good:
				a, err := r.try(t.Context(), http.MethodPost, "/v1/completions", []byte(quickBody(i)))
				if err != nil || a.status != http.StatusOK {
					t.Errorf("a good client got %v %v", a, err)
				}
			case b.framing == "":
				c := r.dialPlane("data")
				_, _ = io.WriteString(c, rawPost("/v1/completions", quickBody(i)))
				b.send(c)
			default:
				if _, err := misbehave(r.dialPlane(p.plane), p, b); err != nil {
					t.Errorf("%s, %s: %v", p.name, b.name, err)
				}
			}
		})
	}
	wg.Wait()
	r.left(goroutines, files)
	r.unharmed()
}

// unharmed: nothing is held, and the router serves.
func (r *rig) unharmed() {
	r.t.Helper()
	r.eventually("nothing to be held", func() error {
		for _, series := range []string{"dynctl_inflight_requests", "dynctl_queued_requests", "dynctl_body_memory_bytes", "dynctl_ledger_open_requests"} {
			if v := r.metricWith(series, badClientToken); v != 0 {
				return fmt.Errorf("%s is %v", series, v)
			}
		}
		return nil
	})
	r.complete(ids(40, 1))
}

// bodyMemory: the bodies of all requests have one bound; beyond it requests
// are refused with a time to try again, visibly, until there is room.
func bodyMemory(t *testing.T, r *rig, p *tap) {
	r.set(func(c *settings.Config) { c.Limits.BodyBytes, c.Limits.BodyMemory = 64<<10, 256<<10 })
	reached, release := p.blockEngines()
	defer release()
	body := `{"model":"sim","prompt":"x","max_tokens":2,"padding":"` + strings.Repeat("u", 60<<10) + `"}`
	var fit []<-chan *answer
	for range 4 {
		got := r.ask(body)
		select {
		case <-reached:
		case a := <-got:
			t.Fatalf("not sent to an engine: %v", a)
		}
		fit = append(fit, got)
	}
	if used := r.metric("dynctl_body_memory_bytes"); used != 256<<10 {
		t.Errorf("%v bytes are taken", used)
	}
	beyond := r.ask(quickBody(1))
	var a *answer
	select {
	case a = <-beyond:
	case <-reached:
		release()
		<-beyond
		t.Fatal("a body beyond the memory was read and sent to an engine")
	}
	if a == nil {
		t.Fatal("no answer")
	}
	a.refused(t, http.StatusServiceUnavailable, "overloaded")
	if a.header.Get("Retry-After") == "" {
		t.Error("it does not say when to come again")
	}
	if n := r.metric(`dynctl_rejections_total{reason="body_memory"}`); n != 1 {
		t.Errorf("%v refusals are counted", n)
	}
	if st := r.status(); st.State != "degraded" || !slices.ContainsFunc(st.Reasons, func(s string) bool { return strings.Contains(s, "limits.body_memory") }) {
		t.Errorf("the status is %s: %q", st.State, st.Reasons)
	}
	release()
	for _, got := range fit {
		if a := <-got; a == nil || a.status != http.StatusOK {
			t.Errorf("%v", a)
		}
	}
	r.eventually("room again", func() error {
		if len(r.events("body_memory_full")) != 1 || len(r.events("body_memory_freed")) != 1 {
			return errors.New("no events of it")
		}
		if st := r.status(); st.State != "ready" {
			return fmt.Errorf("still %s: %q", st.State, st.Reasons)
		}
		return nil
	})
	if a := r.send(http.MethodPost, "/v1/completions", []byte(body)); a.status != http.StatusOK {
		t.Errorf("%s", a)
	}
}

// foreignClientsThatLeave: clients that other people wrote hang up while they
// wait in the queue, and give up on a body.
func foreignClientsThatLeave(t *testing.T, r *rig, p *tap) {
	interpreter := external.Python(t, "http.client")
	r.set(func(c *settings.Config) {
		c.Limits.Inflight, c.Limits.Queue = 1, 2
		c.Timeouts.Body = 300 * time.Millisecond
	})
	first, release := r.fillOnePlace(p)
	defer release()
	const script = `
import http.client, json, socket, sys
host = sys.argv[1]
body = json.dumps({"model": "sim", "prompt": [301, 302], "max_tokens": 2})
def answer(c):
    a = c.getresponse()
    return a.status, a.read()
for turn in range(3):
    waiting = []
    for n in range(2):
        c = http.client.HTTPConnection(host, timeout=20)
        c.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        waiting.append(c)
    print("waiting", flush=True)
    sys.stdin.readline()
    for c in waiting:
        c.close()
    print("left", flush=True)
    sys.stdin.readline()
for path in "/nope", "/v1/completions":
    c = http.client.HTTPConnection(host, timeout=20)
    c.putrequest("POST", path)
    c.putheader("Content-Length", "1000")
    c.endheaders(b"{")
    print(path, answer(c)[0], flush=True)
    try:
        c.sock and c.sock.settimeout(20)
        print("closed", c.sock is None or c.sock.recv(1) == b"", flush=True)
    except ConnectionResetError:
        print("closed True", flush=True)
`
	cmd := exec.CommandContext(t.Context(), interpreter, "-c", script, strings.TrimPrefix(r.URL, "http://"))
	cmd.Stderr = os.Stderr
	in, lines := talkTo(t, cmd)
	expect := func(want string) {
		t.Helper()
		if !lines.Scan() || lines.Text() != want {
			t.Errorf("python says %q, not %q (%v)", lines.Text(), want, lines.Err())
		}
	}
	for range 3 {
		expect("waiting")
		r.queued(2)
		fmt.Fprintln(in)
		expect("left")
		r.queued(0)
		fmt.Fprintln(in)
	}
	for _, want := range []string{"/nope 404", "closed True", "/v1/completions 408", "closed True"} {
		expect(want)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	release()
	if a := <-first; a == nil || a.status != http.StatusOK {
		t.Errorf("%v", a)
	}
	if n := len(p.legs()); n != 1 {
		t.Errorf("the engine got %d requests of one client that stayed", n)
	}
}
