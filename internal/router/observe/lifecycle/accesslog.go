package lifecycle

import (
	"cmp"
	"context"
	"log/slog"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
)

// AccessLog writes one record to log when a request ends; nil writes none. What is not known
// of a request is left out. log must not block.
func AccessLog(log *slog.Logger) Subscriber {
	if log == nil {
		return Subscriber{}
	}
	return Subscriber{Ended: func(e *Event) {
		attrs := make([]slog.Attr, 0, 24)
		log.LogAttrs(context.Background(), slog.LevelInfo, "request", e.Request.access(attrs)...)
	}}
}

// access appends what the access log has of a request that has ended. Durations are in
// milliseconds. isl is the prompt's length in tokens as the router counts it, prompt_tokens as
// the engine reports it.
func (r *Record) access(to []slog.Attr) []slog.Attr {
	text := func(key, value string) {
		if value != "" {
			to = append(to, slog.String(key, value))
		}
	}
	text("id", r.ID)
	text("decision", r.Live.ID())
	if q := r.Client; q != nil {
		text("client", q.RemoteAddr)
		text("method", q.Method)
		text("url", api.Clip(q.URL.Path))
	}
	to = append(to, slog.Int("status", r.Outcome.Status))
	text("model", cmp.Or(r.Model, api.Clip(r.RequestedModel)))
	text("path", r.Path)
	decode, prefill := r.ranks()
	text("worker", decode)
	text("prefill_worker", prefill)
	if q := r.Routing; q != nil {
		if q.Run.Attempt > 1 {
			to = append(to, slog.Int("attempts", q.Run.Attempt))
		}
		if p := &q.Prompt; p.Source != "" && p.Source != route.FromNothing {
			to = append(to, slog.Int("isl", p.ISL), slog.String("isl_source", string(p.Source)))
		}
	}
	to = append(to, slog.Bool("stream", r.Stream))
	a := &r.Answer
	if a.leg != nil {
		for _, n := range [...]struct {
			key    string
			tokens int
		}{{"prompt_tokens", a.Prompt}, {"cached_tokens", a.Cached}, {"completion_tokens", a.Completion}} {
			if n.tokens >= 0 {
				to = append(to, slog.Int(n.key, n.tokens))
			}
		}
	}
	if !a.FirstToken.IsZero() {
		to = append(to, slog.Float64("ttft_ms", ms(a.FirstToken.Sub(r.Start))))
	}
	to = append(to, slog.Float64("duration_ms", ms(r.Outcome.Took)))
	text("key", r.Key)
	text("tenant", r.Tenant)
	if r.Outcome.Err != nil {
		text("error", string(r.Outcome.Err.Code))
	}
	return to
}

// ranks are the labels of the ranks that the newest plan chose; prefill is empty unless the
// plan moves KV, and both are without a plan.
func (r *Record) ranks() (decode, prefill string) {
	if r.Routing == nil {
		return "", ""
	}
	p, in := &r.Routing.Run.Plan, &r.Routing.Run.In
	if p.Err != nil || p.DecodeIndex < 0 || p.Path == "" {
		return "", ""
	}
	if p.Path == route.Remote {
		prefill = in.PrefillPeers[p.PrefillIndex].Rank.Label
	}
	return in.DecodePeers[p.DecodeIndex].Rank.Label, prefill
}
