package trace

import (
	"encoding/json"
	"math"
	"strconv"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/receipt"
)

// Outcome is the end of a request: what its receipt has in addition to its decisions,
// which have records of their own.
type Outcome struct {
	ID string
	// ReceivedUS is when the router got the request. The times of legs and result
	// count from it.
	ReceivedUS  int64
	Stream      bool
	Result      receipt.Outcome
	Legs        []receipt.LegEntry
	LegsOmitted int
	Notes       []string
	Continued   []receipt.Continuation
}

// outcomeLine is the line of an outcome for encoding/json. Members that are zero
// are left out.
type outcomeLine struct {
	ID         string `json:"id"`
	ReceivedUS int64  `json:"received_us"`
	Stream     bool   `json:"stream"`
	receipt.Outcome
	Legs        []receipt.LegEntry `json:"legs"`
	LegsOmitted int                `json:"legs_omitted"`
	Notes       []string           `json:"notes"`

	Continued []receipt.Continuation `json:"continued"`
}

func parseOutcome(p []byte) (*Outcome, error) {
	var l outcomeLine
	if err := json.Unmarshal(p, &l); err != nil {
		return nil, err
	}
	for i := range l.Legs { // one that names only a rank is of its worker
		if leg := &l.Legs[i]; leg.Worker == "" {
			leg.Worker, _, _ = SplitRank(leg.Rank)
		}
	}
	return &Outcome{ID: l.ID, ReceivedUS: l.ReceivedUS, Stream: l.Stream, Result: l.Outcome, Legs: l.Legs, LegsOmitted: l.LegsOmitted, Notes: l.Notes, Continued: l.Continued}, nil
}

// AppendOutcome appends the line of an outcome. Figures that JSON has no number for
// are -1.
func AppendOutcome(dst []byte, at time.Duration, x *Outcome) []byte {
	o := begin(dst, KindOutcome, at.Microseconds())
	r := &x.Result
	o.str("id", x.ID)
	o.some("received_us", int(x.ReceivedUS))
	o.yes("stream", x.Stream)
	o.some("status", r.Status)
	o.str("finish_reason", r.Finish)
	o.some("prompt_tokens", r.PromptTokens)
	o.some("cached_tokens", r.CachedTokens)
	o.some("completion_tokens", r.CompletionTokens)
	o.ms("ttft_ms", r.TTFTMS)
	o.ms("e2e_ms", r.E2EMS)
	if g := &r.ITL; *g != (receipt.Gaps{}) {
		o.key("itl")
		o.open()
		o.some("count", g.Count)
		o.ms("mean_ms", g.MeanMS)
		o.ms("p50_ms", g.P50MS)
		o.ms("p99_ms", g.P99MS)
		o.ms("max_ms", g.MaxMS)
		o.close()
	}
	o.str("error_code", r.ErrorCode)
	o.str("error", r.Error)
	o.yes("silent_recompute", r.SilentRecompute)
	o.yes("cancelled", r.Cancelled)
	o.str("not_continued", r.NotContinued)
	if len(x.Continued) > 0 {
		o.key("continued")
		for i := range x.Continued {
			o.p = append(o.p, "[,"[min(i, 1)])
			o.continuation(&x.Continued[i])
		}
		o.p = append(o.p, ']')
	}
	if len(x.Legs) > 0 {
		o.key("legs")
		for i := range x.Legs {
			o.p = append(o.p, "[,"[min(i, 1)])
			o.leg(&x.Legs[i])
		}
		o.p = append(o.p, ']')
	}
	o.some("legs_omitted", x.LegsOmitted)
	o.strs("notes", x.Notes)
	return append(o.p, '}', '\n')
}

func (o *object) continuation(c *receipt.Continuation) {
	o.open()
	o.ms("at_ms", c.AtMS)
	o.str("from", c.From)
	o.str("reason", c.Reason)
	o.some("tokens", c.Tokens)
	o.some("dropped", c.Dropped)
	o.close()
}

func (o *object) leg(l *receipt.LegEntry) {
	o.open()
	o.str("kind", l.Kind)
	if name, _, _ := SplitRank(l.Rank); name != l.Worker {
		o.str("worker", l.Worker)
	}
	o.str("rank", l.Rank)
	o.some("attempt", l.Attempt)
	o.some("status", l.Status)
	o.ms("queue_ms", l.QueueMS)
	o.ms("dispatch_ms", l.DispatchMS)
	o.ms("first_byte_ms", l.FirstByteMS)
	o.ms("end_ms", l.EndMS)
	o.str("retry_reason", l.RetryReason)
	o.str("error", l.Error)
	o.some("prompt_tokens", l.PromptTokens)
	o.some("cached_tokens", l.CachedTokens)
	o.some("blocks", l.Blocks)
	o.close()
}

// ms writes a time in ms unless it is 0. Such times are whole microseconds, whose
// digits need not be looked for.
func (o *object) ms(k string, v float64) {
	if v == 0 {
		return
	}
	us := math.Round(v * 1000)
	if !(math.Abs(us) < 1e15) || float64(us)/1000 != v {
		o.num(k, v)
		return
	}
	o.key(k)
	n := int64(us)
	if n < 0 {
		o.p = append(o.p, '-')
		n = -n
	}
	o.p = strconv.AppendInt(o.p, n/1000, 10)
	if n %= 1000; n != 0 {
		o.p = append(o.p, '.', byte('0'+n/100), byte('0'+n/10%10), byte('0'+n%10))
		for o.p[len(o.p)-1] == '0' {
			o.p = o.p[:len(o.p)-1]
		}
	}
}
