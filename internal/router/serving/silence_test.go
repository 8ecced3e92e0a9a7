package serving_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/rig/fakeengine"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// silence makes workers ones that answer no probe, though their ports take connections.
func silence(r *fakeengine.Router, prefix string) {
	for _, w := range r.Registry.Snapshot().Workers {
		if strings.HasPrefix(w.Name, prefix) {
			w.State.SetCondition(workers.Condition{Health: workers.Unhealthy, Reason: "no answer", Since: time.Now(), Silent: true})
		}
	}
}

// TestOnlySilentWorkers: where no worker of a phase is healthy, but ports answer, a request
// goes to one of them, and the receipt and an event show that.
func TestOnlySilentWorkers(t *testing.T) {
	for _, c := range []struct{ fleet, silent string }{{"2a", "aggregated"}, {"1p2d", "decode"}, {"2p1d", "prefill"}, {"2p1d sglang", "prefill"}} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/%v", c.fleet, stream), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := fakeengine.New(t, c.fleet, func(s *settings.Config) { s.Routing.PrefillFallback = "error" })
					silence(r, c.silent)
					for range 3 {
						if got := r.Send(t.Context(), ask(stream, "")); !whole(got, stream) || !strings.Contains(notes(got), "answers no probe") {
							t.Errorf("%s: %q", got, got.Receipt.Notes)
						}
					}
					if n := len(r.Events("silent_tried")); n == 0 || n > 2 {
						t.Errorf("%d events for two workers", n)
					}
				})
			})
		}
	}
}
