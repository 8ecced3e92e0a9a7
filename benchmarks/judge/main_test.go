package main

import (
	"bytes"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/cli"
)

// TestCommandLine: wrong flags are refused with what to do.
func TestCommandLine(t *testing.T) {
	halves := []string{"-tuning", "agents,documents", "-judging", "conversation,chats,bursts"}
	for _, tt := range []struct {
		args []string
		want string
	}{
		{nil, "name the halves"},
		{[]string{"-tuning", "moon"}, "workload moon"},
		{[]string{"-tuning", "chats", "-judging", "chats"}, "named twice"},
		{append(halves, "-seeds", "1"), "-seeds 1: want 2"},
		{append(halves, "-requests", "0"), "-requests 0"},
		{append(halves, "-half", "left"), "-half left"},
		{append(halves, "-o", "xml"), "-o xml"},
		{append(halves, "-fleets", "3a"), "-fleets 3a: not one of"},
		{append(halves, "-jobs", "0"), "-jobs 0"},
		{append(halves, "-loads", "0.5,2"), "2: not one of 0.5, 0.8, 1"},
		{append(halves, "-loads", ""), "-loads: name one or more"},
		{append(halves, "-sensitivity", "-set", "keep=1"), "-sensitivity: not with"},
		{append(halves, "x"), `"x": flags only`},
	} {
		var stderr bytes.Buffer
		code, err := start(t.Context(), tt.args, &stderr, &stderr)
		if code != cli.ExitUsage || err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%v: code %d, %v, want %q", tt.args, code, err, tt.want)
		}
	}
}

// TestSmallJudgement: a few requests go through the search, all columns and both forms of
// output. What is not the whole grid gives no judgement and says why, and a second call
// finds all runs made.
func TestSmallJudgement(t *testing.T) {
	dir := t.TempDir()
	args := []string{"-dir", dir, "-tuning", "documents", "-judging", "conversation,chats", "-conversation", filepath.Join(dir, "none"), "-half", "tuning", "-fleets", "4p12d", "-requests", "150", "-seeds", "2", "-more", "random:0"}
	var first, again, log bytes.Buffer
	code, err := start(t.Context(), args, &first, &log)
	if code != cli.ExitInvalid || err != nil {
		t.Fatalf("code %d, %v\n%s", code, err, log.String())
	}
	for _, want := range []string{
		"| documents | 4p12d padded | 0.5 (×", "| kv:never", "| random:0", "## Tuning half", "The worst cells:",
		"not judged: only the tuning half was run", "not judged: 150 requests and 2 seeds", "not judged: fleet 16a was not run",
	} {
		if !strings.Contains(first.String(), want) {
			t.Errorf("no %q in\n%s", want, first.String())
		}
	}
	runs, err := filepath.Glob(filepath.Join(dir, "runs-*.jsonl"))
	if err != nil || len(runs) != 1 {
		t.Fatal(runs, err)
	}
	before, err := os.ReadFile(runs[0])
	if err != nil {
		t.Fatal(err)
	}
	// A line that was cut is made again.
	if err := os.WriteFile(runs[0], before[:len(before)-7], 0o600); err != nil {
		t.Fatal(err)
	}
	if code, err = start(t.Context(), args, &again, &log); code != cli.ExitInvalid || err != nil || again.String() != first.String() {
		t.Errorf("code %d, %v: again\n%s\nfirst\n%s", code, err, again.String(), first.String())
	}
	if after, err := os.ReadFile(runs[0]); err != nil || !bytes.Equal(after, before) {
		t.Errorf("%d bytes of runs, before %d, %v", len(after), len(before), err)
	}
	again.Reset()
	if code, err = start(t.Context(), append(args, "-o", "json"), &again, &log); code != cli.ExitInvalid || err != nil || !strings.Contains(again.String(), `"times_better"`) {
		t.Errorf("code %d, %v\n%s", code, err, again.String())
	}
}

// TestSmallSensitivity: a few requests go through all constants, and the table says of how many cells
// it is.
func TestSmallSensitivity(t *testing.T) {
	dir := t.TempDir()
	var out, log bytes.Buffer
	limit := `{"agents 2p14d requests=60 seeds=2 kv_blocks=1024 engines=mocker": 4}`
	if err := os.WriteFile(filepath.Join(dir, "capacity.json"), []byte(limit), 0o600); err != nil {
		t.Fatal(err)
	}
	code, err := start(t.Context(), []string{"-dir", dir, "-tuning", "agents", "-fleets", "2p14d", "-loads", "1", "-requests", "60", "-seeds", "2", "-sensitivity"}, &out, &log)
	if code != cli.ExitOK || err != nil {
		t.Fatalf("code %d, %v\n%s", code, err, log.String())
	}
	for _, want := range []string{
		"over 1 cell with", "2 seeds of 60 requests", "| as shipped", "| loss         | times that a good request may take", "| 0.4     | 0.2 ", "| stale_s", "| agents   | 2p14d | 1 (×",
		"not all of it: load 0.5 was not run", "not all of it: fleet 16a was not run", "not all of it: 60 requests and 2 seeds",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	if n := strings.Count(out.String(), "| stays"); n != 2 {
		t.Errorf("%d rows of stays in\n%s", n, out.String())
	}
}

// TestConversation: a file that is not the public trace is refused, wherever it is from.
func TestConversation(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("HOME", t.TempDir())
	if _, err := readConversation(""); !errors.Is(err, errNoTrace) {
		t.Errorf("an empty cache: %v", err)
	}
	other := filepath.Join(t.TempDir(), "other.jsonl")
	if err := os.WriteFile(other, []byte("{}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readConversation(other); err == nil || !strings.Contains(err.Error(), "not the public conversation trace") {
		t.Errorf("another file: %v", err)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/other" {
			http.NotFound(w, r)
		}
	}))
	defer server.Close()
	for path, want := range map[string]string{"/other": "not the public conversation trace", "/none": "404"} {
		if err := download(t.Context(), server.URL+path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
	if _, err := readConversation(""); !errors.Is(err, errNoTrace) {
		t.Errorf("a failed download left something: %v", err)
	}
}
