package load

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/settings"
)

// flags are those of a command line.
func flags(t *testing.T, args ...string) *pflag.FlagSet {
	t.Helper()
	f := pflag.NewFlagSet("test", pflag.ContinueOnError)
	AddFlags(f)
	if err := f.Parse(args); err != nil {
		t.Fatal(err)
	}
	return f
}

// TestEveryTextMeansTheSameEverywhere: what a file says of a setting is what its
// text would say in a variable or a flag, whatever YAML would make of it.
func TestEveryTextMeansTheSameEverywhere(t *testing.T) {
	texts := []string{
		"010", "0x10", "0o17", "1e3", "1_000", "+7", "-0", "1.0", ".5", "007", "inf", ".inf", "NaN", "true", "T", "yes", "on", "2026-11-22",
		"12:30:45", "5", "5s", "1h0m", "0.5", "~", "null", "x", "127.0.0.1:8000", "local", "<<", "=",
	}
	path := filepath.Join(t.TempDir(), "c.yaml")
	few := []string{"010", "1e3", "-0", "inf", "T", "5s", "null", "local"}
	tried, seen := 0, map[reflect.Type]bool{} // of each type one with all texts
	for _, r := range settings.Rows() {
		kind := reflect.TypeOf(r.At(&settings.Config{})).Elem()
		if kind.Kind() == reflect.Slice {
			continue // lists are separated by blanks, or by lines
		}
		texts := texts
		if seen[kind] {
			texts = few
		}
		seen[kind] = true
		tried++
		group, name, nested := strings.Cut(r.Key, ".")
		for _, text := range texts {
			file := r.Key + ": " + text + "\n"
			if nested {
				file = group + ": {" + name + ": " + text + "}\n"
			}
			if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
				t.Fatal(err)
			}
			typed, typedErr := Load("", flags(t, "--"+r.Flag+"="+text), nil)
			read, readErr := Load(path, flags(t), nil)
			if text == "~" || text == "null" {
				if readErr == nil || !strings.Contains(readErr.Error(), "want ") {
					t.Errorf("%s: nothing in the file is taken: %v", r.Key, readErr)
				}
				continue
			}
			if (typedErr == nil) != (readErr == nil) {
				t.Errorf("%s: %q: flag %v, file %v", r.Key, text, typedErr, readErr)
			} else if typedErr == nil && !reflect.DeepEqual(typed.Config, read.Config) {
				t.Errorf("%s: %q is %v from a flag and %v from a file", r.Key, text, r.Get(&typed.Config), r.Get(&read.Config))
			}
		}
	}
	if tried < 60 {
		t.Errorf("%d settings were tried", tried)
	}
	if err := os.WriteFile(path, []byte("worker: [http://10.0.0.1, \"http://b\"]\nadmin_hosts: [010, 1.0]\naliases: [{name: 007, model: 1e3}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := Load(path, flags(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	want := settings.Default()
	want.Worker, want.AdminHosts, want.Aliases = []string{"http://10.0.0.1", "http://b"}, []string{"010", "1.0"}, []settings.Alias{{Name: "007", Model: "1e3"}}
	if d := cmp.Diff(want, l.Config); d != "" {
		t.Error(d)
	}
	if l.Origin["aliases"] != "file "+path+":3" {
		t.Errorf("origin of the aliases: %s", l.Origin["aliases"])
	}
}

// TestSecondDocument: a file of two documents is not read in half.
func TestSecondDocument(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.yaml")
	for text, want := range map[string]string{
		"---\nreceipts: 99\n---\n# nothing\n": "",
		"receipts: 99\n...\n":                 "",
		"receipts: 99\n---\nevents: 99\n":     path + ":3: a second document begins here; a configuration file holds one",
		"receipts: 99\n---\nevents: [\n":      path + ": yaml: ",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		l, err := Load(path, flags(t), nil)
		if (err == nil) != (want == "") || !strings.Contains(fmt.Sprint(err), want) || err == nil && l.Config.Receipts != 99 {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

// TestEnvironmentSetsEverySetting: each setting can come from its variable, a
// flag wins over it, and the origins say so.
func TestEnvironmentSetsEverySetting(t *testing.T) {
	other := func(v any) string {
		switch v := v.(type) {
		case string:
			return "other"
		case []string:
			return "one two"
		case bool:
			return fmt.Sprint(!v)
		case time.Duration:
			return (v + time.Second).String()
		case decide.Threshold:
			return "auto:17"
		case int:
			return fmt.Sprint(v + 17)
		case int64:
			return fmt.Sprint(v + 17)
		case uint64:
			return fmt.Sprint(v + 17)
		case float64:
			return fmt.Sprint(v/2 + 0.25)
		}
		t.Fatalf("type %T", v)
		return ""
	}
	valid := map[string]string{
		"kubernetes.discovery": "service-name",
		"kubernetes.scheme":    "https",
		"replicas.routers":     "a:1 b:1", "replicas.listen": "127.0.0.1:3",
		"listen": "127.0.0.1:1", "admin_listen": "127.0.0.1:2", "worker": "http://a:1 http://b:1", "prefill": "http://c:1 http://d:1",
		"decode": "http://e:1,dp=2 http://f:1", "sim": "1p1d", "routing.policy": "random", "routing.prefill_policy": "random",
		"routing.decode_policy": "random", "routing.threshold_on": "isl", "routing.objective": "e2e", "routing.slo": "ttft=1s,itl=9ms", "routing.prefill_fallback": "error", "routing.missing_params": "local", "routing.transfer_check": "report",
		"routing.connector": "nixl", "routing.decoder_registry": `{}`, "retry.attempts": "5",
		"tokens.tokenizer": "engine", "log.level": "warn", "log.format": "json", "log.access": "text", "continue.mode": "exact",
		"root_path": "/llm", "cors_origins": "https://a http://b:1", "trusted_proxies": "10.0.0.0/8 192.0.2.1", "trace.endpoint": "http://collector:4318/v1/traces", "trace.protocol": "grpc",
	}
	// What has no value of its own without another.
	needs := map[string][]string{
		"tls.cert_file": {"tls.key_file"}, "tls.key_file": {"tls.cert_file"}, "tls.client_ca_file": {"tls.cert_file", "tls.key_file"},
		"admin_tls.cert_file": {"admin_tls.key_file"}, "admin_tls.key_file": {"admin_tls.cert_file"}, "admin_tls.client_ca_file": {"admin_tls.cert_file", "admin_tls.key_file"},
		"keys.admin": {"keys.file"}, "keys.salt": {"keys.file"}, "engine_tls.cert_file": {"engine_tls.key_file"}, "engine_tls.key_file": {"engine_tls.cert_file"},
	}
	defaults := settings.Default()
	for _, s := range settings.Rows() {
		if s.Flag == "" {
			continue
		}
		t.Run(s.Key, func(t *testing.T) {
			for _, key := range needs[s.Key] {
				t.Setenv(settings.Lookup(key).Env(), "file")
			}
			before := s.Get(&defaults)
			text, ok := valid[s.Key]
			if !ok {
				text = other(before)
			}
			t.Setenv(s.Env(), text)
			l, err := Load("", flags(t), nil)
			if err != nil {
				t.Fatal(err)
			}
			after := s.Get(&l.Config)
			if want, err := s.Parse(text); err != nil || !reflect.DeepEqual(after, want) {
				t.Errorf("%s=%s gives %v", s.Env(), text, after)
			}
			if l.Origin[s.Key] != "env "+s.Env() {
				t.Errorf("origin %q", l.Origin[s.Key])
			}
			if len(l.Warnings) != 0 {
				t.Errorf("warnings %q", l.Warnings)
			}
			t.Setenv(s.Env(), fmt.Sprint(before))
			if _, list := before.([]string); list {
				t.Setenv(s.Env(), "http://never:1")
			}
			if _, list := before.([]string); list {
				return // lists of flags are not split at blanks
			}
			l, err = Load("", flags(t, "--"+s.Flag+"="+text), nil)
			if err != nil {
				t.Fatal(err)
			}
			if got := s.Get(&l.Config); !reflect.DeepEqual(got, after) || l.Origin[s.Key] != "flag --"+s.Flag {
				t.Errorf("--%s=%s gives %v from %s", s.Flag, text, got, l.Origin[s.Key])
			}
		})
	}
}

// TestStrangeVariables: a misspelt variable is reported; those that Kubernetes
// makes for a service called dynctl are not.
func TestStrangeVariables(t *testing.T) {
	got := strangeVariables([]string{
		"HOME=/", "DYNCTL_ROUTING_POLICY=kv", "DYNCTL_ROUTNG_POLICY=kv", "DYNCTL_ROUTER=http://a", "DYNCTL_PORT=tcp://10.0.0.1:80",
		"DYNCTL_SERVICE_HOST=10.0.0.1", "DYNCTL_SERVICE_PORT=80", "DYNCTL_SERVICE_PORT_HTTP=80", "DYNCTL_PORT_80_TCP=tcp://10.0.0.1:80",
		"DYNCTL_PORT_80_TCP_PROTO=tcp", "DYNCTL_PORT_80_TCP_PORT=80", "DYNCTL_PORT_80_TCP_ADDR=10.0.0.1",
	}, []string{"DYNCTL_ROUTER"})
	if d := cmp.Diff([]string{"environment DYNCTL_ROUTNG_POLICY is no setting; did you mean DYNCTL_ROUTING_POLICY?"}, got); d != "" {
		t.Error(d)
	}
}

// TestNegativeThresholdIsReported: it is the same as 0, which nobody would expect of it. A
// file or a variable with one is refused.
func TestNegativeThresholdIsReported(t *testing.T) {
	for arg, warned := range map[string]bool{"--routing-threshold=-5": true, "--routing-threshold=0": false, "--routing-threshold=5": false} {
		l, err := Load("", flags(t, arg), nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(strings.Join(l.Warnings, "\n"), "routing.threshold -5 (flag --routing-threshold) is always remote"); got != warned {
			t.Errorf("%s: %q", arg, l.Warnings)
		}
	}
	path := filepath.Join(t.TempDir(), "dynctl.yaml")
	if err := os.WriteFile(path, []byte("routing:\n  policy: kv\n  threshold: -5\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	const refused = "routing.threshold: -5 must not be negative: write 0 for always remote, or a number above every prompt for never remote"
	if _, err := Load(path, flags(t), nil); err == nil || !strings.Contains(err.Error(), path+":3: "+refused) {
		t.Error(err)
	}
	if l, err := Load(path, flags(t, "--routing-threshold=7"), nil); err != nil || l.Config.Routing.Threshold.Tokens != 7 {
		t.Errorf("a flag in place of the file's value: %v", err)
	}
	t.Setenv("DYNCTL_ROUTING_THRESHOLD", "-5")
	if _, err := Load("", flags(t), nil); err == nil || !strings.Contains(err.Error(), "env DYNCTL_ROUTING_THRESHOLD: "+refused) {
		t.Error(err)
	}
}
