package commands

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/rig/clitest"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// TestListReplicas: the table shows age, version and differing settings, JSON all of it, and
// the notes what brought no load.
func TestListReplicas(t *testing.T) {
	s := &admin.Status{Version: "v2", Replicas: &admin.Replicas{
		Name: "r0", Fleet: "f", Joined: true, Live: 1, OtherFleet: 7, Refused: 1, LastRefused: "it is version 9",
		IndexCopied: &admin.IndexCopied{Router: "r1", Ranks: 15, Blocks: 4000, Missing: 1, Why: "no answer"},
		Routers: []admin.Replica{
			{Name: "r1", State: "live", SilentMS: 41.3, Version: "v1", Started: time.Unix(1_800_000_000, 0).UTC(), Differs: "routing, limits", Complete: true, Requests: 3, PrefillTokens: 4000, DecodeBlocks: 50, Gaps: 2, UnknownRanks: 6},
			{Name: "r2", State: "live", Version: "v2"}, {Name: "r3", State: "silent", SilentMS: 9000},
		},
	}}
	out := func(format string) (string, string) {
		t.Helper()
		var b, notes strings.Builder
		if err := listReplicas(&b, &notes, format, s); err != nil {
			t.Fatal(err)
		}
		return clitest.Squeeze(b.String()), notes.String()
	}
	got, notes := out("table")
	for _, want := range []string{"r1 live 41 ms v1 (here v2) 2027-01-15T08:00:00Z 3 4000 50 2 6 differ: routing, limits", "r2 live, incomplete 0 ms v2 ", "r3 silent 9000 ms - "} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	for _, want := range []string{"r0 of fleet f shares its load with 1 other router\n", "the index began with 4000 blocks on 15 ranks of router r1\n", "1 rank began without blocks of another router, last: no answer", "7 messages of another fleet", "1 messages refused, last: it is version 9"} {
		if !strings.Contains(notes, want) {
			t.Errorf("no %q in\n%s", want, notes)
		}
	}
	raw, notes := out("json")
	var back admin.Replicas
	if err := json.Unmarshal([]byte(raw), &back); err != nil || back.Routers[0] != s.Replicas.Routers[0] || notes != "" {
		t.Errorf("%v, %+v, notes %q", err, back, notes)
	}
}
