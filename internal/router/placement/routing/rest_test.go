package routing

import (
	"net/url"
	"testing"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestRestOfOneFleet: who takes the rest of a stream and whose blocks its prompt has are both
// from the fleet that is asked for it, whatever the one before had; an adapter that the
// request names itself stays.
func TestRestOfOneFleet(t *testing.T) {
	registry := workers.NewRegistry(func(eventlog.Event) {})
	if _, err := registry.Apply("test", []workers.Spec{{Name: "a", URL: &url.URL{Scheme: "http", Host: "127.0.0.1:1"}}}); err != nil {
		t.Fatal(err)
	}
	fleet := func(learned workers.Learned) *workers.Snapshot {
		t.Helper()
		w, ok := registry.Snapshot().Worker("a")
		if !ok {
			t.Fatal("there is no worker a")
		}
		if _, err := registry.Update(w, learned); err != nil {
			t.Fatal(err)
		}
		return registry.Snapshot()
	}
	base := fleet(workers.Learned{Facts: workers.Facts{Models: []string{"m"}}})
	adapter := fleet(workers.Learned{Facts: workers.Facts{Models: []string{"big", "m"}}, LoRAs: []string{"m"}})
	gone := fleet(workers.Learned{Facts: workers.Facts{Models: []string{"big"}}})
	for _, c := range []struct {
		name, named, before, after string
		from, to                   *workers.Snapshot
		some                       bool // serve the model in to
	}{
		{"an adapter from now on", "", "", "m", base, adapter, true},
		{"no adapter any more", "", "m", "", adapter, base, true},
		{"an adapter that nobody has", "", "m", "", adapter, gone, false},
		{"named by the request", "own", "own", "own", base, adapter, true},
	} {
		q, rest := Request{Details: Details{Model: "m", Named: c.named}}, Request{}
		if q.UseFleet(c.from); q.LoRA != c.before {
			t.Errorf("%s: at first the adapter is %q, want %q", c.name, q.LoRA, c.before)
		}
		q.CopyForRest(&rest, c.to)
		if rest.LoRA != c.after || rest.Fleet != c.to {
			t.Errorf("%s: adapter %q in the fleet of revision %d, want %q in that of %d", c.name, rest.LoRA, rest.Fleet.Revision, c.after, c.to.Revision)
		}
		if len(rest.List) > 0 != c.some || c.some && rest.List[0] != c.to.Model("m")[0] {
			t.Errorf("%s: workers %v, some: %v", c.name, rest.List, c.some)
		}
	}
}
