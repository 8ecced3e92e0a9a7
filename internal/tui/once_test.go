package tui

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/rig/hostile"
	"github.com/dynctl/dynctl/internal/rig/jsonschema"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/tui/feed"
)

// fakeRouter answers like a router with the stage's figures; every snapshot is
// a second later than the one before.
type fakeRouter struct {
	*httptest.Server
	g     stage
	asked atomic.Int64
	// answer, when set, replaces the answer to everything.
	mu     sync.Mutex
	answer http.HandlerFunc
}

func newRouter(t testing.TB, g stage) *fakeRouter {
	f := &fakeRouter{g: g}
	f.Server = httptest.NewServer(f)
	t.Cleanup(f.Close)
	return f
}

func (f *fakeRouter) replace(h http.HandlerFunc) {
	f.mu.Lock()
	f.answer = h
	f.mu.Unlock()
}

func (f *fakeRouter) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	f.mu.Lock()
	other := f.answer
	f.mu.Unlock()
	if other != nil {
		other(w, q)
		return
	}
	f.serve(w, q)
}

func (f *fakeRouter) serve(w http.ResponseWriter, q *http.Request) {
	var v any
	switch path := q.URL.Path; {
	case path == "/admin/v1/snapshot":
		v = f.g.snapshot(int(f.asked.Add(1)))
	case path == "/admin/v1/status":
		v = f.g.snapshot(int(f.asked.Add(1))).Status
	case path == "/admin/v1/workers":
		v = admin.WorkerList{Schema: admin.Schema, Workers: f.g.snapshot(int(f.asked.Load())).Workers}
	case path == "/admin/v1/events":
		v = admin.EventList{Schema: admin.Schema, Events: f.g.snapshot(int(f.asked.Load())).Events}
	case path == "/admin/v1/decisions":
		s := int(f.asked.Load())
		list := admin.DecisionList{Schema: admin.Schema, Total: 5000}
		for i := range 40 {
			list.Decisions = append(list.Decisions, encode(f.g.receipt(s*42+100-i, start.Add(time.Duration(s)*time.Second), false)))
		}
		v = list
	case strings.HasPrefix(path, "/admin/v1/decisions/"):
		var n int
		if _, err := fmt.Sscanf(path, "/admin/v1/decisions/0badcafe%012x", &n); err != nil {
			http.NotFound(w, q)
			return
		}
		v = f.g.receipt(n, start, true)
	case path == "/admin/v1/index/children":
		if q.URL.Query().Get("sort") == "hits" && q.URL.Query().Get("node") == "" {
			v = admin.IndexChildren{Schema: admin.Schema, Now: start.Add(time.Duration(f.asked.Load()) * time.Second), Children: f.g.prefixes(int(f.asked.Load()))}
			break
		}
		v = f.g.children(q.URL.Query().Get("node"))
	default:
		http.NotFound(w, q)
		return
	}
	_ = json.NewEncoder(w).Encode(v)
}

func clients(t testing.TB, urls ...string) []*admin.Client {
	t.Helper()
	var list []*admin.Client
	for _, u := range urls {
		c, err := admin.NewClient(u, admin.Options{})
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, c)
	}
	t.Cleanup(func() {
		for _, c := range list {
			c.Close()
		}
	})
	return list
}

func collect(t *testing.T, urls ...string) feed.View {
	t.Helper()
	v, err := NewCollector(Options{Clients: clients(t, urls...), Rate: time.Second, Timeout: 20 * time.Second}).Collect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// topSchema is the schema of a view: admin types as they are, but for the ranks of workers,
// which stand in a list of their own.
func topSchema() map[string]any {
	object := func(s map[string]any, path ...string) map[string]any {
		for _, p := range path {
			s = s[p].(map[string]any)
		}
		return s
	}
	s := jsonschema.Of(reflect.TypeFor[feed.View](), map[reflect.Type]map[string]any{
		reflect.TypeFor[feed.Num]():      {"type": []any{"number", "null"}},
		reflect.TypeFor[feed.Link]():     {"enum": []any{feed.Waiting, feed.Live, feed.Lag, feed.Stale, feed.Down}},
		reflect.TypeFor[feed.Severity](): {"enum": []any{feed.OK, feed.Info, feed.Warn, feed.Error}},
		reflect.TypeFor[feed.Decision](): {"type": "object", "description": "a receipt (dynctl.receipt/v1) without its candidates, as GET /admin/v1/decisions?brief=true"},
	})
	s["$schema"], s["title"] = "https://json-schema.org/draft/2020-12/schema", feed.Schema
	s["description"] = "What is not in derived, attention and fleet, or about the link, is as in the admin API (dynctl.admin/v1). Numbers carry their unit in the key; what is not known is null or absent."
	object(s, "properties")["schema"] = map[string]any{"const": feed.Schema}
	delete(object(s, "properties", "routers", "items", "properties", "workers", "items", "properties"), "ranks")
	return s
}

// TestOnceMatchesItsSchema checks what --once -o json writes against the
// published schema, both ways: no key is missing, none is undocumented.
func TestOnceMatchesItsSchema(t *testing.T) {
	s := jsonschema.Committed(t, filepath.Join("..", "..", "docs", "schema", "top-v1.json"), topSchema(), updating())
	down := httptest.NewServer(http.NotFoundHandler())
	down.Close()
	for name, urls := range map[string][]string{
		"healthy": {newRouter(t, stage{prefill: 2, decode: 4, dp: 2}).URL},
		"trouble": {newRouter(t, stage{prefill: 2, decode: 4, dp: 2, troubles: true}).URL},
		"quiet":   {newRouter(t, stage{prefill: 1, decode: 1, dp: 2, quiet: true}).URL},
		"auto":    {newRouter(t, stage{prefill: 1, decode: 1, dp: 1, costs: learned}).URL},
		"replay":  {newRouter(t, stage{prefill: 1, decode: 1, dp: 1, replay: &admin.Replay{Records: 7, AtUS: 12, TotalUS: new(int64(90)), Speed: .5}}).URL},
		"caches":  {newRouter(t, stage{prefill: 1, decode: 3, dp: 1, caches: true}).URL},
		"moves":   {newRouter(t, stage{decode: 3, dp: 2, moves: "some"}).URL},
		"unknown": {newRouter(t, stage{decode: 3, dp: 2, moves: "unknown"}).URL},
		"empty":   {newRouter(t, stage{}).URL},
		"down":    {down.URL},
		"fleet":   {newRouter(t, stage{prefill: 1, decode: 1, dp: 1}).URL, down.URL},
	} {
		for _, format := range []string{"json", "jsonl"} {
			t.Run(name+"-"+format, func(t *testing.T) {
				t.Parallel()
				v := collect(t, urls...)
				var b bytes.Buffer
				if err := Write(&b, &v, TextOptions{Format: format}); err != nil {
					t.Fatal(err)
				}
				if format == "jsonl" && strings.Count(b.String(), "\n") != 1 {
					t.Errorf("jsonl is not one line")
				}
				var doc any
				if err := json.Unmarshal(b.Bytes(), &doc); err != nil {
					t.Fatal(err)
				}
				for _, fault := range jsonschema.Check("$", s, doc) {
					t.Error(fault)
				}
			})
		}
	}
}

// TestFirstRates checks that rates are right from the first output.
func TestFirstRates(t *testing.T) {
	v := collect(t, newRouter(t, stage{prefill: 2, decode: 4, dp: 2}).URL)
	r := &v.Routers[0]
	if r.Link != feed.Live || r.RequestRate != 42 || r.CompletionRate != 6640 || r.StoredRate != 1300 {
		t.Errorf("link %s, %v requests/s, %v tokens/s, %v stored/s", r.Link, r.RequestRate, r.CompletionRate, r.StoredRate)
	}
	if got, want := r.HitShare.F(), 80500./127600; math.Abs(got-want) > 1e-9 {
		t.Errorf("hit share %v, want %v", got, want)
	}
	for _, k := range r.Ranks {
		if math.Abs(k.HitShare.F()-.64) > 1e-9 || k.PromptRate != 10000 || k.RequestRate != 5 || k.EventRate != 80 {
			t.Errorf("%s: hit %v, prompt %v, requests %v, events %v", k.Label, k.HitShare, k.PromptRate, k.RequestRate, k.EventRate)
		}
	}
}

func TestTable(t *testing.T) {
	v := collect(t, newRouter(t, stage{prefill: 2, decode: 4, dp: 2, troubles: true}).URL)
	for _, w := range []int{80, 120, 0} {
		for _, ascii := range []bool{false, true} {
			var b bytes.Buffer
			if err := Write(&b, &v, TextOptions{Format: "table", Width: w, ASCII: ascii}); err != nil {
				t.Fatal(err)
			}
			mustContain(t, b.String(), "42.0 req/s", "decode-0/dp0", "ERROR decode-2: engine down: connect: connection refused")
			if strings.ContainsRune(b.String(), '\x1b') {
				t.Error("the table holds escapes")
			}
			for l := range strings.Lines(b.String()) {
				for _, r := range l {
					if ascii && r > 0x7e {
						t.Errorf("not ASCII: %q", l)
						break
					}
				}
			}
		}
	}
}

// learned is of two models, one of which has crossings.
var learned = []admin.ModelCosts{
	{Model: "m", Revision: 7, PathsKnown: true, LocalOutcomes: 90, PrefillOutcomes: 40, TransferOutcomes: 40, Crossings: []admin.Crossing{
		{Running: 0, Low: new(1200), Tokens: new(1800)}, {Running: 8, Low: new(0), Tokens: new(300), High: new(512)},
	}},
	{Model: "new", LocalOutcomes: 3, TransferOutcomes: 2, Unlearned: []admin.Unlearned{{Of: admin.OfPaths, Reason: admin.UnlearnedFew, Overdue: true, Text: "2 of 6 moved", Advice: "wait"}}},
}

// TestCrossingIsShown: with a threshold that is auto, what is in force is shown, and what
// is unknown as unknown; the number that decides before never looks like a rule.
func TestCrossingIsShown(t *testing.T) {
	for name, want := range map[string]struct {
		costs  []admin.ModelCosts
		replay *admin.Replay
		lines  []string
	}{
		"fixed":     {nil, nil, []string{"remote from eff_isl 2048\n"}},
		"one":       {learned[:1], nil, []string{", remote from about 300 tokens at 8 running answers (up to 510)\n", "m: remote from about 1,800 tokens at 0 running answers (1,200 or more)"}},
		"two":       {learned, nil, []string{", auto has learned 1 of 2 models\n", "m: remote from about 1,800 tokens at 0 running answers", "new: unknown yet, 3 prompts computed locally, 0 remotely, 2 transfers", "new: what both paths cost is not known: 2 of 6 moved", "WARN  new: what both paths cost is not known: 2 of 6 moved. To do: wait\n"}},
		"none":      {learned[1:], nil, []string{"remote from eff_isl 2048 until auto has learned\n"}},
		"recording": {[]admin.ModelCosts{}, &admin.Replay{}, []string{"remote from auto, eff_isl 2048 until costs are known\n"}},
	} {
		v := collect(t, newRouter(t, stage{prefill: 1, decode: 1, dp: 1, costs: want.costs, replay: want.replay}).URL)
		var b bytes.Buffer
		if err := Write(&b, &v, TextOptions{}); err != nil {
			t.Fatal(err)
		}
		for _, line := range want.lines {
			if !strings.Contains(b.String(), line) {
				t.Errorf("%s: no %q in\n%s", name, line, b.String())
			}
		}
		if short := v.Routers[0].Threshold(); (short == "auto") != (want.costs != nil) {
			t.Errorf("%s: the threshold is %s", name, short)
		}
	}
}

func TestTextFilterAndSort(t *testing.T) {
	v := collect(t, newRouter(t, stage{prefill: 2, decode: 4, dp: 2, troubles: true}).URL)
	var b bytes.Buffer
	if err := Write(&b, &v, TextOptions{Format: "json", Filter: "role:decode !st:down kv>50", Sort: "kv"}); err != nil {
		t.Fatal(err)
	}
	var got feed.View
	if err := json.Unmarshal(b.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Routers[0].Ranks) == 0 || len(got.Routers[0].Ranks) >= len(v.Routers[0].Ranks) {
		t.Fatalf("%d ranks of %d", len(got.Routers[0].Ranks), len(v.Routers[0].Ranks))
	}
	last := feed.Num(2)
	for _, k := range got.Routers[0].Ranks {
		if k.Role != "decode" || k.Status == "DOWN" || k.KVUsage() > last || k.KVUsage() <= .5 {
			t.Errorf("%s %s %s kv %v", k.Label, k.Role, k.Status, k.KVUsage())
		}
		last = k.KVUsage()
	}
	for _, o := range []TextOptions{{Filter: "nosuch:1"}, {Filter: "kv>x"}, {Filter: "re:("}, {Sort: "nosuch"}} {
		if o.Check() == nil {
			t.Errorf("%+v was taken", o)
		}
	}
	if err := (TextOptions{Filter: "a !b", Sort: "kv"}).Check(); err != nil {
		t.Error(err)
	}
}

// TestOnceWaitsForEngines: rates of engines' counters need two of their pages,
// which come less often than answers of the router.
func TestOnceWaitsForEngines(t *testing.T) {
	g := stage{prefill: 1, decode: 2, dp: 1}
	f := newRouter(t, g)
	f.replace(func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path != "/admin/v1/snapshot" {
			http.NotFound(w, q)
			return
		}
		s := int(f.asked.Add(1))
		snap, page := g.snapshot(s), g.snapshot(s/3*3) // every third answer has new pages
		for i := range snap.Workers {
			for j := range snap.Workers[i].Ranks {
				snap.Workers[i].Ranks[j].Engine = page.Workers[i].Ranks[j].Engine
			}
		}
		_ = json.NewEncoder(w).Encode(snap)
	})
	v := collect(t, f.URL)
	for _, k := range v.Routers[0].Ranks {
		if math.Abs(k.HitShare.F()-.64) > 1e-9 || k.PromptRate != 10000 {
			t.Errorf("%s: hit %v, prompt %v", k.Label, k.HitShare, k.PromptRate)
		}
	}
}

// TestTableIsPrintable: nothing of a fleet commands the terminal, in any format.
func TestTableIsPrintable(t *testing.T) {
	var v feed.View
	hostile.Fill(&v)
	for _, format := range []string{"table", "json", "jsonl"} {
		var b strings.Builder
		if err := Write(&b, &v, TextOptions{Format: format}); err != nil {
			t.Fatal(err)
		}
		hostile.Check(t, "top -o "+format, b.String())
	}
}
