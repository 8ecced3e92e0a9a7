package trace

import (
	"encoding/json"
	"math"
	"strconv"
	"unicode/utf8"

	"github.com/dynctl/dynctl/internal/router/decision"
	"github.com/dynctl/dynctl/internal/router/receipt"
)

// appendTo writes the members of x byte for byte as encoding/json does, which
// would be the most of what a recorded request costs. It reports false, with o
// spoilt, for what only encoding/json can answer: figures and times that JSON
// cannot hold.
func (x *Outcome) appendTo(o *object) bool {
	o.text("id", x.ID)
	o.key("receipt")
	r := x.Receipt
	if r == nil {
		o.p = append(o.p, "null"...)
		return true
	}
	o.open()
	o.text("schema", r.Schema)
	o.text("id", r.ID)
	o.text("request_id", r.RequestID)
	o.key("time")
	at, err := r.Time.AppendText(append(o.p, '"'))
	if err != nil {
		return false
	}
	o.p = append(at, '"')
	o.bool("live", r.Live)
	o.text("endpoint", r.Endpoint)
	o.text("model", r.Model)
	o.bool("stream", r.Stream)
	o.uint("config_revision", r.ConfigRevision)
	ok := o.decided(&r.Decision)
	if len(r.Earlier) > 0 {
		o.key("earlier_decisions")
		for i := range r.Earlier {
			o.p = append(o.p, "[,"[min(i, 1)])
			o.open()
			ok = o.decided(&r.Earlier[i]) && ok
			o.close()
		}
		o.p = append(o.p, ']')
	}
	o.some("earlier_decisions_omitted", r.EarlierOmitted)
	o.key("legs")
	if r.Legs == nil {
		o.p = append(o.p, "null"...)
	} else {
		o.p = append(o.p, '[')
		for i := range r.Legs {
			if i > 0 {
				o.p = append(o.p, ',')
			}
			ok = o.leg(&r.Legs[i]) && ok
		}
		o.p = append(o.p, ']')
	}
	o.some("legs_omitted", r.LegsOmitted)
	o.key("outcome")
	ok = o.result(&r.Outcome) && ok
	if len(r.Notes) > 0 {
		o.key("notes")
		for i, n := range r.Notes {
			o.p = append(o.p, "[,"[min(i, 1)])
			o.p = appendText(o.p, n)
		}
		o.p = append(o.p, ']')
	}
	o.close()
	return ok
}

// decided writes the members of a decision. It reports false for figures that
// JSON cannot hold.
func (o *object) decided(d *decision.Decision) bool {
	o.some("attempt", d.Attempt)
	o.key("inputs")
	o.inputs(&d.Inputs)
	o.text("path", d.Path)
	o.text("reason", d.Reason)
	o.text("reason_text", d.ReasonText)
	o.int("eff_isl_tokens", d.EffISL)
	o.words("connector", d.Connector)
	o.key("decode")
	ok := o.choice(&d.Decode)
	o.key("prefill")
	ok = o.choice(&d.Prefill) && ok
	p := &d.Predicted
	o.key("predicted")
	o.open()
	o.int("cached_tokens", p.CachedTokens)
	o.int("prefill_cached_tokens", p.PrefillCachedTokens)
	o.int("remote_tokens", p.RemoteTokens)
	o.work("local", &p.Local)
	o.work("remote", &p.Remote)
	o.bool("has_remote", p.HasRemote)
	o.close()
	return ok
}

func (o *object) inputs(in *decision.Inputs) {
	o.open()
	o.int("isl_tokens", in.ISL)
	o.text("isl_source", in.ISLSource)
	o.int("block_size_tokens", in.BlockSize)
	o.int("hashed_blocks", in.HashedBlocks)
	o.yes("approximate", in.Approximate)
	if in.SessionKey != 0 {
		o.quoted("session_key_hash", in.SessionKey)
	}
	o.int("threshold_tokens", in.Threshold)
	o.text("threshold_on", in.ThresholdOn)
	o.words("force", in.Force)
	o.quoted("draw", in.Draw)
	o.uint("decode_turn", in.DecodeTurn)
	o.uint("prefill_turn", in.PrefillTurn)
	o.close()
}

func (o *object) choice(p *decision.Phase) bool {
	o.open()
	o.words("policy", p.Policy)
	o.words("verdict", p.Verdict)
	o.words("chosen", p.Chosen)
	o.words("runner_up", p.RunnerUp)
	ok := o.float("margin_blocks", p.MarginBlocks)
	o.int("eligible_ranks", p.Eligible)
	o.some("tied_ranks", p.Tied)
	o.words("tie_break", p.TieBreak)
	o.yes("sampled", p.Sampled)
	o.key("candidates")
	if p.Candidates == nil { // as in all that is recorded: the decision has them
		o.p = append(o.p, "null"...)
	} else {
		c, err := json.Marshal(p.Candidates)
		ok = ok && err == nil
		o.p = append(o.p, c...)
	}
	o.some("candidates_omitted", p.Omitted)
	o.close()
	return ok
}

func (o *object) work(k string, w *decision.Work) {
	o.key(k)
	o.open()
	o.int("compute_tokens", w.Compute)
	o.int("queued_tokens", w.Queued)
	o.int("transfer_tokens", w.Transfer)
	o.close()
}

func (o *object) leg(l *receipt.Leg) bool {
	o.open()
	o.text("kind", l.Kind)
	o.text("worker", l.Worker)
	o.text("rank", l.Rank)
	o.int("attempt", l.Attempt)
	o.int("status", l.Status)
	ok := o.float("queue_ms", l.QueueMS)
	ok = o.float("dispatch_ms", l.DispatchMS) && ok
	ok = o.float("first_byte_ms", l.FirstByteMS) && ok
	ok = o.float("end_ms", l.EndMS) && ok
	o.words("retry_reason", l.RetryReason)
	o.words("error", l.Error)
	o.int("prompt_tokens", l.PromptTokens)
	o.int("cached_tokens", l.CachedTokens)
	o.some("blocks", l.Blocks)
	o.close()
	return ok
}

func (o *object) result(r *receipt.Outcome) bool {
	o.open()
	o.int("status", r.Status)
	o.words("finish_reason", r.Finish)
	o.int("prompt_tokens", r.PromptTokens)
	o.int("cached_tokens", r.CachedTokens)
	o.int("completion_tokens", r.CompletionTokens)
	ok := o.float("ttft_ms", r.TTFTMS)
	ok = o.float("e2e_ms", r.E2EMS) && ok
	o.key("itl")
	o.open()
	o.int("count", r.ITL.Count)
	ok = o.float("mean_ms", r.ITL.MeanMS) && ok
	ok = o.float("p50_ms", r.ITL.P50MS) && ok
	ok = o.float("p99_ms", r.ITL.P99MS) && ok
	ok = o.float("max_ms", r.ITL.MaxMS) && ok
	o.close()
	o.words("error_code", r.ErrorCode)
	o.words("error", r.Error)
	o.bool("silent_recompute", r.SilentRecompute)
	o.bool("cancelled", r.Cancelled)
	o.close()
	return ok
}

// text writes a string, empty or not, with the escapes of encoding/json.
func (o *object) text(k, v string) {
	o.key(k)
	o.p = appendText(o.p, v)
}

// words is text for what is left out when empty.
func (o *object) words(k, v string) {
	if v != "" {
		o.text(k, v)
	}
}

func (o *object) bool(k string, v bool) {
	o.key(k)
	o.p = strconv.AppendBool(o.p, v)
}

// quoted writes a number as a string.
func (o *object) quoted(k string, v uint64) {
	o.key(k)
	o.p = append(strconv.AppendUint(append(o.p, '"'), v, 10), '"')
}

// float writes a number in the form of encoding/json, the shortest that reads
// as v. It reports false for NaN and infinities.
func (o *object) float(k string, v float64) bool {
	o.key(k)
	abs := math.Abs(v)
	switch {
	case math.IsNaN(v) || math.IsInf(v, 0):
		return false
	case abs < 1<<53 && v == math.Trunc(v) && (v != 0 || !math.Signbit(v)):
		o.p = strconv.AppendInt(o.p, int64(v), 10)
	case abs < 1e21 && (abs >= 1e-6 || v == 0):
		o.p = strconv.AppendFloat(o.p, v, 'f', -1, 64)
	default:
		o.p = strconv.AppendFloat(o.p, v, 'e', -1, 64)
		// Exponents have two digits at least: e-09 is written e-9.
		if n := len(o.p); o.p[n-4] == 'e' && o.p[n-3] == '-' && o.p[n-2] == '0' {
			o.p[n-2] = o.p[n-1]
			o.p = o.p[:n-1]
		}
	}
	return true
}

// appendText appends s as encoding/json does: like appendString, but <, > and &
// are escaped too.
func appendText(dst []byte, s string) []byte {
	for i := 0; i < len(s); i++ {
		if c := s[i]; c < ' ' || c == '"' || c == '\\' || c == '<' || c == '>' || c == '&' || c >= utf8.RuneSelf {
			q, _ := json.Marshal(s) // a string cannot fail
			return append(dst, q...)
		}
	}
	dst = append(dst, '"')
	dst = append(dst, s...)
	return append(dst, '"')
}
