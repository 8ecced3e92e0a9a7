package main

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/bench/live"
)

// realRecording is a recording of real engines.
const realRecording = "../../testdata/trace/vllm-0.32.0-1p1d-evictions-v2.jsonl.zst"

// TestACutRecordingIsNotAllOfIt: what is verified up to a cut is said to be that, and
// whoever reads a cut recording is told, with a code that is not that of a whole one.
func TestACutRecordingIsNotAllOfIt(t *testing.T) {
	dir := t.TempDir()
	whole := filepath.Join(dir, "whole.jsonl")
	if code, _, stderr := typed("replay", "convert", realRecording, "-w", whole); code != exitOK {
		t.Fatal(stderr)
	}
	raw, err := os.ReadFile(whole)
	if err != nil {
		t.Fatal(err)
	}
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	if _, err := z.Write(raw); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		data []byte
		code int
	}{
		{"whole.jsonl.gz", packed.Bytes(), exitOK},
		{"cut.jsonl.gz", packed.Bytes()[:packed.Len()/2], exitInvalid},
		{"cut.jsonl", raw[:len(raw)/2], exitInvalid},
	} {
		file := filepath.Join(dir, c.name)
		if err := os.WriteFile(file, c.data, 0o600); err != nil {
			t.Fatal(err)
		}
		code, stdout, stderr := typed("replay", file, "--verify")
		said := strings.Contains(stdout, "% of decisions up to the cut proven") && strings.Contains(stderr, "the trace is cut after line")
		if code != c.code || said != (c.code != exitOK) {
			t.Errorf("%s: code %d\n%s\n%s", c.name, code, stdout, stderr)
		}
		for _, args := range [][]string{
			{"replay", file}, {"replay", "stat", file}, {"replay", file, "--what-if", "eff_isl=3"}, {"replay", "convert", file, "-w", filepath.Join(dir, "again.jsonl")},
			{"replay", file, "--policy", "kv,random", "--fleet", "2a", "--quiet"}, {"replay", "stat", file, "-o", "json"}, {"replay", file, "--what-if", "eff_isl=3", "-o", "json"},
		} {
			code, stdout, stderr := typed(args...)
			said := strings.Contains(stderr, "the trace is cut after line")
			if code != c.code || said != (c.code != exitOK) || stdout == "" && args[1] != "convert" {
				t.Errorf("%v: code %d\n%s\n%s", args, code, stdout, stderr)
			}
		}
		// Where reading ends before the cut, the cut is nothing to tell of.
		if code, _, stderr := typed("replay", file, "--at", "20"); code != exitOK {
			t.Errorf("%s --at 20: code %d, %s", c.name, code, stderr)
		}
	}
}

// TestNoSuchLine: a line that the trace does not have is a mistake, and not its end.
func TestNoSuchLine(t *testing.T) {
	code, _, stderr := typed("replay", realRecording, "--at", "99999999")
	if code != exitUsage || !strings.Contains(stderr, "--at 99999999: the trace ends with line ") {
		t.Errorf("code %d, %q", code, stderr)
	}
	if code, _, stderr = typed("replay", realRecording, "--at", "20"); code != exitOK {
		t.Errorf("code %d, %q", code, stderr)
	}
}

// TestNothingIsIgnoredBesideTheScreen: what a recording that is shown cannot do is refused.
func TestNothingIsIgnoredBesideTheScreen(t *testing.T) {
	for _, flags := range [][]string{{"--to", "1m"}, {"--at", "3"}, {"--step"}, {"--verify"}, {"--min-match", "1"}, {"--what-if", "threshold=4096"}, {"--policy", "kv"}} {
		code, _, stderr := typed(append([]string{"replay", realRecording, "--tui"}, flags...)...)
		if code != exitUsage || !strings.Contains(stderr, "not for a recording that is shown") {
			t.Errorf("%s: code %d, %q", flags, code, stderr)
		}
	}
	if code, _, stderr := typed("replay", realRecording, "--tui"); code != exitUsage || strings.Count(stderr, "the screen needs a terminal") != 1 {
		t.Errorf("without a terminal: code %d, %q", code, stderr)
	}
}

// TestChangesAreNamedAsSettings: what a short key changes is told.
func TestChangesAreNamedAsSettings(t *testing.T) {
	code, stdout, stderr := typed("replay", realRecording, "--what-if", "eff_isl=3")
	if code != exitOK || !strings.Contains(stdout, "threshold=3,threshold_on=eff_isl") {
		t.Errorf("code %d\n%s\n%s", code, stdout, stderr)
	}
	_, _, stderr = typed("replay", realRecording, "--fleet", "1p1d", "--routing-threshold", "-5")
	if !strings.Contains(stderr, "--routing-threshold -5 is always remote") {
		t.Errorf("%q", stderr)
	}
}

// TestLostFleetHasItsCode: a run whose target goes away ends as one whose target was
// never there.
func TestLostFleetHasItsCode(t *testing.T) {
	err := lostFleet(fmt.Errorf("cell: %w within 2m0s: connection refused", live.ErrLost))
	if coded := (*exitError)(nil); !errors.As(err, &coded) || coded.code != exitUnreachable {
		t.Errorf("%#v", err)
	}
	if lostFleet(nil) != nil {
		t.Error("a run that ends well has an error")
	}
}

// TestDocsAreOfNobodysMachine: man pages and completions hold no folder of whoever
// builds them.
func TestDocsAreOfNobodysMachine(t *testing.T) {
	const home = "/home/somebody-else"
	t.Setenv("HOME", home)
	t.Setenv("XDG_CONFIG_HOME", "")
	dir := t.TempDir()
	if code, _, stderr := typed("docs", "--man", filepath.Join(dir, "man"), "--completions", filepath.Join(dir, "completions")); code != exitOK {
		t.Fatal(stderr)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*", "*"))
	if err != nil || len(files) < 20 {
		t.Fatal(err, len(files))
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(text, []byte(home)) {
			t.Errorf("%s holds %s", filepath.Base(f), home)
		}
	}
}
