package kvfeed

import (
	"bytes"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/kvmodel"
)

// fatal makes the failure of a check on another goroutine an error.
type fatal struct{ *testing.T }

func (f fatal) Fatalf(format string, args ...any) { f.Errorf(format, args...) }

// A long random story: drops, hang-ups and restarts, with and without replay.
func TestFeedStory(t *testing.T) {
	if testing.Short() {
		t.Skip("a long story over sockets")
	}
	t.Parallel()
	for _, replay := range []bool{true, false} {
		t.Run(fmt.Sprintf("replay=%v", replay), func(t *testing.T) {
			t.Parallel()
			p := newPublisher(t, 14, 2)
			// At no moment does the index have what the engine had not.
			var f *fixture
			var checks atomic.Int64
			f = newFixture(t, func(o *Options) {
				o.Process = func(string, int) (float64, time.Time) {
					p.mu.Lock()
					defer p.mu.Unlock()
					return 1e9 + float64(p.e.Life)*1e5 - 100, time.Now()
				}
				record := o.Observer
				o.Observer = func(o Observation) {
					record(o)
					p.mu.Lock()
					defer p.mu.Unlock()
					if o.Cleared || o.Seq >= uint64(len(p.e.Log)) || !bytes.Equal(p.e.Log[o.Seq], o.Payload) {
						return // of a life that is over
					}
					checks.Add(1)
					for seq := range kvmodel.Holds(fatal{t}, f.x) {
						if !p.e.After[o.Seq][seq] {
							t.Errorf("after batch %d the index has block %x, the engine has not", o.Seq, seq)
							return
						}
					}
				}
			})
			f.add(p.source(replay))
			p.subscribed()
			n := 0
			rng := rapid.Custom(func(t *rapid.T) []string {
				return rapid.SliceOfN(rapid.SampledFrom([]string{"send", "send", "drop", "hang up", "hang up for nothing", "restart"}), 70, 70).Draw(t, "story")
			}).Example(7)
			for _, act := range rng {
				n++
				switch act {
				case "send":
					p.steps(5)
				case "drop":
					p.step(false)
				case "hang up":
					p.hangUp(func() { p.step(false) })
					p.subscribed()
				case "hang up for nothing":
					p.hangUp(func() {})
					p.subscribed()
				case "restart":
					p.hangUp(func() {
						f.until(func(s Status) bool { return s.State == Connecting || s.State == Stale })
						p.set(func() { p.e.Restart() })
					})
					p.subscribed()
				}
				if n%4 == 0 {
					p.steps(1)
					f.caughtUp(p)
					if replay {
						f.equals(p)
					} else {
						f.within(p)
					}
				}
			}
			if checks.Load() < 50 {
				t.Errorf("only %d checks", checks.Load())
			}
		})
	}
}
