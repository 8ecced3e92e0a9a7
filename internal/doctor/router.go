package doctor

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// clock asks for the status and sees by how much the router's clock is off:
// the middle of the question against the time in the answer.
func (e *exam) clock(ctx context.Context) (*admin.Status, error) {
	var s *admin.Status
	best, skew := time.Duration(math.MaxInt64), time.Duration(0)
	for range 5 {
		t0 := time.Now()
		got, err := e.o.Target.Admin.Status(ctx)
		if err != nil {
			return nil, err
		}
		if took := time.Since(t0); took < best {
			best, skew, s = took, got.Now.Sub(t0.Add(took/2)), got
		}
	}
	text := fmt.Sprintf("the router's clock is %+.1f ms from this one (+-%.1f)", float64(skew.Microseconds())/1000, float64(best.Microseconds())/2000)
	if skew.Abs() > best/2+50*time.Millisecond {
		e.add("clock", "router", Warn, text, "events and receipts are hard to put beside logs of other machines: run a time service")
	} else {
		e.add("clock", "router", OK, text, "")
	}
	return s, nil
}

func (e *exam) router(ctx context.Context, s *admin.Status, ws []admin.Worker) {
	facts := fmt.Sprintf("version %s, %d workers, policy %s, %s", s.Version, s.Workers.Total, s.Policy, admin.Rule(s.ThresholdTokens, s.ThresholdOn, s.ThresholdAuto, s.Costs))
	switch own := ownReasons(s.Reasons, ws); {
	case s.State == "ready":
		e.add("router", s.Name, OK, "ready, "+facts, "")
	case s.State == "degraded" && len(own) == 0:
		e.add("router", s.Name, OK, "degraded by what is found of its workers, "+facts, "")
	default:
		e.add("router", s.Name, Warn, fmt.Sprintf("%s: %s", s.State, strings.Join(own, "; ")), "dynctl workers list shows each worker")
	}
	code, _, err := e.get(ctx, e.o.Target.URL+"/v1/models")
	switch {
	case err != nil:
		e.add("data plane", e.o.Target.URL, Fail, err.Error(), "is this the address that clients use? give --data URL")
	case code == http.StatusUnauthorized || code == http.StatusForbidden:
		e.locked = true
		text := "requires an API key, and none was given"
		if e.o.Target.APIKey != "" {
			text = fmt.Sprintf("does not accept the API key (GET /v1/models answers %d)", code)
		}
		e.add("data plane", e.o.Target.URL, Fail, text, "give --api-key-file FILE; dynctl keys new makes a key")
	case code != http.StatusOK:
		e.add("data plane", e.o.Target.URL, Fail, fmt.Sprintf("GET /v1/models answers %d", code), "")
	default:
		e.add("data plane", e.o.Target.URL, OK, "answers; models "+strings.Join(s.Models, ", "), "")
	}
	for _, l := range []struct {
		name   string
		access admin.ListenerAccess
	}{{"data plane", s.Access.Data}, {"admin API", s.Access.Admin}} {
		if why := l.access.Exposed(); why != "" {
			e.add("access", l.name+" "+l.access.Listen, Warn, why, "docs/security.md shows what to ask clients for")
		} else if l.access.Listen != "" {
			e.add("access", l.name+" "+l.access.Listen, OK, l.access.Who(), "")
		}
	}
	if s.Traffic.Recomputes > 0 {
		e.add("silent recompute", "router", Fail, fmt.Sprintf("the decode engine computed the prompt of %s again that had been prefilled remotely, since the start", count(int(s.Traffic.Recomputes), "request")), "dynctl explain of one of them shows its workers; check the KV connector of both sides")
	}
	if s.Traffic.Fallbacks > 0 {
		e.add("fallback", "router", Warn, count(int(s.Traffic.Fallbacks), "request")+" fell back to local prefill since the start", "")
	}
}

// learned shows where costs change the path, and what of them is not known and why.
func (e *exam) learned(s *admin.Status) {
	for i := range s.Costs {
		m := &s.Costs[i]
		if len(m.Crossings) > 0 {
			var loads []string
			for k := range m.Crossings {
				if !m.Crossings[k].Unknown() { // learning has why
					loads = append(loads, m.Crossings[k].Sentence())
				}
			}
			if len(loads) > 0 && !s.ThresholdAuto {
				loads = append(loads, fmt.Sprintf("routing.threshold is %v and decides", s.Threshold()))
			}
			if len(loads) > 0 {
				e.add("crossing", m.Model, OK, strings.Join(loads, "; "), "")
			}
		}
		for k := range m.Unlearned {
			u, state := &m.Unlearned[k], Skip
			if u.Overdue && u.Severity() == eventlog.Warn {
				state = Warn
			}
			e.add("learning", m.Model, state, u.Effect()+": "+u.Text, u.Advice)
		}
	}
}

// ownReasons leaves out of a router's reasons those that findings of its workers repeat:
// a worker that is not usable, and ranks whose events are not trusted.
func ownReasons(reasons []string, ws []admin.Worker) []string {
	return slices.DeleteFunc(slices.Clone(reasons), func(reason string) bool {
		if strings.Contains(reason, "KV events are not trusted") {
			return true
		}
		return slices.ContainsFunc(ws, func(w admin.Worker) bool {
			return !w.Usable && strings.HasPrefix(reason, "worker "+w.Name+" is not usable")
		})
	})
}
