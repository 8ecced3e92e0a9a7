package main

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dynctl/dynctl/internal/settings"
)

// typed runs a command line without a terminal.
func typed(args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = runMain(args, strings.NewReader(""), &out, &errs)
	return code, out.String(), errs.String()
}

// TestCommandLineMistakes: a mistake is told once, with what was probably
// meant, on standard error, with the code of the contract.
func TestCommandLineMistakes(t *testing.T) {
	const nobody = "http://127.0.0.1:1" // port 1 is closed
	for _, c := range []struct {
		args string
		code int
		say  string
	}{
		{"srve", exitUsage, `dynctl: unknown command "srve"; did you mean "dynctl serve"?`},
		{"workers lst", exitUsage, `dynctl: unknown command "lst"; did you mean "dynctl workers list"?`},
		{"config zzzzzz", exitUsage, `dynctl: unknown command "zzzzzz"; see dynctl config --help`},
		{"help nosuchthing", exitUsage, `dynctl: unknown command "nosuchthing"; see dynctl --help`},
		{"bench --path local --sim 1p1d", exitUsage, "dynctl: --path is for sweeps, and this run compares paths: add --sweep, --trace, --thresholds, --turns or --prefix-groups, or leave it out"},
		{"bench --threshold --trace-scale 2 --sim 1p1d", exitUsage, "dynctl: --trace-scale is for sweeps, and"},
		{"serve --listn x", exitUsage, `dynctl: unknown flag --listn (did you mean --listen?); see dynctl serve --help`},
		{"serve extra", exitUsage, `dynctl: unknown command "extra" for "dynctl serve"; see dynctl serve --help`},
		{"serve --sim 2x2d", exitUsage, "dynctl: 1 problem in the configuration:\n  flag --sim: sim: fleet \"2x2d\": want counts like 2p2d (p prefill, d decode, a aggregated)"},
		{"workers drain", exitUsage, "dynctl: accepts 1 arg(s), received 0; see dynctl workers drain --help"},
		{"workers drain a --wait soon", exitUsage, "dynctl: --wait soon: not a duration such as 500ms, 10s or 2m; see dynctl workers drain --help"},
		{"workers list -o xml", exitUsage, "dynctl: -o xml: not one of table, wide, json, jsonl, csv, markdown, yaml"},
		{"config validate /no/such/file", exitUsage, "dynctl: config file: stat /no/such/file: no such file or directory"},
		{"explain --tokens 1,x", exitUsage, `dynctl: --tokens: "x" is not a token id`},
		{"explain --router " + nobody + " id", exitUnreachable, "dynctl: no router answers at " + nobody},
		{"workers list --router " + nobody, exitUnreachable, "dynctl: no router answers at " + nobody},
	} {
		t.Run(c.args, func(t *testing.T) {
			code, stdout, stderr := typed(strings.Fields(c.args)...)
			if code != c.code || stdout != "" || !strings.HasPrefix(stderr, c.say) || strings.Count(stderr, "dynctl: ") != 1 {
				t.Errorf("code %d, want %d\nstdout %q\nstderr %q\nwant   %q", code, c.code, stdout, stderr, c.say)
			}
		})
	}
}

// TestHelpOfEveryCommand: help goes to standard output and says what the flags
// are, and no command hides behind another's name.
func TestHelpOfEveryCommand(t *testing.T) {
	for _, args := range []string{"", "serve", "sim", "explain", "workers", "workers list", "workers drain", "config", "config view", "keys new", "top", "record", "replay", "version", "environment"} {
		code, stdout, stderr := typed(append([]string{"help"}, strings.Fields(args)...)...)
		if code != exitOK || stderr != "" || len(stdout) < 100 && args != "version" {
			t.Errorf("help %s: code %d, %q, %q", args, code, stdout, stderr)
		}
	}
	root := newRoot()
	for _, c := range root.Commands() {
		if c.IsAvailableCommand() && c.Name() != "help" && c.GroupID == "" {
			t.Errorf("%s stands in no group of the help", c.Name())
		}
	}
}

// TestFlagsStandUnderEachOther: pflag pads by bytes, so what stands left of the blanks
// must be of one byte to a column.
func TestFlagsStandUnderEachOther(t *testing.T) {
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		c.Flags().VisitAll(func(f *pflag.Flag) {
			name, _ := pflag.UnquoteUsage(f)
			if strings.ContainsFunc(f.Name+name, func(r rune) bool { return r > 126 }) {
				t.Errorf("%s --%s %s is not ASCII", c.CommandPath(), f.Name, name)
			}
		})
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(newRoot())
}

// TestEveryConfigProblemAtOnce: each problem of a file with its line and, for
// a key that does not exist, the nearest that does.
func TestEveryConfigProblemAtOnce(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	const file = `listen: 127.0.0.1:18900
lissten: 1
routing:
  policy: kvv
  threshold: many
  treshold: 5
  busy_kv_usage: 7
  decoder_registry: "{bad"
timeouts:
  drain: 5
  dial: [1]
worker:
  - foo bar
  - http://127.0.0.1:1
  - http://127.0.0.1:1,dpp=2
sim: 2q
limits: {inflight: 1.5, inflight: 3}
aliases:
  - {name: a}
`
	if err := os.WriteFile("bad.yaml", []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	code, _, stderr := typed("config", "validate", "bad.yaml")
	want := `dynctl: 15 problems in the configuration:
  bad.yaml:2: unknown key "lissten"; did you mean "listen"?
  bad.yaml:5: routing.threshold: "many" is not a whole number of tokens, nor auto
  bad.yaml:6: unknown key "routing.treshold"; did you mean "threshold"?
  bad.yaml:10: timeouts.drain: "5" is not a duration such as 500ms, 10s or 2m
  bad.yaml:11: timeouts.dial: want a duration such as 500ms, 10s or 2m
  bad.yaml:17: limits.inflight: "1.5" is not a whole number
  bad.yaml:17: key "limits.inflight" stands twice
  file bad.yaml:4: routing.policy: "kvv" is not one of kv, kv_dynamo, least_loaded, round_robin, power_of_two, random, session
  file bad.yaml:7: routing.busy_kv_usage: 7 is not a share between 0 and 1
  file bad.yaml:19: aliases[0]: an alias needs a name and a model
  file bad.yaml:13: worker "foo bar": URL "foo bar" holds a space or a control character
  file bad.yaml:15: worker "http://127.0.0.1:1": unknown key "dpp" (did you mean "dp"?)
  file bad.yaml:16: sim: fleet "2q": want counts like 2p2d (p prefill, d decode, a aggregated)
  file bad.yaml:8: routing.decoder_registry: decoder registry: invalid character 'b' looking for beginning of object key string
`
	want = strings.Replace(want, "15 problems", fmt.Sprintf("%d problems", strings.Count(want, "\n")-1), 1)
	if d := cmp.Diff(want, stderr); d != "" || code != exitInvalid {
		t.Errorf("code %d, (-want +got)\n%s", code, d)
	}

	code, _, stderr = typed("serve", "--routing-threshold", "abc", "--policy", "foo", "--drain-timeout", "5", "--worker", "nonsense", "--allow-routing-headers=maybe")
	want = `dynctl: 5 problems in the configuration:
  flag --policy: routing.policy: "foo" is not one of kv, kv_dynamo, least_loaded, round_robin, power_of_two, random, session
  flag --routing-threshold: "abc" is not a whole number of tokens, nor auto
  flag --allow-routing-headers: "maybe" is not true or false
  flag --drain-timeout: "5" is not a duration such as 500ms, 10s or 2m
  flag --worker: worker "nonsense": URL "nonsense" has no scheme (did you mean http://nonsense?)
`
	if code != exitUsage || !sameLines(want, stderr) {
		t.Errorf("code %d\n%s\nwant\n%s", code, stderr, want)
	}
}

func sameLines(a, b string) bool {
	count := map[string]int{}
	for l := range strings.Lines(a) {
		count[l]++
	}
	for l := range strings.Lines(b) {
		count[l]--
	}
	for _, n := range count {
		if n != 0 {
			return false
		}
	}
	return true
}

// TestConfigInitIsValid: the file that config init writes is valid as it
// stands, and with every comment taken off it says the defaults.
func TestConfigInitIsValid(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"as written": configTemplate(), "all keys": uncomment(configTemplate())} {
		path := filepath.Join(dir, "c.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		l, err := loadConfig(path, newServeCmd().Flags())
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		// An empty list and none are the same.
		if d := cmp.Diff(settings.Default(), l.Config, cmp.FilterValues(func(a, b []string) bool { return len(a)+len(b) == 0 }, cmp.Ignore())); d != "" {
			t.Errorf("%s: (-default +file)\n%s", name, d)
		}
		if name == "all keys" {
			for _, r := range settings.Rows() {
				if r.Flag != "" && !strings.HasPrefix(l.Origin[r.Key], "file ") {
					t.Errorf("%s is not in the file: %s", r.Key, l.Origin[r.Key])
				}
			}
		}
	}
}

// uncomment takes the # off every line that is a key.
func uncomment(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		trimmed := strings.TrimLeft(line, " ")
		if key, _, ok := strings.Cut(strings.TrimPrefix(trimmed, "# "), ":"); ok && !strings.ContainsAny(key, " ") && key != "aliases" {
			line = line[:len(line)-len(trimmed)] + strings.TrimPrefix(trimmed, "# ")
		}
		b.WriteString(line)
	}
	return b.String()
}

// TestLogLines: what a person reads names nothing twice; what a program reads
// is JSON.
func TestLogLines(t *testing.T) {
	var b bytes.Buffer
	log, level := newLevelLogger(settings.Log{Level: "info", Format: "text"}, &b)
	at := time.Date(2026, 11, 21, 15, 0, 0, 0, time.UTC)
	r := slog.NewRecord(at, slog.LevelWarn, "worker p0 is unhealthy", 0)
	r.AddAttrs(slog.String("kind", "health_changed"), slog.String("worker", "p0"), slog.String("request", "r 1"), slog.Any("err", errors.New("gone")))
	h := log.With("a", 1).WithGroup("g").Handler()
	if err := h.Handle(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	log.Debug("not shown")
	if got, want := b.String(), "2026-11-21T15:00:00Z WARN worker p0 is unhealthy  a=1  g.request=\"r 1\"  g.err=gone\n"; got != want {
		t.Errorf("%q\nwant %q", got, want)
	}
	b.Reset()
	level.Set(slog.LevelDebug)
	if log.Debug("shown"); !strings.HasSuffix(b.String(), " DEBUG shown\n") {
		t.Errorf("after the level changed: %q", b.String())
	}
	b.Reset()
	log = newLogger(settings.Log{Level: "info", Format: "auto"}, &b)
	log.Info("hello", "k", "v")
	if got := b.String(); !strings.HasPrefix(got, `{"time":`) || !strings.HasSuffix(got, `"msg":"hello","k":"v"}`+"\n") {
		t.Errorf("a pipe gets %q", got)
	}
}
