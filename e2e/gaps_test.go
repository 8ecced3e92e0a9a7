package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// paced is what a client saw of one stream among many.
type paced struct {
	resp *http.Response
	body []byte
	err  error
	// gap is the longest time between two events while all streams ran.
	gap time.Duration
}

func (p *paced) worker() string {
	name, _, _ := strings.Cut(p.resp.Header.Get("X-Dynctl-Worker"), "/")
	return name
}

// read reads a stream to its end. begun is called with its first event; gaps count from
// the time in all (ns of the Unix epoch), which is set once all streams have begun.
func (p *paced) read(c *http.Client, url string, body []byte, begun func(), all *atomic.Int64) {
	defer begun()
	if p.resp, p.err = c.Post(url+"/v1/completions", "application/json", bytes.NewReader(body)); p.err != nil {
		return
	}
	defer p.resp.Body.Close()
	last := time.Now()
	lines := bufio.NewScanner(p.resp.Body)
	for lines.Scan() {
		p.body = append(append(p.body, lines.Bytes()...), '\n')
		if !bytes.HasPrefix(lines.Bytes(), []byte("data: ")) {
			continue // the heartbeat of one that waits is no event
		}
		begun()
		now := time.Now()
		if at := all.Load(); at > 0 {
			p.gap = max(p.gap, now.Sub(last), 0)
			if since := now.Sub(time.Unix(0, at)); p.gap > since {
				p.gap = since
			}
		}
		last = now
	}
	p.err = lines.Err()
}

// crowd reads many streams at once. Once all have begun, running is called.
func crowd(r *router, c *http.Client, bodies [][]byte, running func()) []*paced {
	out := make([]*paced, len(bodies))
	var all atomic.Int64
	var begun, ended sync.WaitGroup
	begun.Add(len(bodies))
	for i := range out {
		out[i] = &paced{}
		ended.Go(func() { out[i].read(c, r.url, bodies[i], sync.OnceFunc(begun.Done), &all) })
	}
	begun.Wait()
	all.Store(time.Now().UnixNano())
	running()
	ended.Wait()
	return out
}

// TestEngineWithTwoHundredStreams: four simulated engines, each a process, with two
// hundred streams each, and one is killed. All its streams go on elsewhere with the text
// of an engine that lives, and no stream of the other three stands still for more than
// a second longer than at the same load without the kill.
func TestEngineWithTwoHundredStreams(t *testing.T) {
	need(t)
	bin := built(t)
	// A step of two hundred streams takes 150 ms, the prompt of one 50 ms: eight of them
	// make a step of half a second, and as many as fit into a step one of two and a half.
	profile := filepath.Join(t.TempDir(), "profile.yaml")
	if err := os.WriteFile(profile, []byte("name: paced\nprefill_ms: [8, 0.15, 0]\ndecode_ms: [90, 0.3, 0]\ntransfer_ms: [2, 0.001]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	kill, args := map[string]func(){}, []string{"--continue", "exact"}
	for _, name := range []string{"a", "b", "c", "d"} {
		url, k := simulated(t, bin, "1a:answers=letters,max_seqs=1024,max_batched_tokens=16384,kv_blocks=16384,profile="+profile)
		kill[name], args = k, append(args, "--worker", url+",name="+name)
	}
	r := serveUntil(t, "four workers are ready", func(r *router) bool {
		l, err := r.admin.Ranks(t.Context())
		return err == nil && len(l.Ranks) == 4 && !slices.ContainsFunc(l.Ranks, func(k admin.Rank) bool { return !k.Usable || k.Feed.State != "live" })
	}, args...)
	const streams, tokens = 800, 120
	rng := rand.New(rand.NewPCG(2, 4))
	bodies := make([][]byte, streams)
	for i := range bodies {
		var err error
		if bodies[i], err = json.Marshal(completion("sim", ids(rng, 300), tokens, true)); err != nil {
			t.Fatal(err)
		}
	}
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: streams, DisableCompression: true}}
	defer client.CloseIdleConnections()
	gaps := func(list []*paced, of func(*paced) bool) (n int, median, most time.Duration) {
		var all []time.Duration
		for _, p := range list {
			if of(p) {
				all = append(all, p.gap)
			}
		}
		if len(all) == 0 {
			return 0, 0, 0
		}
		slices.Sort(all)
		return len(all), all[len(all)/2], all[len(all)-1]
	}

	without := crowd(r, client, bodies, func() {})
	with := crowd(r, client, bodies, kill["a"])
	for i := range bodies {
		for _, p := range []*paced{without[i], with[i]} {
			if p.err != nil || p.resp.StatusCode != http.StatusOK {
				t.Fatalf("stream %d: %v %s", i, p.err, p.body)
			}
		}
		was, is := parseStream(without[i].body), parseStream(with[i].body)
		if is.text != was.text || is.failed != "" || was.text == "" {
			t.Errorf("stream %d on %s: %q %s, want %q", i, with[i].worker(), is.text, is.failed, was.text)
		}
		if !is.done || len(is.names) != 1 {
			t.Errorf("stream %d on %s has the ids %v; ended: %v", i, with[i].worker(), is.names, is.done)
		}
	}
	killed := func(p *paced) bool { return p.worker() == "a" }
	moved := 0
	for _, p := range with {
		if killed(p) {
			moved += len(r.explain(answer{header: p.resp.Header}).Continued)
		}
	}
	n, median, most := gaps(with, killed)
	t.Logf("%d streams ran on the engine that was killed; %d went on elsewhere; longest gap of each: median %v, most %v", n, moved, median.Round(time.Millisecond), most.Round(time.Millisecond))
	if moved != n || n < streams/5 {
		t.Errorf("%d of %d streams went on elsewhere", moved, n)
	}
	others := func(p *paced) bool { return !killed(p) }
	n, median, before := gaps(without, others)
	t.Logf("%d streams of the other engines without the kill: median %v, most %v", n, median.Round(time.Millisecond), before.Round(time.Millisecond))
	n, median, after := gaps(with, others)
	t.Logf("%d with it: median %v, most %v", n, median.Round(time.Millisecond), after.Round(time.Millisecond))
	if after > before+time.Second {
		t.Errorf("a stream of another engine stood still for %v, without the kill for %v", after, before)
	}
}
