package decide

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

const (
	readableFile = "testdata/decisions.txt"
	// eachShown is how many of the readable decisions show one thing, where so many do.
	eachShown = 4
)

// seldom makes inputs to which something applies that someInput makes seldom or never.
var seldom = []func(in *Input){
	func(in *Input) { in.Facts.Multimodal = true },
	func(in *Input) { in.Facts.Continues = true },
	func(in *Input) { in.Facts.ServerTools = true },
	func(in *Input) { in.Facts.PromptLogprobs = true },
	func(in *Input) { in.Facts.MaxTokens = 0 },
	func(in *Input) { in.Facts.Prompts = 3 },
	func(in *Input) { in.Force, in.GaveUp = route.ForceLocal, string(attempt.Ended) },
	func(in *Input) { in.Force, in.GaveUp = route.ForceLocal, string(attempt.Status5xx) },
	func(in *Input) { // a burst before costs are known
		in.Rule.Auto, in.Rule.Threshold, in.Rule.PrefillGate, in.Rule.StartGate = true, 500, 0, 2000
		for i := range in.Decode.Candidates {
			in.Decode.Candidates[i].PrefillTokens = 0
		}
	},
	func(in *Input) { // nobody decodes alone, and the request needs one who does
		sglang(in.DecodePeers, workers.Decode)
		in.Facts.N = 2
	},
	func(in *Input) { // a pair of SGLang's engines, or a decode engine without its pair
		sglang(in.DecodePeers, workers.Decode)
		if in.Facts.ISL%2 == 0 {
			sglang(in.PrefillPeers, workers.Prefill)
		}
	},
	func(in *Input) { in.Decode.Busy.Requests, in.Prefill.Busy.Requests = 2, 2 },
	func(in *Input) { // two models, revisions and slices
		for i, p := range append(in.DecodePeers[:len(in.DecodePeers):len(in.DecodePeers)], in.PrefillPeers...) {
			p.Worker.Models = []string{[]string{"one", "two"}[i%2]}
			p.Worker.Revision = []string{"a", "b", ""}[i%3]
			p.Worker.Slice = []string{"", "x", "y"}[i%3]
		}
	},
	func(in *Input) { // caches of another block size
		for i, p := range in.PrefillPeers {
			p.Worker.BlockSize *= 1 + i%2
		}
	},
	func(in *Input) { in.Facts.RoutedExperts = true },
}

func sglang(peers []workers.Peer, role workers.Role) {
	for _, p := range peers {
		p.Worker.Engine, p.Worker.Connector, p.Worker.Role = workers.SGLang, workers.ConnectorSGLang, role
	}
}

// TestDecisionsToRead holds some of the golden decisions as text that a person can read: some
// with each path, reason, policy, refusal and exclusion. With -update those that are in the
// file stay there, so that a difference is one of decisions, and what is shown too seldom is
// added.
func TestDecisionsToRead(t *testing.T) {
	file := filepath.FromSlash(readableFile)
	b, err := os.ReadFile(file)
	if err != nil && !(*update && errors.Is(err, fs.ErrNotExist)) {
		t.Fatal(err)
	}
	was := strings.Split(strings.TrimSuffix(string(b), "\n"), "\n\n")
	kept := map[int]bool{}
	for _, d := range was {
		number, _, _ := strings.Cut(d, " ")
		if n, err := strconv.Atoi(number); err == nil {
			kept[n] = true
		}
	}
	shown := map[string]int{}
	makeDecisions(func(i int, in *Input, p *Plan) {
		if kept[i] {
			for _, what := range shows(in, p) {
				shown[what]++
			}
		}
	})
	var now []string
	makeDecisions(func(i int, in *Input, p *Plan) {
		add := kept[i]
		for _, what := range shows(in, p) {
			if *update && !kept[i] && shown[what] < eachShown {
				add = true
			}
		}
		if !add {
			return
		}
		now = append(now, fmt.Sprintf("%d %s", i, readable(in, p)))
		if !kept[i] {
			for _, what := range shows(in, p) {
				shown[what]++
			}
		}
	})
	sameDecisions(t, was, now)
	for _, what := range everything(t) {
		if shown[what] == 0 {
			t.Errorf("no decision to read shows %s: seldom has none, or -update was not run", what)
		}
	}
	if *update {
		if err := os.WriteFile(file, []byte(strings.Join(now, "\n\n")+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// shows lists what a decision is an example of.
func shows(in *Input, p *Plan) (list []string) {
	add := func(kind string, what any) { list = append(list, fmt.Sprint(kind, " ", what)) }
	if p.Err != nil {
		add("refusal", refusal(in, p).Code)
		add("error", p.Err)
	} else {
		add("path", p.Path)
		add("reason", p.Reason)
		add("costs", p.CostRevision > 0)
	}
	for _, phase := range []struct {
		name string
		in   *selector.Input
		out  *selector.Ranking
	}{{"decode", &in.Decode, &p.Decode}, {"prefill", &in.Prefill, &p.Prefill}} {
		if phase.out.Policy == "" {
			continue
		}
		add(phase.name+" policy", phase.out.Policy)
		add(phase.name+" drawn", phase.out.Sampled)
		if phase.out.TieBreak != selector.TieNone {
			add("tie by", phase.out.TieBreak)
		}
		for i := range phase.in.Candidates {
			switch c := &phase.in.Candidates[i]; c.ExcludedCode {
			case "":
			case selector.ExcludedGiven:
				add("excluded:", c.Excluded)
			default:
				add("excluded:", c.ExcludedCode)
			}
		}
	}
	return list
}

// everything lists what the readable decisions must show at least.
func everything(t *testing.T) (list []string) {
	t.Helper()
	for _, p := range []route.Path{route.Local, route.Remote} {
		list = append(list, "path "+string(p))
	}
	for _, p := range selector.Policies() {
		list = append(list, "decode policy "+string(p), "prefill policy "+string(p))
	}
	for _, code := range []api.Code{api.CodeInvalidRequest, api.CodeNoDecodeWorker, api.CodeNoPrefillWorker, api.CodeOverloaded} {
		list = append(list, "refusal "+string(code))
	}
	for _, code := range []string{selector.ExcludedDecodeBlocks, selector.ExcludedPrefillTokens, selector.ExcludedWaiting, selector.ExcludedKVUsage, selector.ExcludedRequests} {
		list = append(list, "excluded: "+code)
	}
	f, err := parser.ParseFile(token.NewFileSet(), filepath.FromSlash("../../route/reason.go"), nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	reasons := 0
	ast.Inspect(f, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		for _, v := range spec.Values {
			if lit, ok := v.(*ast.BasicLit); ok {
				text, err := strconv.Unquote(lit.Value)
				if err != nil {
					t.Fatal(err)
				}
				reasons++
				list = append(list, "reason "+text)
			}
		}
		return true
	})
	if reasons == 0 {
		t.Error("no reasons are found in package decision")
	}
	return list
}

// refusal is what the client of a request without a plan gets.
func refusal(in *Input, p *Plan) *api.Error {
	run := Run{In: *in, Plan: *p}
	return api.FromError(run.Refusal())
}

// readable is a decision in some lines for a person: what was chosen and why, what was
// asked, and how the ranks of each phase compare.
func readable(in *Input, p *Plan) string {
	var b strings.Builder
	if p.Err != nil {
		fmt.Fprintf(&b, "refused %s: %s", refusal(in, p).Code, refusal(in, p).Message)
	} else {
		fmt.Fprintf(&b, "%s %s: %s", p.Path, p.Reason, p.Words(in))
	}
	f, c := &in.Facts, &in.Rule
	fmt.Fprintf(&b, "\n  request  %s of %d tokens (%s)", f.Kind, f.ISL, f.Source)
	for _, x := range []struct {
		is   bool
		what string
	}{
		{!f.Splittable, "not split"},
		{f.N > 1, fmt.Sprintf("%d answers", f.N)},
		{f.Prompts > 1, fmt.Sprintf("%d prompts", f.Prompts)},
		{f.MaxTokens == 0, "no output"},
		{f.Multimodal, "multimodal"},
		{f.Opaque, "opaque"},
		{f.Continues, "continues a response"},
		{f.ServerTools, "server tools"},
		{f.PromptLogprobs, "logprobs of the prompt"},
		{f.RoutedExperts, "experts of the prompt"},
		{in.Force != route.ForceAuto, "forced " + string(in.Force)},
		{in.GaveUp != "", "gave up " + in.GaveUp},
	} {
		if x.is {
			b.WriteString(", " + x.what)
		}
	}
	fmt.Fprintf(&b, "\n  rule     threshold %d on %s", p.Threshold, p.On)
	for _, x := range []struct {
		is   bool
		what string
	}{
		{c.Auto, "auto"},
		{c.Fallback == FallbackError, "fallback error"},
		{c.PrefillGate > 0, fmt.Sprintf("prefill gate %d", c.PrefillGate)},
		{c.StartGate > 0, fmt.Sprintf("start gate %d", c.StartGate)},
		{c.DecodeGate > 0, fmt.Sprintf("decode gate %g", c.DecodeGate)},
	} {
		if x.is {
			b.WriteString(", " + x.what)
		}
	}
	readableRanking(&b, "decode ", &in.Decode, &p.Decode, p.CachedTokens)
	readableRanking(&b, "prefill", &in.Prefill, &p.Prefill, p.PrefillCached)
	if p.CostRevision > 0 {
		fmt.Fprintf(&b, "\n  costs    local %.1f ms, remote %.1f ms", p.Costs.Local, p.Costs.Remote)
	}
	return b.String()
}

func readableRanking(b *strings.Builder, phase string, in *selector.Input, r *selector.Ranking, cached int) {
	if r.Policy == "" {
		return
	}
	fmt.Fprintf(b, "\n  %s  %s", phase, r.Policy)
	const most = 3
	for n, i := range r.Order {
		if n == most {
			fmt.Fprintf(b, ", %d more", len(r.Order)-most)
			break
		}
		c := &in.Candidates[i]
		fmt.Fprintf(b, "%s %s %.4g", map[bool]string{true: ":", false: ","}[n == 0], c.Rank, c.Cost)
	}
	if cached > 0 {
		fmt.Fprintf(b, "; %d tokens cached", cached)
	}
	if r.TieBreak != selector.TieNone {
		fmt.Fprintf(b, "; tie of %d by %s", r.Tied, r.TieBreak)
	}
	if r.Sampled {
		b.WriteString("; drawn")
	}
	for i := range in.Candidates {
		if c := &in.Candidates[i]; c.ExcludedCode != "" {
			fmt.Fprintf(b, "; not %s (%s)", c.Rank, in.Why(i))
		}
	}
}
