package serving_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/rig/fakeengine"
	"github.com/dynctl/dynctl/internal/router/forward/pair"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

const ms = time.Millisecond

// free is a good engine that answers after a while, whatever the other leg does.
func free(r *fakeengine.Router, after time.Duration) func(*fakeengine.Request) fakeengine.Answer {
	return func(q *fakeengine.Request) fakeengine.Answer {
		a := r.Model.Answer(q).After(after)
		a.Meets = ""
		return a
	}
}

// TestLegsOfAPair: the two legs of a concurrent pair in each order, on one pair of engines
// with one attempt: what the client gets, when each leg is over, and how it counts.
func TestLegsOfAPair(t *testing.T) {
	good := func(after time.Duration) func(*fakeengine.Router) func(*fakeengine.Request) fakeengine.Answer {
		return func(r *fakeengine.Router) func(*fakeengine.Request) fakeengine.Answer { return free(r, after) }
	}
	bad := func(a fakeengine.Answer) func(*fakeengine.Router) func(*fakeengine.Request) fakeengine.Answer {
		return func(*fakeengine.Router) func(*fakeengine.Request) fakeengine.Answer {
			return func(*fakeengine.Request) fakeengine.Answer { return a }
		}
	}
	reset, error5xx := fakeengine.Fails(upstream.Reset, true), fakeengine.JSON(500, words)
	const streams = 120 * ms // from the head of the stream of 12 tokens to its end mark
	for _, c := range []struct {
		name              string
		prefill, decode   func(*fakeengine.Router) func(*fakeengine.Request) fakeengine.Answer
		status            int // 200 is a whole answer
		legs, outcomes    string
		prefilled, answer time.Duration // when the legs are over
		dead              bool          // engines give no sign of life when they are asked
		note              string        // in the receipt
	}{
		{"the prefill ends first", good(10 * ms), good(20 * ms), 200, "", "decode-0: success, prefill-0: success", 10 * ms, 20*ms + streams, false, ""},
		{"the decode begins first", good(50 * ms), good(20 * ms), 200, "", "decode-0: success, prefill-0: success", 50 * ms, 20*ms + streams, false, ""},
		{"the prefill outlasts the answer", good(time.Hour), good(20 * ms), 200, "prefill-0: canceled", "decode-0: success, prefill-0: canceled", 20*ms + streams + pair.Grace, 20*ms + streams, false, ""},
		{"the prefill fails while the answer streams", bad(error5xx.After(50 * ms)), good(20 * ms), 200, "prefill-0: status_5xx", "decode-0: success, prefill-0: server error", 50 * ms, 20*ms + streams, false, ""},
		{"the prefill fails after the answer", bad(error5xx.After(500 * ms)), good(20 * ms), 200, "prefill-0: status_5xx", "decode-0: success, prefill-0: server error", 500 * ms, 20*ms + streams, false, ""},

		{"the prefill fails first", bad(error5xx.After(10 * ms)), good(time.Hour), 502, "prefill-0: status_5xx, decode-0: canceled", "decode-0: canceled, prefill-0: server error", 10 * ms, 10 * ms, false, ""},
		{"the prefill refuses first", bad(fakeengine.JSON(400, words).After(10 * ms)), bad(error5xx.After(11 * ms)), 400, "prefill-0: status_4xx, decode-0: canceled", "decode-0: canceled, prefill-0: client error", 10 * ms, 10 * ms, false, ""},
		{"the decode fails before the prefill refuses", bad(fakeengine.JSON(400, words).After(11 * ms)), bad(error5xx.After(10 * ms)), 500, "decode-0: status_5xx, prefill-0: canceled", "decode-0: server error, prefill-0: canceled", 10 * ms, 10 * ms, false, ""},
		{"the prefill is lost, the decode says nothing in the grace time", bad(reset.After(10 * ms)), good(time.Hour), 502, "prefill-0: reset, decode-0: canceled", "decode-0: canceled, prefill-0: server error", 10 * ms, 10*ms + pair.Grace, false, ""},
		{"the prefill is lost, and the decode in the grace time", bad(reset.After(10 * ms)), bad(reset.After(500 * ms)), 502, "prefill-0: reset, decode-0: reset", "decode-0: server error, prefill-0: server error", 10 * ms, 500 * ms, false, "prefill-0 had the request at the same time"},
		{"the prefill is lost, and the decode engine says nothing when asked", bad(reset.After(10 * ms)), good(time.Hour), 502, "prefill-0: reset, decode-0: canceled", "decode-0: canceled, prefill-0: server error", 10 * ms, 10*ms + pair.Grace, true, "decode-0 had the request at the same time"},
		{"the prefill is lost, the decode answers in the grace time", bad(reset.After(10 * ms)), good(500 * ms), 200, "prefill-0: reset", "decode-0: success, prefill-0: server error", 10 * ms, 500*ms + streams, false, ""},

		{"the decode fails first", good(time.Hour), bad(error5xx.After(10 * ms)), 500, "decode-0: status_5xx, prefill-0: canceled", "decode-0: server error, prefill-0: canceled", 10 * ms, 10 * ms, false, ""},
		{"the decode is lost, the prefill ends in the grace time", good(500 * ms), bad(reset.After(10 * ms)), 502, "decode-0: reset", "decode-0: server error, prefill-0: success", 500 * ms, 10 * ms, false, ""},
		{"the decode is lost, and the prefill in the grace time", bad(reset.After(500 * ms)), bad(reset.After(10 * ms)), 502, "decode-0: reset, prefill-0: reset", "decode-0: server error, prefill-0: server error", 500 * ms, 10 * ms, false, "prefill-0 had the request at the same time"},
		{"the decode is lost, the prefill says nothing in the grace time", good(time.Hour), bad(reset.After(10 * ms)), 502, "decode-0: reset, prefill-0: canceled", "decode-0: server error, prefill-0: canceled", 10*ms + pair.Grace, 10 * ms, true, "prefill-0 had the request at the same time"},
		{"the stream breaks off", good(10 * ms), bad(fakeengine.Stream(`{"choices":[{"index":0,"text":"F"}]}`).Then(1, fakeengine.Piece{Fail: upstream.Reset}).After(20 * ms)), 0, "decode-0: reset", "decode-0: server error, decode-0: success, prefill-0: success", 10 * ms, 20 * ms, false, ""},
		{"the stream breaks off before the prefill has ended", good(time.Hour), bad(fakeengine.Stream(`{"choices":[{"index":0,"text":"F"}]}`).Then(1, fakeengine.Piece{Fail: upstream.Reset}).After(20 * ms)), 0, "decode-0: reset, prefill-0: canceled", "decode-0: server error, decode-0: success, prefill-0: canceled", 20 * ms, 20 * ms, false, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := fakeengine.New(t, "1p1d sglang", func(s *settings.Config) {
					s.Retry.Attempts, s.Routing.PrefillFallback, s.Timeouts.Prefill, s.Timeouts.Response = 1, "error", 2*time.Hour, 2*time.Hour
				})
				r.Alive = func(*workers.Worker) bool { return !c.dead }
				r.Always("prefill-0", c.prefill(r))
				r.Always("decode-0", c.decode(r))
				began := time.Now()
				got := r.Send(t.Context(), ask(true, ""))
				switch {
				case c.status == 200 && !whole(got, true), c.status > 200 && got.Status != c.status:
					t.Errorf("%s", got)
				case c.status == 0 && (said(got.Body) != "F" || got.Err == nil || !strings.Contains(got.Err.Message, "broke off")):
					t.Errorf("%s", got)
				}
				for leg := range strings.SplitSeq(c.legs, ", ") {
					if !strings.Contains(got.Legs(), leg) {
						t.Errorf("the legs are %q, without %q", got.Legs(), leg)
					}
				}
				if n := strings.Count(got.Legs(), ":"); c.legs == "" && n > 0 || c.legs != "" && n != strings.Count(c.legs, ":") {
					t.Errorf("the legs are %q, want %q", got.Legs(), c.legs)
				}
				if o := r.Outcomes(); o != c.outcomes {
					t.Errorf("the outcomes are %q, want %q", o, c.outcomes)
				}
				for name, want := range map[string]time.Duration{"prefill": c.prefilled, "decode": c.answer} {
					if q := r.Requests(name); len(q) != 1 || q[0].Ended.Sub(began) != want {
						t.Errorf("the %s leg is over after %v, want %v", name, q[0].Ended.Sub(began), want)
					}
				}
				if notes := strings.Join(got.Receipt.Notes, "\n"); !strings.Contains(notes, c.note) || c.note == "" && strings.Contains(notes, "at the same time") {
					t.Errorf("notes %q", notes)
				}
			})
		})
	}
}

// TestLegsAtTheSameMoment: of two answers that come at the same time one counts, and the client
// gets that one: a prefill's 400 is final, whatever the decode engine makes of its end.
func TestLegsAtTheSameMoment(t *testing.T) {
	for range 100 {
		for _, decodes := range []bool{true, false} {
			synctest.Test(t, func(t *testing.T) {
				r := fakeengine.New(t, "1p1d sglang", func(s *settings.Config) { s.Retry.Attempts, s.Routing.PrefillFallback = 2, "error" })
				r.Always("prefill-0", always(fakeengine.JSON(400, words).After(20*ms)))
				if r.Always("decode-0", free(r, 20*ms)); !decodes {
					r.Always("decode-0", always(fakeengine.JSON(500, words).After(20*ms)))
				}
				got := r.Send(t.Context(), ask(true, ""))
				if first := len(got.Receipt.Earlier) > 0; !first && got.Status != 400 && !(decodes && whole(got, true)) {
					t.Errorf("%s by %s", got, got.Legs())
				}
			})
		}
	}
}

// TestPairDropsItsInput: a stream of a pair gives its request's body back once the prefill leg
// beside it has ended.
func TestPairDropsItsInput(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := fakeengine.New(t, "1p1d sglang")
		r.Always("prefill-0", free(r, 65*ms))
		r.Always("decode-0", free(r, 20*ms))
		began := time.Now()
		var held, dropped int
		q := ask(true, "")
		q.Piece = func([]byte) error {
			synctest.Wait()
			switch used := r.Bodies.Used(); {
			case time.Since(began) < 65*ms && used > 0:
				held++
			case time.Since(began) > 65*ms && used == 0:
				dropped++
			default:
				t.Errorf("%d bytes are held after %v", used, time.Since(began))
			}
			return nil
		}
		if got := r.Send(t.Context(), q); !whole(got, true) || held == 0 || dropped == 0 {
			t.Errorf("%s; the body was held at %d pieces, and dropped at %d", got, held, dropped)
		}
	})
}
