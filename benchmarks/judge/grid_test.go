package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
)

// TestWindows: the seeds of the conversation trace are windows at even distances, from its
// first request to its last one.
func TestWindows(t *testing.T) {
	recorded := make([]arrivals.Request, 100)
	for i := range recorded {
		recorded[i].Number, recorded[i].ISL = i, i
	}
	w := find(conversation)
	for seed, from := range []int{0, 30, 60, 90} {
		got, err := w.requests(10, seed, 4, recorded)
		if err != nil || len(got) != 10 || got[0].ISL != from || got[0].Number != 0 || got[9].Number != 9 {
			t.Errorf("seed %d: %+v, %v, want from %d", seed, got, err, from)
		}
	}
	if recorded[99].Number != 99 {
		t.Error("the trace was changed")
	}
	if _, err := w.requests(101, 0, 4, recorded); err == nil {
		t.Error("more requests than the trace has")
	}
}

// TestPaddedThird: under each workload the engines of one fleet pad their steps, and the
// profile that they have does so.
func TestPaddedThird(t *testing.T) {
	file := filepath.Join(t.TempDir(), "padded.yaml")
	if err := os.WriteFile(file, padded, 0o600); err != nil {
		t.Fatal(err)
	}
	for i := range workloads {
		w := &workloads[i]
		if !slices.Contains(fleets, w.padded) {
			t.Errorf("%s: fleet %q pads", w.name, w.padded)
		}
		for _, text := range fleets {
			f, err := w.fleet(text, file)
			if err != nil {
				t.Fatal(err)
			}
			for _, g := range f.Groups {
				if padded := g.Profile == file; padded != (text == w.padded) || g.Blocks != w.blocks {
					t.Errorf("%s on %s: padded %t, %d blocks", w.name, text, padded, g.Blocks)
				}
			}
		}
	}
	p, err := engine.ReadProfile(file)
	if err != nil {
		t.Fatal(err)
	}
	if one, many := p.Step(engine.Batch{PrefillTokens: 1}), p.Step(engine.Batch{PrefillTokens: 2048}); one != many {
		t.Errorf("a step takes %v for one token and %v for 2,048", one, many)
	}
	if one, eight, nine := p.Step(engine.Batch{DecodeRequests: 1}), p.Step(engine.Batch{DecodeRequests: 8}), p.Step(engine.Batch{DecodeRequests: 9}); one != eight || nine <= eight {
		t.Errorf("a step takes %v for one answer, %v for eight and %v for nine", one, eight, nine)
	}
}

// TestColumns: a column is a policy with a threshold, auto unless one is named.
func TestColumns(t *testing.T) {
	for text, want := range map[string]column{
		"session": {name: "session", policy: selector.Session},
		"kv:0":    {name: "kv:0", policy: selector.KV},
	} {
		c, err := parseColumn(text)
		if err != nil || c.name != want.name || c.policy != want.policy || c.threshold.Auto != (text == "session") {
			t.Errorf("%s: %+v, %v", text, c, err)
		}
	}
	if c, err := parseColumn("kv:never"); err != nil || c.threshold.Tokens < 1<<24 || c.threshold.Auto {
		t.Errorf("never is %+v, %v", c, err)
	}
	for _, bad := range []string{"moon", "kv:", "kv:moon", ""} {
		if c, err := parseColumn(bad); err == nil {
			t.Errorf("%q is %+v", bad, c)
		}
	}
}
