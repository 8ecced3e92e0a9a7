package sim_test

import (
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/workers/sim"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/profiles"
	"github.com/dynctl/dynctl/internal/workers/sim/vocab"
)

// timings are the timing models of a fleet's groups.
func timings(t *testing.T, text string) []engine.Timing {
	t.Helper()
	f, err := sim.ParseFleet(text)
	if err != nil {
		t.Fatal(err)
	}
	var out []engine.Timing
	for i := range f.Groups {
		c, err := f.Groups[i].RankConfig(vocab.New(), 0, 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, c.Timing)
	}
	return out
}

func TestProfileAndTransferOfAFleet(t *testing.T) {
	p, x := profiles.All()[0], profiles.Transfers()[1]
	step := engine.Batch{PrefillTokens: 100, PrefillSquares: 1e4, DecodeRequests: 3, DecodeTokens: 700}
	moved := time.Duration((x.Millis[0] + 1000*x.Millis[1]) * 1e6)
	own, _ := profiles.FindTransfer(p.Transfer)
	got := timings(t, sim.WithProfile("1p:transfer="+x.Name+"+1d+1a:profile=mocker,transfer="+x.Name, p.Timing.Name))
	for i, want := range []struct{ step, transfer time.Duration }{
		{p.Timing.Step(step), moved},
		{p.Timing.Step(step), time.Duration((own.Millis[0] + 1000*own.Millis[1]) * 1e6)},
		{engine.Mocker{}.Step(step), moved},
	} {
		if s, m := got[i].Step(step), got[i].Transfer(1000); s != want.step || (m-want.transfer).Abs() > time.Microsecond {
			t.Errorf("part %d: a step of %v and a transfer of %v, want %v", i, s, m, want)
		}
	}
}

func TestUnknownProfilesNameTheKnownOnes(t *testing.T) {
	f, err := sim.ParseFleet("1a:profile=h100-9b")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range append(sim.ProfileNames(), "h100-9b") {
		if _, err := f.Groups[0].RankConfig(vocab.New(), 0, 0, 0); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%v, want %s in it", err, name)
		}
	}
	for _, x := range profiles.Transfers() {
		if _, err := sim.ParseFleet("1a:transfer=pigeon"); err == nil || !strings.Contains(err.Error(), x.Name) {
			t.Errorf("%v, want %s in it", err, x.Name)
		}
	}
}

func TestNotesOfAFleet(t *testing.T) {
	name := profiles.All()[0].Timing.Name
	f, err := sim.ParseFleet(sim.WithProfile("1p1d+1a:profile=mocker", name))
	if err != nil {
		t.Fatal(err)
	}
	if got := f.Notes(); len(got) != 1 || !strings.Contains(got[0], name) {
		t.Errorf("%q", got)
	}
}

func TestWithOptions(t *testing.T) {
	for _, c := range [][2]string{{"2p2d", "2p2d:a=1"}, {"1a:b=2+2d", "1a:a=1,b=2+2d:a=1"}, {"1a:", "1a:a=1"}} {
		if got := sim.WithOptions(c[0], "a=1"); got != c[1] {
			t.Errorf("%s: %s, want %s", c[0], got, c[1])
		}
	}
	if got := sim.WithProfile("2p2d", ""); got != "2p2d" {
		t.Errorf("%s", got)
	}
}
