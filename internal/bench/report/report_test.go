package report

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"

	"github.com/dynctl/dynctl/internal/bench/experiment"
	"github.com/dynctl/dynctl/internal/bench/fleet"
	"github.com/dynctl/dynctl/internal/bench/loadgen"
	"github.com/dynctl/dynctl/internal/bench/plan"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// scripted is a Bench with made-up figures: local 20+0.09n ms, remote 90+0.055n,
// times factor.
type scripted struct {
	factor float64
	rng    *rand.Rand
}

func (s scripted) measure(c plan.Cell) *experiment.Measure {
	n := float64(c.ISL())
	t := 20 + 0.09*n
	if c.Arm == plan.Remote {
		t = 90 + 0.055*n
	}
	t *= s.factor * math.Exp(0.02*s.rng.NormFloat64())
	d := loadgen.Dist{N: 8, Mean: t, P50: t, P90: t * 1.2, P95: t * 1.3, Max: t * 1.4}
	hit, moved, bytes := 0.0, float64(8*(c.ISL()/16*16)), 1e6
	q, p, x, f, r := 1.0, t*0.8, 5.0, 8.0, 0.2
	m := &experiment.Measure{
		Requests: 8, TTFT: d, TTFTIntended: d, E2E: d, TPOT: loadgen.Dist{N: 8, P50: 10}, ITL: loadgen.Dist{N: 80, P50: 10, Max: 25 + n/200},
		Dispatch: loadgen.Dist{N: 8, P50: 0.1, P95: 0.3}, Good: 8, GoodPerSecond: 3, RequestsPerSecond: 3, TokensPerSecond: 30,
		InFlight: 1, ExactISL: 8, ExactOSL: 8, PathOK: 8, HitShare: &hit, Stages: experiment.Stages{Router: &r, PrefillQueue: &q, Prefill: &p}, Seconds: 2,
	}
	if c.Arm == plan.Remote {
		m.TransferTokens, m.ExpectedTransferTokens, m.TransferBytes = &moved, moved, &bytes
		m.Stages.Transfer, m.Stages.FirstDecode = &x, &f
	}
	return m
}

// result runs a scripted experiment.
func result(t *testing.T, factor float64, seed uint64) *experiment.Result {
	t.Helper()
	s := plan.Spec{
		Schema: plan.Schema, ISL: []int{256, 512, 1024, 2048, 4096, 8192}, OSL: 16, Loads: []plan.Load{{Concurrency: 1}, {Concurrency: 16}}, Cached: []float64{0},
		Repeats: 5, MaxRepeats: 10, Level: 0.95, Objective: "ttft", Seed: seed, Salt: "s", SLO: plan.SLO{TTFT: 800 * time.Millisecond, ITL: 40 * time.Millisecond},
	}
	b := scripted{factor, rand.New(rand.NewPCG(seed, 1))}
	var now time.Duration
	r := &experiment.Runner{
		Spec: s, Block: 16, Now: func() time.Duration { now += time.Second; return now },
		Measure: func(ctx context.Context, c plan.Cell) (*experiment.Measure, error) { return b.measure(c), ctx.Err() },
	}
	res, err := r.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	res.Name, res.Version, res.Created = "run-test", "test", time.Date(2026, 11, 21, 14, 23, 0, 0, time.UTC)
	res.Target = &fleet.Facts{Model: "m<script>", Block: 16, Prefill: 1, Decode: 1, Engines: []string{"sim"}}
	return res
}

func TestText(t *testing.T) {
	r := result(t, 1, 1)
	var b bytes.Buffer
	if err := Text(&b, r, TextOptions{Folder: "run-test", Live: 99}); err != nil {
		t.Fatal(err)
	}
	out := b.String()
	for _, want := range []string{
		"RESULT  concurrency 16: remote prefill has the lower ttft p50 above about ", "RECOMMEND  eff_isl ", "nonCachedTokens: ", "VALID ",
		"CROSSOVER BY LOAD", "objective ttft", "live load (99 running) is above the highest level tested (16): add --concurrency 128", "GOOD% L/R", "ok  transfer",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("the text lacks %q", want)
		}
	}
	if strings.ContainsFunc(out, func(r rune) bool { return r > 126 || r < 32 && r != '\n' }) {
		t.Error("the text is not plain ASCII")
	}
	b.Reset()
	if err := Text(&b, r, TextOptions{Width: 80}); err != nil {
		t.Fatal(err)
	}
	for _, l := range strings.Split(b.String(), "\n") {
		if strings.HasPrefix(l, "  ") && len(l) > 80 && !strings.Contains(l, " --") && !strings.ContainsAny(l, "(%") {
			t.Errorf("%d columns: %q", len(l), l)
		}
	}
	// A gate that fails takes the recommendation away from the text, too.
	r.Valid, r.Recommend, r.Sentence = false, nil, "not valid: x"
	b.Reset()
	if err := Text(&b, r, TextOptions{}); err != nil || strings.Contains(b.String(), "RECOMMEND") || !strings.Contains(b.String(), "NOT VALID") {
		t.Error(b.String())
	}
}

// What the router learned by itself stands beside what was measured, with a word on
// whether both agree where they are of the same load.
func TestTextHasWhatWasLearned(t *testing.T) {
	r := result(t, 1, 1)
	m := r.Groups[0].Crossing("ttft")
	if m == nil || m.At.Low == nil || m.At.High == nil {
		t.Fatalf("nothing was measured: %+v", r.Groups[0])
	}
	low, high := int(*m.At.Low), int(*m.At.High)
	far, farther := high+100, high+200
	for _, c := range []struct {
		learned admin.Crossing
		want    string
	}{
		{admin.Crossing{Low: &low, Tokens: &high, High: &high}, "agrees with concurrency 1"},
		{admin.Crossing{Low: &low, Tokens: &low}, "agrees with concurrency 1"},
		{admin.Crossing{Low: &far, Tokens: &far, High: &farther}, "differs from concurrency 1"},
		{admin.Crossing{}, "differs from concurrency 1"},
		{admin.Crossing{Running: 8, Low: &low, Tokens: &high, High: &high}, "at 8 running answers"},
	} {
		r.Learned = []admin.Crossing{c.learned}
		var b bytes.Buffer
		if err := Text(&b, r, TextOptions{Width: 200}); err != nil {
			t.Fatal(err)
		}
		_, out, _ := strings.Cut(b.String(), "router learned")
		out, _, _ = strings.Cut(out, "\n")
		if !strings.Contains(out, c.learned.Sentence()) || !strings.Contains(out, c.want) || c.learned.Running > 0 && strings.Contains(out, "concurrency") {
			t.Errorf("%s: %q", c.learned.Sentence(), out)
		}
	}
}

// The page stands alone: it loads nothing, runs nothing, and what comes from
// outside is escaped.
func TestHTMLIsSelfContained(t *testing.T) {
	r := result(t, 1, 1)
	var b bytes.Buffer
	if err := HTML(&b, r); err != nil {
		t.Fatal(err)
	}
	page := b.String()
	for _, bad := range []string{"src=", "href=", "@import", "url(", "<script>", "javascript:", "m<script"} {
		if strings.Contains(page, bad) {
			t.Errorf("the page has %q", bad)
		}
	}
	if strings.Count(page, "<svg") < 9 || strings.Count(page, "<svg") != strings.Count(page, "</svg>") {
		t.Errorf("%d drawings", strings.Count(page, "<svg"))
	}
	_, data, ok := strings.Cut(page, `<script type="application/json" id="result">`)
	if !ok {
		t.Fatal("no data in the page")
	}
	data, _, _ = strings.Cut(data, "</script>")
	var back experiment.Result
	if err := json.Unmarshal([]byte(data), &back); err != nil || len(back.Cells) != len(r.Cells) {
		t.Errorf("the data in the page: %v", err)
	}
	// Every drawing is well-formed XML.
	rest := page
	for {
		k := strings.Index(rest, "<svg")
		if k < 0 {
			break
		}
		e := strings.Index(rest[k:], "</svg>") + k + len("</svg>")
		d := xml.NewDecoder(strings.NewReader(rest[k:e]))
		for {
			if _, err := d.Token(); err != nil {
				if !errors.Is(err, io.EOF) {
					t.Errorf("drawing: %v in %.200s", err, rest[k:e])
				}
				break
			}
		}
		if strings.Contains(rest[k:e], "NaN") || strings.Contains(rest[k:e], "Inf") {
			t.Errorf("a drawing has no number somewhere: %.200s", rest[k:e])
		}
		rest = rest[e:]
	}
}

// An empty and a one-cell result can be shown, too.
func TestPoorResults(t *testing.T) {
	full := result(t, 1, 1)
	empty := &experiment.Result{Schema: experiment.Schema, Spec: full.Spec, Sentence: "nothing was measured", Partial: "interrupted"}
	one := *full
	one.Groups = []experiment.GroupResult{{Group: full.Groups[0].Group, Points: full.Groups[0].Points[:1]}}
	for _, r := range []*experiment.Result{empty, &one} {
		var b bytes.Buffer
		if err := errors.Join(Text(&b, r, TextOptions{}), HTML(&b, r), plot(&b, r), CSV(&b, r.Cells)); err != nil {
			t.Error(err)
		}
	}
}

func TestFolder(t *testing.T) {
	r := result(t, 1, 1)
	dir := filepath.Join(t.TempDir(), "runs", "run-1")
	f, err := CreateFolder(dir, &plan.Run{Spec: r.Spec})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := CreateFolder(dir, &plan.Run{Spec: r.Spec}); err == nil {
		t.Error("a second run may write into the folder of the first")
	}
	for _, c := range r.Cells[:3] {
		f.Request(c.Cell, &loadgen.Result{ID: "a\"b", ISL: 5, OSL: 6, Sent: time.Millisecond, Status: 500, Kind: "failed", Err: "bad \x00 \"thing\""})
		f.Request(c.Cell, &loadgen.Result{ID: "ok", First: time.Second, OutputTokens: 6, Path: "local\x1b\x7f", Good: true})
		if err := f.Cell(c); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	// A line that was cut by a crash is left out.
	j, err := os.OpenFile(filepath.Join(dir, journalFile), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := j.WriteString(`{"cell":{"id":"cut"},"meas`); err != nil {
		t.Fatal(err)
	}
	j.Close()
	f, run, done, err := ResumeFolder(dir)
	if err != nil || len(done) != 3 {
		t.Fatal(err, len(done))
	}
	if diff := cmp.Diff(r.Spec, run.Spec); diff != "" {
		t.Error(diff)
	}
	f.Request(r.Cells[4].Cell, &loadgen.Result{ID: "later"})
	if err := f.Finish(r); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{resultFile, planFile, cellsFile, requestsFile, htmlFile, plotFile} {
		if st, err := os.Stat(filepath.Join(dir, name)); err != nil || st.Size() == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
	raw, err := os.Open(filepath.Join(dir, requestsFile))
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	z, err := zstd.NewReader(raw)
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	lines := 0
	for d := json.NewDecoder(z); ; lines++ {
		var v map[string]any
		if err := d.Decode(&v); err != nil {
			if !errors.Is(err, io.EOF) {
				t.Error(err)
			}
			break
		}
		if v["cell"] == "" || v["id"] == nil {
			t.Errorf("%v", v)
		}
	}
	if lines != 7 {
		t.Errorf("%d requests, want 7", lines)
	}
	back, err := ReadResult(dir)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(r.Groups, back.Groups); diff != "" {
		t.Error(diff)
	}
	c, err := os.Open(filepath.Join(dir, cellsFile))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	rows, err := csv.NewReader(c).ReadAll()
	if err != nil || len(rows) != len(r.Cells)+1 {
		t.Errorf("%v, %d rows", err, len(rows))
	}
	if _, _, _, err := ResumeFolder(t.TempDir()); err == nil {
		t.Error("an empty folder can be resumed")
	}
}

func TestCompare(t *testing.T) {
	a, same, slow := result(t, 1, 1), result(t, 1, 2), result(t, 1.2, 3)
	find := func(cs []Change, metric string) Change {
		for _, c := range cs {
			if c.Metric == metric && c.Group.Load.Concurrency == 16 && c.Arm == plan.Local {
				return c
			}
		}
		t.Fatalf("no %s", metric)
		return Change{}
	}
	if c := find(Compare(a, same), "ttft_p50"); c.Verdict != "same" && math.Abs(c.Change.Value) > 0.02 {
		t.Errorf("equal runs differ: %+v", c)
	}
	cs := Compare(a, slow)
	c := find(cs, "ttft_p50")
	if c.Verdict != "worse" || c.Change.Low > 0.2 || c.Change.High < 0.2 || c.Change.Low < 0.15 {
		t.Errorf("20%% slower: %+v", c)
	}
	if better := find(Compare(slow, a), "ttft_p50"); better.Verdict != "better" {
		t.Errorf("%+v", better)
	}
	for text, fails := range map[string]bool{"ttft_p50>5%": true, "ttft_p50>50%": false, "goodput<-3%": false} {
		cond, err := ParseCondition(text)
		if err != nil || (len(cond.Failed(cs)) > 0) != fails {
			t.Errorf("%s: %v %v", text, cond.Failed(cs), err)
		}
	}
	for _, bad := range []string{"", "x>1%", "ttft_p50", "ttft_p50>x", "ttft_p50>NaN%"} {
		if _, err := ParseCondition(bad); err == nil {
			t.Errorf("%q passed", bad)
		}
	}
	var b bytes.Buffer
	if err := CompareText(&b, a, slow, cs); err != nil || !strings.Contains(b.String(), "for the worse") {
		t.Error(err)
	}
}
