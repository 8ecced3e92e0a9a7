package admission

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/router/request/api"
)

// TestAsk: every client may lower its priority and its wait; only one that may steer
// raises the priority.
func TestAsk(t *testing.T) {
	for _, c := range []struct {
		priority, wait string
		steers         bool
		band           Band
		patience       time.Duration
		bad            bool
	}{
		{band: Normal},
		{priority: "low", band: Low},
		{priority: "high", band: Normal},
		{priority: "high", steers: true, band: High},
		{wait: "0.25", band: Normal, patience: 250 * time.Millisecond},
		{wait: "86400", band: Normal, patience: 24 * time.Hour},
		{priority: "urgent", band: Normal, bad: true},
		{wait: "soon", band: Normal, bad: true},
		{wait: "NaN", band: Normal, bad: true},
		{wait: "0", band: Normal, bad: true},
		{wait: "86401", band: Normal, bad: true},
	} {
		h := http.Header{}
		h.Set(headerPriority, c.priority)
		h.Set(headerMaxWait, c.wait)
		got := Claim{Band: Normal}
		err := got.ReadHeaders(h, c.steers)
		if got.Band != c.band || got.Patience != c.patience {
			t.Errorf("%+v: band %v, patience %v", c, got.Band, got.Patience)
		}
		if (err != nil) != c.bad || c.bad && api.FromError(err).Status != http.StatusBadRequest {
			t.Errorf("%+v: %v", c, err)
		}
		if name, value := headerPriority, c.priority; c.bad {
			if c.wait != "" {
				name, value = headerMaxWait, c.wait
			}
			if e := api.FromError(err); e.Param != name || !strings.HasPrefix(e.Message, fmt.Sprintf("header %s: %q is not ", name, value)) {
				t.Errorf("%+v: the error names neither header nor value: %+v", c, e)
			}
		}
	}
}

// TestRefusal: a router that stops sends clients elsewhere; one without room asks them to
// come again, as late as the slowest queue needs and within a minute.
func TestRefusal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		line := NewQueue(1, time.Minute, 0)
		queues := []NamedQueue{{NewQueue(1, time.Minute, 0), ""}, {line, "m"}}
		for _, c := range []struct {
			err    error
			reason string
			status int
		}{
			{ErrClosed, "draining", http.StatusServiceUnavailable},
			{ErrFull, "overload", http.StatusTooManyRequests},
			{ErrHopeless, "overload", http.StatusTooManyRequests},
			{fmt.Errorf("%w; why", ErrTimeout), "overload", http.StatusTooManyRequests},
		} {
			reason, answer := Refusal(c.err, queues...)
			e := api.FromError(answer)
			if reason != c.reason || e.Status != c.status || e.RetryAfter != time.Second || !errors.Is(answer, c.err) {
				t.Errorf("%v: %s, %+v", c.err, reason, e)
			}
		}
		for range 2 {
			line.order.queue("m").took[line.order.queue("m").tookAt] = time.Now()
			line.order.queue("m").tookAt++
			<-time.After(10 * time.Second)
		}
		if _, answer := Refusal(ErrFull, queues...); api.FromError(answer).RetryAfter != 10*time.Second {
			t.Errorf("with two places in 20 seconds: %+v", answer)
		}
		other := errors.New("other")
		if reason, answer := Refusal(other, queues...); reason != "overload" || !errors.Is(answer, other) {
			t.Errorf("%s, %v", reason, answer)
		}
	})
}
