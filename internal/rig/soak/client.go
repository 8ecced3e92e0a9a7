package soak

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/wait"
)

// errLeft is the end of an answer that the client did not want to read on.
var errLeft = errors.New("the client left")

// Ways of clients.
const (
	politely = "polite"
	slowly   = "slow reader"
	dripping = "slow sender"
	stuck    = "stuck sender"
	leaving  = "hang up"
	rudely   = "garbage"
	brokenly = "broken request"
	badly    = "poisonous request"
)

// patience is how long a client waits for anything at all. A request that needs
// longer counts as lost.
const patience = 90 * time.Second

// client sends one request after the other until the load ends.
func (s *soak) client(ctx context.Context, no int) {
	rng := rand.New(rand.NewPCG(s.o.Seed, uint64(no)|1<<32))
	for ctx.Err() == nil {
		s.gate.RLock()
		if ctx.Err() == nil {
			s.request(ctx, rng)
		}
		s.gate.RUnlock()
		wait.For(ctx, time.Duration(rng.ExpFloat64()*float64(think)))
	}
}

func (s *soak) request(ctx context.Context, rng *rand.Rand) {
	way := politely
	switch k := rng.IntN(100); {
	case k < 8:
		way = slowly
	case k < 18:
		way = leaving
	case k < 22:
		s.rude(ctx, rng.Uint64())
		return
	case k < 24:
		s.broken(ctx, rng.Uint64())
		return
	case k < 30:
		way = dripping
	case k < 31:
		s.stuck(ctx, rng.Uint64())
		return
	case k < 33:
		s.poisonous(ctx, rng.Uint64())
		return
	}
	epoch, n := uint64(time.Since(s.began)/epochTime), rng.IntN(poolSize)
	j := makeJob(s.o.Seed, epoch, n)
	if way == slowly {
		j.stream = j.streams()
	}
	// What this client does is drawn before anything happens, so that it does
	// not depend on what comes back.
	leaveAfter, leaveIn := rng.IntN(12), time.Duration(rng.IntN(60))*time.Millisecond

	// A request that has begun is seen through when the load ends.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	if way == leaving && (leaveAfter < 6 || !j.stream) {
		stop := time.AfterFunc(leaveIn, cancel)
		defer stop.Stop()
	}
	t := try{way: way, job: &j, epoch: epoch, n: n, from: time.Now()}
	s.send(ctx, &t, func() bool {
		switch way {
		case leaving:
			leaveAfter--
			return leaveAfter > 0
		case slowly:
			wait.For(ctx, 40*time.Millisecond)
		}
		return true
	})
	t.to = time.Now()
	s.judge(ctx, &t)
}

// try is one request and what came of it.
type try struct {
	way      string
	job      *job
	epoch    uint64
	n        int
	from, to time.Time
	status   int // 0 without an answer
	body     []byte
	decision string
	worker   string // that answered
	path     string
	said     said
	err      error
}

func (s *soak) send(ctx context.Context, t *try, each func() bool) {
	body := t.job.body(t.job.stream)
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, s.rig.URL+t.job.path, bytes.NewReader(body))
	if err != nil {
		t.err = err
		return
	}
	if t.way == dripping {
		q.Body, q.GetBody = io.NopCloser(&drip{ctx, body, len(body)/8 + 1, s.o.Timeout / 40}), nil
		if t.n%2 == 0 {
			q.ContentLength = -1
		}
	}
	q.Header.Set("Content-Type", "application/json")
	resp, err := s.http.Do(q)
	if err != nil {
		t.err = err
		return
	}
	defer resp.Body.Close()
	t.status, t.decision, t.path = resp.StatusCode, resp.Header.Get("X-Dynctl-Decision"), resp.Header.Get("X-Dynctl-Path")
	t.worker, _, _ = strings.Cut(resp.Header.Get("X-Dynctl-Worker"), "/")
	if t.status != http.StatusOK {
		t.body, t.err = io.ReadAll(io.LimitReader(resp.Body, 4<<10))
		return
	}
	t.said, t.err = t.job.read(resp.Body, t.job.stream, each)
}

// judge counts a request, and logs it when something is wrong with it.
func (s *soak) judge(ctx context.Context, t *try) {
	c := &s.counts
	c.add(t.job.kind, t.way, t.job.stream, t.job.bytes)
	restarted := s.chaos.restarting(t.from, t.to)
	switch {
	case t.err != nil && t.way == leaving && (errors.Is(t.err, errLeft) || errors.Is(t.err, context.Canceled)):
		// What came before must still be right.
		c.left.Add(1)
		if t.status == http.StatusOK && t.job.stream {
			s.compare(t, true)
		}
	case t.status == 0 || t.status != http.StatusOK:
		s.failedBefore(ctx, t, restarted)
	case t.said.done && t.err == nil:
		c.completed.Add(1)
		c.onPath(t.path)
		s.compare(t, false)
	default:
		// The answer has begun and was not completed.
		if t.job.stream {
			s.compare(t, true)
		}
		switch {
		case restarted:
			c.cutByRestart.Add(1)
		case s.chaos.faulty(t.worker, t.from, t.to) || s.prefillHit(ctx, t):
			c.cutByFault.Add(1)
			if t.job.stream && t.said.failed == "" {
				s.violation("silent cut", t, "a stream ended without an error event")
			}
		default:
			s.violation("broken answer", t, fmt.Sprintf("%s was well, but its answer broke off: %v %s", t.worker, t.err, t.said.failed))
		}
	}
}

// prefillHit reports whether something was done to a prefill engine whose KV a request's
// answer needed: the decode engine then ends its stream with an error.
func (s *soak) prefillHit(ctx context.Context, t *try) bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	raw, err := s.rig.Admin.Decision(ctx, t.decision)
	if err != nil {
		return false
	}
	for l := range rawjson.Value(raw).Get("legs").Elements() {
		if l.Get("kind").String() == string(route.Prefill) && s.chaos.faulty(l.Get("worker").String(), t.from, t.to) {
			return true
		}
	}
	return false
}

func (s *soak) failedBefore(ctx context.Context, t *try, restarted bool) {
	code := rawjson.Value(t.body).Get("error.code").String()
	if restarted && (t.status == 0 || t.status >= 500) {
		// The router itself was away: the client tries again, as clients do.
		s.counts.duringRestart.Add(1)
		return
	}
	if t.status == http.StatusGatewayTimeout && !t.job.stream && strings.Contains(string(t.body), "timeouts.response") && s.chaos.faulty(t.worker, t.from, t.to) {
		// The engine was made slow and answers probes: its answer is not begun elsewhere.
		s.counts.tooLong.Add(1)
		return
	}
	if s.tooManyBroke(ctx, t) {
		s.counts.tooManyBroke.Add(1)
		return
	}
	s.violation("failed request", t, fmt.Sprintf("status %d %s: %v %.400s", t.status, code, t.err, t.body))
}

// poisonous sends a request that every engine answers with an error, the same one again
// and again: the client gets that. That it takes no engine from the others shows in
// theirs, which would fail.
func (s *soak) poisonous(ctx context.Context, n uint64) {
	s.counts.ways(badly)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	from := time.Now()
	status, _, err := s.marked(ctx, []string{modelVLLM, modelSGLang}[n%2], poisonText, int(n/2%4))
	if !s.chaos.restarting(from, time.Now()) && (err != nil || status < 500) {
		s.violation("poisonous request", nil, fmt.Sprintf("status %d, %v", status, err))
	}
}

// marked sends a request with a text that breaks engines.
func (s *soak) marked(ctx context.Context, model, text string, no int) (status int, body []byte, err error) {
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, s.rig.URL+"/v1/completions", strings.NewReader(
		fmt.Sprintf(`{"model":%q,"max_tokens":4,"stream":%v,"user":%q,"prompt":%s}`, model, no%2 == 1, text, jsonNumbers(numbers(s.o.Seed, uint64(no), uint64(no), 0, 400)))))
	if err != nil {
		return 0, nil, err
	}
	q.Header.Set("Content-Type", "application/json")
	resp, err := s.http.Do(q)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(io.LimitReader(resp.Body, 4<<10))
	return resp.StatusCode, body, err
}

// tooManyBroke reports whether a request was given up because two engines died or hung, or
// three broke on it, with something done to an engine of each attempt at the time, or a prefill
// engine full of what faults left behind: that is a rule, and so many faults can meet one
// request. Which of a pair's two engines was at fault
// the legs do not always say: a decode that waits for its prefill's KV fails by time.
func (s *soak) tooManyBroke(ctx context.Context, t *try) bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	raw, err := s.rig.Admin.Decision(ctx, t.decision)
	if err != nil || !slices.ContainsFunc(slices.Collect(rawjson.Value(raw).Get("notes").Elements()), func(n rawjson.Value) bool {
		return strings.Contains(n.String(), attempt.NoMoreTry) || strings.Contains(n.String(), attempt.NoMoreLost)
	}) {
		return false
	}
	explained := map[string]bool{}
	for _, l := range broken(rawjson.Value(raw)) {
		n, worker := l.Get("attempt").String(), l.Get("worker").String()
		explained[n] = explained[n] || s.chaos.faulty(worker, t.from, t.to) || full(rawjson.Value(raw), n, l.Get("rank").String())
	}
	for _, ok := range explained {
		if !ok {
			return false
		}
	}
	return true
}

// broken is the legs of a receipt that failed, and the prefills that ended after a leg of their
// attempt had failed: it waited for them.
func broken(receipt rawjson.Value) (list []rawjson.Value) {
	ended := func(l rawjson.Value) float64 { ms, _ := strconv.ParseFloat(l.Get("end_ms").String(), 64); return ms }
	legs := slices.Collect(receipt.Get("legs").Elements())
	for _, l := range legs {
		failed := func(k rawjson.Value) bool {
			return k.Get("error").String() != "" && k.Get("attempt").String() == l.Get("attempt").String() && ended(k) < ended(l)
		}
		if l.Get("error").String() != "" || l.Get("kind").String() == string(route.Prefill) && slices.ContainsFunc(legs, failed) {
			list = append(list, l)
		}
	}
	return list
}

// full reports whether a prefill rank may have had no room for the prompt of a receipt's attempt,
// when that was decided or when the next one was: KV whose decode was hit by a fault waits there
// until its lease ends, and the prompt behind it, longer than the router waits. So does one behind
// prompts that wait where none is computed.
func full(receipt rawjson.Value, attempt, rank string) bool {
	first, _ := strconv.Atoi(attempt)
	for _, d := range append(slices.Collect(receipt.Get("earlier_decisions").Elements()), receipt) {
		if n, _ := d.Get("attempt").Int(); n < first {
			continue
		}
		tokens, _ := d.Get("inputs.isl_tokens").Int()
		size, _ := d.Get("inputs.block_size_tokens").Int()
		for c := range d.Get("prefill.candidates").Elements() {
			if c.Get("rank").String() != rank || size == 0 {
				continue
			}
			running, ok := c.Get("running_requests").Int()
			waiting, _ := c.Get("waiting_requests").Int()
			blocks, _ := c.Get("kv_blocks").Int()
			used, err := strconv.ParseFloat(c.Get("kv_usage_ratio").String(), 64)
			// What is cached for it is in the usage only where others use it, too.
			if ok && running == 0 && waiting > 0 || err == nil && used*float64(blocks)+float64(tokens/size) > float64(blocks) {
				return true
			}
		}
	}
	return false
}

// compare holds an answer against the reference engine's. part allows it to be
// only the beginning.
func (s *soak) compare(t *try, part bool) {
	want, err := s.oracle.answer(context.Background(), t.epoch, t.n)
	if err != nil {
		s.violation("reference", t, err.Error())
		return
	}
	s.counts.compared.Add(1)
	right := t.said.text == want.text && t.said.finish == want.finish
	if part {
		right = strings.HasPrefix(want.text, t.said.text)
	}
	if !right {
		s.violation("wrong output", t, fmt.Sprintf("got %.200q (%s), want %.200q (%s)", t.said.text, t.said.finish, want.text, want.finish))
	}
}

// rude sends nonsense: it must be blamed on the client at once.
func (s *soak) rude(ctx context.Context, n uint64) {
	s.counts.ways(rudely)
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	from := time.Now()
	method, path, contentType, body := garbage(n)
	q, err := http.NewRequestWithContext(ctx, method, s.rig.URL+path, bytes.NewReader(body))
	if err != nil {
		return
	}
	q.Header.Set("Content-Type", contentType)
	resp, err := s.http.Do(q)
	if err != nil {
		if !s.chaos.restarting(from, time.Now()) && ctx.Err() == nil {
			s.violation("garbage", nil, fmt.Sprintf("%s %s %.60q: %v", method, path, body, err))
		}
		return
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
	// For a moment a worker that was added has not reported its models.
	early := resp.StatusCode == http.StatusServiceUnavailable && bytes.Contains(b, []byte("have not reported theirs yet")) && s.chaos.adding(from, time.Now())
	if resp.StatusCode/100 != 4 && !early && !s.chaos.restarting(from, time.Now()) {
		s.violation("garbage", nil, fmt.Sprintf("%s %s %.60q: %d %.300s", method, path, body, resp.StatusCode, b))
	}
}

// broken sends what is not even HTTP, or leaves in the middle of a body.
func (s *soak) broken(ctx context.Context, n uint64) {
	s.counts.ways(brokenly)
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", strings.TrimPrefix(s.rig.URL, "http://"))
	if err != nil {
		return // the router is being restarted
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	text := "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n{\"model\":\"sim\",\"prompt\":\"half a"
	switch n % 4 {
	case 0:
		text = "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 this is no HTTP\r\n\r\n"
	case 1:
		text = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n"
	case 2:
		text = "GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + strings.Repeat("y", 100_000) + "\r\n\r\n"
	}
	if _, err := io.WriteString(c, text); err != nil {
		return // refused while it was still being written
	}
	if n%4 == 3 {
		return // and away
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(c, 64<<10)) // whatever it says
}

// drip gives a body in parts, with pauses.
type drip struct {
	ctx   context.Context
	rest  []byte
	part  int
	pause time.Duration
}

func (d *drip) Read(p []byte) (int, error) {
	if len(d.rest) == 0 {
		return 0, io.EOF
	}
	wait.For(d.ctx, d.pause)
	n := copy(p, d.rest[:min(d.part, len(d.rest))])
	d.rest = d.rest[n:]
	return n, d.ctx.Err()
}

// stuck sends half a body, to whatever path, and waits: the router must end it.
func (s *soak) stuck(ctx context.Context, n uint64) {
	s.counts.ways(stuck)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	from := time.Now()
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", strings.TrimPrefix(s.rig.URL, "http://"))
	if err != nil {
		return // the router is being restarted
	}
	defer c.Close()
	end, _ := ctx.Deadline()
	_ = c.SetDeadline(end)
	line := []string{"POST /v1/completions", "POST /v1/chat/completions", "POST /nope", "DELETE /v1/completions"}[n%4]
	if _, err := io.WriteString(c, line+" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n{\"model\":\"sim\",\"prompt\":\"half a"); err != nil {
		return
	}
	if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) && !s.chaos.restarting(from, time.Now()) {
		s.violation("stuck sender", nil, fmt.Sprintf("%s without the rest of its body was kept for %s", line, patience))
	}
}

// onPath stands in the place of a prefill worker for a path without one.
func onPath(path string) string { return "path: " + path }

// pinned sends a fresh prompt to certain workers and reports how it went. It is
// the soak's own finger: nothing of it counts as load.
func (s *soak) pinned(ctx context.Context, model, decode, prefill string, tokens int, wait time.Duration) error {
	return s.fresh(ctx, s.rig.URL, model, decode, prefill, tokens, wait)
}

// fresh sends a new prompt to a router or an engine. Its answer is longer than what
// an engine that cuts answers lets through.
func (s *soak) fresh(ctx context.Context, to, model, decode, prefill string, tokens int, wait time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	n := s.pins.Add(1)
	j := job{kind: kindIDs}
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, to+"/v1/completions",
		strings.NewReader(fmt.Sprintf(`{"model":%q,"max_tokens":8,"prompt":%s}`, model, jsonNumbers(numbers(s.o.Seed+0x70696e, n, n, 0, tokens)))))
	if err != nil {
		return err
	}
	q.Header.Set("Content-Type", "application/json")
	switch path, ok := strings.CutPrefix(prefill, onPath("")); {
	case ok:
		q.Header.Set("X-Dynctl-Path", path)
	case prefill != "":
		q.Header.Set("X-Dynctl-Path", "remote")
		q.Header.Set("X-Dynctl-Prefill-Worker", prefill)
	}
	if decode != "" {
		q.Header.Set("X-Dynctl-Worker", decode)
	}
	resp, err := s.http.Do(q)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(io.LimitReader(resp.Body, 400))
		return fmt.Errorf("status %d: %s", resp.StatusCode, b)
	}
	_, err = j.read(resp.Body, false, nil)
	return err
}

func jsonNumbers(ids []uint32) []byte {
	b := make([]byte, 0, 6*len(ids)+2)
	b = append(b, '[')
	for i, id := range ids {
		if i > 0 {
			b = append(b, ',')
		}
		b = fmt.Append(b, id)
	}
	return append(b, ']')
}
