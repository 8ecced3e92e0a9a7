package doctor

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/bench/fleet"
	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/table"
)

// Matrix is the result of a prompt sent over each prefill worker to each decode worker.
type Matrix struct {
	Prefill []string `json:"prefill"`
	Decode  []string `json:"decode"`
	// Cells has a row for each prefill worker with a cell for each decode worker.
	Cells [][]Cell `json:"cells"`
}

// Cell is one pair.
type Cell struct {
	State  State  `json:"state"`
	Text   string `json:"text"`
	Advice string `json:"advice,omitempty"`
}

// transfer sends a fresh prompt over every pair of prefill and decode worker. Each
// pair is judged by its own requests alone, and what pairs have in common is one
// finding.
func (e *exam) transfer(ctx context.Context) {
	var ps, ds []*admin.Worker
	for i := range e.facts.Workers {
		w := &e.facts.Workers[i]
		switch {
		case !slices.Contains(w.Models, e.facts.Model):
		case w.Role == "prefill":
			ps = append(ps, w)
		case w.Role == "decode":
			ds = append(ds, w)
		}
	}
	if len(ps) == 0 || len(ds) == 0 {
		e.add("transfer", "engines", Skip, "there is no prefill worker with a decode worker", "")
		return
	}
	m := &Matrix{Cells: make([][]Cell, len(ps))}
	for _, d := range ds {
		m.Decode = append(m.Decode, d.Name)
	}
	for i, p := range ps {
		m.Prefill = append(m.Prefill, p.Name)
		for _, d := range ds {
			m.Cells[i] = append(m.Cells[i], e.pair(ctx, p, d))
		}
	}
	e.r.Transfer = m
	e.summarize(m)
}

// summarize makes one finding of all cells that say the same.
func (e *exam) summarize(m *Matrix) {
	type cause struct {
		state State
		text  string
	}
	var causes []cause
	pairs := map[cause][]string{}
	first := map[cause]Cell{}
	for i, row := range m.Cells {
		for j, c := range row {
			k := cause{c.State, c.Text}
			if pairs[k] == nil {
				causes, first[k] = append(causes, k), c
			}
			pairs[k] = append(pairs[k], m.Prefill[i]+" to "+m.Decode[j])
		}
	}
	for _, k := range causes {
		list := pairs[k]
		subject := strings.Join(list[:min(len(list), 2)], ", ")
		switch {
		case len(list) == len(m.Prefill)*len(m.Decode) && len(list) > 2:
			subject = fmt.Sprintf("all %d pairs", len(list))
		case len(list) > 2:
			subject += fmt.Sprintf(" and %d more", len(list)-2)
		}
		e.add("transfer", subject, k.state, k.text, first[k].Advice)
	}
}

// tries is how often a transfer is repeated where other requests hide its result, and
// larger how many times longer its prompt is then: the longer it is, the more other requests
// must compute in the same second to hide it. longest bounds it, in tokens.
const tries, larger, longest = 3, 4, 16384

// pair proves that KV moves from one worker to another: by the decode engine's answer where
// that counts what it took, else by the decode engine's own counters; see moved.
func (e *exam) pair(ctx context.Context, p, d *admin.Worker) Cell {
	for _, w := range []*admin.Worker{p, d} {
		if !w.Usable {
			state := w.Health
			if w.Draining {
				state = "draining"
			}
			return Cell{Skip, fmt.Sprintf("%s gets no requests: %s", w.Name, state), ""}
		}
	}
	e.o.Step("the transfer from " + p.Name + " to " + d.Name)
	var c Cell
	n := e.tokens()
	for range tries {
		var again bool
		if c, again = e.probePair(ctx, p, d, n); !again {
			break
		}
		n = min(n*larger, max(n, longest), max(n, e.facts.MaxModelLen/2))
	}
	return c
}

// probePair sends one prompt of n tokens. again reports that other requests hid the result.
func (e *exam) probePair(ctx context.Context, p, d *admin.Worker, n int) (c Cell, again bool) {
	alone := &fleet.Facts{Workers: []admin.Worker{*d}}
	before, berr := e.o.Target.IdleCounters(ctx, alone, time.Second)
	prompt := e.prompt(n)
	res, rec, err := e.one(ctx, fmt.Sprintf("X-Dynctl-Path: remote\r\nX-Dynctl-Prefill-Worker: %s\r\nX-Dynctl-Worker: %s\r\n", p.Name, d.Name), prompt)
	if c, ok := notRemote(res == nil, rec, err); !ok {
		return e.orGone(ctx, c, p.Name, d.Name), false
	}
	if went := rec.Prefill.Chosen + " to " + rec.Decode.Chosen; !strings.HasPrefix(rec.Prefill.Chosen, p.Name+"/") || !strings.HasPrefix(rec.Decode.Chosen, d.Name+"/") {
		if rec.Inputs.Force == "" {
			return Cell{Skip, "no probe went there: the router does not let clients steer", "start it with --allow-routing-headers"}, false
		}
		return Cell{Warn, "the request took another way: " + went, "dynctl explain " + rec.ID + " shows why these were left out"}, false
	}
	block := max(e.facts.Block, 1)
	want := float64(len(prompt) / block * block)
	if rec.Outcome.SilentRecompute {
		return Cell{Fail, "the decode engine computed the prompt again and said nothing", "check the KV connector's role and address on both engines"}, false
	}
	if got := float64(res.CachedTokens); got >= 0.9*want { // nobody has seen the prompt: it came from the prefill engine
		return Cell{OK, fmt.Sprintf("%.0f of %d tokens moved, by the decode engine's answer", got, len(prompt)), ""}, false
	}
	after, aerr := e.o.Target.IdleCounters(ctx, alone, time.Second)
	if err := cmp.Or(berr, aerr); err != nil {
		return Cell{Warn, "not proven: " + err.Error(), "doctor needs the engines' metrics: run it where they can be reached"}, false
	}
	return moved(before.Decode, after.Decode, len(prompt), want, d.Name)
}

// orGone is what a pair failed by: its own words, or a worker that the router has
// given up since the examination began.
func (e *exam) orGone(ctx context.Context, c Cell, names ...string) Cell {
	now, err := e.o.Target.Admin.Workers(ctx)
	if err != nil {
		return c
	}
	for _, w := range now.Workers {
		if slices.Contains(names, w.Name) && !w.Usable && !strings.Contains(c.Text, w.Name+":") {
			return Cell{Fail, fmt.Sprintf("%s is not usable any more: %s (%s)", w.Name, w.Health, orNone(w.Reason)), "dynctl workers list shows each worker"}
		}
	}
	return c
}

// moved judges by the growth of the decode engine's counters around one request. Where it had
// the engine to itself, the growth is its own. Beside other requests the growth still has
// bounds: they only add to it, so the request took no more from elsewhere than all did, and
// computed no more than all did. again reports that other requests hid the result.
func moved(before, after fleet.Sums, prompt int, want float64, decode string) (c Cell, again bool) {
	delta := after.Minus(before)
	took := delta.External // counted when it has come; hits are counted when it is to come
	if math.IsNaN(took) {
		took = delta.ExternalHits
	}
	least := float64(prompt) - delta.Computed // NaN where the engine does not report it
	busy := before.Running+before.Waiting > 0 || after.Running+after.Waiting > 0
	alone := !busy && delta.Prompt == float64(prompt)
	const advice = "check the KV connector's role and address on both engines"
	switch {
	case math.IsNaN(took) || math.IsNaN(delta.Prompt):
		return Cell{Warn, "not proven: the decode engine counts nothing that comes from elsewhere", ""}, false
	case took < 0 || delta.Prompt < float64(prompt):
		return Cell{Warn, fmt.Sprintf("not proven: %s did not count the prompt, or restarted", decode), "run doctor again; dynctl top --view events shows restarts"}, true
	case took < 0.9*want:
		return Cell{Fail, fmt.Sprintf("the decode engine took %.0f of %d tokens from the prefill engine and computed the rest again", took, prompt), advice}, false
	case alone:
		return Cell{OK, fmt.Sprintf("%.0f of %d tokens moved, by the decode engine's own count", took, prompt), ""}, false
	case least >= want/2:
		return Cell{OK, fmt.Sprintf("at least %.0f of %d tokens moved, by the decode engine's own count, while other requests ran", least, prompt), ""}, false
	}
	return Cell{Warn, fmt.Sprintf("not proven: other requests computed prompts on %s at the same time, and its counters are theirs, too", decode), "run doctor again when fewer prompts are computed there, or look at one request: dynctl explain ID"}, true
}

// notRemote is what became of a request that took no remote path, or failed on it;
// ok says that it did neither.
func notRemote(unsent bool, rec *receipt.Receipt, err error) (c Cell, ok bool) {
	why, advice := legFailure(rec)
	switch {
	case why != "" && err != nil:
		return Cell{Fail, "a remote prefill failed: " + why, advice}, false
	case err != nil || unsent:
		return Cell{Fail, fmt.Sprintf("a remote prefill failed: %v", err), advice}, false
	case rec == nil:
		return Cell{Skip, "the router has no receipt of the request", "does it keep enough of them (--receipts)?"}, false
	case why != "":
		return Cell{Fail, "the prefill failed and the decode engine computed the prompt instead: " + why, advice}, false
	case rec.Path != "remote" && rec.Inputs.Force == "":
		return Cell{Skip, "the router took the local path: it does not let clients steer", "start it with --allow-routing-headers"}, false
	case rec.Path != "remote":
		for _, n := range rec.Notes {
			if strings.Contains(n, disagg.ErrNoBootstrap.Error()) {
				return Cell{Fail, n, "connector=mooncake needs the bootstrap server of the prefill engine: state bootstrap=HOST:PORT, or connector=nixl if the engine has NIXL"}, false
			}
		}
		return Cell{Fail, "the router took the local path: " + rec.ReasonText, "dynctl explain " + rec.ID + " shows what was considered"}, false
	}
	return Cell{}, true
}

// legFailure is why the last legs of a request were given up, with what can be
// done; empty when none was, or when another leg took the place of each.
func legFailure(rec *receipt.Receipt) (why, advice string) {
	if rec == nil {
		return "", ""
	}
	last := map[string]*receipt.LegEntry{}
	for i := range rec.Legs {
		last[rec.Legs[i].Kind] = &rec.Legs[i]
	}
	for _, kind := range []string{"prefill", "decode"} {
		l := last[kind]
		if l == nil || l.Error == "" {
			continue
		}
		advice = "dynctl explain " + rec.ID + " shows both legs"
		switch {
		case l.RetryReason == "missing_params":
			advice = "the prefill engine has no KV connector, or not the one that the decode engine has: start both with --kv-transfer-config, kv_role kv_producer (or kv_both) on this one. One with MooncakeConnector needs connector=mooncake"
		case strings.Contains(l.Error, "VLLM_NIXL_SIDE_CHANNEL_HOST"):
			advice = "the prefill engine names itself by an address of its own machine: set VLLM_NIXL_SIDE_CHANNEL_HOST there to one that decode engines reach"
		case l.RetryReason == "bad_params":
			advice = "do block size, model and connector of both engines agree, and their clocks?"
		}
		return l.Worker + ": " + l.Error, advice
	}
	return "", ""
}

// text writes the matrix, with the shorter side as columns.
func (m *Matrix) text(w io.Writer) error {
	rows, cols := m.Prefill, m.Decode
	at := func(i, j int) Cell { return m.Cells[i][j] }
	head := "FROM \\ TO"
	if len(cols) > len(rows) {
		rows, cols = cols, rows
		at = func(i, j int) Cell { return m.Cells[j][i] }
		head = "TO \\ FROM"
	}
	lines := make([][]string, len(rows))
	for i, name := range rows {
		lines[i] = []string{"  " + name}
		for j := range cols {
			word := strings.ToUpper(string(at(i, j).State))
			if word == "SKIP" {
				word = "-"
			}
			lines[i] = append(lines[i], word)
		}
	}
	return table.Write(w, "table", append([]string{"  " + head}, cols...), lines)
}
