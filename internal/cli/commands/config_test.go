package commands

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/rig/clitest"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/settings"
)

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
  bad.yaml:17: key "limits.inflight" appears twice
  bad.yaml:4: routing.policy: "kvv" is not one of POLICIES
  bad.yaml:7: routing.busy_kv_usage: 7 is not a share between 0 and 1
  bad.yaml:19: aliases[0]: an alias needs a name and a model
  bad.yaml:13: worker "foo bar": URL "foo bar" holds a space or a control character
  bad.yaml:15: worker "http://127.0.0.1:1": unknown key "dpp" (did you mean "dp"?)
  bad.yaml:16: sim: fleet "2q": want counts like 2p2d (p prefill, d decode, a aggregated)
  bad.yaml:8: routing.decoder_registry: decoder registry: invalid character 'b' looking for beginning of object key string
`
	var names []string
	for _, p := range selector.Policies() {
		names = append(names, string(p))
	}
	policies := strings.NewReplacer("POLICIES", strings.Join(names, ", "))
	want = policies.Replace(strings.Replace(want, "15 problems", fmt.Sprintf("%d problems", strings.Count(want, "\n")-1), 1))
	if d := cmp.Diff(want, stderr); d != "" || code != cli.ExitInvalid {
		t.Errorf("code %d, (-want +got)\n%s", code, d)
	}

	code, _, stderr = typed("serve", "--routing-threshold", "abc", "--policy", "foo", "--drain-timeout", "5", "--worker", "nonsense", "--allow-routing-headers=maybe")
	want = `dynctl: 5 problems in the configuration:
  flag --policy: routing.policy: "foo" is not one of POLICIES
  flag --routing-threshold: "abc" is not a whole number of tokens, nor auto
  flag --allow-routing-headers: "maybe" is not true or false
  flag --drain-timeout: "5" is not a duration such as 500ms, 10s or 2m
  flag --worker: worker "nonsense": URL "nonsense" has no scheme (did you mean http://nonsense?)
`
	if want = policies.Replace(want); code != cli.ExitUsage || !sameLines(want, stderr) {
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
		l, err := cli.LoadConfig(path, newServeCmd().Flags())
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

func TestConfigViewAsRows(t *testing.T) {
	for format, want := range map[string]string{
		"csv":      "routing.threshold,7,flag --routing-threshold\n",
		"markdown": "| routing.threshold | 7 | flag --routing-threshold |\n",
		"jsonl":    `{"key":"routing.threshold","value":7,"origin":"flag --routing-threshold"}` + "\n",
	} {
		code, out, errs := typed("config", "view", "--origin", "--routing-threshold", "7", "-o", format)
		if code != cli.ExitOK || !strings.Contains(clitest.Squeeze(out), want) {
			t.Errorf("%s: exit %d %s\n%s", format, code, errs, out)
		}
	}
}

// TestConfigViewHidesPasswords: in no format the password of a collector is shown.
func TestConfigViewHidesPasswords(t *testing.T) {
	for _, format := range cli.ListFormats() {
		code, out, errs := typed("config", "view", "--otlp-endpoint", "https://me:s3cret@collector:4318/v1/traces", "-o", format)
		if code != cli.ExitOK || strings.Contains(out+errs, "s3cret") || !strings.Contains(out, "https://redacted@collector:4318/v1/traces") {
			t.Errorf("%s: exit %d %s\n%s", format, code, errs, out)
		}
	}
	if code, out, errs := typed("config", "view", "--otlp-endpoint", "me:s3cret@collector"); code != cli.ExitUsage || strings.Contains(out+errs, "s3cret") || !strings.Contains(errs, "not a URL such as") {
		t.Errorf("a bad URL: exit %d %s\n%s", code, errs, out)
	}
}

// TestConfigInitRedirected: where standard output is no terminal, the file goes there, and
// it has no marks of flags' values.
func TestConfigInitRedirected(t *testing.T) {
	t.Chdir(t.TempDir())
	code, out, errs := typed("config", "init")
	if code != cli.ExitOK || out != configTemplate() || errs != "" || strings.Contains(out, "`") {
		t.Errorf("code %d %s\n%s", code, errs, out)
	}
	if files, err := os.ReadDir("."); err != nil || len(files) > 0 {
		t.Errorf("it left %v, %v", files, err)
	}
	if code, _, errs = typed("config", "init", "c.yaml"); code != cli.ExitOK {
		t.Errorf("a file: code %d %s", code, errs)
	}
	if code, _, errs = typed("config", "init", "c.yaml"); code != cli.ExitRuntime || !strings.Contains(errs, "--force") {
		t.Errorf("a file that exists: code %d %s", code, errs)
	}
}

// TestConfigValidateCodes: the codes are those of the command's help.
func TestConfigValidateCodes(t *testing.T) {
	t.Chdir(t.TempDir())
	for name, text := range map[string]string{"good.yaml": "routing: {threshold: 3}\n", "bad.yaml": "routing: {treshold: 3}\n", "broken.yaml": "routing: [\n"} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]int{"good.yaml": cli.ExitOK, "missing.yaml": cli.ExitUsage, "bad.yaml": cli.ExitInvalid, "broken.yaml": cli.ExitInvalid} {
		if code, _, errs := typed("config", "validate", name); code != want {
			t.Errorf("%s: code %d %s", name, code, errs)
		}
	}
}

// TestConfigViewOfARouter: the running configuration has the form of the own one.
func TestConfigViewOfARouter(t *testing.T) {
	router := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path != "/admin/v1/config" {
			http.NotFound(w, q)
			return
		}
		_, _ = io.WriteString(w, `{"settings":[{"key":"limits.body_memory","value":1073741824,"origin":"default"},{"key":"worker","value":["http://a","http://b"],"origin":"flag --worker"},{"key":"sim","value":"","origin":"default"}]}`)
	}))
	t.Cleanup(router.Close)
	code, out, errs := typed("config", "view", "--origin", "--router", router.URL, "-o", "csv")
	if want := "KEY,VALUE,ORIGIN\nlimits.body_memory,1073741824,default\nworker,http://a http://b,flag --worker\nsim,-,default\n"; code != cli.ExitOK || out != want {
		t.Errorf("code %d %s\n%s", code, errs, out)
	}
	for _, extra := range []string{"--routing-threshold=7", "--config=c.yaml"} {
		if code, _, errs = typed("config", "view", "--router", router.URL, extra); code != cli.ExitUsage || !strings.Contains(errs, "--router") {
			t.Errorf("%s: code %d %s", extra, code, errs)
		}
	}
}
