package plan

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestParseISL(t *testing.T) {
	for _, c := range []struct {
		in   string
		want []int
		bad  string
	}{
		{"256:2048:x2", []int{256, 512, 1024, 2048}, ""},
		{"1k:4k:+1k", []int{1024, 2048, 3072, 4096}, ""},
		{"300, 100,100", []int{100, 300}, ""},
		{"256:512:x2,384", []int{256, 384, 512}, ""},
		{"", nil, "not a number"},
		{"256:100:x2", nil, "LOW"},
		{"1:10:x1", nil, "factor"},
		{"1:10:xNaN", nil, "factor"},
		{"1:10:xInf", nil, "factor"},
		{"1:16777216:+1", nil, "more than"},
		{"1:10", nil, "want"},
		{"1:10:2", nil, "step"},
		{"-5", nil, "not a number"},
	} {
		got, err := ParseISL(c.in)
		if c.bad != "" {
			if err == nil || !strings.Contains(err.Error(), c.bad) {
				t.Errorf("%q: error %v, want %q", c.in, err, c.bad)
			}
			continue
		}
		if diff := cmp.Diff(c.want, got); err != nil || diff != "" {
			t.Errorf("%q: %v %s", c.in, err, diff)
		}
	}
}

func FuzzParseISL(f *testing.F) {
	for _, s := range []string{"256:16384:x2", "1:2:+1", "5,6"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := ParseISL(s)
		if err == nil && (len(got) == 0 || len(got) > 1000*(1+strings.Count(s, ",")) || got[0] < 1) {
			t.Errorf("%q gives %d points", s, len(got))
		}
	})
}

func spec() Spec {
	return Spec{
		ISL: []int{256, 1024, 4096}, OSL: 16, Loads: []Load{{Concurrency: 1}, {Rate: 4}}, Cached: []float64{0, 0.5},
		Repeats: 4, MaxRepeats: 8, Level: 0.95, Objective: "ttft", Seed: 3,
	}
}

func TestValidate(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*Spec)
		limits Limits
		want   string
	}{
		{"fine", func(*Spec) {}, Limits{MaxModelLen: 8192}, ""},
		{"too long", func(*Spec) {}, Limits{MaxModelLen: 4100}, "lower the end of --isl to 4084"},
		{"no room", func(*Spec) {}, Limits{KVTokens: 2000}, "does not fit a rank's cache"},
		{"no load", func(s *Spec) { s.Loads = nil }, Limits{}, "--concurrency or --rate"},
		{"both loads", func(s *Spec) { s.Loads = []Load{{1, 1}} }, Limits{}, "neither"},
		{"all cached", func(s *Spec) { s.Cached = []float64{1} }, Limits{}, "--cached"},
		{"objective", func(s *Spec) { s.Objective = "itl" }, Limits{}, "--slo itl"},
		{"repeats", func(s *Spec) { s.MaxRepeats = 1 }, Limits{}, "--max-repeat"},
	} {
		s := spec()
		c.change(&s)
		err := s.Validate(c.limits)
		if (err == nil) != (c.want == "") || !strings.Contains(fmt.Sprint(err), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}

// Each point is measured by both arms, back to back, and each arm comes first
// as often as the other.
func TestPairsAreInterleaved(t *testing.T) {
	s := spec()
	var want []Wanted
	for _, g := range s.Groups() {
		want = append(want, s.Grid(g, 16)...)
	}
	pairs := s.Pairs("grid", want)
	if len(pairs) != 4*4*3 {
		t.Fatalf("%d pairs", len(pairs))
	}
	first := map[string]int{}
	seen := map[string]bool{}
	for i, p := range pairs {
		if p[0].EffISL != p[1].EffISL || p[0].Load != p[1].Load || p[0].Repeat != p[1].Repeat || p[0].Arm == p[1].Arm {
			t.Fatalf("not a pair: %+v", p)
		}
		if i > 0 && p[0].Repeat < pairs[i-1][0].Repeat {
			t.Fatal("repeats are not measured one after the other")
		}
		for _, c := range p {
			if seen[c.ID] {
				t.Fatalf("%s twice", c.ID)
			}
			seen[c.ID] = true
		}
		if p[0].Arm == Local {
			first[Group{p[0].Load, p[0].CachedShare}.Key()+string(rune(p[0].EffISL))]++
		}
	}
	for k, n := range first {
		if n != 2 {
			t.Errorf("%s: local came first %d times of 4", k, n)
		}
	}
	again := s.Pairs("grid", want)
	if diff := cmp.Diff(pairs, again); diff != "" {
		t.Error("the same spec gives another order")
	}
	if c := CostOf(pairs); c.Cells != 96 || c.Requests <= c.Cells {
		t.Errorf("cost %+v", c)
	}
}

func TestPoint(t *testing.T) {
	for _, c := range []struct {
		isl         int
		share       float64
		eff, cached int
	}{{1000, 0, 1000, 0}, {1000, 0.5, 504, 496}, {1024, 0.5, 512, 512}, {16, 0.99, 16, 0}, {32, 0.99, 16, 16}} {
		if eff, cached := Point(c.isl, c.share, 16); eff != c.eff || cached != c.cached {
			t.Errorf("%d at %v: %d and %d", c.isl, c.share, eff, cached)
		}
	}
	if got := CachedFor(512, 0.5, 16); got != 512 {
		t.Error(got)
	}
}

func TestParseSLO(t *testing.T) {
	s, err := ParseSLO("ttft=800ms, itl=40ms")
	if err != nil || s.TTFT != 800*time.Millisecond || s.ITL != 40*time.Millisecond {
		t.Error(s, err)
	}
	for _, bad := range []string{"ttft", "ttft=-1s", "x=1s", "ttft=1"} {
		if _, err := ParseSLO(bad); err == nil {
			t.Errorf("%q passed", bad)
		}
	}
}
