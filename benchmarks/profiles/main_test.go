package main

import (
	"encoding/csv"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/rig/repository"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/profiles"
)

var update = flag.Bool("update", false, "write the tables of docs/profiles.md and docs/lab/profiles.md")

// document keeps a table of the page equal to want.
func document(t *testing.T, page, part, want string) {
	t.Helper()
	repository.Document(t, page, part, want, "go test ./benchmarks/profiles -update", *update)
}

// The errors that each profile is shipped with are those that the simulator makes on the
// rows held out of its fit.
func TestHeldOut(t *testing.T) {
	t.Chdir("../..")
	rows, err := table("held-out.csv")
	if err != nil {
		t.Fatal(err)
	}
	doc := &strings.Builder{}
	doc.WriteString("| profile | of | rows fitted, held out | error of TTFT: median, p90 | of TPOT | |\n|---|---|---|---|---|---|\n")
	for _, p := range profiles.All() {
		held := slices.DeleteFunc(slices.Clone(rows), func(r row) bool { return r.Profile != p.Timing.Name })
		if len(held) != p.Held || p.Held == 0 {
			t.Errorf("%s: %d rows are kept, %d were held out", p.Timing.Name, len(held), p.Held)
		}
		ttft, tpot, err := judge(p.Timing, held)
		if err != nil {
			t.Fatal(err)
		}
		// The last digit may differ between processors.
		for _, d := range []float64{ttft.Median - p.TTFT.Median, ttft.P90 - p.TTFT.P90, tpot.Median - p.TPOT.Median, tpot.P90 - p.TPOT.P90} {
			if math.Abs(d) > 0.11 {
				t.Errorf("%s: TTFT %s, TPOT %s; shipped with %s, %s", p.Timing.Name, ttft, tpot, p.TTFT, p.TPOT)
				break
			}
		}
		rough := ""
		if p.Rough() {
			rough = "rough"
		}
		fmt.Fprintf(doc, "| `%s` | %s | %d, %d | %.1f %%, %.1f %% | %.1f %%, %.1f %% | %s |\n", p.Timing.Name, p.What, p.Fitted, p.Held, p.TTFT.Median, p.TTFT.P90, p.TPOT.Median, p.TPOT.P90, rough)
	}
	document(t, "docs/profiles.md", "profiles", doc.String())
}

func TestTransfers(t *testing.T) {
	t.Chdir("../..")
	raw, err := os.ReadFile(filepath.Join(testdata, "mooncake.csv"))
	if err != nil {
		t.Fatal(err)
	}
	records, err := csv.NewReader(strings.NewReader(string(raw))).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	mooncake, _ := profiles.FindTransfer("mooncake")
	for _, r := range records[1:] {
		tokens, err := strconv.ParseFloat(r[0], 64)
		if err != nil {
			t.Fatal(err)
		}
		ms, err := strconv.ParseFloat(r[1], 64)
		if err != nil {
			t.Fatal(err)
		}
		if got := mooncake.Millis[0] + mooncake.Millis[1]*tokens; math.Abs(got/ms-1) > 0.12 {
			t.Errorf("%.0f tokens: %.2f ms, measured %.2f ms", tokens, got, ms)
		}
	}
	doc := &strings.Builder{}
	doc.WriteString("| transfer | ms | of | source |\n|---|---|---|---|\n")
	for _, x := range profiles.Transfers() {
		fmt.Fprintf(doc, "| `%s` | %g + %g for 1,000 tokens | %s | %s |\n", x.Name, x.Millis[0], round(1000*x.Millis[1], 1e4), x.What, x.Source)
	}
	document(t, "docs/profiles.md", "transfers", doc.String())
}

// disaggregated measures a load on engines that prefill and engines that decode.
func disaggregated(t *testing.T, prefill, decode, transfer string, prefills, decodes int, l load) times {
	t.Helper()
	p, ok := profiles.Find(prefill)
	d, ok2 := profiles.Find(decode)
	x, ok3 := profiles.FindTransfer(transfer)
	if !ok || !ok2 || !ok3 {
		t.Fatalf("%s, %s or %s is not shipped", prefill, decode, transfer)
	}
	g, err := newRig(p.Timing, engine.WithTransfer(d.Timing, x.Millis), prefills, decodes, l.ISL+l.OSL, l.Clients)
	if err != nil {
		t.Fatal(err)
	}
	got, err := g.run(l)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// What the constants of aggregated engines and a transfer say of measured engines with
// prefill and decode apart. The page shows by how much that misses.
func TestDisaggregated(t *testing.T) {
	t.Chdir("../..")
	rows, err := table("disaggregated.csv")
	if err != nil {
		t.Fatal(err)
	}
	doc := &strings.Builder{}
	doc.WriteString("| prompt tokens | requests at a time | measured TTFT, ms | model | measured TPOT, ms | model |\n|---|---|---|---|---|---|\n")
	within := map[string][2]int{}
	for i := 0; i < len(rows); {
		same := slices.Clone(rows[i:])
		if j := slices.IndexFunc(same, func(r row) bool { return r.shape() != rows[i].shape() }); j > 0 {
			same = same[:j]
		}
		i += len(same)
		got := disaggregated(t, same[0].Profile, same[0].Profile, "mooncake", 1, 1, same[0].load)
		var ttft, tpot []string
		for _, r := range same {
			ttft, tpot = append(ttft, fmt.Sprintf("%.0f", r.TTFT)), append(tpot, fmt.Sprintf("%.1f", r.TPOT))
			for name, v := range map[string]float64{"TTFT": got.TTFT / r.TTFT, "TPOT": got.TPOT / r.TPOT} {
				n := within[name]
				if n[1]++; math.Abs(v-1) <= 0.3 {
					n[0]++
				}
				within[name] = n
			}
		}
		fmt.Fprintf(doc, "| %d | %d | %s | %.0f | %s | %.1f |\n", same[0].ISL, same[0].Clients, strings.Join(ttft, ", "), got.TTFT, strings.Join(tpot, ", "), got.TPOT)
	}
	fmt.Fprintf(doc, "\nOf these rows the model is within 30 %% for %d of %d in TTFT and for %d of %d in TPOT.\n", within["TTFT"][0], within["TTFT"][1], within["TPOT"][0], within["TPOT"][1])
	document(t, "docs/lab/profiles.md", "DeepSeek-R1", doc.String())

	// The source does not say how many requests there were at a time: only the size of a
	// decode engine's batch, 48 and 224.
	doc.Reset()
	doc.WriteString("| engine, fleet | measured TTFT, TPOT, ms | model, 1 request at a time | model, a batch of the decode engines in all |\n|---|---|---|---|\n")
	for _, c := range []struct {
		what, decode, transfer     string
		prefills, decodes, batch   int
		measuredTTFT, measuredTPOT float64
	}{
		{"SGLang 0.5.6, 5 prefill and 11 decode engines on 1 GPU each", "h100-32b-fp8-tp1", "mooncake", 5, 11, 48, 566.7, 22.3},
		{"vLLM 0.12.0, 8 prefill engines on 1 GPU and 2 decode engines on 4", "h100-32b-fp8-tp4", "nixl-16", 8, 2, 224, 367.7, 8.7},
	} {
		l := load{Clients: 1, ISL: 4000, OSL: 1000, Shortest: 0.9, Rounds: rounds}
		alone := disaggregated(t, "h100-32b-fp8-tp1", c.decode, c.transfer, c.prefills, c.decodes, l)
		l.Clients = c.batch
		full := disaggregated(t, "h100-32b-fp8-tp1", c.decode, c.transfer, c.prefills, c.decodes, l)
		fmt.Fprintf(doc, "| %s | %.0f, %.1f | %.0f, %.1f | %.0f, %.1f |\n", c.what, c.measuredTTFT, c.measuredTPOT, alone.TTFT, alone.TPOT, full.TTFT, full.TPOT)
	}
	document(t, "docs/lab/profiles.md", "Qwen3-32B", doc.String())
}

const head = "id,backend,backend_version,model_path,system,mode,isl,osl,batch_size,tp_size,moe_ep_size,silicon_ttft_ms,silicon_tpot_ms\n"

// sample has rows of one profile, of another version, of a disaggregated fleet, and of nobody.
const sample = head + `a,vllm,0.12.0,Qwen/Qwen3-32B,h100_sxm,agg,4096,512,8,4,1,423.1234,12.3
b,vllm,0.12.0,Qwen/Qwen3-32B,h100_sxm,agg,4096,512,8,4,1,423.1234,12.3
c,vllm,0.12.0,Qwen/Qwen3-32B,h100_sxm,agg,4096,512,128,4,1,58753.2,55
d,vllm,0.13.0,Qwen/Qwen3-32B,h100_sxm,agg,4096,512,8,4,1,423,12
e,vllm,0.12.0,Qwen/Qwen3-32B,h100_sxm,disagg,4096,512,,,,423,12
f,vllm,0.12.0,Qwen/Qwen3-33B,h100_sxm,agg,x,,,4,1,,
`

func TestReadSource(t *testing.T) {
	rows, dropped, err := readSource(strings.NewReader(sample))
	if err != nil {
		t.Fatal(err)
	}
	want := row{Profile: "h100-32b-tp4", load: load{Clients: 8, ISL: 4096, OSL: 512, Shortest: 0.9, Rounds: rounds}, times: times{423.123, 12.3}}
	if got := rows["h100-32b-tp4"]; len(rows) != 1 || !slices.Equal(got, []row{want}) || dropped["h100-32b-tp4"] != 2 {
		t.Errorf("%v, %v", rows, dropped)
	}
	if _, _, err := readSource(strings.NewReader("a,b\n1,2\n")); err == nil || !strings.Contains(err.Error(), "no column") {
		t.Errorf("a strange table: %v", err)
	}
}

func FuzzReadSource(f *testing.F) {
	f.Add(sample)
	f.Add(head + "a,b\n")
	f.Add("profile,clients,isl,osl,cached,ttft_ms,tpot_ms\np,1,2,3,4,5,6\n")
	f.Fuzz(func(t *testing.T, text string) {
		rows, _, err := readSource(strings.NewReader(text))
		for _, r := range rows {
			fit, held := split(r)
			if err == nil && len(fit)+len(held) != len(r) {
				t.Errorf("%d and %d of %d rows", len(fit), len(held), len(r))
			}
		}
		_, _ = readTable(strings.NewReader(text), loadOf)
	})
}

// Every third shape is held out, with all of its rows.
func TestSplit(t *testing.T) {
	var rows []row
	for _, clients := range []int{1, 2, 3, 4, 5, 5, 6} {
		rows = append(rows, row{load: load{Clients: clients, ISL: 1, OSL: 1}})
	}
	fit, held := split(rows)
	var got []int
	for _, r := range held {
		got = append(got, r.Clients)
	}
	if !slices.Equal(got, []int{2, 5, 5}) || len(fit) != 4 {
		t.Errorf("held out %v, fitted %d", got, len(fit))
	}
}

// A fit finds the constants that made the rows.
func TestFitFindsWhatMadeTheRows(t *testing.T) {
	truth := engine.Profile{Prefill: [3]float64{20, 0.05, 2e-6}, Decode: [3]float64{9, 0.1, 3e-5}}
	var rows []row
	for _, isl := range []int{512, 4096} {
		for _, clients := range []int{1, 4, 16} {
			r := row{load: load{Clients: clients, ISL: isl, OSL: 64, Shortest: 0.8, Rounds: 4}}
			var err error
			if r.times, err = aggregated(truth, r.load); err != nil {
				t.Fatal(err)
			}
			rows = append(rows, r)
		}
	}
	p, err := fit(rows)
	if err != nil {
		t.Fatal(err)
	}
	ttft, tpot, err := judge(p, rows)
	if err != nil || max(ttft.P90, tpot.P90) > 5 {
		t.Errorf("TTFT %s, TPOT %s, %v: %+v", ttft, tpot, err, p)
	}
}
