package recorder

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// listen is a listener of all that a tap passes on.
func listen(t testing.TB, tap *Tap) *Subscription {
	t.Helper()
	sub, err := tap.Subscribe(0)
	if err != nil {
		t.Fatal(err)
	}
	return sub
}

func read(t *testing.T, paths ...string) ([]trace.Record, *trace.Reader) {
	t.Helper()
	r, err := trace.OpenAll(paths, trace.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	var all []trace.Record
	for {
		var rec trace.Record
		err := r.Next(&rec)
		if errors.Is(err, io.EOF) {
			return all, r
		}
		if err != nil {
			t.Fatal(err)
		}
		rec.Batch.Payload = bytes.Clone(rec.Batch.Payload)
		all = append(all, rec)
	}
}

func kinds(all []trace.Record) []trace.Kind {
	out := make([]trace.Kind, len(all))
	for i := range all {
		out[i] = all[i].Kind
	}
	return out
}

// TestRecording writes every kind to a file and reads it again.
func TestRecording(t *testing.T) {
	tap := NewTap(trace.Header{Source: "test"})
	if tap.active.Load() {
		t.Error("active without a listener")
	}
	tap.Batch("w/dp0", 1, time.Now(), false, []byte{1}) // nobody listens
	tap.Rank("w/dp0", trace.RankInfo{Slot: 1, BlockSize: 16, New: true})
	tap.Feed("w/dp0", true)
	sub := listen(t, tap)
	path := filepath.Join(t.TempDir(), "t.jsonl.zst")
	f, err := NewFile(sub, FileOptions{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- f.Run(ctx) }()
	payload := []byte{1, 2, 3}
	tap.Batch("w/dp0", 2, time.Now(), true, payload)
	payload[0] = 9 // not kept
	tap.Clear("w/dp0", true, "why")
	tap.Feed("w/dp0", false)
	began := time.Now()
	tap.Decision(began, made("d", fleet(1)))
	tap.Outcome(&receipt.Receipt{ID: "d", Time: began, Outcome: receipt.Outcome{TTFTMS: posInf()}})
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if tap.active.Load() {
		t.Error("still active after the end")
	}
	all, r := read(t, path)
	want := []trace.Kind{trace.KindRank, trace.KindFeed, trace.KindBatch, trace.KindClear, trace.KindFeed, trace.KindDecision, trace.KindOutcome, trace.KindEnd}
	if got := kinds(all); !slices.Equal(got, want) {
		t.Fatalf("kinds %v, want %v", got, want)
	}
	if all[0].RankInfo.New || !all[1].Trusted {
		t.Errorf("the listener that came later got %+v, trusted %v", all[0].RankInfo, all[1].Trusted)
	}
	if b := all[2].Batch; b.Seq != 2 || !b.Replayed || !bytes.Equal(b.Payload, []byte{1, 2, 3}) {
		t.Errorf("batch %+v", b)
	}
	if e := all[7].End; e.Records != 7 || e.Dropped != 0 {
		t.Errorf("end %+v", e)
	}
	// The file has the wall clock's start, the tap measured with the other clock.
	h := r.Header()
	if off := began.Sub(h.Start) - time.Duration(all[5].Decision.BeganUS)*time.Microsecond; h.Source != "test" || off.Abs() > time.Millisecond || all[6].Outcome.ReceivedUS != all[5].Decision.BeganUS {
		t.Errorf("header %+v, began %d, received %d, %s off", h, all[5].Decision.BeganUS, all[6].Outcome.ReceivedUS, off)
	}
	d := all[5].Decision
	if d.Unverifiable != "" || d.Tokens != nil {
		t.Errorf("unverifiable %q, tokens %v", d.Unverifiable, d.Tokens)
	}
	if policy, version := d.Settings.Decode, d.Input.DecodePeers[0].Worker.Version; policy != selector.KV || version != "1.0" {
		t.Errorf("policy %s, version %q of the worker", policy, version)
	}
	if ttft := all[6].Outcome.Result.TTFTMS; ttft != -1 {
		t.Errorf("TTFT %v, want -1: none", ttft)
	}
}

var testSettings = &decide.Options{Decode: selector.KV, Prefill: selector.KV, Weights: selector.DefaultWeights()}

// fleet is so many workers.
func fleet(n int) (list []*workers.Worker) {
	for i := range n {
		list = append(list, &workers.Worker{Facts: workers.Facts{Engine: workers.VLLM, Role: workers.Aggregated, Version: "1.0"}, Name: fmt.Sprint("decode-", i)})
	}
	return list
}

// made is a decision among the workers of a list.
func made(id string, list []*workers.Worker) *trace.Decision {
	in := &decide.Input{Facts: api.Facts{Kind: api.Chat, ISL: 1024, Source: route.FromIDs, MaxTokens: 16}}
	in.Decode.BlockSize, in.Decode.Draw = 16, 1<<63
	for i, w := range list {
		in.Decode.Candidates = append(in.Decode.Candidates, decision.Candidate{Rank: w.Name + "/dp0", OverlapBlocks: i, Cost: float64(i) / 3, KVUsage: -1})
		in.DecodePeers = append(in.DecodePeers, workers.Peer{Worker: w})
	}
	return &trace.Decision{
		ID: id, Model: "sim", Attempt: 1, BlockSize: 16, Locals: make(trace.Hashes, 64), Tokens: trace.Tokens{1}, Revision: 1, Settings: testSettings, Input: in,
		Path: "local", Reason: "below_threshold", EffISL: 1024,
	}
}

func posInf() float64 { x := 1e308; return x * 10 }

// TestFullBuffer: what does not fit is dropped, counted and reported.
func TestFullBuffer(t *testing.T) {
	tap := NewTap(trace.Header{})
	sub, err := tap.Subscribe(1000)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		tap.Batch("w/dp0", uint64(i), time.Now(), false, make([]byte, 30))
	}
	taken := bytes.Clone(sub.take())
	tap.Batch("w/dp0", 50, time.Now(), false, nil)
	taken = append(taken, sub.take()...)
	records, dropped := sub.Counts()
	if dropped == 0 || records+dropped != 51 {
		t.Errorf("%d records and %d dropped of 51", records, dropped)
	}
	want := fmt.Sprintf(`"records":%d}`, dropped)
	lines := strings.Split(strings.TrimSpace(string(taken)), "\n")
	if n := len(lines); !strings.Contains(lines[n-2], want) || !strings.Contains(lines[n-2], `"dropped"`) {
		t.Errorf("no word of %d dropped records before the last line: %s", dropped, lines[n-2])
	}
	sub.Close()
	if _, err := sub.Next(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("after the end: %v", err)
	}
}

// TestWake: a File is woken by a batch, by what is dropped and by the end, and
// not by each line; a stream by the first line.
func TestWake(t *testing.T) {
	tap := NewTap(trace.Header{})
	woken := func(s *Subscription) bool {
		select {
		case <-s.wake:
			return true
		default:
			return false
		}
	}
	stream, err := tap.Subscribe(0)
	if err != nil {
		t.Fatal(err)
	}
	sub, err := tap.Subscribe(1000)
	if err != nil {
		t.Fatal(err)
	}
	f, err := NewFile(sub, FileOptions{Path: filepath.Join(t.TempDir(), "t.jsonl")})
	if err != nil {
		t.Fatal(err)
	}
	if !woken(stream) || !woken(sub) {
		t.Error("the header woke nobody")
	}
	stream.take()
	sub.take()
	put := func(n int) { tap.Batch("w/dp0", 1, time.Now(), false, make([]byte, n)) }
	put(0)
	if !woken(stream) || woken(sub) {
		t.Error("one short line: want the stream woken, and the file not")
	}
	put(400)
	if woken(stream) || !woken(sub) {
		t.Error("a batch: want the file woken, and the stream, which took nothing, not again")
	}
	put(400)
	if !woken(sub) {
		t.Error("a dropped line did not wake the file")
	}
	stream.Close()
	sub.Close()
	if !woken(sub) {
		t.Error("the end did not wake the file")
	}
	sub.signal()
	if err := f.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	// What is less than a batch does not wait for more of it.
	slow, err := tap.Subscribe(0)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "t.jsonl")
	if f, err = NewFile(slow, FileOptions{Path: path, FlushEvery: time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- f.Run(ctx) }()
	put(10)
	for end := time.Now().Add(10 * time.Second); ; {
		raw, err := os.ReadFile(path)
		if err != nil || time.Now().After(end) {
			t.Fatalf("the line did not reach the file: %s %v", raw, err)
		}
		if bytes.Contains(raw, []byte(`"kv"`)) {
			break
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// TestRotation: parts are whole, can be read alone, and together hold all; the
// oldest go beyond Keep.
func TestRotation(t *testing.T) {
	for _, keep := range []int{0, 2} {
		tap := NewTap(trace.Header{})
		tap.Rank("w/dp0", trace.RankInfo{Slot: 4, BlockSize: 16})
		sub := listen(t, tap)
		dir := t.TempDir()
		path := filepath.Join(dir, "t.jsonl.gz")
		if err := os.WriteFile(filepath.Join(dir, "t.0001.jsonl.gz"), []byte("mine"), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := NewFile(sub, FileOptions{Path: path, MaxBytes: 2000, Keep: keep})
		if err != nil {
			t.Fatal(err)
		}
		for i := range 60 {
			tap.Batch("w/dp0", uint64(i), time.Now(), false, make([]byte, 60))
		}
		sub.Close()
		if err := f.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if raw, err := os.ReadFile(filepath.Join(dir, "t.0001.jsonl.gz")); err != nil || string(raw) != "mine" {
			t.Errorf("a file that was there was touched: %q %v", raw, err)
		}
		paths, _ := filepath.Glob(filepath.Join(dir, "t*"))
		slices.Sort(paths)
		paths = slices.DeleteFunc(paths, func(p string) bool { return strings.Contains(p, "0001") })
		if i := slices.Index(paths, path); i >= 0 {
			paths = append([]string{path}, slices.Delete(paths, i, i+1)...)
		}
		if keep > 0 && len(paths) != keep || keep == 0 && len(paths) < 4 {
			t.Errorf("keep %d: %d parts", keep, len(paths))
		}
		next := uint64(0)
		for i, p := range paths {
			part, r := read(t, p)
			if part[0].Kind != trace.KindRank || part[0].RankInfo.Slot != 4 {
				t.Errorf("%s begins with %+v", p, part[0])
			}
			if keep == 0 && i > 0 && r.Header().Part == 0 {
				t.Errorf("%s is part 0", p)
			}
			for _, rec := range part {
				if rec.Kind == trace.KindBatch {
					if keep == 0 && rec.Batch.Seq != next {
						t.Errorf("%s: batch %d, want %d", p, rec.Batch.Seq, next)
					}
					next = rec.Batch.Seq + 1
				}
			}
		}
		if next != 60 {
			t.Errorf("the last batch is %d", next-1)
		}
	}
}

// TestLongOpening: parts are not made for each line where what they repeat is longer than
// they may be.
func TestLongOpening(t *testing.T) {
	tap := NewTap(trace.Header{})
	sub := listen(t, tap)
	const ranks, batches, most = 100, 60, 2000
	for i := range ranks {
		tap.Rank(fmt.Sprintf("w-%d/dp0", i), trace.RankInfo{Slot: uint32(i), BlockSize: 16})
	}
	for i := range batches {
		tap.Batch("w-0/dp0", uint64(i), time.Now(), false, make([]byte, 60))
	}
	sub.Close()
	f, err := NewFile(sub, FileOptions{Path: filepath.Join(t.TempDir(), "t.jsonl"), MaxBytes: most})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	// All lines are less than 200 bytes long.
	if n := len(f.parts); n < 4 || n > (ranks+batches)*200/(most/2)+1 || n > ranks+batches/2 {
		t.Errorf("%d parts", n)
	}
	got := 0
	for _, p := range f.parts {
		part, _ := read(t, p)
		for _, rec := range part {
			if rec.Kind == trace.KindBatch {
				got++
			}
		}
	}
	if got != batches {
		t.Errorf("%d batches, want %d", got, batches)
	}
}

// TestStream: the admin API's stream is copied to files that are recordings of
// their own.
func TestStream(t *testing.T) {
	tap := NewTap(trace.Header{Source: "serve"})
	tap.Rank("w/dp0", trace.RankInfo{Slot: 4, BlockSize: 16, New: true})
	server := httptest.NewServer(tap)
	defer server.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL, nil)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	const n = 500
	for i := range n {
		tap.Batch("w/dp0", uint64(i), time.Now(), false, make([]byte, 3000))
	}
	pr, pw := io.Pipe()
	go func() {
		// The stream has no end: cut it after the last batch.
		br := bufio.NewReader(resp.Body)
		for range n + 3 { // header, rank, feed
			line, err := br.ReadBytes('\n')
			if err == nil {
				_, err = pw.Write(line)
			}
			if err != nil {
				_ = pw.CloseWithError(err)
				return
			}
		}
		_ = pw.Close()
	}()
	c := NewCopy(0)
	path := filepath.Join(t.TempDir(), "t.jsonl")
	f, err := NewFile(c.Subscription(), FileOptions{Path: path, MaxBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	copied := make(chan error)
	go func() { copied <- c.From(pr) }()
	if err := f.Run(context.WithoutCancel(t.Context())); err != nil {
		t.Fatal(err)
	}
	if err := <-copied; err != nil {
		t.Fatal(err)
	}
	second := strings.Replace(path, ".jsonl", ".0001.jsonl", 1)
	all, _ := read(t, path, second)
	got := 0
	for _, r := range all {
		if r.Kind == trace.KindBatch {
			got++
		}
	}
	if got != n {
		t.Errorf("%d batches of %d", got, n)
	}
	part, r := read(t, second)
	if r.Header().Part != 1 || part[0].Kind != trace.KindRank || part[1].Kind != trace.KindFeed {
		t.Errorf("the second part begins with %v, part %d", kinds(part)[:2], r.Header().Part)
	}
	if err := NewCopy(0).From(strings.NewReader("404 page not found\n")); !errors.Is(err, trace.ErrSchema) {
		t.Errorf("a page that is no stream: %v", err)
	}
}

// BenchmarkBatch is what recording a batch of 32 blocks costs its feed.
func BenchmarkBatch(b *testing.B) {
	tap := NewTap(trace.Header{})
	sub := listen(b, tap)
	defer sub.Close()
	payload := make([]byte, 2600)
	now := time.Now()
	b.ReportAllocs()
	for i := uint64(0); b.Loop(); i++ {
		tap.Batch("decode-0/dp0", i, now, false, payload)
		if i%1024 == 0 {
			sub.take()
		}
	}
}

// BenchmarkDecision is what recording a decision among 16 ranks costs.
func BenchmarkDecision(b *testing.B) {
	tap := NewTap(trace.Header{})
	sub := listen(b, tap)
	defer sub.Close()
	d := made("a754fe24000000000588", fleet(16))
	now := time.Now()
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		tap.Decision(now, d)
		if i%1024 == 0 {
			sub.take()
		}
	}
}

// finished is a receipt of a local request.
func finished() *receipt.Receipt {
	leg := receipt.NewLeg("decode", "decode-0", "decode-0/dp0", 1)
	leg.Status, leg.QueueMS, leg.DispatchMS, leg.FirstByteMS, leg.EndMS = 200, 0.012, 0.118, 11.402, 40.911
	return &receipt.Receipt{
		Schema: receipt.Schema, ID: "a754fe24000000000588", RequestID: "9b1c04e2f7d84bb0", Time: time.Now().UTC(), Endpoint: "chat", Model: "sim",
		Legs: []receipt.LegEntry{leg},
		Outcome: receipt.Outcome{Status: 200, Finish: "stop", PromptTokens: 1024, CachedTokens: 928, CompletionTokens: 16,
			TTFTMS: 11.43, E2EMS: 40.93, ITL: receipt.Gaps{Count: 15, MeanMS: 1.96, P50MS: 1.9, P99MS: 2.4, MaxMS: 2.4}},
	}
}

// BenchmarkOutcome is what recording a receipt costs.
func BenchmarkOutcome(b *testing.B) {
	tap := NewTap(trace.Header{})
	sub := listen(b, tap)
	defer sub.Close()
	r := finished()
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		tap.Outcome(r)
		if i%1024 == 0 {
			sub.take()
		}
	}
}

// TestLateListeners: a listener, whenever it came, has what the decisions of its
// recording refer to; so has each part of a file, and a listener without room gets
// it when there is room again.
func TestLateListeners(t *testing.T) {
	tap := NewTap(trace.Header{Source: "serve"})
	first, err := tap.Subscribe(0)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(sub *Subscription, name string, most int64) (paths []string) {
		t.Helper()
		sub.Close()
		f, err := NewFile(sub, FileOptions{Path: filepath.Join(dir, name), MaxBytes: most})
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		return f.parts
	}
	check := func(paths []string, want int) {
		t.Helper()
		n := 0
		for _, p := range paths {
			part, _ := read(t, p)
			for _, r := range part {
				if d := r.Decision; d != nil {
					n++
					if d.Unverifiable != "" || len(d.Input.DecodePeers) == 0 || d.Input.DecodePeers[0].Worker.Version == "" {
						t.Fatalf("%s: decision %s: %q of %+v", p, d.ID, d.Unverifiable, d.Input.DecodePeers)
					}
				}
			}
		}
		if n != want {
			t.Errorf("%d decisions in %d parts, want %d", n, len(paths), want)
		}
	}
	list, n := fleet(3), 0
	decide := func(times int) {
		for range times {
			d := made(fmt.Sprint("d", n), list)
			d.Revision = uint64(1 + n/40)
			n++
			tap.Decision(time.Now(), d)
		}
	}
	decide(50)
	late, err := tap.Subscribe(0)
	if err != nil {
		t.Fatal(err)
	}
	changed := *list[1]
	changed.Version = "2.0" // as after a restart with another version
	list[1] = &changed
	decide(50)
	small, err := tap.Subscribe(3 << 10) // its preamble and hardly more
	if err != nil {
		t.Fatal(err)
	}
	list = append(list, fleet(9)[8])
	tap.Batch("w/dp0", 1, time.Now(), false, make([]byte, 4000)) // is dropped there
	decide(20)
	taken := bytes.Clone(small.take())
	decide(5)
	taken = append(taken, small.take()...)
	_, lost := small.Counts()
	if lost == 0 {
		t.Error("nothing was dropped")
	}
	small.Close()
	path := filepath.Join(dir, "small.jsonl")
	if err := os.WriteFile(path, taken, 0o600); err != nil {
		t.Fatal(err)
	}
	part, _ := read(t, path)
	kept := 0
	for _, r := range part {
		if r.Decision != nil {
			kept++
		}
	}
	if kept == 0 || kept >= 25 {
		t.Errorf("%d decisions of 25 had room", kept)
	}
	check([]string{path}, kept)
	check(write(late, "late.jsonl.zst", 0), 75)
	if parts := write(first, "first.jsonl", 20<<10); len(parts) < 4 {
		t.Errorf("%d parts", len(parts))
	} else {
		check(parts, 125)
	}

	// The same lines, copied from a stream to parts.
	stream, err := tap.Subscribe(0)
	if err != nil {
		t.Fatal(err)
	}
	decide(60)
	stream.Close()
	c := NewCopy(0)
	if err := c.From(bytes.NewReader(stream.take())); err != nil {
		t.Fatal(err)
	}
	if parts := write(c.Subscription(), "copied.jsonl", 20<<10); len(parts) < 3 {
		t.Errorf("%d parts", len(parts))
	} else {
		check(parts, 60)
	}
}

// TestOpeningIsBounded: of a recording that describes without end, the newest are
// repeated.
func TestOpeningIsBounded(t *testing.T) {
	o := newOpening()
	o.most.lines, o.most.bytes = 50, 10_000
	note := func(l string) {
		t.Helper()
		if err := o.note([]byte(l + "\n")); err != nil {
			t.Fatal(err)
		}
	}
	note(`{"schema":"dynctl.trace/v2"}`)
	for i := range 110 {
		note(fmt.Sprintf(`{"kind":"worker","t_us":1,"n":%d,"worker":"w"}`, i))
	}
	if len(o.described) < 25 || len(o.described) > 50 || !strings.Contains(string(o.described[len(o.described)-1].tail), `"n":109,`) {
		t.Errorf("%d lines, the last is %s", len(o.described), o.described[len(o.described)-1].tail)
	}
	note(fmt.Sprintf(`{"kind":"worker","t_us":-5,"n":1,"worker":%q}`, strings.Repeat("w", 10_000)))
	if len(o.described) != 0 || o.bytes != 0 {
		t.Errorf("%d lines of %d bytes", len(o.described), o.bytes)
	}
	note(`{"kind":"rank","t_us":9,"rank":"w/dp0","slot":4,"new":true}`)
	note(`{"kind":"feed","t_us":10,"rank":"w/dp0","trusted":true}`)
	note(`{"kind":"rank","t_us":11,"rank":"x/dp0","slot":5}` + "\n" + `{"kind":"kv","t_us":-12}`)
	got, err := o.lines(3)
	if want := `{"kind":"rank","t_us":-12,"rank":"w/dp0","slot":4}
{"kind":"feed","t_us":-12,"rank":"w/dp0","trusted":true}
{"kind":"rank","t_us":-12,"rank":"x/dp0","slot":5}
`; err != nil || !strings.HasSuffix(string(got), want) || !strings.Contains(string(got), `"part":3`) {
		t.Errorf("%s %v", got, err)
	}
	if err := NewCopy(0).From(strings.NewReader(`{"schema":"dynctl.trace/v1"}` + "\n")); !errors.Is(err, trace.ErrSchema) || !strings.Contains(err.Error(), "own version of dynctl") {
		t.Errorf("a stream of version 1: %v", err)
	}
}

// TestPartsAreOfTheirTime: a part begins with what was so when its lines were made,
// whatever has become of it when they are written.
func TestPartsAreOfTheirTime(t *testing.T) {
	tap := NewTap(trace.Header{})
	sub := listen(t, tap)
	tap.Rank("w/dp0", trace.RankInfo{BlockSize: 16, New: true, Kept: true})
	tap.Feed("w/dp0", true)
	for i := range 40 {
		tap.Batch("w/dp0", uint64(i), time.Now(), false, make([]byte, 60))
	}
	tap.Feed("w/dp0", false) // and only now the disk is ready
	sub.Close()
	f, err := NewFile(sub, FileOptions{Path: filepath.Join(t.TempDir(), "t.jsonl"), MaxBytes: 1500})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, p := range f.parts[1:] {
		part, _ := read(t, p)
		if len(part) < 3 {
			t.Fatalf("%s has %d records", p, len(part))
		}
		if k := kinds(part[:2]); !slices.Equal(k, []trace.Kind{trace.KindRank, trace.KindFeed}) || part[0].RankInfo.New || part[0].RankInfo.Kept || !part[1].Trusted {
			t.Errorf("%s begins with %v, a rank %+v, trusted %v", p, k, part[0].RankInfo, part[1].Trusted)
		}
		if feed, next := part[1].Time, part[2].Time; feed > next {
			t.Errorf("%s: the feed's record is of %v, the next of %v", p, feed, next)
		}
	}
	_, all := read(t, f.parts...)
	if all.Stats().Reordered != 0 || len(f.parts) < 4 {
		t.Errorf("%d parts: %+v", len(f.parts), all.Stats())
	}
}

// TestSlowCopy: settings and workers for which there was no room follow later, and
// decisions that may refer to them do not come before.
func TestSlowCopy(t *testing.T) {
	c := NewCopy(300)
	pad := strings.Repeat("x", 150)
	for _, l := range []string{`{"schema":"dynctl.trace/v2"}`, `{"kind":"kv","t_us":1,"pad":"` + pad + `"}`} {
		c.sub.add([]byte(l + "\n"))
	}
	c.line([]byte(`{"kind":"worker","t_us":2,"n":1,"pad":"` + pad + "\"}\n"))
	c.line([]byte(`{"kind":"decision","t_us":3}` + "\n"))
	taken := bytes.Clone(c.sub.take())
	c.line([]byte(`{"kind":"decision","t_us":4}` + "\n"))
	taken = append(taken, c.sub.take()...)
	var got []string
	for l := range strings.Lines(string(taken)) {
		got = append(got, string(kindOf([]byte(l))))
	}
	if want := []string{"", "kv", "dropped", "worker", "decision"}; !slices.Equal(got, want) || len(c.late) != 0 {
		t.Errorf("lines %q, want %q", got, want)
	}
}

// BenchmarkIdle is a batch when nobody listens.
func BenchmarkIdle(b *testing.B) {
	tap := NewTap(trace.Header{})
	now := time.Now()
	b.ReportAllocs()
	for b.Loop() {
		tap.Batch("decode-0/dp0", 1, now, false, nil)
	}
}
