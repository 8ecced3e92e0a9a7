package profiles_test

import (
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/workers/sim/profiles"
)

// Every profile is usable, has a name of its own, and says what it is.
func TestShipped(t *testing.T) {
	seen := map[string]bool{"mocker": true, "instant": true, "cpu": true}
	good, h200 := 0, false
	for _, p := range profiles.All() {
		name := p.Timing.Name
		if seen[name] || name == "" {
			t.Errorf("the name %q is taken", name)
		}
		seen[name] = true
		if err := p.Timing.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if p.Timing.Prefill[1] == 0 || p.Timing.Decode[0] == 0 || p.What == "" || p.Fitted == 0 || p.Held == 0 || p.TTFT.P90 == 0 || p.TPOT.P90 == 0 {
			t.Errorf("%s is incomplete: %+v", name, p)
		}
		if p.Source != profiles.Published && p.Source != profiles.Own {
			t.Errorf("%s: source %q", name, p.Source)
		}
		found, ok := profiles.Find(name)
		transfer, ok2 := profiles.FindTransfer(p.Transfer)
		if !ok || !ok2 || found.Timing.Transfers != transfer.Millis {
			t.Errorf("%s: transfer %q gives %v", name, p.Transfer, found.Timing.Transfers)
		}
		if !strings.Contains(p.Note(), "not a measurement of your engines") || strings.Contains(p.Note(), "rough") != p.Rough() {
			t.Errorf("%s: %s", name, p.Note())
		}
		if !p.Rough() {
			good++
			h200 = h200 || strings.HasPrefix(name, "h200-")
		}
	}
	if good < 4 || !h200 {
		t.Errorf("%d profiles are not rough, one of an H200: %t", good, h200)
	}
	for _, x := range profiles.Transfers() {
		if x.Name == "" || x.What == "" || x.Source == "" || x.Millis[0] <= 0 || x.Millis[1] <= 0 {
			t.Errorf("%+v is incomplete", x)
		}
	}
	if _, ok := profiles.Find("mocker"); ok {
		t.Error("mocker is no model of a GPU")
	}
}

func TestRough(t *testing.T) {
	for _, c := range []struct {
		ttft, tpot profiles.Errors
		rough      bool
	}{
		{profiles.Errors{Median: 15, P90: 35}, profiles.Errors{Median: 15, P90: 35}, false},
		{profiles.Errors{Median: 15.1, P90: 20}, profiles.Errors{}, true},
		{profiles.Errors{}, profiles.Errors{Median: 2, P90: 35.1}, true},
	} {
		p := profiles.Profile{TTFT: c.ttft, TPOT: c.tpot}
		if p.Rough() != c.rough {
			t.Errorf("%s, %s: rough is %t", c.ttft, c.tpot, p.Rough())
		}
	}
}
