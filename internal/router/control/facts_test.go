package control

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/outcome"
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/prompt"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/settings/effective"
	"github.com/dynctl/dynctl/internal/workers"
)

// recording is one that stands where it stands.
type recording admin.Recorder

func (r *recording) State() *admin.Recorder { return (*admin.Recorder)(r) }
func (r *recording) Ended() <-chan struct{} { return nil }

// TestFacts: costs are shown where they decide, and troubles are those of every stage.
func TestFacts(t *testing.T) {
	config := settings.Default()
	of := func() *effective.InForce {
		s, err := effective.New(config, nil, 3)
		if err != nil {
			t.Fatal(err)
		}
		return effective.NewInForce(s)
	}
	tokens, err := prompt.New(prompt.Options{Mode: "estimate"})
	if err != nil {
		t.Fatal(err)
	}
	defer tokens.Close()
	proofs, err := NewSecure(SecureOptions{Config: &config, Connections: func(netip.Addr) int { return 0 }, Metrics: telemetry.New("test", "", nil), Event: func(eventlog.Event) {}})
	if err != nil {
		t.Fatal(err)
	}
	f := &Facts{
		InForce: of(), Compute: watch.NewRecompute(watch.RecomputeOptions{}), Learners: outcome.New(outcome.Options{Objective: config.Routing.Aim(), Fleet: workers.NewRegistry(nil).Snapshot, Decisions: func() *decide.Options { return &decide.Options{} }}),
		Tokens: tokens, Bodies: admission.NewMemory(10, nil), Legs: admission.NewMemory(2, nil), Secure: proofs,
	}
	f.Learners.Of("m")
	if s := f.Settings(); s.Revision != 3 || s.Auto || s.Threshold != config.Routing.Threshold.Tokens || s.Policy != config.Routing.Policy {
		t.Errorf("%+v", s)
	}
	if c := f.Costs(); len(c) != 1 || c[0].Model != "m" || c[0].TimesKnown || f.Kubernetes() != nil || f.Recorder() != nil {
		t.Errorf("costs %+v, pods %+v, recording %+v where there is none", f.Costs(), f.Kubernetes(), f.Recorder())
	}
	if troubles, keys := f.Troubles(), f.Keys(); len(troubles) != 0 || keys != -1 {
		t.Errorf("troubles %q, %d keys, want none and -1", troubles, keys)
	}
	config.Routing.Threshold.Auto = true
	f.InForce = of()
	if list := f.Costs(); len(list) != 1 || list[0].Model != "m" {
		t.Errorf("%+v", list)
	}
	rec := &recording{Path: "file"}
	f.Recording = rec
	if len(f.Troubles()) != 0 || f.Recorder().Path != "file" {
		t.Errorf("%q", f.Troubles())
	}
	rec.Error = "disk full"
	if f.Bodies.Take(11) {
		t.Fatal("more than there is was given")
	}
	if got := f.Troubles(); len(got) != 2 || !slices.ContainsFunc(got, func(s string) bool { return strings.Contains(s, "limits.body_memory") }) || got[1] != "the recording has ended: disk full" {
		t.Errorf("%q", got)
	}
}
