package kvstream

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
)

// hybridLine is a line of testdata/hybrid.
type hybridLine struct {
	Type string
	// Of the header.
	Groups []struct {
		Spec   string
		Size   int `json:"block_size"`
		Window int
		Chunk  int
	}
	Unit int `json:"hash_block_size"`
	Hash string
	// Of a batch.
	Payload []byte
	Seq     uint64
	// Of a request.
	ID     string
	Tokens []uint32
	Cached int
}

func readHybrid(t testing.TB, file string) (lines []hybridLine) {
	t.Helper()
	linesOf(t, file, func(line []byte) {
		lines = append(lines, hybridLine{})
		if err := json.Unmarshal(line, &lines[len(lines)-1]); err != nil {
			t.Fatal(err)
		}
	})
	return lines
}

// eachRecording runs a test with each recording of testdata/hybrid whose name matches, at
// least so many.
func eachRecording(t *testing.T, glob string, atLeast int, test func(t *testing.T, lines []hybridLine)) {
	t.Helper()
	files, err := filepath.Glob(filepath.FromSlash("../../../../testdata/hybrid/" + glob))
	if err != nil || len(files) < atLeast {
		t.Fatalf("recordings: %d, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".jsonl.gz"), func(t *testing.T) {
			t.Parallel()
			test(t, readHybrid(t, file))
		})
	}
}

// chunk is the size of a header's chunks of attention in tokens, 0 without.
func (l *hybridLine) chunk() (n int) {
	for _, g := range l.Groups {
		n = max(n, g.Chunk)
	}
	return n
}

// tally is how many predictions of cached tokens were vLLM's own number, more, or
// less.
type tally struct{ equal, more, less, warm, lost, found int }

// predict plays a recording and compares every request with what the router would
// count for it, in router blocks of size tokens.
func predict(t *testing.T, lines []hybridLine, size int, known kvgroup.Traits) (n tally, s *Stream) {
	t.Helper()
	n, s, _ = predictOver(t, lines, size, known, 0)
	return n, s
}

// predictOver is predict for a router that restarts after every so many batches, 0 for
// never, if there is something to go on from. It returns how often it did.
func predictOver(t *testing.T, lines []hybridLine, size int, known kvgroup.Traits, every uint64) (n tally, s *Stream, restarts int) {
	t.Helper()
	x := kvmodel.NewIndex(t)
	s = New(x, 0, size)
	s.Know(known)
	var q kvindex.Query
	var text kvgroup.Text
	for _, l := range lines {
		switch l.Type {
		case "batch":
			v := s.Offer(l.Seq, l.Payload)
			if _, begun := s.Last(); v.Kind == Gap && !begun { // what came before cannot be had
				s.Skip(l.Seq)
				v = s.Offer(l.Seq, l.Payload)
			}
			if v.Kind != Apply {
				t.Fatalf("batch %d: %v", l.Seq, v)
			}
			if every > 0 && l.Seq%every == 0 && s.app.groups != nil {
				if after, again := restarted(t, x, s); again != nil {
					x, s, restarts = after, again, restarts+1
				}
			}
		case "request":
			locals := blockhash.Locals(nil, l.Tokens, size, blockhash.Key{})
			x.Overlap(locals, &q)
			text.Set(l.Tokens, "")
			p := kvgroup.Prompt{Seq: blockhash.Chain(nil, locals), Tokens: len(l.Tokens), Text: &text}
			// As decide.CachedTokens has it: the last token is computed in any case.
			usable, _ := s.Usable(q.Depth(0), p)
			got := min(usable, (len(l.Tokens)-1)/size) * size
			if s.Mismatch() != "" {
				got = 0 // the rank is not trusted
			}
			switch {
			case got == l.Cached:
				n.equal++
			case got > l.Cached:
				n.more++
				if n.more < 4 {
					t.Logf("%s: %d tokens, vLLM %d of %d", l.ID, got, l.Cached, len(l.Tokens))
				}
			default:
				n.less++
				if n.less < 4 && testing.Verbose() {
					t.Logf("%s: %d tokens, vLLM %d of %d", l.ID, got, l.Cached, len(l.Tokens))
				}
			}
			if l.Cached > 0 {
				n.warm++
			}
			n.found += got
			n.lost += max(0, l.Cached-got)
		}
	}
	return n, s, restarts
}

// restarted is a rank whose router has restarted and goes on from its snapshot; nil if
// there is nothing to go on from.
func restarted(t *testing.T, x *kvindex.Index, s *Stream) (*kvindex.Index, *Stream) {
	t.Helper()
	var file bytes.Buffer
	kept := false
	err := x.Snapshot(&file, func(_ kvindex.Rank, _ string, take func()) []byte {
		p, ok := s.Position()
		if !ok {
			return nil
		}
		note, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		kept = true
		take()
		return note
	})
	if err != nil {
		t.Fatal(err)
	}
	if !kept {
		return nil, nil
	}
	y := kvindex.New(kvindex.Options{})
	t.Cleanup(func() { _ = y.Close() })
	var p Position
	if err := y.Restore(&file, func(_ kvindex.Rank, _ string, note []byte) error { return json.Unmarshal(note, &p) }); err != nil {
		t.Fatal(err)
	}
	again := New(y, 0, s.app.size)
	again.Know(s.app.Traits)
	again.Resume(p)
	if seq, ok := again.Last(); !ok || seq != p.Seq {
		t.Fatalf("goes on from %d, %v, not %d", seq, ok, p.Seq)
	}
	return y, again
}

// Judged by vLLM's own cache manager: what the router counts is what the engine
// finds cached, in every request, where a full group with the finest blocks shows
// what the hashes stand for. Elsewhere it is never more.
func TestHybridCachesOfVLLM(t *testing.T) {
	t.Parallel()
	eachRecording(t, "*.jsonl.gz", 20, func(t *testing.T, lines []hybridLine) {
		head := lines[0]
		finest, full, chunked := head.Groups[0].Size, 0, false
		for _, g := range head.Groups {
			finest = min(finest, g.Size)
			chunked = chunked || g.Chunk > 0
		}
		for _, g := range head.Groups {
			if strings.Contains(g.Spec, "FullAttention") {
				full = g.Size
			}
		}
		n, s := predict(t, lines, head.Unit, kvgroup.Traits{})
		t.Logf("%+v", n)
		if n.more > 0 {
			t.Errorf("%d predictions of %d are more than vLLM's", n.more, n.equal+n.more+n.less)
		}
		if exact := full == finest && !chunked; exact && n.less > 0 {
			t.Errorf("%d predictions are less than vLLM's", n.less)
		}
		if chunked {
			n, _ := predict(t, lines, head.Unit, kvgroup.Traits{Chunk: head.chunk()})
			t.Logf("with the chunk stated: %+v", n)
			if n.more > 0 || full == finest && n.less > 0 {
				t.Errorf("with the chunk stated %d predictions are more than vLLM's, %d less", n.more, n.less)
			}
		}
		if full == 0 && (s.Mismatch() == "" || n.found > 0) {
			t.Errorf("without a full group: mismatch %q, %d tokens", s.Mismatch(), n.found)
		}
		if n.warm < 10 {
			t.Errorf("only %d requests met a warm cache", n.warm)
		}
		// In larger blocks less may be seen, never more.
		if n, _ := predict(t, lines, 2*head.Unit, kvgroup.Traits{}); n.more > 0 {
			t.Errorf("in blocks twice the size: %d predictions are more than vLLM's", n.more)
		}
	})
}

// A router that restarts goes on with what a hybrid rank had, counts of copies included: it
// predicts what it would have predicted without the restart.
func TestHybridCachesOverRestarts(t *testing.T) {
	t.Parallel()
	var went atomic.Int32
	t.Cleanup(func() {
		if went.Load() < 12 {
			t.Errorf("only %d recordings were gone on with", went.Load())
		}
	})
	eachRecording(t, "*.jsonl.gz", 20, func(t *testing.T, lines []hybridLine) {
		want, _ := predict(t, lines, lines[0].Unit, kvgroup.Traits{Chunk: lines[0].chunk()})
		got, _, restarts := predictOver(t, lines, lines[0].Unit, kvgroup.Traits{Chunk: lines[0].chunk()}, 5)
		if got != want {
			t.Errorf("after %d restarts %+v, without %+v", restarts, got, want)
		}
		if restarts > 3 && want.found > 0 {
			went.Add(1)
		}
	})
}

// A router that joins an engine in the middle, without its earlier events, counts no
// prefix that the engine would not reuse, wherever it begins.
func TestHybridCachesJoinedLate(t *testing.T) {
	t.Parallel()
	eachRecording(t, "*full*.jsonl.gz", 10, func(t *testing.T, lines []hybridLine) {
		found := 0
		for from := 1; from < len(lines); from += 7 {
			n, _ := predict(t, lines[from:], lines[0].Unit, kvgroup.Traits{})
			if found += n.found; n.more > 0 {
				t.Fatalf("from line %d on: %d predictions are more than vLLM's", from+1, n.more)
			}
		}
		if found == 0 {
			t.Error("nothing was found")
		}
	})
}

// As above, for engines that draft with EAGLE and so compute the last block of each
// hit anew, which their events do not say.
func TestLastBlockDroppedByVLLM(t *testing.T) {
	t.Parallel()
	eachRecording(t, "eagle/*.jsonl.gz", 10, func(t *testing.T, lines []hybridLine) {
		head := lines[0]
		finest := head.Groups[0].Size
		for _, g := range head.Groups {
			finest = min(finest, g.Size)
		}
		exact := false
		for _, g := range head.Groups {
			exact = exact || strings.Contains(g.Spec, "FullAttention") && g.Size == finest
		}
		if n, _ := predict(t, lines, head.Unit, kvgroup.Traits{}); n.more == 0 {
			t.Errorf("as a recording of dropped blocks it proves nothing: %+v", n)
		}
		n, _ := predict(t, lines, head.Unit, kvgroup.Traits{Drops: true})
		t.Logf("%+v", n)
		if n.more > 0 || exact && n.less > 0 {
			t.Errorf("%d predictions are more than vLLM's, %d less", n.more, n.less)
		}
		if n.warm < 10 {
			t.Errorf("only %d requests met a warm cache", n.warm)
		}
		if n, _ := predict(t, lines, 2*head.Unit, kvgroup.Traits{Drops: true}); n.more > 0 {
			t.Errorf("in blocks twice the size: %d predictions are more than vLLM's", n.more)
		}
	})
}

// Some requests of the recording asked vLLM to report hits as stores. Copies are then
// counted that are none, unless it is stated that they shall not be.
func TestHitsReportedByVLLM(t *testing.T) {
	t.Parallel()
	eachRecording(t, "report/*.jsonl.gz", 3, func(t *testing.T, lines []hybridLine) {
		if n, _ := predict(t, lines, lines[0].Unit, kvgroup.Traits{}); n.more == 0 {
			t.Errorf("as a recording of hits that count as copies it proves nothing: %+v", n)
		}
		n, _ := predict(t, lines, lines[0].Unit, kvgroup.Traits{IgnoreCopies: true, Chunk: lines[0].chunk()})
		t.Logf("%+v", n)
		if n.more > 0 || n.equal < n.warm/2 {
			t.Errorf("with single copies: %+v", n)
		}
	})
}
