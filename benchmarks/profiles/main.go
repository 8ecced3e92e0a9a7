// Command profiles fits the simulator's profiles of real GPUs (docs/profiles.md) to measured
// times, and writes them with the errors that the simulator makes on rows held out of the fit.
//
//	go run ./benchmarks/profiles -source silicon_sample.csv
//
// The source is aic-core/src/aiconfigurator_core/systems/silicon_sample.csv of
// github.com/ai-dynamo/aiconfigurator at commit 095f58a51c4ca8e61b66ec108d86f223f8d559ce
// (Apache-2.0), 5,221 rows. It is not part of this repository. The rows held out are kept in
// testdata/held-out.csv, so that a test repeats the judgement.
package main

import (
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/dynctl/dynctl/internal/bench/stats"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/profiles"
)

// Where the results go and the kept tables are, from the root of the repository.
const (
	profilesFile = "internal/workers/sim/profiles/profiles.yaml"
	testdata     = "benchmarks/profiles/testdata"
)

func main() {
	source := flag.String("source", "", "silicon_sample.csv")
	only := flag.String("only", "", "fit this profile, print every row, and write nothing")
	flag.Parse()
	if err := run(*source, *only, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "profiles:", err)
		os.Exit(1)
	}
}

func run(source, only string, w io.Writer) error {
	f, err := os.Open(source)
	if err != nil {
		return fmt.Errorf("the source (-source FILE): %w", err)
	}
	defer f.Close()
	rows, dropped, err := readSource(f)
	if err != nil {
		return fmt.Errorf("%s: %w", source, err)
	}
	if rows[own.Name], err = table("h100-8b.csv"); err != nil {
		return err
	}
	var out []profiles.Profile
	var kept []row
	for _, g := range append([]group{own}, groups...) {
		if only != "" && only != g.Name {
			continue
		}
		learn, held := split(rows[g.Name])
		learn = slices.DeleteFunc(learn, func(r row) bool { return r.OSL > longest })
		p := profiles.Profile{What: g.What, Source: profiles.Published, Transfer: "mooncake", Fitted: len(learn), Held: len(held)}
		if g.Name == own.Name {
			p.Source = profiles.Own
		}
		if p.Timing, err = fit(learn); err != nil {
			return fmt.Errorf("%s: %w", g.Name, err)
		}
		p.Timing.Name = g.Name
		if p.TTFT, p.TPOT, err = judge(p.Timing, held); err != nil {
			return fmt.Errorf("%s: %w", g.Name, err)
		}
		verdict := "shipped"
		switch {
		case p.TTFT.Median > hopeless || p.TPOT.Median > hopeless:
			verdict = "left out"
		case p.Rough():
			verdict = "rough"
		}
		fmt.Fprintf(w, "%-18s %-8s %2d fitted, %2d held out, %2d saturated or twice; error of TTFT %s, of TPOT %s; prefill %.4g decode %.4g\n",
			g.Name, verdict, len(learn), len(held), dropped[g.Name], p.TTFT, p.TPOT, p.Timing.Prefill, p.Timing.Decode)
		if only != "" {
			for _, r := range slices.Concat(learn, held) {
				got, err := aggregated(p.Timing, r.load)
				if err != nil {
					return err
				}
				fmt.Fprintf(w, "  %3d clients, %5d/%5d tokens, %5d cached: TTFT %8.1f measured %8.1f simulated, TPOT %7.2f %7.2f ms\n", r.Clients, r.ISL, r.OSL, r.Cached, r.TTFT, got.TTFT, r.TPOT, got.TPOT)
			}
		}
		if verdict != "left out" {
			out, kept = append(out, p), append(kept, held...)
		}
	}
	if only != "" {
		return nil
	}
	return write(out, kept)
}

// hopeless is the median error in percent from which a profile is left out.
const hopeless = 20

// write replaces the shipped profiles and the rows that judge them. Transfers stay as they are.
func write(out []profiles.Profile, kept []row) error {
	var text strings.Builder
	for _, p := range out {
		fmt.Fprintf(&text, "    - name: %s\n      what: %s\n      source: %s\n      transfer: %s\n", p.Timing.Name, p.What, p.Source, p.Transfer)
		fmt.Fprintf(&text, "      prefill_ms: %s\n      decode_ms: %s\n      fitted: %d\n      held_out: %d\n", list(p.Timing.Prefill), list(p.Timing.Decode), p.Fitted, p.Held)
		fmt.Fprintf(&text, "      ttft_error: {median_pct: %g, p90_pct: %g}\n      tpot_error: {median_pct: %g, p90_pct: %g}\n", p.TTFT.Median, p.TTFT.P90, p.TPOT.Median, p.TPOT.P90)
	}
	old, err := os.ReadFile(profilesFile)
	if err != nil {
		return err
	}
	const start = "\nprofiles:\n"
	head, _, ok := strings.Cut(string(old), start)
	if !ok {
		return fmt.Errorf("%s has no line profiles:", profilesFile)
	}
	if err := os.WriteFile(profilesFile, []byte(head+start+text.String()), 0o644); err != nil {
		return err
	}
	f, err := os.Create(filepath.Join(testdata, "held-out.csv"))
	if err != nil {
		return err
	}
	if err := writeTable(f, kept); err != nil {
		return err
	}
	return f.Close()
}

// list is constants as YAML has them.
func list(v [3]float64) string { return fmt.Sprintf("[%g, %g, %g]", v[0], v[1], v[2]) }

// table reads a kept table from the root of the repository.
func table(name string) ([]row, error) {
	f, err := os.Open(filepath.Join(testdata, name))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readTable(f, loadOf)
}

// judge gives the errors of a profile on rows, in percent of what was measured.
func judge(p engine.Profile, rows []row) (ttft, tpot profiles.Errors, err error) {
	r, err := residuals(p, rows)
	if err != nil {
		return ttft, tpot, err
	}
	var a, b []float64
	for i, row := range rows {
		percent := func(v float64) float64 { return 100 * math.Abs(math.Expm1(v)) }
		if row.TTFT > 0 {
			a = append(a, percent(r[2*i]))
		}
		if row.TPOT > 0 {
			b = append(b, percent(r[2*i+1]))
		}
	}
	errorsOf := func(v []float64) profiles.Errors {
		if len(v) == 0 {
			return profiles.Errors{}
		}
		return profiles.Errors{Median: round(stats.Median(v), 10), P90: round(stats.Quantile(v, 0.9), 10)}
	}
	return errorsOf(a), errorsOf(b), nil
}
