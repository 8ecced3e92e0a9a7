package soak

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rawjson"
)

// TestJobsRepeat: a request follows from its number alone, all kinds and sizes
// come, and prompts of a family begin alike.
func TestJobsRepeat(t *testing.T) {
	kinds, models := map[string]int{}, map[string]int{}
	small, large := 0, 0
	for n := range poolSize {
		a, b := makeJob(7, 3, n), makeJob(7, 3, n)
		kinds[a.kind]++
		models[a.model]++
		if a.bytes < minPrompt || a.bytes > maxPrompt {
			t.Errorf("request %d has %d bytes", n, a.bytes)
		}
		if a.bytes < 4<<10 {
			small++
		}
		if a.bytes > 64<<10 {
			large++
		}
		body := a.body(true)
		if !bytes.Equal(body, b.body(true)) {
			t.Fatalf("request %d is not the same twice", n)
		}
		if !json.Valid(body) || rawjson.Value(body).Get("model").String() != a.model || rawjson.Value(body).Get("stream").Bool() != a.streams() {
			t.Errorf("request %d: %.200s", n, body)
		}
		if c := makeJob(7, 4, n).body(true); bytes.Equal(body, c) {
			t.Errorf("request %d is the same in the next epoch", n)
		}
	}
	for _, k := range []string{kindChat, kindCompletion, kindIDs, kindCut, kindBatch, kindMessages, kindResponses, kindEmbedding} {
		if kinds[k] < poolSize/50 {
			t.Errorf("%d of %d requests are of kind %s", kinds[k], poolSize, k)
		}
	}
	if models[modelSGLang] == 0 || models[modelVLLM] == 0 || small < poolSize/8 || large < poolSize/8 {
		t.Errorf("models %v, %d small and %d large prompts", models, small, large)
	}
	x, y := prose(1, 2, 3, 500, 1000), prose(1, 2, 4, 500, 1000)
	if x[:500] != y[:500] || x == y || len(x) < 1000 {
		t.Error("prompts of a family do not begin alike, or do not differ")
	}
	i, j := numbers(1, 2, 3, 50, 100), numbers(1, 2, 4, 50, 100)
	if !cmp.Equal(i[:50], j[:50]) || cmp.Equal(i, j) {
		t.Error("ids of a family do not begin alike, or do not differ")
	}
}

// oneByte makes a reader give as little as it can.
type oneByte struct{ r io.Reader }

func (o oneByte) Read(p []byte) (int, error) { return o.r.Read(p[:min(1, len(p))]) }

func TestReadingAnswers(t *testing.T) {
	chat, text := &job{kind: kindChat}, &job{kind: kindCompletion}
	gone := errors.New("gone")
	for _, c := range []struct {
		name   string
		job    *job
		stream bool
		body   io.Reader
		want   said
		err    error
	}{
		{"whole chat", chat, false, strings.NewReader(`{"choices":[{"message":{"content":"a b"},"finish_reason":"stop"}]}`), said{text: "a b", finish: "stop", done: true}, nil},
		{"whole text", text, false, strings.NewReader(`{"choices":[{"text":"a b","finish_reason":"length"}]}`), said{text: "a b", finish: "length", done: true}, nil},
		{"embedding", &job{kind: kindEmbedding}, false, strings.NewReader(`{"data":[{"embedding":[0.5,1]}]}`), said{text: "[0.5,1]", finish: "embedding", done: true}, nil},
		{"streamed chat", chat, true, oneByte{strings.NewReader("data: {\"choices\":[{\"delta\":{\"content\":\" a\"}}]}\r\n\r\n: note\n\ndata: {\"choices\":[{\"delta\":{\"content\":\" b\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n")}, said{text: " a b", finish: "stop", done: true}, nil},
		{"batch", &job{kind: kindBatch}, false, strings.NewReader(`{"choices":[{"text":"a","finish_reason":"stop"},{"text":"b","finish_reason":"length"}]}`), said{text: `"a""b"`, finish: `"stop""length"`, done: true}, nil},
		{"streamed message", &job{kind: kindMessages}, true, strings.NewReader("event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"a\"}}\n\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"max_tokens\"}}\n\ndata: {\"type\":\"message_stop\"}\n\n"), said{text: "a", finish: "max_tokens", done: true}, nil},
		{"streamed response", &job{kind: kindResponses}, true, strings.NewReader("data: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\ndata: {\"type\":\"response.completed\",\"response\":{\"status\":\"incomplete\",\"error\":null}}\n\n"), said{text: "a", finish: "incomplete", done: true}, nil},
		{"streamed response that breaks", &job{kind: kindResponses}, true, strings.NewReader("data: {\"type\":\"error\",\"code\":\"x\"}\n\n"), said{failed: `{"type":"error","code":"x"}`}, nil},
		{"streamed error", text, true, strings.NewReader("data: {\"choices\":[{\"text\":\" a\"}]}\n\ndata: {\"error\":{\"code\":5}}\n\ndata: [DONE]\n\n"), said{text: " a", failed: `{"code":5}`}, nil},
		{"silent end", text, true, strings.NewReader("data: {\"choices\":[{\"text\":\" a\"}]}\n\n"), said{text: " a"}, nil},
		{"cut", text, true, io.MultiReader(strings.NewReader("data: {\"choices\":[{\"text\":\" a\"}]}\n\ndata: {"), failing{gone}), said{text: " a"}, gone},
	} {
		got, err := c.job.read(c.body, c.stream, nil)
		if !errors.Is(err, c.err) || got != c.want {
			t.Errorf("%s: %+v, %v; want %+v, %v", c.name, got, err, c.want, c.err)
		}
	}
	if _, err := text.read(strings.NewReader(`{"choices":`), false, nil); err == nil {
		t.Error("half an object was taken for an answer")
	}
	_, err := text.read(strings.NewReader("data: {\"choices\":[{\"text\":\" a\"}]}\n\ndata: [DONE]\n\n"), true, func() bool { return false })
	if !errors.Is(err, errLeft) {
		t.Errorf("a client that leaves: %v", err)
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// TestFaultsNeedTheirOwnEvent: of another worker, too early, too late, of a kind that
// does not show it, or without the worker's name is no proof.
func TestFaultsNeedTheirOwnEvent(t *testing.T) {
	at := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	s := func(n int) time.Time { return at.Add(time.Duration(n) * time.Second) }
	events := []logged{
		{s(1), "worker_failing", "d0", "d0 failed"},
		{s(10), "worker_failing", "d1", "d1 failed"},
		{s(11), "feed_gap", "d0", "d0/dp0: batches are missing"},
		{s(12), "worker_failing", "d0", "somebody failed"},
		{s(13), "outlier_ejected", "d0", "worker d0 is ejected"},
		{s(90), "worker_failing", "d0", "d0 failed"},
	}
	for _, c := range []struct {
		fault Fault
		want  time.Time
	}{
		{Fault{Kind: loopback.Errors, Worker: "d0", From: s(9), To: s(14)}, s(13)},
		{Fault{Kind: loopback.Errors, Worker: "d0", From: s(1), To: s(2)}, s(1)},
		{Fault{Kind: loopback.Errors, Worker: "d0", From: s(20), To: s(30)}, time.Time{}},
		{Fault{Kind: loopback.Drop, Worker: "d0", From: s(9), To: s(9)}, s(11)},
		{Fault{Kind: loopback.Drop, Worker: "d1", From: s(9), To: s(12)}, time.Time{}},
		{Fault{Kind: loopback.Errors, Worker: "d2", From: s(0), To: s(99)}, time.Time{}},
	} {
		f := c.fault
		find(&f, events)
		if !f.SeenAt.Equal(c.want) || (f.Seen == "") != c.want.IsZero() {
			t.Errorf("%s of %s from %v: found %q at %v, want %v", f.Kind, f.Worker, f.From, f.Seen, f.SeenAt, c.want)
		}
	}
}

func TestSummarySaysWhatWasWrong(t *testing.T) {
	clean := &Summary{Duration: Seconds(time.Hour), Requests: map[string]uint64{"all": 3}, Checks: []Check{{When: "after 5m0s"}}}
	if err := clean.Err(); err != nil || !strings.Contains(clean.Text(), "1h0m0s, clean") {
		t.Errorf("%v\n%s", err, clean.Text())
	}
	bad := &Summary{
		Violations: []Violation{{What: "leak", Detail: "9 goroutines"}, {What: "leak"}}, More: 1,
		Unseen: []Fault{{Kind: loopback.Hang, Worker: "decode-1"}},
	}
	text := bad.Text()
	for _, want := range []string{"3 violation(s)", "leak ×2", "9 goroutines", "faults without an event", "hang decode-1"} {
		if !strings.Contains(text, want) {
			t.Errorf("the summary lacks %q:\n%s", want, text)
		}
	}
	left := (&Summary{Checks: []Check{{When: "at the end", Held: 311, Exits: 712, Over: 523}}}).Text()
	if !strings.Contains(left, "311") || !strings.Contains(left, "712") || !strings.Contains(left, "523") {
		t.Errorf("requests left in engines, engines that died or blocks too many are not reported:\n%s", left)
	}
	raw, err := json.Marshal(clean)
	if err != nil || rawjson.Value(raw).Get("duration_seconds").String() != "3600.000" {
		t.Errorf("%s %v", raw, err)
	}
}

func TestUnexplained(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 0, 0, time.UTC)
	faults := []*Fault{{Kind: "hang", Worker: "a", From: at, To: at.Add(time.Minute)}}
	for _, c := range []struct {
		kind, worker string
		after        time.Duration
		want         bool
	}{
		{"silent_recompute", "a", time.Second, true},
		{"prefill_without_params", "b", 0, true},
		{"prefill_bad_params", "b", 0, true},
		{"prefill_unexpected_params", "b", 0, true},
		{"panic", "", 0, true},
		{"load_unknown", "a", time.Second, false},
		{"load_unknown", "a", time.Minute + seenWithin, false},
		{"load_unknown", "a", time.Minute + seenWithin + 1, true},
		{"load_unknown", "a", -1, true},
		{"load_unknown", "b", time.Second, true},
		{"health_changed", "b", time.Second, false},
	} {
		got := unexplained([]logged{{Time: at.Add(c.after), Kind: c.kind, Worker: c.worker}}, faults)
		if (len(got) == 1) != c.want {
			t.Errorf("%s of %q after %s: unexplained %v, want %v", c.kind, c.worker, c.after, !c.want, c.want)
		}
	}
}

// TestBroken: a decode engine that waited for a slow prefill did not break alone.
func TestBroken(t *testing.T) {
	var got []string
	for _, l := range broken(rawjson.Value(`{"legs":[
		{"kind":"decode","worker":"d1","attempt":1,"end_ms":6000.6,"error":"timeout"},
		{"kind":"prefill","worker":"slow","attempt":1,"end_ms":6890.3},
		{"kind":"decode","worker":"d2","attempt":2,"end_ms":13002.7,"error":"timeout"},
		{"kind":"prefill","worker":"quick","attempt":2,"end_ms":7000.1},
		{"kind":"decode","worker":"d3","attempt":3,"end_ms":14000}]}`)) {
		got = append(got, l.Get("worker").String())
	}
	if want := []string{"d1", "slow", "d2"}; !slices.Equal(got, want) {
		t.Errorf("broken legs on %v, want %v", got, want)
	}
}

// TestFullPrefill: a prompt that had no room beside the KV that waits explains that a
// prefill took too long, in the attempt and on the rank that it was about.
func TestFullPrefill(t *testing.T) {
	receipt := rawjson.Value(`{"attempt":2,"inputs":{"isl_tokens":44333,"block_size_tokens":16},
		"earlier_decisions":[{"attempt":1,"inputs":{"isl_tokens":44333,"block_size_tokens":16},"prefill":{"candidates":[
			{"rank":"full/dp0","overlap_blocks":3,"kv_blocks":6000,"kv_usage_ratio":0.727},
			{"rank":"cached/dp0","overlap_blocks":1500,"kv_blocks":6000,"kv_usage_ratio":0.727},
			{"rank":"half/dp0","overlap_blocks":1500,"kv_blocks":6000,"kv_usage_ratio":0.5},
			{"rank":"stuck/dp0","overlap_blocks":1500,"kv_blocks":6000,"kv_usage_ratio":0.7,"running_requests":0,"waiting_requests":3},
			{"rank":"busy/dp0","overlap_blocks":1500,"kv_blocks":6000,"kv_usage_ratio":0.5,"running_requests":1,"waiting_requests":3},
			{"rank":"idle/dp0","overlap_blocks":1500,"kv_blocks":6000,"kv_usage_ratio":0.5,"running_requests":0,"waiting_requests":0},
			{"rank":"later/dp0","overlap_blocks":0,"kv_blocks":6000,"kv_usage_ratio":0.2},
			{"rank":"empty/dp0","overlap_blocks":0,"kv_blocks":6000,"kv_usage_ratio":0.2}]}}],
		"prefill":{"candidates":[{"rank":"later/dp0","kv_blocks":6000,"kv_usage_ratio":0.2,"running_requests":0,"waiting_requests":7},{"rank":"full/dp0","overlap_blocks":0,"kv_blocks":6000,"kv_usage_ratio":0.1}]}}`)
	for _, c := range []struct {
		attempt, rank string
		want          bool
	}{
		{"1", "stuck/dp0", true}, {"1", "busy/dp0", false}, {"1", "idle/dp0", false},
		{"1", "full/dp0", true}, {"1", "later/dp0", true}, {"1", "cached/dp0", true}, {"1", "half/dp0", false}, {"1", "empty/dp0", false},
		{"2", "full/dp0", false}, {"1", "other/dp0", false}, {"3", "full/dp0", false},
	} {
		if got := full(receipt, c.attempt, c.rank); got != c.want {
			t.Errorf("attempt %s on %s: %v, want %v", c.attempt, c.rank, got, c.want)
		}
	}
}
