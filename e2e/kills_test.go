package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
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

	"github.com/dynctl/dynctl/internal/wait"
)

// engineStarter starts vLLM engines in a few seconds each.
type engineStarter struct {
	in  io.Writer
	out *bufio.Reader
}

// startStarter runs the script that has vLLM imported, with what an engine that runs
// already was started with.
func startStarter(t *testing.T, like engine) *engineStarter {
	t.Helper()
	argv, env := procList(t, like.PID, "cmdline"), procList(t, like.PID, "environ")
	cmd := exec.Command(argv[0], filepath.Join("testdata", "vllm_fork.py"))
	cmd.Env = env
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close() // it kills what it has started
		_ = cmd.Wait()
	})
	s := &engineStarter{in, bufio.NewReader(out)}
	if line, err := s.out.ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("vLLM cannot be imported: %q, %v\n%s", line, err, stderr.Bytes())
	}
	return s
}

// procList reads a list of the kernel's about a process.
func procList(t *testing.T, pid int, what string) []string {
	t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, what))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimRight(string(raw), "\x00"), "\x00")
}

// mortal is an engine that is killed and started again.
type mortal struct {
	engine
	args []string
	env  map[string]string
	tap  *tap
}

func newMortal(t *testing.T, e engine) *mortal {
	t.Helper()
	m := &mortal{engine: e, args: procList(t, e.PID, "cmdline")[2:], env: map[string]string{}, tap: startTap(t, e.URL)}
	if m.args[0] != "serve" {
		t.Fatalf("%s was started with %q", e.Name, m.args)
	}
	for _, v := range procList(t, e.PID, "environ") {
		if k, v, _ := strings.Cut(v, "="); strings.HasPrefix(k, "VLLM_") {
			m.env[k] = v
		}
	}
	t.Cleanup(func() {
		m.kill()
		if raw, err := os.ReadFile(m.Log); t.Failed() && err == nil {
			t.Logf("%s said last:\n%s", m.Name, raw[max(0, len(raw)-8<<10):])
		}
	})
	return m
}

// kill ends all processes of the engine, and leaves them no time for anything.
func (m *mortal) kill() { _ = syscall.Kill(-m.PID, syscall.SIGKILL) }

// killCore ends the process that computes. The one that serves HTTP reports it to its clients.
func (m *mortal) killCore(t *testing.T) {
	t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", m.PID, m.PID))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range strings.Fields(string(raw)) {
		pid, err := strconv.Atoi(f)
		if err == nil && strings.Contains(procList(t, pid, "cmdline")[0], "EngineCore") {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			return
		}
	}
	t.Fatalf("no process of %s computes: %q", m.Name, raw)
}

// start starts the engine again, and does not wait for it. A process that was killed
// has its port until the kernel has taken back its memory, and a new one that is
// forked from one with all of vLLM in it is there sooner.
func (m *mortal) start(t *testing.T, s *engineStarter) {
	t.Helper()
	at := strings.TrimPrefix(m.URL, "http://")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for range wait.Every(ctx, 50*time.Millisecond) {
		l, err := net.Listen("tcp", at)
		if err == nil {
			_ = l.Close()
			break
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			t.Fatal(err)
		}
	}
	if ctx.Err() != nil {
		t.Fatalf("a minute after %s was killed something has its port %s still", m.Name, at)
	}
	raw, err := json.Marshal(map[string]any{"args": m.args, "env": m.env, "log": m.Log})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.in.Write(append(raw, '\n')); err != nil {
		t.Fatal(err)
	}
	line, err := s.out.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	if m.PID, err = strconv.Atoi(strings.TrimSpace(line)); err != nil {
		t.Fatal(err)
	}
}

// transcript is the content of a stream, of an engine or of the router.
type transcript struct {
	text, finish, failed string
	prompt, ids          []uint32
	texts                []string // by event that has text or ids
	ends                 []int    // how many ids there were after it
	names                map[string]bool
	inputs, outputs      int // of usage; -1 for none
	done                 bool
}

func parseStream(body []byte) transcript {
	s := transcript{names: map[string]bool{}, inputs: -1, outputs: -1}
	for {
		event, rest, whole := bytes.Cut(body, []byte("\n\n"))
		if !whole {
			return s
		}
		body = rest
		data, ok := bytes.CutPrefix(event, []byte("data: "))
		if !ok {
			continue
		}
		if string(data) == "[DONE]" {
			s.done = true
			continue
		}
		var v struct {
			ID      string
			Created int
			Prompt  []uint32 `json:"prompt_token_ids"`
			Error   *struct{ Message string }
			Choices []struct {
				Text   string
				Delta  struct{ Content string }
				Prompt []uint32 `json:"prompt_token_ids"`
				IDs    []uint32 `json:"token_ids"`
				Finish string   `json:"finish_reason"`
			}
			Usage *struct {
				Prompt     int `json:"prompt_tokens"`
				Completion int `json:"completion_tokens"`
			}
		}
		if err := json.Unmarshal(data, &v); err != nil {
			s.failed = fmt.Sprintf("%v: %s", err, data)
			return s
		}
		if v.Error != nil {
			s.failed = v.Error.Message
			continue
		}
		s.names[fmt.Sprint(v.ID, " of ", v.Created)] = true
		s.prompt = append(s.prompt, v.Prompt...)
		for _, c := range v.Choices {
			s.prompt = append(s.prompt, c.Prompt...)
			s.ids = append(s.ids, c.IDs...)
			s.text += c.Text + c.Delta.Content
			s.finish += c.Finish
			s.texts, s.ends = append(s.texts, c.Text+c.Delta.Content), append(s.ends, len(s.ids))
		}
		if v.Usage != nil && len(v.Choices) == 0 {
			s.inputs, s.outputs = v.Usage.Prompt, v.Usage.Completion
		}
	}
}

// reader is a client of one stream.
type reader struct {
	path, id string
	body     map[string]any
	resp     *http.Response
	at       int           // the engine may be killed after so many events
	reached  chan struct{} // closed then, or at the end
	ended    chan struct{}
	got      []byte
	err      error
}

var streams int // readers so far: each has another prompt and name

const killTokens = 160 // of an answer

// read opens a stream, whose answer has begun when it returns.
func (s *stand) read(path string, at int, more map[string]any) *reader {
	s.t.Helper()
	streams++
	k := &reader{
		path: path, id: fmt.Sprintf("stream-%d", streams), at: at, reached: make(chan struct{}), ended: make(chan struct{}),
		body: map[string]any{"model": s.decode[0].Model, "temperature": 0, "ignore_eos": true, "stream": true, "stream_options": map[string]any{"include_usage": true}},
	}
	limit := "max_tokens"
	switch {
	case strings.Contains(path, "chat"):
		limit = "max_completion_tokens"
		k.body["messages"] = []any{map[string]any{"role": "user", "content": fmt.Sprintf("Tell me story %d about the wide river.", streams)}}
	case streams%2 == 0:
		k.body["prompt"] = fmt.Sprintf("Story %d: the river was wide, and on its other side they saw", streams)
	default:
		k.body["prompt"] = ids(s.rng, 20+s.rng.IntN(200))
	}
	k.body[limit] = killTokens
	for name, v := range more {
		k.body[name] = v
	}
	raw, err := json.Marshal(k.body)
	if err != nil {
		s.t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(s.t.Context(), http.MethodPost, s.r.url+path, bytes.NewReader(raw))
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", k.id)
	if k.resp, err = http.DefaultClient.Do(req); err != nil {
		s.t.Fatal(err)
	}
	s.wg.Go(func() {
		defer close(k.ended)
		defer k.resp.Body.Close()
		reached := sync.OnceFunc(func() { close(k.reached) })
		defer reached()
		piece, events := make([]byte, 32<<10), 0
		for {
			n, err := k.resp.Body.Read(piece)
			k.got = append(k.got, piece[:n]...)
			if events += bytes.Count(piece[:n], []byte("\n\n")); events >= k.at {
				reached()
			}
			if err != nil {
				if err != io.EOF {
					k.err = err
				}
				return
			}
		}
	})
	return k
}

// on is the decode engine that a stream began on.
func (k *reader) on() string {
	name, _, _ := strings.Cut(k.resp.Header.Get("X-Dynctl-Worker"), "/")
	return name
}

// stand is a fleet of real engines whose decode engines are killed in turns.
type stand struct {
	t       *testing.T
	r       *router
	decode  []*mortal
	starter *engineStarter
	rng     *rand.Rand
	wg      sync.WaitGroup
	counts  map[string]int
	refused int // how many of the requests that are not continued had their turn
}

// TestKillsOnVLLM: engines are killed in the middle of streams, again and again. The
// rest is asked for with exactly the ids that the dead engine has reported for the text
// that was sent; it is what the other engine answers to those by itself; and the whole
// is the answer of an engine that lives. What is not to be continued is refused by
// name. DYNCTL_E2E_KILLS is the number of kills, 50 by default.
func TestKillsOnVLLM(t *testing.T) {
	need(t)
	kills := 50
	if v := os.Getenv("DYNCTL_E2E_KILLS"); v != "" {
		var err error
		if kills, err = strconv.Atoi(v); err != nil || kills < 2 {
			t.Fatalf("DYNCTL_E2E_KILLS=%s is no number from 2 on", v)
		}
	}
	for _, fleet := range []string{"2d", "1p2d"} {
		t.Run(fleet, func(t *testing.T) {
			list := startEngines(t, fleet)
			s := &stand{t: t, rng: rand.New(rand.NewPCG(16, uint64(len(list)))), counts: map[string]int{}}
			s.refused = (len(list) - 2) * len(refused) / 2 // so that few kills cover all of them, too
			// Engines that start take the processor from the others for seconds; a killed one
			// refuses connections, which needs no timeout.
			args := []string{"--continue", "exact", "--health-timeout", "15s"}
			for _, e := range list {
				if e.Role == "prefill" {
					args = append(args, "--prefill", e.URL+",name=p0")
					continue
				}
				m := newMortal(t, e)
				m.Name = fmt.Sprintf("d%d", len(s.decode))
				s.decode = append(s.decode, m)
				flag := "--worker"
				if len(list) > 2 {
					flag = "--decode"
				}
				args = append(args, flag, m.tap.url+",name="+m.Name)
			}
			s.starter = startStarter(t, s.decode[0].engine)
			s.r = serve(t, args...)
			defer func() {
				s.wg.Wait()
				for _, k := range slices.Sorted(maps.Keys(s.counts)) {
					t.Logf("%4d %s", s.counts[k], k)
				}
			}()
			end, limited := t.Deadline()
			for i := range kills / 2 {
				if limited && time.Until(end) < 90*time.Second {
					t.Errorf("the time is up after %d of %d kills; raise -timeout or lower DYNCTL_E2E_KILLS", i, kills/2)
					break
				}
				if s.round(i); t.Failed() {
					break
				}
			}
		})
	}
}

type members = map[string]any

// continuable are requests whose streams are continued.
var continuable = []struct {
	name, path string
	more       members
}{
	{"completion", "/v1/completions", nil},
	{"completion with repetition_penalty", "/v1/completions", members{"repetition_penalty": 1.2}},
	{"chat", "/v1/chat/completions", nil},
	{"completion with ids asked for, greedy with a seed", "/v1/completions", members{"return_token_ids": true, "seed": 7}},
	{"chat with min_tokens and logit_bias", "/v1/chat/completions", members{"min_tokens": killTokens / 2, "logit_bias": members{"70": -5}}},
	{"completion that is sampled", "/v1/completions", members{"temperature": 0.8}},
}

// refused are requests whose streams are not, and the metric's name for it.
var refused = []struct {
	why, path string
	more      members
}{
	{"penalties", "/v1/completions", members{"presence_penalty": 0.5}},
	{"penalties", "/v1/chat/completions", members{"frequency_penalty": 0.5}},
	{"seed", "/v1/completions", members{"seed": 7, "temperature": 0.7}},
	{"guided_decoding", "/v1/completions", members{"structured_outputs": members{"regex": "[a-z ]{600}"}}},
	{"guided_decoding", "/v1/chat/completions", members{"response_format": members{"type": "json_schema", "json_schema": members{"name": "x", "schema": members{"type": "string", "minLength": 900}}}}},
	{"several_answers", "/v1/completions", members{"n": 2, "temperature": 0.7}},
	{"several_answers", "/v1/completions", members{"best_of": 2}},
	{"several_answers", "/v1/completions", members{"prompt": []string{"The river was wide", "The river was deep"}}},
	{"logprobs", "/v1/completions", members{"logprobs": 1}},
	{"logprobs", "/v1/chat/completions", members{"logprobs": true, "top_logprobs": 2}},
	{"echo", "/v1/completions", members{"echo": true}},
	{"tools", "/v1/chat/completions", members{"tool_choice": "none", "tools": []any{members{"type": "function", "function": members{"name": "time", "parameters": members{"type": "object", "properties": members{}}}}}}},
	{"reasoning", "/v1/chat/completions", members{"reasoning_effort": "low"}},
	{"prompt", "/v1/completions", members{"truncate_prompt_tokens": 8}},
	{"other_field", "/v1/completions", members{"bad_words": []string{"river"}}},
	{"stop_strings", "/v1/completions", members{"stop": "never in an answer"}}, // and no tokenizer here
}

// round kills one engine with streams on it, and looks at what became of them.
func (s *stand) round(i int) {
	t := s.t
	may, on := make([]*reader, len(continuable)), map[string]int{}
	for j, c := range continuable {
		if may[j] = s.read(c.path, 1+s.rng.IntN(60), c.more); may[j].resp.StatusCode != http.StatusOK {
			<-may[j].ended
			t.Fatalf("%s: %d %s", c.name, may[j].resp.StatusCode, may[j].got)
		}
		on[may[j].on()]++
	}
	victim, other := s.decode[i%2], s.decode[1-i%2]
	if on[victim.Name] < on[other.Name] {
		victim, other = other, victim
	}
	no := refused[s.refused%len(refused)]
	counted := func() float64 {
		return counter(t, s.r.metrics, "dynctl_streams_not_continued_total", fmt.Sprintf(`why="%s"`, no.why))
	}
	before := counted()
	var must *reader
	var extra []*reader
	for must == nil && len(extra) < 4 {
		k := s.read(no.path, 1+s.rng.IntN(40), no.more)
		if k.resp.StatusCode != http.StatusOK {
			<-k.ended
			t.Fatalf("%v: %d %s", no.more, k.resp.StatusCode, k.got)
		}
		if k.on() == victim.Name {
			must = k
			s.refused++
		} else {
			extra = append(extra, k)
		}
	}
	for _, k := range append(slices.Clone(may), must) {
		if k != nil && k.on() == victim.Name {
			<-k.reached
		}
	}
	how := "all processes of an engine killed"
	if i%4 == 3 {
		how = "the process of an engine that computes killed"
		victim.killCore(t)
	} else {
		victim.kill()
	}
	s.counts["= "+how]++
	ended := append(append(slices.Clone(may), extra...), must)
	if must == nil {
		ended = ended[:len(ended)-1]
	}
	for _, k := range ended {
		<-k.ended
	}
	victim.kill()
	victim.start(t, s.starter)
	for j, k := range may {
		s.judge(continuable[j].name, k, victim, other)
	}
	if must != nil {
		a := answer{header: must.resp.Header}
		rec := s.r.explain(a)
		got := parseStream(must.got)
		switch why := rec.Outcome.NotContinued; {
		case got.done && got.failed == "" && why == "":
			s.counts["refused, "+no.why+": ended before the kill"]++
		case why == "" || len(rec.Continued) > 0 || !strings.Contains(got.failed, "not continued elsewhere: "+why) || counted() != before+1:
			t.Errorf("%v: %q, %q, counted %v times; %+v", no.more, why, got.failed, counted()-before, rec.Continued)
		default:
			s.counts["refused, "+no.why+": "+why]++
		}
	}
	s.r.until(victim.Name+" is back", func() bool {
		l, err := s.r.admin.Ranks(t.Context())
		if err != nil {
			return false
		}
		for _, k := range l.Ranks {
			if !k.Usable || k.Feed.State != "live" || k.ActiveRequests > 0 {
				return false
			}
		}
		return alive(victim.URL)
	})
}

func alive(url string) bool {
	resp, err := http.Get(url + "/health")
	if err != nil {
		return false
	}
	_ = resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// judge compares a stream that may be continued with what engines say by themselves.
func (s *stand) judge(name string, k *reader, victim, other *mortal) {
	t := s.t
	rec := s.r.explain(answer{header: k.resp.Header})
	got := parseStream(k.got)
	sampled := k.body["temperature"] != 0
	first, second := victim.tap.take(k.id), other.tap.take(k.id)
	fail := func(format string, a ...any) {
		t.Errorf("%s, %s, continued %+v: %s", name, k.id, rec.Continued, fmt.Sprintf(format, a...))
	}
	alone := s.alone(other, k.path, k.body)
	if k.err != nil {
		fail("%v", k.err)
	}
	if why := rec.Outcome.NotContinued; why != "" {
		s.counts["not continued, "+name+": "+why]++
		if !sampled && !strings.HasPrefix(alone.text, got.text) {
			fail("%q is not the beginning of %q", got.text, alone.text)
		}
		if _, ids := k.body["return_token_ids"]; !ids || !strings.Contains(why, "requested token ids") {
			fail("refused: %s", why)
		}
		return
	}
	if !got.done || got.failed != "" || got.finish != "length" || len(got.names) != 1 {
		fail("the stream ended with %q %q, done %v, and has the names %v", got.finish, got.failed, got.done, got.names)
	}
	if !sampled && got.text != alone.text {
		fail("%q, want %q", got.text, alone.text)
	}
	if got.outputs != killTokens || got.inputs != alone.inputs {
		fail("usage %d+%d, want %d+%d", got.inputs, got.outputs, alone.inputs, killTokens)
	}
	if _, asked := k.body["return_token_ids"]; asked != (len(got.ids) > 0) || asked && !slices.Equal(got.ids, alone.ids) {
		fail("ids %v, want %v", got.ids, alone.ids)
	}
	if len(rec.Continued) == 0 {
		switch {
		case k.on() != victim.Name:
			s.counts["on the other engine, "+name]++
		case len(second) > 0:
			s.counts["tried again before the first text, "+name]++
		default:
			s.counts["ended before the kill, "+name]++
		}
		return
	}
	sent := rec.Continued[0].Tokens
	if len(rec.Continued) > 1 || len(first) != 1 || len(second) != 1 || rec.Continued[0].From != victim.Name {
		fail("%d requests to %s, %d to %s", len(first), victim.Name, len(second), other.Name)
		return
	}
	// The ids at the seam.
	reported := parseStream(first[0].answer)
	var rest struct{ Prompt []uint32 }
	if err := json.Unmarshal(second[0].body, &rest); err != nil {
		fail("%v: %s", err, second[0].body)
		return
	}
	if len(reported.ids) < sent || !slices.Equal(rest.Prompt, append(slices.Clone(reported.prompt), reported.ids[:sent]...)) {
		fail("asked for the rest after %v; %v and %v were reported, and %d sent", rest.Prompt, reported.prompt, reported.ids, sent)
		return
	}
	// The text before it, and what the other engine says after it by itself.
	head := ""
	for i := range reported.texts {
		if reported.ends[i] <= sent {
			head += reported.texts[i]
		}
	}
	if !slices.Contains(reported.ends, sent) { // within an event of several tokens
		head = s.text(other, reported.ids[:sent])
		s.counts["  within an event of several tokens"]++
	}
	var again members
	if err := json.Unmarshal(second[0].body, &again); err != nil {
		t.Fatal(err)
	}
	tail := s.alone(other, second[0].path, again)
	if cont := parseStream(second[0].answer); !strings.HasPrefix(got.text, head) || got.text[len(head):] != cont.text {
		fail("%q and then %q are not %q", head, cont.text, got.text)
	} else if !sampled && (cont.text != tail.text || !slices.Equal(cont.ids, tail.ids)) {
		fail("after %d ids the other engine says %q by itself, and %q for the stream", len(rest.Prompt), tail.text, cont.text)
	}
	s.counts["continued, "+name]++
	s.counts["+ tokens whose text was not sent: "+strconv.Itoa(rec.Continued[0].Dropped)]++
	s.counts["+ broken off: "+rec.Continued[0].Reason]++
	if s.decode[0].Role == "decode" {
		s.counts["+ the rest was prefilled: "+rec.Path]++
	}
}

// alone is what an engine answers without a router.
func (s *stand) alone(m *mortal, path string, body members) transcript {
	s.t.Helper()
	body = maps.Clone(body)
	body["return_token_ids"] = true
	delete(body, "kv_transfer_params")
	return parseStream(post(s.t, m.URL, path, body).must(s.t).body)
}

// text asks an engine for the text of ids.
func (s *stand) text(m *mortal, ids []uint32) string {
	s.t.Helper()
	var v struct{ Prompt string }
	a := post(s.t, m.URL, "/detokenize", members{"model": m.Model, "tokens": ids}).must(s.t)
	if err := json.Unmarshal(a.body, &v); err != nil {
		s.t.Fatal(err)
	}
	return v.Prompt
}
