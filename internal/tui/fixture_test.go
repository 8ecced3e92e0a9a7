package tui

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	tea "github.com/charmbracelet/bubbletea"
	"github.com/muesli/termenv"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/page"
)

func TestMain(m *testing.M) {
	time.Local = time.UTC // goldens show times of day
	leakMain(m)
}

var start = time.Date(2026, 11, 21, 14, 22, 0, 0, time.UTC)

// stage is a made-up router whose figures depend on the second only.
type stage struct {
	prefill, decode, dp int
	// troubles adds one of each kind that the overview must show.
	troubles bool
	// quiet routers have seen nothing yet: no batch, no answer of an engine.
	quiet bool
	// costs are of a threshold that is auto.
	costs []admin.ModelCosts
	// replay is where the recording stands, if this is one.
	replay *admin.Replay
	// caches adds cache groups and tiers.
	caches bool
	// moves is "some" for streams that went on elsewhere, "unknown" for a router that does
	// not know of them.
	moves string
}

// snapshot is the router's answer s seconds after the start.
func (g stage) snapshot(s int) *admin.Snapshot {
	now := start.Add(time.Duration(s) * time.Second)
	u := uint64(s)
	snap := &admin.Snapshot{Schema: admin.Schema}
	st := &snap.Status
	*st = admin.Status{
		Replay: g.replay, ThresholdAuto: g.costs != nil, Costs: g.costs,
		Schema: admin.Schema, Version: "0.9.2", Name: "rt-0:8000", Now: now, Started: start.Add(-3 * time.Hour), State: "ready", Reasons: []string{},
		ConfigRevision: 3, FleetRevision: 9, Listen: "rt-0:8000", Models: []string{"Qwen/Qwen3-32B"}, Policy: "kv", ThresholdTokens: 2048, ThresholdOn: "eff_isl",
		Tokenizer: "local", BlockSizeTokens: 64, Workers: admin.WorkerCounts{Total: g.prefill + g.decode, Prefill: g.prefill, Decode: g.decode, Usable: g.prefill + g.decode, Ranks: (g.prefill + g.decode) * g.dp},
		Traffic: admin.Traffic{
			Requests: 1000 + 42*u, Completed: 990 + 41*u, Failed: 2, Cancelled: 5 + u/10, Rejected: 1, Inflight: 114, Queued: 0, Local: 600 + 24*u, Remote: 400 + 17*u, Fallbacks: 3, Retries: 4,
			PromptTokens: 1e6 + 127600*u, CachedTokens: 6e5 + 80500*u, PredictedTokens: 6e5 + 81000*u, CompletionTokens: 1e5 + 11600*u,
			TTFT: &admin.Quantiles{Count: 2500, P50: 188, P90: 611, P99: 1020, Max: 1400}, ITL: &admin.Quantiles{Count: 90000, P50: 14.1, P90: 22.8, P99: 31.4, Max: 80},
			E2E: &admin.Quantiles{Count: 2500, P50: 4100, P90: 6000, P99: 9020, Max: 14000}, Overhead: &admin.Quantiles{Count: 2500, P50: 80, P90: 120, P99: 210, Max: 900},
		},
		Index:   admin.IndexTotals{Blocks: 702000, Memberships: 1840000, Nodes: 41200, Bytes: 91 << 20, MaxBlocks: 8_000_000, Lookups: 1000 + 42*u, Stored: 1e6 + 1300*u, Removed: 8e5 + 1200*u, HitShare: new(.63)},
		Ledger:  admin.LedgerTotals{Requests: 114, PrefillTokens: 31000, DecodeBlocks: 68000, Reservations: 114},
		Runtime: admin.Runtime{Goroutines: 200, HeapBytes: 60 << 20, RSSBytes: 180 << 20, CPUSeconds: 100 + .2*float64(s), OpenFiles: 60},
	}
	add := func(role string, i int) {
		name := fmt.Sprintf("%s-%d", role, i)
		w := admin.Worker{
			Name: name, URL: fmt.Sprintf("http://10.0.4.%d:8000", 10+i), Engine: "vllm", Version: "0.32.0", Role: role, Connector: "nixl", Models: st.Models, DP: g.dp,
			BlockSizeTokens: 64, MaxModelLen: 40960, KVBlocks: 14570, Source: "flag", Health: "healthy", Usable: true, Ranks: []admin.Rank{},
		}
		for dp := range g.dp {
			n := i*g.dp + dp
			k := admin.Rank{
				Label: fmt.Sprintf("%s/dp%d", name, dp), Worker: name, DP: dp, Slot: uint32(n), Role: role, Health: "healthy", Usable: true,
				ActiveRequests: 12 + n%5, PrefillTokens: int64(200 * (n % 3)), DecodeBlocks: int64(8000 + 97*n), Requests: 500 + 5*u, IndexBlocks: int64(13204 + 11*n), CapacityBlock: 14570, Moves: &admin.Moves{Waiting: new(0)},
				Feed:   admin.Feed{State: "live", Trusted: true, Since: start.Add(-time.Hour), Endpoint: "tcp://10.0.4.11:5557", LastSeq: new(88_120_441 + 8*u), LastAt: now.Add(-9 * time.Millisecond), Batches: 1000 + 8*u, Events: 2000 + 80*u, Blocks: 4000 + 300*u},
				Engine: &admin.EngineLoad{Running: new(11 + n%5), Waiting: new(0), KVUsage: new(.5 + .01*float64((n*7+s)%13)), PrefixQueries: new(1e6 + 10_000*float64(s)), PrefixHits: new(6e5 + 6_400*float64(s)), ExternalHits: new(0.), At: now.Add(-300 * time.Millisecond)},
			}
			if role == "prefill" {
				k.ActiveRequests, k.DecodeBlocks, k.PrefillTokens = 4, 0, int64(6000+500*n)
				*k.Engine.KVUsage, *k.Engine.Running = .38+.01*float64(n), 4
			}
			k.ITL, k.TTFT, k.OutputRate = new(13.5+float64(n%4)), new(180+float64(10*n)), new(900-float64(20*n))
			if role == "prefill" {
				k.ITL, k.OutputRate = nil, new(5.)
			}
			switch {
			case g.moves == "unknown":
				k.Moves = nil
			case g.moves == "some" && role == "decode":
				k.Moves = &admin.Moves{Away: uint64(200 * (n % 2)), Onto: uint64(70 * ((n + 1) % 2)), Waiting: new(7 * ((n + 1) % 2))}
			}
			if g.quiet {
				k.ITL, k.TTFT, k.OutputRate = nil, nil, nil
				k.Engine, k.Feed = nil, admin.Feed{State: "connecting"}
			}
			w.Ranks = append(w.Ranks, k)
		}
		snap.Workers = append(snap.Workers, w)
	}
	for i := range g.prefill {
		add("prefill", i)
	}
	for i := range g.decode {
		add("decode", i)
	}
	for i := range 12 {
		snap.Decisions = append(snap.Decisions, encode(g.receipt(s*42+100-i, now.Add(-time.Duration(i)*23*time.Millisecond), false)))
	}
	for i := max(1, s-3); i <= s; i++ {
		e := admin.Event{Seq: uint64(i), At: start.Add(time.Duration(i) * time.Second), Kind: "feed_live", Severity: "info", Worker: "decode-1", Rank: "decode-1/dp1", Text: "decode-1/dp1: live: every batch since the publisher's start was seen"}
		switch i % 4 {
		case 1:
			e = admin.Event{Seq: e.Seq, At: e.At, Kind: "feed_gap", Severity: "warn", Worker: "decode-1", Rank: "decode-1/dp1", Text: "decode-1/dp1: batches 88110002 to 88110018 are missing", Fields: map[string]any{"missing": 17}}
		case 3:
			e = admin.Event{Seq: e.Seq, At: e.At, Kind: "config_reloaded", Severity: "info", Text: "configuration revision 3 is in force"}
		}
		snap.Events = append(snap.Events, e)
	}
	if g.caches {
		for i := range snap.Workers {
			f := &snap.Workers[i].Ranks[0].Feed
			switch i % 3 {
			case 0:
				f.CacheGroups = []admin.CacheGroup{{Kind: "full_attention", Block: 16}, {Group: 1, Kind: "sliding_window", Window: 128, Block: 16}, {Group: 2, Kind: "mamba", Block: 64}}
				f.CopiesImplausible = i == 3
			case 1:
				f.TiersReported, f.Tiers = true, route.Tiers{CPU: 4711, Disk: 12}
			}
		}
	}
	if g.troubles {
		g.trouble(snap, s, now)
	}
	return snap
}

// trouble changes a healthy answer into one of a fleet in trouble.
func (g stage) trouble(snap *admin.Snapshot, s int, now time.Time) {
	st := &snap.Status
	st.State = "degraded"
	st.Reasons = []string{
		"worker decode-2 is not usable: connect: connection refused", "1 rank(s) are routed without cache knowledge because their KV events are not trusted now",
		"decode-1/dp0 computes remotely prefilled prompts again", "tokens of Qwen/Qwen3-32B are estimated: no tokenizer was found",
	}
	st.Traffic.Fallbacks += 5 * uint64(s)
	st.Traffic.Retries += 9 * uint64(s)
	st.Traffic.Failed += uint64(s)
	st.Index.UntrustedRank = 1
	worker := func(name string) *admin.Worker {
		for i := range snap.Workers {
			if snap.Workers[i].Name == name {
				return &snap.Workers[i]
			}
		}
		return &admin.Worker{}
	}
	d0 := worker("decode-0")
	*d0.Ranks[0].Engine.KVUsage, *d0.Ranks[0].Engine.Running, *d0.Ranks[0].Engine.Waiting = .914, 18, 6
	d1 := worker("decode-1")
	d1.Ranks[1].Feed.Gaps, d1.Ranks[1].Feed.Replayed = uint64(s/3), uint64(17*(s/3))
	d2 := worker("decode-2")
	d2.Health, d2.Reason, d2.Usable = "unhealthy", "connect: connection refused", false
	for i := range d2.Ranks {
		d2.Ranks[i].Health, d2.Ranks[i].Usable, d2.Ranks[i].Reason, d2.Ranks[i].Engine = "unhealthy", false, "unhealthy", nil
	}
	d3 := worker("decode-3")
	f := &d3.Ranks[1].Feed
	f.State, f.Trusted, f.Reason, f.Since, f.LastAt = "stale", false, "no connection for 7.2s", now.Add(-2200*time.Millisecond), now.Add(-7200*time.Millisecond)
	d1.Ranks[1].ITL, d1.Ranks[1].OutputRate, d1.Ranks[1].Slow = new(131.), new(92.), &admin.Slow{Figure: "ITL", Times: 9.2, Since: now.Add(-time.Minute)}
	p1 := worker("prefill-1")
	p1.Draining, p1.Usable = true, false
}

// prefixes are the most used runs s seconds after the start; the first one
// takes nearly all lookups.
func (g stage) prefixes(s int) []admin.IndexNode {
	return []admin.IndexNode{
		{ID: "1", Local: "7f3a19c2e5d04b66", LengthBlocks: 16, Blocks: 702000, Exact: true, Children: 3, Ranks: 2, Longest: 16, Hits: 1000 + 31*uint64(s), RankLabels: []string{"decode-0/dp0", "decode-0/dp1"}},
		{ID: "2", Local: "aa01b27fe2c96011", LengthBlocks: 24, Blocks: 93000, Exact: true, Ranks: 4, Longest: 24, Hits: 500 + 4*uint64(s), RankLabels: []string{"decode-1/dp0"}},
	}
}

func encode(v any) json.RawMessage {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return raw
}

// receipt is the n-th decision; whole adds its candidates.
func (g stage) receipt(n int, at time.Time, whole bool) *receipt.Receipt {
	r := &receipt.Receipt{
		Schema: receipt.Schema, ID: fmt.Sprintf("0badcafe%012x", n), RequestID: fmt.Sprintf("9c1e%04d7a", n), Time: at, Endpoint: "chat", Model: "Qwen/Qwen3-32B", Stream: true, ConfigRevision: 3,
		Decision: decision.Decision{Attempt: 1, Inputs: decision.Inputs{ISL: 3010 + n%700, ISLSource: "local", BlockSize: 64, HashedBlocks: 47, Threshold: 2048, ThresholdOn: "eff_isl"},
			Path: "remote", Reason: "eff_isl_above_threshold", EffISL: 3010 + n%700, Connector: "nixl",
			Decode:    decision.Phase{Policy: "kv", Verdict: "chosen", Chosen: "decode-2/dp0", RunnerUp: "decode-1/dp0", MarginBlocks: 3.9, Eligible: 6},
			Prefill:   decision.Phase{Policy: "kv", Verdict: "chosen", Chosen: "prefill-1/dp0", RunnerUp: "prefill-0/dp0", MarginBlocks: 12, Eligible: 4},
			Predicted: decision.Prediction{RemoteTokens: 3008, HasRemote: true, Local: decision.Work{Compute: 3010, Queued: 120}, Remote: decision.Work{Compute: 2, Queued: 900, Transfer: 3008}}},
		Legs: []receipt.LegEntry{
			{Kind: "prefill", Worker: "prefill-1", Rank: "prefill-1/dp0", Attempt: 1, Status: 200, QueueMS: .1, DispatchMS: .3, FirstByteMS: 402, EndMS: 570, PromptTokens: 3010, CachedTokens: 0},
			{Kind: "decode", Worker: "decode-2", Rank: "decode-2/dp0", Attempt: 1, Status: 200, QueueMS: .1, DispatchMS: 571, FirstByteMS: 611, EndMS: 4000, PromptTokens: -1, CachedTokens: -1},
		},
		Outcome: receipt.Outcome{Status: 200, Finish: "stop", PromptTokens: 3010, CachedTokens: 3008, CompletionTokens: 210, TTFTMS: 611, E2EMS: 4000, ITL: receipt.Gaps{Count: 209, MeanMS: 14.2, P50MS: 14, P99MS: 31, MaxMS: 40}},
	}
	r.ReasonText = fmt.Sprintf("eff_isl %d >= 2048", r.EffISL)
	switch n % 4 {
	case 1:
		r.Path, r.Reason, r.ReasonText, r.EffISL, r.Prefill = "local", "eff_isl_below_threshold", "eff_isl 72 < 2048", 72, decision.Phase{}
		r.Predicted.CachedTokens, r.Outcome.CachedTokens = r.Inputs.ISL-72, r.Inputs.ISL-72
	case 2:
		if whole {
			break
		}
		r.Live = true
		r.Outcome = receipt.Outcome{CachedTokens: -1, CompletionTokens: -1, TTFTMS: -1, E2EMS: -1}
	case 3:
		if g.troubles {
			r.Outcome.Status, r.Outcome.Error, r.Outcome.ErrorCode = 502, "decode-2/dp0 reset the connection", "upstream_broke"
		}
	}
	if whole {
		ranks := []string{"decode-2/dp0", "decode-1/dp0", "decode-1/dp1", "decode-2/dp1", "decode-3/dp0", "decode-0/dp1", "decode-0/dp0", "decode-3/dp1"}
		for i := range 8 {
			c := decision.Candidate{Rank: ranks[i], Slot: uint32(i), Cost: 63.2 + 4*float64(i), Terms: decision.Terms{Prefill: 47, Decode: 12.2 + float64(i), Spread: 4}, ActiveRequests: 12, HasLoad: true, KVUsage: .58}
			switch i {
			case 1:
				c.Cost = 67.1
			case 6:
				c.Excluded, c.ExcludedCode = "KV usage 91% > 90%", "kv_usage"
			case 7:
				c.Excluded, c.ExcludedCode = "draining", "given"
			}
			r.Decode.Candidates = append(r.Decode.Candidates, c)
		}
	}
	return r
}

// children is the made-up radix tree.
func (g stage) children(node string) *admin.IndexChildren {
	now := start.Add(20 * time.Second)
	a := &admin.IndexChildren{Schema: admin.Schema, Now: now, Children: []admin.IndexNode{}}
	labels := []string{"decode-0/dp0", "decode-1/dp1", "prefill-0/dp0"}
	child := func(id, local string, depth, length, blocks, kids int, hits uint64, ranks int) {
		a.Children = append(a.Children, admin.IndexNode{ID: id, DepthBlocks: depth, LengthBlocks: length, Local: local, Children: kids, Blocks: blocks, Exact: blocks < 600000, Ranks: ranks, Longest: length, Hits: hits, HitsExact: id != "112", RankLabels: labels[:min(ranks, 3)]})
	}
	switch node {
	case "":
		child("1", "7f3a19c2e5d04b66", 0, 16, 602000, 3, 31200, 12)
		child("2", "aa01b27fe2c96011", 0, 24, 93000, 0, 2510, 2)
		child("3", "bb77120000000000", 0, 8, 7000, 1, 10, 1)
		a.Total = 40
	case "1":
		n := admin.IndexNode{ID: "1", LengthBlocks: 16, Local: "7f3a19c2e5d04b66", Children: 3, Blocks: 602000, Ranks: 12, Hits: 31200, HitsExact: true}
		a.Node = &n
		child("11", "91c2aa5500000000", 16, 36, 398000, 2, 19840, 3)
		child("12", "3b77aa5500000000", 16, 24, 191000, 0, 8730, 2)
		child("13", "c0ffee0000000000", 16, 4, 900, 0, 3, 1)
		a.Total = 3
	case "11":
		child("111", "02ab000000000000", 52, 1, 291000, 0, 12020, 1)
		child("112", "e811000000000000", 52, 128, 19000, 0, 1120, 1)
		a.Total = 2
	}
	return a
}

// newStage is the screen at a size after seconds samples of the stage.
func newStage(t testing.TB, g stage, w, h, seconds int, o Options) *app {
	t.Helper()
	if len(o.Clients) == 0 {
		c, err := admin.NewClient("http://10.0.0.1:8001", admin.Options{})
		if err != nil {
			t.Fatal(err)
		}
		o.Clients = []*admin.Client{c}
	}
	a := newApp(t.Context(), o)
	a.now = start
	a.Update(tea.WindowSizeMsg{Width: w, Height: h})
	for s := range seconds {
		sendSample(a, g, s)
	}
	return a
}

func sendSample(a *app, g stage, s int) {
	a.Update(sampleMsg{0, feed.Sample{Snapshot: g.snapshot(s), Prefixes: g.prefixes(s), PrefixesAsked: true, At: start.Add(time.Duration(s) * time.Second), Took: 3 * time.Millisecond}})
}

// press sends keys: single characters, or names such as "enter".
func press(a *app, keys ...string) []tea.Cmd {
	named := map[string]tea.KeyType{
		"enter": tea.KeyEnter, "esc": tea.KeyEsc, "tab": tea.KeyTab, "shift+tab": tea.KeyShiftTab, "up": tea.KeyUp, "down": tea.KeyDown, "left": tea.KeyLeft, "right": tea.KeyRight,
		"ctrl+c": tea.KeyCtrlC, "ctrl+d": tea.KeyCtrlD, "ctrl+u": tea.KeyCtrlU, "ctrl+s": tea.KeyCtrlS, "ctrl+l": tea.KeyCtrlL, "home": tea.KeyHome, "end": tea.KeyEnd, "backspace": tea.KeyBackspace, "pgdown": tea.KeyPgDown,
	}
	var cmds []tea.Cmd
	for _, k := range keys {
		m := tea.KeyMsg{Type: tea.KeyRunes, Runes: []rune(k)}
		if k == " " {
			m.Type = tea.KeySpace
		}
		if kt, ok := named[k]; ok {
			m = tea.KeyMsg{Type: kt}
		}
		_, cmd := a.Update(m)
		cmds = append(cmds, cmd)
	}
	return cmds
}

// typed sends text one character at a time.
func typed(a *app, text string) {
	for _, r := range text {
		press(a, string(r))
	}
}

// deliver runs the message of a page's command that needs no router.
func deliver(a *app, cmds []tea.Cmd) {
	for _, c := range cmds {
		if c == nil {
			continue
		}
		switch m := c().(type) {
		case page.OpenMsg, page.FilterMsg, page.ShowMsg:
			a.Update(m)
		}
	}
}

// screen is the frame without escapes.
func screen(a *app) string { return escapes.ReplaceAllString(a.View(), "") }

func loadTree(a *app, g stage, nodes ...string) {
	for _, n := range nodes {
		a.Update(page.ChildrenMsg{Router: a.sel, Query: admin.BrowseQuery{Node: n, Sort: "blocks", Limit: 50}, Answer: g.children(n)})
	}
}

// The newest decision, and when its list is loaded in seconds after the start.
const newest, listed = listed*42 + 100, 19

func loadList(a *app, g stage, filter string) {
	var list []feed.Decision
	for i := range 30 {
		d, ok := feed.ParseDecision(encode(g.receipt(newest-i, start.Add(listed*time.Second-time.Duration(i)*23*time.Millisecond), false)))
		if ok {
			list = append(list, d)
		}
	}
	a.Update(page.DecisionsMsg{Router: a.sel, Filter: filter, List: list, Total: 5000})
}

func loadReceipt(a *app, g stage) {
	r := g.receipt(newest, start.Add(listed*time.Second), true)
	a.Update(page.DecisionMsg{Router: a.sel, ID: r.ID, Raw: encode(r)})
}

func mustContain(t *testing.T, text string, wants ...string) {
	t.Helper()
	for _, w := range wants {
		if !strings.Contains(text, w) {
			t.Errorf("the screen lacks %q:\n%s", w, text)
		}
	}
}

var plainOptions = Options{Profile: termenv.Ascii}
