package admission

import (
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/dynctl/dynctl/internal/router/request/api"
)

// The headers by which a client says how long it waits, and before whom.
const (
	headerPriority = "X-Dynctl-Priority"
	headerMaxWait  = "X-Dynctl-Max-Wait"
)

// ReadHeaders takes into the claim what a client's headers ask for. Every client may lower its
// priority; only one that may steer raises it.
func (c *Claim) ReadHeaders(h http.Header, steers bool) error {
	if name := h.Get(headerPriority); name != "" {
		b, ok := ParseBand(name)
		if !ok {
			return api.BadRequest(headerPriority, "header %s: %q is not one of %v", headerPriority, api.Clip(name), Bands)
		}
		if b > c.Band || steers {
			c.Band = b
		}
	}
	if v := h.Get(headerMaxWait); v != "" {
		seconds, err := strconv.ParseFloat(v, 64)
		if err != nil || !(seconds >= 0.001 && seconds <= 86400) {
			return api.BadRequest(headerMaxWait, "header %s: %q is not a number of seconds from 0.001 to 86400", headerMaxWait, api.Clip(v))
		}
		c.Patience = time.Duration(seconds * float64(time.Second))
	}
	return nil
}

// NamedQueue is a model's queue, or with an empty name the only one.
type NamedQueue struct {
	Queue interface {
		// EstimateWait is [Queue.EstimateWait].
		EstimateWait(queue string) (time.Duration, bool)
	}
	Name string
}

// Refusal is the answer to a request that is not let in, and its reason for metrics. A
// request that finds no room is to come again after the time that those which wait in these
// queues will take at the recent rate, a minute at most.
func Refusal(err error, queues ...NamedQueue) (reason string, answer error) {
	switch {
	case errors.Is(err, ErrClosed):
		return "draining", &api.Error{Status: http.StatusServiceUnavailable, Code: api.CodeDraining, Message: "this router is stopping; send the request to another one", RetryAfter: time.Second, Err: err}
	case errors.Is(err, ErrFull), errors.Is(err, ErrTimeout), errors.Is(err, ErrHopeless):
		after := time.Second
		for _, q := range queues {
			if d, known := q.Queue.EstimateWait(q.Name); known {
				after = max(after, d)
			}
		}
		return "overload", &api.Error{Status: http.StatusTooManyRequests, Code: api.CodeOverloaded, Message: err.Error() + "; try again later", RetryAfter: min(after, time.Minute), Err: err}
	}
	return "overload", err
}
