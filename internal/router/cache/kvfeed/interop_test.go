package kvfeed

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/rig/external"
	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/workers"
)

// zmqPublisher is an engine model whose sockets are libzmq's, in a Python process.
type zmqPublisher struct {
	t        *testing.T
	e        *kvmodel.Engine
	in       io.Writer
	out      *bufio.Scanner
	pub, rep string
}

func newZMQPublisher(t *testing.T, args ...string) *zmqPublisher {
	t.Helper()
	return startPublisher(t, exec.Command(external.Python(t, "zmq"), append([]string{filepath.Join("testdata", "publisher.py")}, args...)...))
}

// startPublisher starts a publisher that takes the commands of testdata/publisher.py.
func startPublisher(t *testing.T, cmd *exec.Cmd) *zmqPublisher {
	t.Helper()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close() // ends the process
		if err := cmd.Wait(); err != nil {
			t.Errorf("publisher: %v: %s", err, stderr.String())
		}
	})
	p := &zmqPublisher{t: t, e: kvmodel.New(21, 2), in: in, out: bufio.NewScanner(out)}
	words := strings.Fields(p.line())
	if len(words) != 3 || words[0] != "ready" {
		t.Fatalf("publisher says %q: %s", words, stderr.String())
	}
	p.pub, p.rep = words[1], words[2]
	return p
}

func (p *zmqPublisher) line() string {
	p.t.Helper()
	if !p.out.Scan() {
		p.t.Fatalf("publisher has gone: %v", p.out.Err())
	}
	return p.out.Text()
}

func (p *zmqPublisher) step(send int) {
	p.t.Helper()
	p.e.Step()
	if _, err := fmt.Fprintf(p.in, "add %x %d\n", p.e.Log[len(p.e.Log)-1], send); err != nil {
		p.t.Fatal(err)
	}
}

func (p *zmqPublisher) restart() {
	p.t.Helper()
	if _, err := io.WriteString(p.in, "restart\n"); err != nil {
		p.t.Fatal(err)
	}
	if got := p.line(); got != "restarted" {
		p.t.Fatalf("publisher says %q", got)
	}
	p.e.Restart()
}

// catchUp sends batches until one has arrived live and all are applied: nobody
// knows when libzmq has taken note of a subscription.
func (p *zmqPublisher) catchUp(f *fixture) {
	p.t.Helper()
	next := time.Now()
	eventually(p.t, f.show, func() bool {
		s := f.one()
		if s.State == Live && s.LastSeq == int64(len(p.e.Log))-1 && s.LastSeq >= 0 {
			return true
		}
		if now := time.Now(); now.After(next) {
			p.step(1)
			next = now.Add(50 * time.Millisecond)
		}
		return false
	})
}

func TestInteropLibzmqPublisher(t *testing.T) {
	t.Parallel()
	p := newZMQPublisher(t, "bind")
	for range 20 {
		p.step(0) // before anyone listens
	}
	f := newFixture(t, nil)
	f.add(workers.EventSource{Endpoint: p.pub, Replay: p.rep, Topic: "k"})
	defer func() {
		if t.Failed() {
			t.Logf("%s\n%+v", f.show(), f.events)
		}
	}()
	check := func(when string) {
		t.Helper()
		p.catchUp(f)
		kvmodel.Equal(t, when, p.e.Set(), kvmodel.Holds(t, f.x))
		kvmodel.Equal(t, when+", played back", p.e.Set(), kvmodel.Holds(t, f.copied))
	}
	check("joined late")
	for range 10 {
		p.step(1)
		p.step(0)
		p.step(1)
	}
	check("after gaps")
	if s := f.one(); s.Dropped != 0 || !s.Complete {
		t.Errorf("status %+v", s)
	}
	p.restart()
	for range 5 {
		p.step(1)
	}
	check("after a restart")
	// The events may come back before the replay port is there: then the old life's
	// entries were dropped before the new one was seen to be another.
	if s := f.one(); s.Restarts == 0 && s.Dropped == 0 || !s.Complete {
		t.Errorf("status %+v", s)
	}
}

// TestInteropSGLangPublisher: events in the bytes of SGLang's own package, published and
// replayed by it: from its beginning, and after it started over, the index holds what was
// published. DYNCTL_SGLANG names a Python that has the package.
func TestInteropSGLangPublisher(t *testing.T) {
	t.Parallel()
	interpreter := os.Getenv("DYNCTL_SGLANG")
	if interpreter == "" {
		t.Skip("skipped: DYNCTL_SGLANG names no Python with SGLang's package (e2e/engines.py sglang installs one)")
	}
	p := startPublisher(t, exec.Command(interpreter, filepath.Join("testdata", "sglang_publisher.py")))
	for range 20 {
		p.step(1) // before anyone listens
	}
	f := newFixture(t, nil)
	f.add(workers.EventSource{Endpoint: p.pub, Replay: p.rep})
	for _, when := range []string{"joined late", "after a restart"} {
		p.catchUp(f)
		for range 30 {
			p.step(1)
		}
		p.catchUp(f)
		kvmodel.Equal(t, when, p.e.Set(), kvmodel.Holds(t, f.x))
		kvmodel.Equal(t, when+", played back", p.e.Set(), kvmodel.Holds(t, f.copied))
		if s := f.one(); s.Dropped != 0 && when == "joined late" || !s.Complete || s.RankDisagree != 0 {
			t.Errorf("%s: status %+v", when, s)
		}
		if when == "joined late" {
			p.restart()
			for range 5 {
				p.step(1)
			}
		}
	}
	if s := f.one(); s.Restarts == 0 && s.Dropped == 0 {
		t.Errorf("status %+v", s)
	}
}

func TestInteropLibzmqDialsIn(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	f.add(workers.EventSource{Endpoint: "tcp://127.0.0.1:0", Bind: true})
	bound := ""
	eventually(t, f.show, func() bool {
		if l := f.Listeners(); len(l) == 1 {
			bound = l[0].Bound
		}
		return bound != ""
	})
	p := newZMQPublisher(t, "dial", bound)
	p.catchUp(f)
	kvmodel.Subset(t, "dialled in", p.e.Set(), kvmodel.Holds(t, f.x))
	for range 50 {
		p.step(1)
	}
	p.catchUp(f)
	kvmodel.Subset(t, "dialled in", p.e.Set(), kvmodel.Holds(t, f.x))
	if s := f.one(); s.Batches < 50 {
		t.Errorf("status %+v", s)
	}
}

// TestInteropLibzmqSilence: a publisher that is silent and busy in turns keeps
// the feed it has, for what its libzmq makes of the feed's heartbeats. The times
// are the real ones, for a minute, if DYNCTL_LIBZMQ_MINUTE is set, else a fifth
// of them.
func TestInteropLibzmqSilence(t *testing.T) {
	t.Parallel()
	heartbeat, turns := time.Second, 1
	if os.Getenv("DYNCTL_LIBZMQ_MINUTE") != "" {
		heartbeat, turns = 5*time.Second, 3
	}
	p := newZMQPublisher(t, "bind")
	f := newFixture(t, func(o *Options) { o.Heartbeat = heartbeat })
	f.add(workers.EventSource{Endpoint: p.pub, Topic: "k"}) // without replay, which is vLLM's default
	p.catchUp(f)
	began := f.one()
	for range turns {
		silent := time.NewTimer(heartbeat * 8 / 5)
		<-silent.C
		tick := time.NewTicker(heartbeat / 5)
		for range 16 {
			<-tick.C
			p.step(1)
		}
		tick.Stop()
	}
	f.until(func(s Status) bool { return s.LastSeq == int64(len(p.e.Log))-1 || s.Connects > 1 })
	if s := f.one(); s.Connects != 1 || s.Dropped != began.Dropped || f.emitted("feed_disconnected") > 0 {
		t.Errorf("the feed was lost: %+v\n%+v", s, f.events)
	}
	kvmodel.Subset(t, "index", p.e.Set(), kvmodel.Holds(t, f.x))
}
