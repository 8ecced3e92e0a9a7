package feed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// Poller asks one router for samples. It is not safe for concurrent use.
type Poller struct {
	Client *admin.Client
	// Timeout of one question; default 2 s.
	Timeout time.Duration
	// Decisions is how many decisions a sample holds; default 20.
	Decisions int

	nextNode time.Time
}

// errNotRouter is an answer that is JSON, but not that of a router.
var errNotRouter = errors.New("the address answers, but not like a dynctl router: is it the --admin-listen address?")

// Poll asks once. Errors are part of the sample.
func (p *Poller) Poll(ctx context.Context, after uint64) Sample {
	timeout, decisions := p.Timeout, p.Decisions
	timeout = cmp.Or(max(timeout, 0), 2*time.Second)
	decisions = cmp.Or(max(decisions, 0), 20)
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	began := time.Now()
	var s Sample
	s.Snapshot, s.Err = p.Client.SnapshotBrief(ctx, decisions, 200, after)
	s.At = time.Now()
	s.Took = s.At.Sub(began)
	if s.Err == nil && (!strings.HasPrefix(s.Snapshot.Schema, "dynctl.admin/") || s.Snapshot.Status.Now.IsZero()) {
		s.Snapshot, s.Err = nil, errNotRouter
	}
	if s.Err != nil {
		s.Snapshot = nil
		if errors.Is(s.Err, context.DeadlineExceeded) {
			s.Err = fmt.Errorf("%s does not answer within %s: the router is overloaded or hangs", p.Client.URL(), timeout)
		}
		return s
	}
	if began.Before(p.nextNode) {
		return s
	}
	// The most used prefixes cost the router a walk over the root's children;
	// that it never takes more than a hundredth of its time is our duty.
	asked := time.Now()
	if c, err := p.Client.IndexChildren(ctx, admin.BrowseQuery{Sort: "hits", Limit: prefixLimit}); err == nil {
		s.Prefixes, s.PrefixesAsked = c.Children, true
	}
	p.nextNode = asked.Add(min(100*time.Since(asked), time.Minute))
	return s
}

// sentence is an error as one line, without control characters; the painter
// and JSON take care of the rest.
func sentence(err error) string {
	if err == nil {
		return "no answer"
	}
	text := strings.Join(strings.Fields(err.Error()), " ")
	if len(text) > 300 {
		text = text[:300] + "..."
	}
	return text
}
