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
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/table"
)

// Explain writes the decision in plain words: the text of dynctl explain.
func (r *Receipt) Explain(w io.Writer) error {
	b := &strings.Builder{}
	printable.Fprintf(b, "decision %s  request %s  %s\n", r.ID, cmp.Or(r.RequestID, "-"), r.Time.UTC().Format("2006-01-02 15:04:05.000"))
	printable.Fprintf(b, "%s  model %s  %s  config revision %d\n", cmp.Or(r.Endpoint, "-"), cmp.Or(r.Model, "-"), pick(r.Stream, "streamed", "not streamed"), r.ConfigRevision)
	if r.Key != "" {
		printable.Fprintf(b, "API key %s of tenant %s\n", r.Key, r.Tenant)
	}
	if r.QueuedMS > 0 {
		printable.Fprintf(b, "waited %.1f ms for a place behind %d other(s): %s\n", r.QueuedMS, r.QueuedBehind, r.QueuedFor)
	}
	b.WriteString("\n")

	in := &r.Inputs
	if len(r.Earlier) > 0 {
		in = &r.Earlier[0].Inputs
	}
	source := cmp.Or(in.ISLSource, "-")
	if in.Multimodal && route.Source(source) == route.FromEstimate {
		source += " of its text, without images and other media"
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
	r.whatIf(b)
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
	for _, n := range r.Notes {
		printable.Fprintf(b, "  note       %s\n", n)
	}
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
		if c.Excluded != "" {
			row = append(row, slices.Repeat([]string{"-"}, len(terms)+1)...)
		} else {
			for i := range terms {
				row = append(row, strconv.FormatFloat(*terms[i].At(&c.Terms), 'f', 1, 64))
			}
			row = append(row, strconv.FormatFloat(c.Cost, 'f', 2, 64))
		}
		rows = append(rows, append(row, state))
	}
	_ = table.Figures(b, head, rows, len(head)-1) // a strings.Builder takes everything
	if unknown > 0 {
		b.WriteString("             ? = what it holds is not known: its KV events were not trusted, and it counted as holding nothing\n")
	}
	if p.Omitted > 0 {
		printable.Fprintf(b, "             and %d more ranks\n", p.Omitted)
	}
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
	if second == nil {
		return s + tie(p)
	}
	if p.Tied > 1 {
		return s + ", as " + second.Rank + tie(p)
	}
	s += fmt.Sprintf(", %.2f less than %s", p.MarginBlocks, second.Rank)
	// The largest difference between the two is what decided.
	best, word := 0.0, ""
	terms := decision.EachTerm()
	for i := range terms {
		if t := &terms[i]; t.Why != nil && t.Cheaper(chosen, second) > best {
			best, word = t.Cheaper(chosen, second), ": "+t.Why(chosen, second)
		}
	}
	return s + word
}

func tie(p *decision.Phase) string {
	if p.Tied <= 1 {
		return ""
	}
	words := map[string]string{
		"overlap": "more of the prompt in its cache", "requests": "fewer active requests", "decode": "fewer blocks decoding", "session": "first by the session's hash",
		"resident": "fewer blocks in its cache", "turn": "least recently used", "label": "first by name", "draw": "drawn",
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

func (r *Receipt) whatIf(b *strings.Builder) {
	p := &r.Predicted
	if r.Path == "" {
		return
	}
	if !p.HasRemote {
		b.WriteString("5 what if    remote was not possible\n")
		return
	}
	costs := func(path string, w decision.Work, where string) {
		printable.Fprintf(b, "5 what if    %s: %s would compute %d tokens behind %d queued", path, cmp.Or(where, "-"), w.Compute, w.Queued)
		if w.Transfer > 0 {
			printable.Fprintf(b, " and move %d", w.Transfer)
		}
	}
	taken := p.Local
	if r.Path == "remote" {
		costs("local", p.Local, r.Decode.Chosen)
		taken = p.Remote
	} else {
		costs("remote", p.Remote, r.Prefill.Chosen)
	}
	printable.Fprintf(b, "; taken: %d tokens behind %d\n", taken.Compute, taken.Queued)
	if p.CostRevision > 0 {
		printable.Fprintf(b, "  costs      local %.1f ms, remote %.1f ms, by revision %d of what was learned\n", p.LocalMS, p.RemoteMS, p.CostRevision)
	}
}

func (r *Receipt) legs(b *strings.Builder) {
	for i := range r.Legs {
		l := &r.Legs[i]
		printable.Fprintf(b, "6 leg        %s on %s, attempt %d: ", l.Kind, l.Rank, l.Attempt)
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
		if l.RetryReason != "" {
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
	if r.Live {
		b.WriteString("7 outcome    still running\n")
		return
	}
	printable.Fprintf(b, "7 outcome    HTTP %d", o.Status)
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
	if o.CachedTokens >= 0 {
		printable.Fprintf(b, "             cached tokens: predicted %d, the engine says %d\n", r.Predicted.CachedTokens, o.CachedTokens)
	}
	switch {
	case o.SilentRecompute:
		b.WriteString("             the KV did not arrive: the decode engine computed the prompt again\n")
	case o.Cancelled:
		b.WriteString("             the client left before the end\n")
	}
	if o.NotContinued != "" {
		printable.Fprintf(b, "             not continued: %s\n", o.NotContinued)
	}
	if o.ErrorCode != "" || o.Error != "" {
		printable.Fprintf(b, "             error %s: %s\n", cmp.Or(o.ErrorCode, "-"), cmp.Or(o.Error, "-"))
	}
}

func pick(c bool, yes, no string) string {
	if c {
		return yes
	}
	return no
}
