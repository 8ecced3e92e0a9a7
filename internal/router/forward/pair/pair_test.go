package pair

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var errPrefill, errDecode = errors.New("prefill"), errors.New("decode")

// leg ends after a time with an error, or panics with it, or is cancelled before.
type leg struct {
	takes time.Duration
	err   error
	panic bool
}

func (l *leg) run(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(l.takes):
	}
	if l.panic {
		panic(l.err)
	}
	return l.err
}

// two are legs of which the answer begins at a time.
type two struct {
	held            bool          // the decode leg is held until the prefill's request is written
	connects        time.Duration // when it makes a connection; 0 for never
	prepares        time.Duration // how long it takes to prepare the decode leg
	prepared        time.Duration // when that began; 0 for never
	writes          time.Duration // how long it takes to write it, from then on
	decoded         time.Duration // when the decode leg was sent; 0 for never
	prefill, decode leg
	start           time.Time
	begins          time.Duration
	prefilled       time.Duration // when the prefill leg ended
	panics          []any
	both            error // after which the other leg may fail, too
	answer          context.Context
}

func (p *two) Prefill(ctx context.Context, connects, written func()) error {
	defer func() { p.prefilled = time.Since(p.start) }()
	if p.connects > 0 {
		<-time.After(p.connects)
		connects()
	}
	if p.held && p.writes > 0 {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(p.writes):
			written()
		}
	}
	return p.prefill.run(ctx)
}
func (p *two) Decode(ctx context.Context) error {
	p.answer = ctx
	p.decoded = time.Since(p.start)
	return p.decode.run(ctx)
}
func (p *two) Prepare(ctx context.Context) {
	p.prepared = time.Since(p.start)
	_ = (&leg{takes: p.prepares}).run(ctx) // Decode sees that it has ended, too
}
func (p *two) Begun() bool         { return p.begins > 0 && time.Since(p.start) >= p.begins }
func (p *two) Stop() bool          { return !p.Begun() }
func (p *two) Both(err error) bool { return p.both != nil && errors.Is(err, p.both) }
func (p *two) Panicked(v any)      { p.panics = append(p.panics, v) }

// runPair begins a pair and reads the answer to its end.
func runPair(ctx context.Context, legs *two) Ending {
	p, end := Begin(ctx, nil, legs, legs.held)
	if end.Err == nil {
		synctest.Wait()
		end.Err = legs.answer.Err() // nobody ends an answer that has begun
		p.End(true)
	}
	return end
}

// TestRun: a leg that fails ends the other, unless the answer has begun; a prefill leg that
// does not end is given a moment.
func TestRun(t *testing.T) {
	const s = time.Second
	for _, c := range []struct {
		name      string
		legs      two
		want      Ending
		took      time.Duration
		prefilled time.Duration
	}{
		{"both are well", two{prefill: leg{takes: s}, decode: leg{takes: 3 * s}}, Ending{}, 3 * s, s},
		{"prefill fails", two{prefill: leg{takes: s, err: errPrefill}, decode: leg{takes: 3 * s}}, Ending{Err: errPrefill, Cancelled: true}, s, s},
		{"prefill fails after the answer has begun", two{prefill: leg{takes: 2 * s, err: errPrefill}, decode: leg{takes: 3 * s}, begins: s}, Ending{}, 3 * s, 2 * s},
		{"decode fails while prefill works", two{prefill: leg{takes: 3 * s}, decode: leg{takes: s, err: errDecode}}, Ending{Err: errDecode, Waiting: true}, s, s},
		{"decode fails after prefill", two{prefill: leg{takes: s}, decode: leg{takes: 3 * s, err: errDecode}}, Ending{Err: errDecode}, 3 * s, s},
		{"prefill has no end", two{prefill: leg{takes: 60 * s}, decode: leg{takes: 3 * s}, begins: s}, Ending{}, 3*s + Grace, 3*s + Grace},
		{"prefill ends late", two{prefill: leg{takes: 3*s + Grace/2}, decode: leg{takes: 3 * s}}, Ending{}, 3*s + Grace/2, 3*s + Grace/2},
		{"prefill fails, and decode would show whether it does", two{prefill: leg{takes: s, err: errPrefill}, decode: leg{takes: 3 * s}, both: errPrefill}, Ending{Err: errPrefill, Cancelled: true}, s + Grace, s},
		{"prefill fails, and then decode", two{prefill: leg{takes: s, err: errPrefill}, decode: leg{takes: s + Grace/2, err: errDecode}, both: errPrefill}, Ending{Err: errDecode, Other: errPrefill}, s + Grace/2, s},
		{"prefill fails, and decode answers", two{prefill: leg{takes: s, err: errPrefill}, decode: leg{takes: s + Grace/2}, begins: s + Grace/2, both: errPrefill}, Ending{}, s + Grace/2, s},
		{"decode fails, and then prefill", two{prefill: leg{takes: s + Grace/2, err: errPrefill}, decode: leg{takes: s, err: errDecode}, both: errDecode}, Ending{Err: errDecode, Waiting: true, Other: errPrefill}, s + Grace/2, s + Grace/2},
		{"decode fails, and prefill shows nothing", two{prefill: leg{takes: 60 * s}, decode: leg{takes: s, err: errDecode}, both: errDecode}, Ending{Err: errDecode, Waiting: true}, s + Grace, s + Grace},
		{"decode fails, and prefill is well", two{prefill: leg{takes: s + Grace/2}, decode: leg{takes: s, err: errDecode}, both: errDecode}, Ending{Err: errDecode, Waiting: true}, s + Grace/2, s + Grace/2},
	} {
		synctest.Test(t, func(t *testing.T) {
			c.legs.start = time.Now()
			got := runPair(t.Context(), &c.legs)
			took := time.Since(c.legs.start)
			if d := cmp.Diff(c.want, got, cmpopts.EquateErrors()); d != "" {
				t.Errorf("%s: the ending (-want +got):\n%s", c.name, d)
			}
			if took != c.took || c.legs.prefilled != c.prefilled {
				t.Errorf("%s: it ended after %v, want %v, and the prefill after %v, want %v", c.name, took, c.took, c.legs.prefilled, c.prefilled)
			}
		})
	}
}

// TestHeld: the decode leg is sent when the prefill's request was written, and never where
// that failed before.
func TestHeld(t *testing.T) {
	const s = time.Second
	for _, c := range []struct {
		name          string
		legs          two
		want          Ending
		took, decoded time.Duration
	}{
		{"written", two{writes: s, prefill: leg{takes: 2 * s}, decode: leg{takes: 4 * s}}, Ending{}, 5 * s, s},
		{"answered, and nothing said that it was written", two{prefill: leg{takes: 2 * s}, decode: leg{takes: s}}, Ending{}, 3 * s, 2 * s},
		{"not written", two{prefill: leg{takes: 2 * s, err: errPrefill}, decode: leg{takes: s}}, Ending{Err: errPrefill, Cancelled: true}, 2 * s, 0},
		{"not written, and decode might show why", two{prefill: leg{takes: 2 * s, err: errPrefill}, decode: leg{takes: s}, both: errPrefill}, Ending{Err: errPrefill, Cancelled: true}, 2 * s, 0},
		{"refused", two{writes: s, prefill: leg{takes: s, err: errPrefill}, decode: leg{takes: 9 * s}}, Ending{Err: errPrefill, Cancelled: true}, 2 * s, s},
		{"a panic before it was written", two{prefill: leg{takes: s, err: errPrefill, panic: true}, decode: leg{takes: s}}, Ending{Err: errPrefill, Cancelled: true}, s, 0},
		{"decode fails", two{writes: s, prefill: leg{takes: 60 * s}, decode: leg{takes: s, err: errDecode}}, Ending{Err: errDecode, Waiting: true}, 2 * s, s},
		{"prepared before it is written", two{connects: s, prepares: s, writes: 2 * s, prefill: leg{takes: s}, decode: leg{takes: s}}, Ending{}, 4 * s, 3 * s},
		{"written before it is prepared", two{connects: s, prepares: 2 * s, writes: s, prefill: leg{takes: s}, decode: leg{takes: s}}, Ending{}, 4 * s, 3 * s},
		{"no connection, being prepared", two{connects: s, prepares: 60 * s, prefill: leg{takes: s, err: errPrefill}, decode: leg{takes: s}}, Ending{Err: errPrefill, Cancelled: true}, 2 * s, 0},
		{"refused, being prepared", two{connects: s, prepares: 60 * s, writes: s, prefill: leg{takes: s, err: errPrefill}, decode: leg{takes: s}}, Ending{Err: errPrefill, Cancelled: true}, 3 * s, 3 * s},
	} {
		synctest.Test(t, func(t *testing.T) {
			c.legs.held, c.legs.start = true, time.Now()
			got := runPair(t.Context(), &c.legs)
			took := time.Since(c.legs.start)
			if len(c.legs.panics) > 0 && got.Err != nil {
				got.Err = errPrefill
			}
			if d := cmp.Diff(c.want, got, cmpopts.EquateErrors()); d != "" {
				t.Errorf("%s: the ending (-want +got):\n%s", c.name, d)
			}
			if took != c.took || c.legs.decoded != c.decoded {
				t.Errorf("%s: it ended after %v, want %v, and decode was sent after %v, want %v", c.name, took, c.took, c.legs.decoded, c.decoded)
			}
			if c.legs.prepared != c.legs.connects {
				t.Errorf("%s: decode was prepared after %v, want %v", c.name, c.legs.prepared, c.legs.connects)
			}
		})
	}
}

// TestLeavingWhileHeld: a client that leaves before the prefill's request was written has no
// decode leg sent.
func TestLeavingWhileHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, leave := context.WithTimeout(t.Context(), time.Second)
		defer leave()
		p := &two{held: true, writes: time.Minute, decode: leg{takes: time.Minute}, start: time.Now()}
		if end := runPair(ctx, p); !errors.Is(end.Err, context.DeadlineExceeded) || end.Cancelled || p.decoded != 0 || time.Since(p.start) != time.Second {
			t.Errorf("%+v after %v, decode sent after %v", end, time.Since(p.start), p.decoded)
		}
	})
}

// TestLeavingIsNoFailureOfALeg: with a context that ends both legs end, and nobody blames
// the prefill leg.
func TestLeavingIsNoFailureOfALeg(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, leave := context.WithTimeout(t.Context(), time.Second)
		defer leave()
		p := &two{prefill: leg{takes: time.Minute}, decode: leg{takes: time.Minute}, start: time.Now()}
		if end := runPair(ctx, p); !errors.Is(end.Err, context.DeadlineExceeded) || end.Cancelled || time.Since(p.start) != time.Second {
			t.Errorf("%+v after %v", end, time.Since(p.start))
		}
	})
}

// TestPanics: a panic of the prefill leg is reported and is an error; one of the decode
// leg goes on, after the prefill leg has ended.
func TestPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &two{prefill: leg{err: errPrefill, panic: true}, decode: leg{takes: time.Minute}, start: time.Now()}
		if end := runPair(t.Context(), p); end.Err == nil || !end.Cancelled || len(p.panics) != 1 {
			t.Errorf("%+v, reported %v", end, p.panics)
		}
		p = &two{prefill: leg{takes: time.Minute}, decode: leg{takes: time.Second, err: errDecode, panic: true}, start: time.Now()}
		func() {
			defer func() {
				if v, _ := recover().(error); !errors.Is(v, errDecode) || p.prefilled != time.Second {
					t.Errorf("%v, prefill ended after %v", v, p.prefilled)
				}
			}()
			runPair(t.Context(), p)
		}()
	})
}
