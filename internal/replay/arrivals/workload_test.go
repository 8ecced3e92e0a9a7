package arrivals

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/dynctl/dynctl/internal/rig/external"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
)

// TestConversationFacts checks the reader and the figures against what is known
// of the conversation trace.
func TestConversationFacts(t *testing.T) {
	path := external.Conversation(t)
	if testing.Short() {
		t.Skip("145 million tokens, twice")
	}
	src, err := FromTrace(func() (*trace.Reader, error) { return trace.Open(path, nil, trace.Options{}) })
	if err != nil {
		t.Fatal(err)
	}
	s, err := Describe(src)
	if err != nil {
		t.Fatal(err)
	}
	type facts struct {
		Requests, Blocks, Distinct, Reused, LongestPath, Roots, OSL int
		Span                                                        time.Duration
	}
	got := facts{int(s.Requests), int(s.Blocks), int(s.Distinct), int(s.Reused), s.LongestPath, s.Roots, int(s.OSL.Mean + .5), s.Span}
	if d := cmp.Diff(facts{12031, 288500, 182790, 105710, 247, 1, 343, 3536999 * time.Millisecond}, got); d != "" {
		t.Errorf("facts (-want +got):\n%s", d)
	}
	if isl := int(s.ISL.Mean + .5); isl != 12036 && isl != 12035 {
		t.Errorf("mean length of prompts %d", isl)
	}
	if got := fmt.Sprintf("%.1f", 100*s.ReuseRatio); got != "36.6" {
		t.Errorf("reuse %s%%", got)
	}
	// One cache without limit, with blocks that are cut smaller, saves as much.
	for _, size := range []int{512, 64} {
		b, err := Bound(src, size, 0)
		if err != nil || b < s.TokenReuse-0.001 || b > s.TokenReuse+0.01 {
			t.Errorf("bound with blocks of %d: %.4f, reuse of tokens %.4f, %v", size, b, s.TokenReuse, err)
		}
	}
}

func request(n int, at time.Duration, isl, size int, kind string, blocks ...uint64) Request {
	return Request{Number: n, At: at, Request: trace.Request{ISL: isl, OSL: 10, BlockSize: size, IDs: kind, Blocks: blocks}}
}

// TestExpand: equal blocks give equal tokens, everything else differs.
func TestExpand(t *testing.T) {
	a := request(0, 0, 40, 16, trace.PrefixIDs, 1, 2, 3)
	b := request(1, 0, 40, 16, trace.PrefixIDs, 1, 2, 4)
	c := request(2, 0, 40, 16, trace.PrefixIDs, 1, 2) // the rest has no name
	ta, tb, tc := a.Expand(nil), b.Expand(nil), c.Expand(nil)
	for _, x := range [][]uint32{ta, tb, tc} {
		if len(x) != 40 {
			t.Fatalf("%d tokens of 40", len(x))
		}
	}
	if !slices.Equal(ta[:32], tb[:32]) || !slices.Equal(ta[:32], tc[:32]) {
		t.Error("the shared prefix differs")
	}
	if slices.Equal(ta[32:], tb[32:]) || slices.Equal(ta[32:], tc[32:]) {
		t.Error("different blocks are equal")
	}
	longer := request(3, 0, 48, 16, trace.PrefixIDs, 1, 2, 3)
	if !slices.Equal(longer.Expand(nil)[:40], ta) {
		t.Error("a partial block is not the beginning of the whole one")
	}
	a.Tokens = make(trace.Tokens, 40)
	if got := a.Expand(nil); !slices.Equal(got, a.Tokens) {
		t.Error("recorded tokens are not used")
	}
}

func TestBound(t *testing.T) {
	src := FromSlice([]Request{
		request(0, 0, 64, 16, trace.PrefixIDs, 1, 2, 3, 4),
		request(1, 1, 64, 16, trace.PrefixIDs, 1, 2, 5, 6),
		request(2, 2, 65, 16, trace.PrefixIDs, 1, 2, 3, 4),
	})
	for _, tt := range []struct {
		blocks int
		hits   int
	}{
		{0, 32 + 64}, // the last token is always computed, so block 4 counts in the last
		{6, 32 + 64},
		{4, 32 + 32}, // 3 and 4 went when 5 and 6 came
		{2, 32 + 32}, // leaves go first
		{1, 16 + 16},
	} {
		got, err := Bound(src, 16, tt.blocks)
		if want := float64(tt.hits) / 193; err != nil || got != want {
			t.Errorf("%d blocks: %.4f, want %.4f, %v", tt.blocks, got, want, err)
		}
	}
}

func TestDescribe(t *testing.T) {
	src := FromSlice([]Request{
		request(0, 0, 64, 16, trace.LocalIDs, 1, 2, 3, 4),
		request(1, time.Second, 60, 16, trace.LocalIDs, 1, 2, 5),
		request(2, 2000*time.Second, 40, 16, trace.LocalIDs, 2, 2),
	})
	s, err := Describe(src)
	if err != nil {
		t.Fatal(err)
	}
	want := *s
	want.Requests, want.Blocks, want.Distinct, want.Reused, want.Roots, want.Shared, want.BlockSize, want.ISL.Max = 3, 9, 7, 2, 2, 2, 16, 64
	if d := cmp.Diff(want, *s, cmpopts.EquateNaNs()); d != "" {
		t.Errorf("the workload (-want +got):\n%s", d)
	}
	if len(s.Rate) > maxBuckets {
		t.Errorf("the curve has %d buckets, more than %d", len(s.Rate), maxBuckets)
	}
	if len(s.Top) != 1 || s.Top[0].Blocks != 2 || s.Top[0].Requests != 2 || s.Top[0].Children != 2 {
		t.Errorf("prefixes %+v", s.Top)
	}
	sum := uint64(0)
	for _, n := range s.Rate {
		sum += n
	}
	if sum != 3 {
		t.Errorf("%d requests in the curve", sum)
	}
	if err := s.AddCaches(src); err != nil || len(s.Cache) != 1 || s.Cache[0].Blocks != 7 {
		t.Errorf("caches %+v, %v", s.Cache, err)
	}
	if s, err = Describe(FromSlice(nil)); err != nil || s.Requests != 0 {
		t.Errorf("nothing: %+v, %v", s, err)
	}
}
