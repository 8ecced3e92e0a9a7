package receipt

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/table"
)

// Explain writes the decision in plain words: the text of dynctl explain.
func (r *Receipt) Explain(w io.Writer) error {
	b := &strings.Builder{}
	if r.ID == DryRun {
		r.wouldDo(b)
	} else {
		printable.Fprintf(b, "decision %s  request %s  %s\n", r.ID, cmp.Or(r.RequestID, "-"), r.Time.UTC().Format("2006-01-02 15:04:05.000"))
	}
	printable.Fprintf(b, "%s  model %s  %s  config revision %d\n", cmp.Or(r.Endpoint, "-"), cmp.Or(r.Model, "-"), pick(r.Stream, "streamed", "not streamed"), r.ConfigRevision)
	if r.Key != "" {
		printable.Fprintf(b, "API key %s of tenant %s\n", r.Key, r.Tenant)
	}
	if r.QueuedMS > 0 {
		printable.Fprintf(b, "queued for %.1f ms behind %d other(s): %s\n", r.QueuedMS, r.QueuedBehind, r.QueuedFor)
	}
	b.WriteString("\n")

	in := &r.Inputs
	if len(r.Earlier) > 0 {
		in = &r.Earlier[0].Inputs
	}
	source := cmp.Or(in.ISLSource, "-")
	if in.Multimodal && route.Source(source) == route.FromEstimate {
		source += " of its text, and media by what was learned of others"
	}
	if in.Approximate {
		printable.Fprintf(b, "1 prompt     %d tokens (%s), %d text chunks: overlaps are approximate", in.ISL, source, in.HashedBlocks)
	} else {
		printable.Fprintf(b, "1 prompt     %d tokens (%s) -> %d full blocks of %d", in.ISL, source, in.HashedBlocks, in.BlockSize)
	}
	if in.Output > 0 {
		printable.Fprintf(b, "; each answer is expected to have %d tokens", in.Output)
	}
	b.WriteByte('\n')
	for i := range r.Earlier {
		printable.Fprintf(b, "attempt %d\n", r.Earlier[i].Attempt)
		explain(&r.Earlier[i], b)
	}
	if r.EarlierOmitted > 0 {
		printable.Fprintf(b, "and %d attempts more\n", r.EarlierOmitted)
	}
	if len(r.Earlier) > 0 {
		printable.Fprintf(b, "attempt %d, the last\n", r.Attempt)
	}
	explain(&r.Decision, b)
	r.instead(b)
	r.legs(b)
	for i := range r.Continued {
		c := &r.Continued[i]
		printable.Fprintf(b, "6 continued  after %d tokens, at %.1f ms: %s left off (%s); the rest came from elsewhere", c.Tokens, c.AtMS, c.From, c.Reason)
		if c.Dropped > 0 {
			printable.Fprintf(b, ", with %d tokens whose text had not been sent", c.Dropped)
		}
		b.WriteByte('\n')
	}
	r.outcome(b)
	r.verdict(b)
	for _, n := range r.Notes {
		printable.Fprintf(b, "  note       %s\n", n)
	}
	r.legend(b)
	_, err := io.WriteString(w, b.String())
	return err
}

// explain writes both choices and the path.
func explain(d *decision.Decision, b *strings.Builder) {
	phase(b, "2 decode  ", &d.Decode)
	path(d, b)
	if d.Prefill.Policy != "" {
		phase(b, "4 prefill ", &d.Prefill)
	}
}

// phase writes the choice of one rank and why.
func phase(b *strings.Builder, title string, p *decision.Phase) {
	switch p.Verdict {
	case "chosen":
		printable.Fprintf(b, "%s   %s by %s: %s\n", title, p.Chosen, p.Policy, why(p))
	case "no_candidates":
		printable.Fprintf(b, "%s   no rank serves this\n", title)
	case "all_busy":
		printable.Fprintf(b, "%s   every rank is busy\n", title)
	case "all_excluded":
		printable.Fprintf(b, "%s   every rank is excluded\n", title)
	default:
		printable.Fprintf(b, "%s   not ranked\n", title)
	}
	if len(p.Candidates) == 0 {
		return
	}
	terms := p.ShownTerms()
	tiers := p.Tiers()
	head := append([]string{"", "RANK", "OVERLAP"}, tiers.Titles()...)
	for i := range terms {
		head = append(head, terms[i].Title)
	}
	siblings := slices.ContainsFunc(p.Candidates, func(c decision.Candidate) bool { return c.SiblingAgeMS > 0 })
	if siblings {
		head = append(head, "SIBLINGS")
	}
	head = append(head, "COST", "STATE")
	var rows [][]string
	unknown := 0
	for i := range p.Candidates {
		c := &p.Candidates[i]
		overlap := strconv.Itoa(c.OverlapBlocks)
		if c.CacheUnknown {
			unknown++
			overlap = "?"
		}
		state := ""
		switch {
		case c.Rank == p.Chosen:
			state = "chosen"
		case c.Excluded != "":
			state = "excluded: " + c.Excluded
		case c.Rank == p.RunnerUp:
			state = "runner-up"
		}
		row := []string{pick(c.Rank == p.Chosen, ">", ""), c.Rank, overlap}
		row = append(row, tiers.Cells(c.Tiers)...)
		cost := "-"
		if c.Excluded != "" {
			row = append(row, slices.Repeat([]string{"-"}, len(terms))...)
		} else {
			for i := range terms {
				row = append(row, strconv.FormatFloat(*terms[i].At(&c.Terms), 'f', 1, 64))
			}
			cost = strconv.FormatFloat(c.Cost, 'f', 2, 64)
		}
		if siblings {
			row = append(row, ofSiblings(&c.Siblings))
		}
		row = append(row, cost)
		rows = append(rows, append(row, state))
	}
	_ = table.Figures(b, head, rows, len(head)-1) // a strings.Builder takes everything
	if unknown > 0 {
		b.WriteString("             ? = what it holds is not known: its KV events were not trusted, and it counted as holding nothing\n")
	}
	if siblings {
		b.WriteString("             SIBLINGS = requests of other routers there, which the cost includes, and their age\n")
	}
	if p.Omitted > 0 {
		printable.Fprintf(b, "             and %d more ranks\n", p.Omitted)
	}
}

// ofSiblings is what other routers have on a rank, and how old that is.
func ofSiblings(s *decision.Siblings) string {
	if s.SiblingAgeMS == 0 {
		return "?"
	}
	return fmt.Sprintf("%d (%d ms)", s.SiblingRequests, s.SiblingAgeMS)
}

// why says what spoke for the chosen rank.
func why(p *decision.Phase) string {
	var chosen, second *decision.Candidate
	for i := range p.Candidates {
		switch p.Candidates[i].Rank {
		case p.Chosen:
			chosen = &p.Candidates[i]
		case p.RunnerUp:
			second = &p.Candidates[i]
		}
	}
	policy := selector.Policy(p.Policy)
	switch {
	case chosen == nil:
		return "the decision has no figures"
	case p.Eligible == 1:
		return "the only rank that could be chosen"
	case policy.Chose() != "" && (p.Home == "" || p.Home == p.Chosen):
		return policy.Chose()
	case p.Sampled:
		return fmt.Sprintf("cost %.2f, drawn by temperature", chosen.Cost)
	case policy.CountsRequests():
		s := fmt.Sprintf("%.0f requests", chosen.Cost)
		switch p.Home {
		case "":
		case selector.HomeNew:
			s = "a new session; " + s
		default:
			s = "the session could not stay on " + p.Home + "; " + s
		}
		if second != nil {
			s += fmt.Sprintf(", runner-up %s has %.0f", second.Rank, second.Cost)
		}
		return s + tie(p)
	}
	s := fmt.Sprintf("cost %.2f blocks", chosen.Cost)
	if p.Unit == decision.Milliseconds {
		risk := ""
		if chosen.Late > 0 {
			risk = fmt.Sprintf(", %.0f for its risk to miss the SLO", chosen.Late)
		}
		s = fmt.Sprintf("expected to cost %.0f ms, %.0f of its own time%s and %.0f of others'", chosen.Cost, chosen.Own()-chosen.Late, risk, chosen.Caused())
	}
	switch {
	case second == nil || p.TieBreak == string(selector.TieRouter):
		return s + tie(p)
	case p.Tied > 1 && p.Unit == decision.Milliseconds:
		return s + fmt.Sprintf(", as good as %s (%.0f ms)", second.Rank, second.Cost) + tie(p)
	case p.Tied > 1:
		return s + ", as " + second.Rank + tie(p)
	}
	s += fmt.Sprintf(", %s less than %s", figure(p.MarginBlocks), second.Rank)
	// The largest difference between the two is what decided.
	best, word := 0.0, ""
	terms := decision.EachTerm()
	for i := range terms {
		if t := &terms[i]; t.Unit == p.Unit && t.Why != nil && t.Cheaper(chosen, second) > best {
			best, word = t.Cheaper(chosen, second), ": "+t.Why(chosen, second)
		}
	}
	return s + word
}

// figure is a difference of costs with the digits that show it: never 0.00.
func figure(v float64) string {
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 0.01:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.1g", v)
}

func tie(p *decision.Phase) string {
	if p.Tied <= 1 {
		return ""
	}
	words := map[string]string{
		"overlap": "more of the prompt in its cache", "requests": "fewer active requests", "decode": "fewer blocks decoding", "session": "first by the session's hash",
		"router": "drawn by this router, since others choose among them too", "resident": "fewer blocks in its cache", "turn": "least recently used", "label": "first by name", "draw": "drawn",
	}
	return fmt.Sprintf("; tie of %d ranks, %s", p.Tied, words[p.TieBreak])
}

func path(d *decision.Decision, b *strings.Builder) {
	cached := d.Inputs.ISL - d.EffISL
	switch d.Path {
	case "":
		printable.Fprintf(b, "3 path       none: %s\n", cmp.Or(d.ReasonText, "-"))
	default:
		printable.Fprintf(b, "3 path       %s: %s (%d of %d tokens cached on the decode rank)", d.Path, cmp.Or(d.ReasonText, "-"), cached, d.Inputs.ISL)
		if d.Path == "remote" && d.Connector != "" {
			printable.Fprintf(b, ", KV over %s", d.Connector)
		}
		b.WriteByte('\n')
	}
}

// wouldDo says what the router would do with the prompt of a dry run, and why.
func (r *Receipt) wouldDo(b *strings.Builder) {
	switch {
	case r.Path == "":
		b.WriteString("dry run: the router would refuse this request now")
	case r.Path == "remote":
		printable.Fprintf(b, "dry run: %s would prefill this prompt, %s would decode", r.Prefill.Chosen, r.Decode.Chosen)
	default:
		printable.Fprintf(b, "dry run: %s would prefill this prompt and decode", r.Decode.Chosen)
	}
	printable.Fprintf(b, ": %s\n", cmp.Or(r.ReasonText, "-"))
}

// instead compares the path that was taken with the other one.
func (r *Receipt) instead(b *strings.Builder) {
	p := &r.Predicted
	if r.Path == "" {
		return
	}
	if !p.HasRemote {
		b.WriteString("5 instead    remote prefill was not possible\n")
		return
	}
	other, took := "remote", "local"
	if r.Path == "remote" {
		other, took = took, other
	}
	for _, path := range []string{other, took} {
		rank, work := r.Decode.Chosen, p.Local
		if path == "remote" {
			rank, work = r.Prefill.Chosen, p.Remote
		}
		printable.Fprintf(b, "%-12s %s prefill: %s computes %d prompt tokens, ", pick(path == other, "5 instead", "  taken"), path, cmp.Or(rank, "-"), work.Compute)
		if work.Queued > 0 {
			printable.Fprintf(b, "after %d that are queued there", work.Queued)
		} else {
			b.WriteString("with none queued there")
		}
		if work.Transfer > 0 {
			printable.Fprintf(b, ", and moves %d", work.Transfer)
		}
		b.WriteByte('\n')
	}
	if p.CostRevision > 0 {
		printable.Fprintf(b, "  expected   local %.1f ms, remote %.1f ms (revision %d of the cost model)\n", p.LocalMS, p.RemoteMS, p.CostRevision)
	}
}

func (r *Receipt) legs(b *strings.Builder) {
	again := slices.ContainsFunc(r.Legs, func(l LegEntry) bool { return l.Attempt > 1 })
	for i := range r.Legs {
		l := &r.Legs[i]
		printable.Fprintf(b, "6 leg        %s on %s", l.Kind, l.Rank)
		if again {
			printable.Fprintf(b, ", attempt %d", l.Attempt)
		}
		b.WriteString(": ")
		switch {
		case l.Status > 0:
			printable.Fprintf(b, "HTTP %d", l.Status)
		case l.EndMS >= 0:
			b.WriteString("no answer")
		default:
			b.WriteString("running")
		}
		for _, t := range [...]struct {
			name string
			ms   float64
		}{{"sent", l.DispatchMS}, {"first byte", l.FirstByteMS}, {"end", l.EndMS}} {
			if t.ms >= 0 {
				printable.Fprintf(b, ", %s %.1f ms", t.name, t.ms)
			}
		}
		if l.Error != "" {
			printable.Fprintf(b, "; %s", l.Error)
		}
		if l.RetryReason != "" && !strings.Contains(l.Error, l.RetryReason) {
			printable.Fprintf(b, "; given up: %s", l.RetryReason)
		}
		b.WriteByte('\n')
	}
	if r.LegsOmitted > 0 {
		printable.Fprintf(b, "             and %d more legs\n", r.LegsOmitted)
	}
}

func (r *Receipt) outcome(b *strings.Builder) {
	o := &r.Outcome
	switch {
	case r.ID == DryRun:
		b.WriteString("7 outcome    none: a dry run sends nothing\n")
		return
	case r.Live:
		b.WriteString("7 outcome    still running\n")
		return
	case o.Status > 0:
		printable.Fprintf(b, "7 outcome    HTTP %d", o.Status)
	default:
		b.WriteString("7 outcome    no HTTP status")
	}
	if o.Finish != "" {
		printable.Fprintf(b, ", finish %s", o.Finish)
	}
	if o.TTFTMS >= 0 {
		printable.Fprintf(b, ", TTFT %.1f ms", o.TTFTMS)
	}
	if o.E2EMS >= 0 {
		printable.Fprintf(b, ", E2E %.1f ms", o.E2EMS)
	}
	if o.ITL.Count > 0 {
		printable.Fprintf(b, ", ITL mean %.1f p99 %.1f ms", o.ITL.MeanMS, o.ITL.P99MS)
	}
	if o.CompletionTokens >= 0 {
		printable.Fprintf(b, ", %d tokens out", o.CompletionTokens)
	}
	b.WriteByte('\n')
	switch {
	case o.SilentRecompute:
		b.WriteString("             the KV did not arrive: the decode engine computed the prompt again\n")
	case o.Cancelled:
		b.WriteString("             the client left before the end\n")
	}
	if o.NotContinued != "" {
		printable.Fprintf(b, "             not continued: %s\n", o.NotContinued)
	}
	if (o.ErrorCode != "" || o.Error != "") && !(o.Cancelled && o.ErrorCode == string(api.CodeClientClosed)) {
		printable.Fprintf(b, "             error %s: %s\n", cmp.Or(o.ErrorCode, "-"), cmp.Or(r.failure(), "-"))
	}
}

// failure is the error of the request without what the lines before it say: its code, the
// reason for its path, and the errors of its legs.
func (r *Receipt) failure() string {
	text := strings.TrimPrefix(r.Outcome.Error, r.Outcome.ErrorCode+": ")
	if r.ReasonText != "" {
		text = strings.TrimSuffix(text, ": "+r.ReasonText)
	}
	for i := range r.Legs {
		if e := r.Legs[i].Error; e != "" {
			text = strings.TrimSuffix(text, ": "+e)
		}
	}
	return text
}

// verdict compares the cached tokens that were predicted with those that the engine found.
func (r *Receipt) verdict(b *strings.Builder) {
	o := &r.Outcome
	if r.Path == "" || r.Live || r.ID == DryRun || o.Status >= 400 && o.CachedTokens < 0 {
		return
	}
	b.WriteString("8 verdict    ")
	found, predicted, there := o.CachedTokens, r.Predicted.CachedTokens, "in the cache of "+cmp.Or(r.Decode.Chosen, "its rank")
	switch {
	case r.Path != "remote":
	case r.countedByPrefill():
		predicted, there = r.Predicted.PrefillCachedTokens, "in the cache of "+cmp.Or(r.Prefill.Chosen, "the prefill rank")
	case found != predicted: // most connectors' engines count what was moved as cached, NIXL's do not
		predicted += r.Predicted.RemoteTokens
		there = "cached or moved"
	}
	switch d := found - predicted; {
	case found < 0:
		b.WriteString("unknown: the engine did not report how many prompt tokens were cached\n")
	case d == 0:
		printable.Fprintf(b, "as predicted: %d prompt tokens were %s\n", found, there)
	case d < 0:
		printable.Fprintf(b, "fewer than predicted: %d of %d tokens were %s; blocks were evicted before the request came, or the KV did not arrive\n", found, predicted, there)
	default:
		printable.Fprintf(b, "more than predicted: %d tokens, not %d, were %s; the index undercounts, never overcounts\n", found, predicted, there)
	}
}

// countedByPrefill reports whether the answer's usage has the cached tokens of the prefill
// engine in place of the decode engine's, as routing.prefill_usage has it.
func (r *Receipt) countedByPrefill() bool {
	for i := len(r.Legs) - 1; i >= 0; i-- {
		if l := &r.Legs[i]; l.Kind == "prefill" {
			return l.CachedTokens >= 0 && l.CachedTokens == r.Outcome.CachedTokens
		}
	}
	return false
}

// meanings explain the columns of the tables, by title.
var meanings = map[string]string{
	"OVERLAP": "blocks of the prompt in the rank's cache",
	"PREFILL": "computing the whole prompt",
	"CREDIT":  "what the cache saves of that, subtracted",
	"QUEUE":   "prompts that wait there",
	"DECODE":  "answers in progress there",
	"SPREAD":  "new prompts that it got recently",
	"REQS":    "requests in progress there",
	"STALL":   "answers there that pause while this prompt is computed",
	"SLOW":    "what a rank that is slower than its peers adds",
	"COST":    "the sum; the lowest wins",

	"WAIT":    "ms until the prompt is computed",
	"COMPUTE": "ms to compute what is not cached",
	"MOVE":    "ms to move its KV",
	"ANSWER":  "ms for its answer",
	"LATE":    "its risk to miss the SLO, in ms",
	"+PAUSE":  "ms that answers there pause for it, together",
	"+BEHIND": "ms that prompts wait behind it, together",
	"+SLOWER": "ms that answers there take longer, together",
	"+LATE":   "what it adds to the others' risk to miss it, in ms",
	"+EVICT":  "ms to compute again what leaves the cache for it",
}

// legendWidth is how many columns the legend takes, so that the smallest screens show it.
const legendWidth = 78

// legend explains the columns of the tables above.
func (r *Receipt) legend(b *strings.Builder) {
	titles := []string{"OVERLAP"}
	for _, p := range []*decision.Phase{&r.Decode, &r.Prefill} {
		if len(p.Candidates) == 0 {
			continue
		}
		for _, t := range p.ShownTerms() {
			if !slices.Contains(titles, t.Title) {
				titles = append(titles, t.Title)
			}
		}
	}
	if len(titles) == 1 {
		return
	}
	const margin = "             "
	line := "  columns    "
	for i, title := range append(titles, "COST") {
		text := title + " " + meanings[title]
		if i < len(titles) {
			text += "; "
		}
		if len(line)+len(text) > legendWidth {
			b.WriteString(strings.TrimRight(line, " ") + "\n")
			line = margin
		}
		line += text
	}
	b.WriteString(line + "\n")
}

func pick(c bool, yes, no string) string {
	if c {
		return yes
	}
	return no
}
