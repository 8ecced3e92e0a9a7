package router_test

import (
	"errors"
	"testing"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/settings"
)

// TestOneEngine is what one router in front of one engine shows, in an order in which each
// test leaves to the next what that needs.
func TestOneEngine(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1a:profile=instant")
	at := r.worker("aggregated-0").URL // of the tap
	for _, c := range []struct {
		name string
		test func(*testing.T, *rig, *tap)
	}{
		{"unknown figures are null", unknownFiguresAreNull}, // the first: nothing has been seen yet
		{"what is off is off", whatIsOff},
		{"the list of models is asked for once", modelListIsAskedForOnce},
		{"HEAD has the length", headHasTheLength},
		{"a stream is cut anywhere", streamIsCutAnywhere},
		{"a client leaves after its answer", clientLeavesAfterItsAnswer},
		{"invariant 2: forms and queries cannot steer", invariant02FormsAndQueriesCannotSteer},
		{"a dry run reads the request", dryRunReadsTheRequest},
		{"no series of a worker that left", noSeriesOfAWorkerThatLeft},
		{"the router drains", drainOfTheRouter}, // the last: it serves no more
	} {
		t.Run(c.name, func(t *testing.T) {
			r := r.in(t)
			p.set(nil)
			p.reset()
			r.set(func(*settings.Config) {})
			if l, err := r.Admin.Workers(t.Context()); err != nil {
				t.Fatal(err)
			} else if len(l.Workers) == 0 {
				if _, err := r.Admin.AddWorker(t.Context(), admin.AddWorker{Spec: at + ",name=aggregated-0"}); err != nil {
					t.Fatal(err)
				}
			}
			r.eventually("the worker", func() error {
				r.Router.Heal("aggregated-0")
				if w := r.worker("aggregated-0"); !w.Usable {
					return errors.New(w.Reason)
				}
				return nil
			})
			c.test(t, r, p)
		})
	}
}

// whatIsOff: a router that records nothing reports no failures of that, and one that shows
// no words of prompts names the setting.
func whatIsOff(t *testing.T, r *rig, _ *tap) {
	if got := r.metric("dynctl_recording_failed"); got != -1 {
		t.Errorf("dynctl_recording_failed is %v without a recording", got)
	}
	if st := r.status(); st.State != "ready" || st.Recorder != nil || len(r.events("recording_failed")) != 0 {
		t.Errorf("recorder %+v, state %s %q", st.Recorder, st.State, st.Reasons)
	}
}
