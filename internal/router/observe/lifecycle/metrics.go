package lifecycle

import (
	"strconv"

	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
)

// Metrics counts requests for Prometheus.
func Metrics(m *telemetry.Metrics) Subscriber {
	excluded := func(phase string, in *selector.Input) {
		for i := range in.Candidates {
			if code := in.Candidates[i].ExcludedCode; code != "" {
				m.Excluded(phase, code)
			}
		}
	}
	return Subscriber{
		Refused:   func(e *Event) { m.Rejected(e.Reason) },
		Waited:    func(e *Event) { m.Stage(e.Reason, e.Took) },
		Tokenized: func(e *Event) { m.Tokenized(e.Reason) },
		Decided: func(e *Event) {
			run, t := &e.Request.Routing.Run, &e.Request.Routing.Took
			if run.Attempt == 1 {
				m.Stage("read", t.Read)
				m.Stage("parse", t.Parse)
				m.Stage("tokenize", t.Tokenize)
				m.Stage("hash", t.Hash)
				m.Stage("overlap", t.Overlap)
				m.Stage("plan", t.Plan)
			}
			if p := &run.Plan; p.Err == nil {
				m.Decision(string(p.Path), string(p.Reason))
				if p.Reason.Degraded() {
					m.Fallback(string(p.Reason))
				}
			}
			excluded("decode", &run.In.Decode)
			excluded("prefill", &run.In.Prefill)
		},
		Retried: func(e *Event) { m.Retry(string(e.Phase), e.Reason) },
		LegEnded: func(e *Event) {
			l := e.Leg
			m.Leg(string(l.Phase), l.Peer.Worker.Name, e.Reason, e.At.Sub(l.Start), l.FirstByte)
		},
		Prefilled: func(e *Event) {
			if e.Text != "" {
				m.OddParams(e.Worker.Name)
			}
		},
		Unkept:        func(*Event) { m.StreamWithoutMemory() },
		RequestFaulty: func(*Event) { m.RequestFaulty() },
		Continued:     func(e *Event) { m.Continued(e.Text, e.Reason) },
		NotContinued:  func(e *Event) { m.NotContinued(e.Reason) },
		Aborted:       func(e *Event) { m.Abort(e.Reason) },
		Ended: func(e *Event) {
			r := e.Request
			endpoint, model := "unknown", r.Model
			if r.Endpoint != nil {
				endpoint = r.Endpoint.Kind.String()
			}
			if model != "" && (r.Routing == nil || len(r.Routing.List) == 0) {
				model = "unknown"
			}
			m.Request(endpoint, model, r.Outcome.Path, strconv.Itoa(r.Outcome.Status), r.Outcome.Took)
		},
		Answered: func(e *Event) {
			r, a := e.Request, &e.Request.Answer
			if r.Endpoint.Streamable && a.Cached >= 0 {
				m.Cached(r.predicted(), a.Cached)
			}
			if !a.FirstToken.IsZero() {
				m.FirstToken(r.Model, r.Outcome.Path, a.FirstToken.Sub(r.Start))
			}
			if a.Gaps.Count() > 0 {
				m.InterToken(r.Model, a.Gaps.Mean())
			}
			if run := &r.Routing.Run; r.Outcome.Recomputed {
				m.SilentRecompute(run.In.DecodePeers[run.Plan.DecodeIndex].Worker.Name)
			}
		},
	}
}
