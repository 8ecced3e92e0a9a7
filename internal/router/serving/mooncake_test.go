package serving_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/rig/fakeengine"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// mooncake is engines with vLLM's MooncakeConnector: a prefill engine that is asked for a
// transfer has a sender wait for its KV, for 480 s where none comes; what the decode engine
// does meanwhile ends nothing.
type mooncake struct {
	*fakeengine.Router
	t *testing.T

	mu sync.Mutex
	// life counts the starts of each prefill engine, conns are by what requests reached it.
	life  map[string]int
	conns map[*fakeengine.Request]connection
	legs  map[string]*transferLegs // by transfer
	asked int                      // of the bootstrap servers
	// fails is what becomes of a prefill leg; nil for a good one.
	fails func(*fakeengine.Request) *fakeengine.Answer
	// Until a decode engine asks for KV it takes a step, and until an engine has all of a
	// request to be written it takes a while, as the bootstrap servers take to answer.
	step, writes, prefill, answers time.Duration
}

// transferLegs are the legs of a transfer.
type transferLegs struct {
	prefill, decode *fakeengine.Request
	written, ready  time.Time // ready is zero where the prefill failed
}

// connection is of a request: to which life of its engine, and whether it was made for it.
type connection struct {
	life  int
	fresh bool
}

func newMooncake(t *testing.T, fleet string) *mooncake {
	m := &mooncake{
		Router: fakeengine.New(t, fleet+" mooncake"), t: t, life: map[string]int{}, conns: map[*fakeengine.Request]connection{}, legs: map[string]*transferLegs{},
		step: 5 * time.Millisecond, writes: time.Millisecond, prefill: 20 * time.Millisecond, answers: 1500 * time.Microsecond,
	}
	m.Bootstrap = func(ctx context.Context, worker string) (string, error) {
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-time.After(m.answers):
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		m.asked++
		return fmt.Sprintf(`{"0":{"engine_id":%q,"worker_addr":{"0":{"0":"tcp://%s:1"}}}}`, m.engine(worker), worker), nil
	}
	m.Writes = func(q *fakeengine.Request) (takes time.Duration, fresh, lost bool) {
		if !strings.HasPrefix(q.Worker, "prefill") {
			return 0, false, false
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		life, made, busy, old := m.life[q.Worker], 0, 0, 0
		for b, c := range m.conns {
			switch {
			case b.Worker != q.Worker:
			case c.life == life:
				if c.fresh {
					made++
				}
				if !m.Idle(b) {
					busy++ // or broken
				}
			case m.Idle(b):
				old++
			}
		}
		fresh = made == busy
		m.conns[q] = connection{life, fresh}
		return m.writes, fresh, made == 0 && old > 0 // the first one finds all that are closed
	}
	m.Serves = m.serve
	return m
}

// engine is the id of a prefill engine.
func (m *mooncake) engine(worker string) string { return fmt.Sprintf("%s#%d", worker, m.life[worker]) }

// restart makes a prefill engine another process.
func (m *mooncake) restart(worker string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.life[worker]++
}

func (m *mooncake) serve(q *fakeengine.Request) fakeengine.Answer {
	m.mu.Lock()
	defer m.mu.Unlock()
	params := rawjson.Value(q.Body).Get("kv_transfer_params")
	if !params.Exists() {
		return m.Model.Answer(q) // computes all of it
	}
	var names []string
	for name := range params.Members() {
		names = append(names, string(name))
	}
	slices.Sort(names)
	id := params.Get("transfer_id").String()
	legs := m.legs[id]
	if strings.HasPrefix(q.Worker, "prefill") {
		if got := strings.Join(names, " "); got != "do_remote_decode do_remote_prefill transfer_id" || !params.Get("do_remote_decode").Bool() || params.Get("do_remote_prefill").Bool() {
			m.t.Errorf("a prefill leg with %s", params)
		}
		if !rawjson.Value(q.Body).Get("ignore_eos").Bool() {
			m.t.Errorf("the prefill could end by itself: %s", q.Body)
		}
		if legs != nil {
			m.t.Errorf("the transfer %s has two prefill legs", id)
		}
		legs = &transferLegs{prefill: q, written: q.At.Add(m.writes)}
		m.legs[id] = legs
		if m.fails != nil {
			if a := m.fails(q); a != nil {
				return *a
			}
		}
		legs.ready = legs.written.Add(m.prefill)
		return fakeengine.JSON(200, fakeengine.Prefilled(q.ID, 64, "null")).After(m.prefill)
	}
	if got := strings.Join(names, " "); got != "do_remote_decode do_remote_prefill remote_bootstrap_addr remote_engine_id transfer_id" || params.Get("do_remote_decode").Bool() || !params.Get("do_remote_prefill").Bool() {
		m.t.Errorf("a decode leg with %s", params)
	}
	switch {
	case legs == nil:
		m.t.Errorf("the transfer %s has a decode leg and no prefill leg", id)
		return fakeengine.Hangs()
	case legs.decode != nil:
		m.t.Errorf("the transfer %s feeds two decode legs", id)
	case q.At.Before(legs.written):
		m.t.Errorf("a decode leg was sent %s before the request of its prefill leg was written", legs.written.Sub(q.At))
	}
	legs.decode = q
	worker := legs.prefill.Worker
	if server := params.Get("remote_bootstrap_addr").String(); server != "http://"+worker+":8998" {
		m.t.Errorf("the decode engine would ask %s for an engine of %s", server, worker)
	}
	if params.Get("remote_engine_id").String() != m.engine(worker) || legs.ready.IsZero() {
		return fakeengine.Hangs() // it has no timeout
	}
	return m.Model.Answer(q).After(max(m.step, time.Until(legs.ready)))
}

// senders counts those of the engine that has most that wait for KV that never comes.
func (m *mooncake) senders() (most int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := map[string]int{}
	for _, l := range m.legs {
		// A decode engine whose request was given up before its first step asked for nothing; a
		// prefill that is given up leaves no KV.
		gone := l.ready.IsZero() || !l.prefill.Ended.IsZero() && l.prefill.Ended.Before(l.ready)
		if gone && l.decode != nil && l.decode.Ended.Sub(l.decode.At) >= m.step && time.Since(l.decode.At) < 480*time.Second {
			n[l.prefill.Worker]++
			most = max(most, n[l.prefill.Worker])
		}
	}
	return most
}

// send has a request answered and wants it to be.
func (m *mooncake) send(path string) {
	m.t.Helper()
	got := m.Send(m.t.Context(), ask(false, ""))
	if got.Err != nil || got.Status != 200 || path != "" && got.Receipt.Path != path {
		m.t.Errorf("%s by %s, want %s: %s", got, got.Receipt.Path, path, got.Legs())
	}
}

// TestMooncakeLegs: the first transfer of a rank waits for its answer, the others are held,
// and a bootstrap server is asked once.
func TestMooncakeLegs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMooncake(t, "1p1d")
		for range 5 {
			m.send("remote")
		}
		for i, p := range m.Requests("prefill") {
			d := m.Requests("decode")[i]
			if held := d.At.Sub(p.At); (held == m.writes) != (i > 0) {
				t.Errorf("request %d: the decode leg came %v after the prefill leg", i, held)
			}
		}
		if m.asked != 1 {
			t.Errorf("the bootstrap server was asked %d times", m.asked)
		}
		page := httptest.NewRecorder()
		m.Metrics.Handler().ServeHTTP(page, httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody))
		if text := page.Body.String(); !strings.Contains(text, `dynctl_stage_seconds_count{stage="held"} 4`) || !strings.Contains(text, `dynctl_stage_seconds_sum{stage="held"} 0.004`) {
			t.Error("the metrics do not have the time that decode legs are held")
		}
	})
}

// TestMooncakeAsksWhileItConnects: over a new connection the decode leg is held until the
// prefill's request is written and the bootstrap server has answered, whichever takes longer.
func TestMooncakeAsksWhileItConnects(t *testing.T) {
	for _, answers := range []time.Duration{0, time.Millisecond, 3 * time.Millisecond} {
		synctest.Test(t, func(t *testing.T) {
			m := newMooncake(t, "1p1d")
			m.writes, m.answers = 2*time.Millisecond, answers
			m.send("remote")
			m.Writes = func(*fakeengine.Request) (time.Duration, bool, bool) { return m.writes, true, false }
			<-time.After(2 * time.Second) // another engine could have started
			m.send("remote")
			p, d := m.Requests("prefill")[1], m.Requests("decode")[1]
			if held := d.At.Sub(p.At); held != max(m.writes, answers) || m.asked != 2 {
				t.Errorf("an answer takes %v: the decode leg is held for %v; asked %d times", answers, held, m.asked)
			}
		})
	}
}

// TestMooncakeSeenAsksNothing: a rank that answers once a second is not asked for its engine
// again, however many requests make connections: decode legs are held until the prefill's request
// is written, or wait for its answer.
func TestMooncakeSeenAsksNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMooncake(t, "1p1d")
		m.send("remote")
		m.Writes = func(*fakeengine.Request) (time.Duration, bool, bool) { return m.writes, true, false }
		for range 20 {
			var wg sync.WaitGroup
			for range 6 {
				wg.Go(func() { m.send("remote") })
			}
			wg.Wait()
			<-time.After(900 * time.Millisecond)
		}
		held := 0
		for _, l := range m.legs {
			switch l.decode.At.Sub(l.prefill.At) {
			case m.writes:
				held++
			case m.writes + m.prefill:
			default:
				t.Errorf("a decode leg came %v after its prefill leg", l.decode.At.Sub(l.prefill.At))
			}
		}
		if m.asked != 1 || held != 80 {
			t.Errorf("asked %d times; %d legs were held", m.asked, held)
		}
		<-time.After(time.Second)
		m.send("remote")
		if m.asked != 2 {
			t.Errorf("asked %d times after a second without an answer", m.asked)
		}
	})
}

// TestMooncakeRestart: after a prefill engine's restart, between requests or in the middle of
// one, no request fails, and none waits for the old engine but the one that was under way.
func TestMooncakeRestart(t *testing.T) {
	for _, known := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			m := newMooncake(t, "1p1d")
			m.send("remote")
			m.send("remote")
			m.restart("prefill-0")
			if known { // the router still has a connection to the old process
				m.fails = func(*fakeengine.Request) *fakeengine.Answer {
					m.fails = nil
					return new(fakeengine.Stale())
				}
			}
			m.send("remote")
			m.send("remote")
			if n := len(m.Requests("prefill")); n > 5 {
				t.Errorf("%d prefill legs for 4 requests", n)
			}
		})
	}
}

// TestFailingPrefillsTakeNoSender: 20 prefills that are refused leave no sender taken. Where
// they fail only after the decode engine has asked, the first one does, and no other.
func TestFailingPrefillsTakeNoSender(t *testing.T) {
	for _, c := range []struct {
		name  string
		fails fakeengine.Answer
		warm  bool // the rank has answered before
		want  int
	}{
		{"not reached", fakeengine.Fails(upstream.Connect, false), true, 0},
		{"refused", fakeengine.JSON(500, `{"error":{"message":"no"}}`).After(time.Millisecond), true, 0},
		{"full", fakeengine.JSON(503, `{"error":{"message":"no"}}`, "Retry-After: 1").After(time.Millisecond), true, 0},
		{"the request's fault", fakeengine.JSON(400, `{"error":{"message":"no"}}`).After(time.Millisecond), true, 0},
		// It may have died, and the decode engine has a moment to show whether it has, too.
		{"closed", fakeengine.Fails(upstream.Reset, true).After(time.Millisecond), true, 1},
		{"late", fakeengine.JSON(500, `{"error":{"message":"no"}}`).After(50 * time.Millisecond), true, 1},
		{"late, from the start", fakeengine.JSON(500, `{"error":{"message":"no"}}`).After(50 * time.Millisecond), false, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			m := newMooncake(t, "1p1d")
			if c.warm {
				m.send("remote")
				m.send("remote")
			}
			m.fails = func(*fakeengine.Request) *fakeengine.Answer { return &c.fails }
			for range 20 {
				if got := m.Send(t.Context(), ask(false, "")); got.Err != nil && c.name != "the request's fault" {
					t.Errorf("%s: %s: %s", c.name, got, got.Legs())
				}
				<-time.After(time.Second)
			}
			if n := m.senders(); n != c.want {
				t.Errorf("%s: %d senders are taken, want %d", c.name, n, c.want)
			}
		})
	}
}

// TestSendersAtRisk: of a prefill engine's twenty senders one router leaves sixteen free, whatever
// fails and in whatever order; in a row it takes no second one. While one is taken, decode
// legs wait for the prefill's answer.
func TestSendersAtRisk(t *testing.T) {
	late := fakeengine.JSON(500, `{"error":{"message":"no"}}`).After(50 * time.Millisecond)
	for _, c := range []struct {
		name           string
		leaves, fails  func(i int) bool // the client, the prefill
		atOnce         bool
		want, heldThen int // senders, and decode legs that are held after that
	}{
		{"every second one fails", nil, func(i int) bool { return i%2 == 1 }, false, 1, 0},
		{"all fail at once", nil, func(int) bool { return true }, true, 4, 0},
		{"clients leave", func(i int) bool { return i%2 == 1 }, nil, false, 1, 0},
		{"all clients leave at once", func(int) bool { return true }, nil, true, 4, 0},
		{"all are well, at once", nil, nil, true, 0, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			m := newMooncake(t, "1p1d")
			m.prefill = 40 * time.Millisecond
			m.send("remote")
			m.send("remote")
			n := 0 // of the prefills
			m.fails = func(*fakeengine.Request) *fakeengine.Answer {
				if n++; c.fails != nil && c.fails(n) {
					return &late
				}
				return nil
			}
			var wg sync.WaitGroup
			for i := range 30 {
				ctx, leave := context.WithCancel(t.Context())
				wg.Go(func() {
					defer leave()
					m.Send(ctx, ask(false, "")) // what fails is in the senders
				})
				if c.leaves != nil && c.leaves(i) {
					time.AfterFunc(30*time.Millisecond, leave)
				}
				if !c.atOnce {
					wg.Wait()
				}
			}
			wg.Wait()
			synctest.Wait()
			if got := m.senders(); got != c.want {
				t.Errorf("%s: %d senders are taken, want %d", c.name, got, c.want)
			}
			m.fails = nil
			held := func() (n int) {
				before := len(m.Requests("decode"))
				m.send("remote")
				m.send("remote")
				for _, d := range m.Requests("decode")[before:] {
					for _, l := range m.legs {
						if l.decode == d && d.At.Sub(l.prefill.At) == m.writes {
							n++
						}
					}
				}
				return min(n, 1)
			}
			<-time.After(time.Minute)
			if got := held(); got != c.heldThen {
				t.Errorf("%s: %d decode legs are held a minute later, want %d", c.name, got, c.heldThen)
			}
			<-time.After(8 * time.Minute)
			if got := held(); m.senders() != 0 || got != 1 {
				t.Errorf("%s: after 480 s %d senders are taken, %d decode legs held", c.name, m.senders(), got)
			}
		})
	}
}

// TestMooncakeWithoutBootstrap: where no bootstrap server answers the request is served
// locally, and the event says what to do.
func TestMooncakeWithoutBootstrap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMooncake(t, "1p1d")
		m.Bootstrap = func(context.Context, string) (string, error) { return "", errors.New("connection refused") }
		m.send("local")
		texts := m.Events("prefill_no_bootstrap")
		if len(texts) != 1 || !strings.Contains(texts[0], "connection refused") || !strings.Contains(texts[0], "connector=nixl") {
			t.Errorf("events %q", texts)
		}
		if n := len(m.Requests("prefill")); n != 0 {
			t.Errorf("%d prefill legs were sent", n)
		}
	})
}

// TestMooncakeProperties: whatever prefill engines do, each transfer has one leg of each kind,
// the decode leg is sent after the prefill's request was written, no client waits for KV that
// never comes, and few senders are taken.
func TestMooncakeProperties(t *testing.T) {
	for seed := range uint64(200) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 0x6d6f6f6e))
			m := newMooncake(t, fmt.Sprintf("%dp%dd", 1+rng.IntN(3), 1+rng.IntN(3)))
			var mu sync.Mutex // guards rng
			draw := func(n int) int {
				mu.Lock()
				defer mu.Unlock()
				return rng.IntN(n)
			}
			late := 0                                                // failures and clients that leave, after the decode engine has asked
			m.fails = func(*fakeengine.Request) *fakeengine.Answer { // m.mu is held
				after := time.Duration(draw(30)) * time.Millisecond
				a := fakeengine.Answer{}
				switch draw(9) {
				case 0:
					a = fakeengine.Fails(upstream.Connect, false)
				case 1:
					a = fakeengine.JSON(500, `{"error":{"message":"no"}}`)
				case 2:
					a = fakeengine.Fails(upstream.Reset, true)
				case 3:
					a = fakeengine.Stale()
				default:
					return nil
				}
				late++
				return new(a.After(after))
			}
			var wg sync.WaitGroup
			for range 12 {
				if draw(4) == 0 { // whose KV died with it, those requests have ended
					wg.Wait()
					m.restart("prefill-0")
				}
				ctx, leave := context.WithCancel(t.Context())
				leaves := draw(5) == 0
				if leaves {
					m.mu.Lock()
					late++
					m.mu.Unlock()
				}
				wg.Go(func() {
					defer leave()
					got := m.Send(ctx, ask(false, ""))
					// Two engines that break are taken for the request's fault, and retries have a budget.
					if got.Err != nil && !leaves && got.Err.Code != api.CodePrefillFailed {
						t.Errorf("seed %d: %s: %s", seed, got, got.Legs())
					}
				})
				<-time.After(time.Duration(draw(60)) * time.Millisecond)
				if leaves {
					leave()
				}
			}
			wg.Wait()
			synctest.Wait()
			if n := m.senders(); n > min(late, 4) {
				t.Errorf("seed %d: %d senders are taken after %d failures", seed, n, late)
			}
		})
	}
}
