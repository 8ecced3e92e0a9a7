package lifecycle

// Spans completes the span of a request, and makes those of its legs.
func Spans() Subscriber {
	return Subscriber{
		LegSent: func(e *Event) {
			r, l := e.Request, e.Leg
			if r.Span == nil {
				return
			}
			e.Call.Header = e.Call.Header.Clone()
			l.span = r.Span.Leg(string(l.Phase)+" leg", e.Call.Header)
			l.span.String("dynctl.worker", l.Peer.Worker.Name)
			l.span.Int("dynctl.dp_rank", l.Peer.Rank.DP)
			l.span.Int("dynctl.attempt", r.Routing.Run.Attempt)
		},
		LegEnded: func(e *Event) { e.Leg.span.End(e.Err) },
		Ended: func(e *Event) {
			r := e.Request
			r.Span.String("dynctl.decision", r.Live.ID())
			r.Span.String("dynctl.path", r.Outcome.Path)
			r.Span.Int("http.response.status_code", r.Outcome.Status)
			r.Span.End(e.Err)
		},
	}
}
