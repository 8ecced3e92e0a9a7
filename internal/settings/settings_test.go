package settings

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestRowsAndFields: every field of the config has one row, and every row says
// what it must, in the types of its field.
func TestRowsAndFields(t *testing.T) {
	var c Config
	fields := map[any]string{}
	var walk func(v reflect.Value, path string)
	walk = func(v reflect.Value, path string) {
		if _, one := v.Interface().(decide.Threshold); one || v.Kind() != reflect.Struct {
			fields[v.Addr().Interface()] = path
			return
		}
		for i := range v.NumField() {
			walk(v.Field(i), path+"."+v.Type().Field(i).Name)
		}
	}
	walk(reflect.ValueOf(&c).Elem(), "Config")
	var names []string
	for _, r := range Rows() {
		at := r.At(&c)
		if fields[at] == "" {
			t.Errorf("%s: its field is none, or that of another row", r.Key)
		}
		delete(fields, at)
		if r.Default != nil && reflect.TypeOf(r.Default) != reflect.TypeOf(at).Elem() {
			t.Errorf("%s: the default is a %T, the field a %T", r.Key, r.Default, at)
		}
		if _, text := at.(*string); r.Values != nil && !text {
			t.Errorf("%s: has words and is a %T", r.Key, at)
		}
		if r.Help == "" || strings.HasSuffix(r.Help, ".") {
			t.Errorf("%s: help %q", r.Key, r.Help)
		}
		for _, name := range []string{r.Key, "--" + r.Flag} {
			if slices.Contains(names, name) {
				t.Errorf("%s appears twice", name)
			}
			names = append(names, name)
		}
		if r.Flag == "" {
			continue
		}
		value := r.Get(&defaults)
		if reflect.TypeOf(value).Kind() == reflect.Slice {
			continue
		}
		if got, err := r.ParseChecked(fmt.Sprint(value)); err != nil || got != value {
			t.Errorf("%s: the default %v is read back as %v, %v", r.Key, value, got, err)
		}
	}
	for _, path := range fields {
		t.Errorf("%s has no row", path)
	}
	d := Default()
	if err := d.Validate(); err != nil {
		t.Errorf("the defaults: %v", err)
	}
}

// TestChecks: values at the bounds and beyond.
func TestChecks(t *testing.T) {
	for _, c := range []struct{ key, good, bad string }{
		{"listen", ":0", "8000"},
		{"trusted_proxies", "10.0.0.0/8 192.0.2.1", "10.0.0.0/8 x"},
		{"cors_origins", "https://chat.example http://localhost:3000 *", "https://chat.example/"},
		{"cors_origins", "", "chat.example"},
		{"root_path", "/llm/v2", "/llm/"},
		{"root_path", "", "llm"},
		{"root_path", "/a.b", "/a%20b"},
		{"root_path", "/x", "/x/../y"},
		{"root_path", "/y", "/"},
		{"routing.policy", "session", ""},
		{"routing.prefill_policy", "", "magic"},
		{"routing.connector", "", "none"},
		{"routing.transfer_check", "report", "lax"},
		{"routing.queue_weight", "1e12", "inf"},
		{"routing.temperature", "0", "NaN"},
		{"routing.spread", "1", "-0.1"},
		{"routing.busy_kv_usage", "1", "1.01"},
		{"routing.decode_gate", "0", "NaN"},
		{"routing.busy_waiting", "0", "-1"},
		{"routing.prefill_gate", "9999999999", "-1"},
		{"tokens.block_size", "4096", "4097"},
		{"tokens.chunk_bytes", "16", "15"},
		{"tokens.cache_bytes", "0", "-1"},
		{"tokens.approx_ttl", "1ns", "0s"},
		{"index.max_blocks", "1024", "1023"},
		{"limits.body_bytes", "1024", "1023"},
		{"limits.inflight", "0", "-1"},
		{"retry.attempts", "16", "17"},
		{"retry.budget", "0", "-0.5"},
		{"timeouts.kv_lease", "1s", "-1s"},
		{"trace.protocol", "grpc", "http/json"},
		{"trace.service_name", "router of team a", " "},
		{"trace.sample", "1", "2"},
		{"log.level", "error", "loud"},
		{"receipts", "1048576", "1048577"},
		{"events", "16", "15"},
	} {
		r := Lookup(c.key)
		config := Default()
		value, err := r.ParseChecked(c.good)
		if err != nil {
			t.Errorf("%s: %q: %v", c.key, c.good, err)
			continue
		}
		if r.Set(&config, value); len(config.Problems()) != 0 {
			t.Errorf("%s: %q: %v", c.key, c.good, config.Validate())
		}
		if value, err = r.Parse(c.bad); err != nil {
			t.Errorf("%s: %q: %v", c.key, c.bad, err)
			continue
		}
		r.Set(&config, value)
		if list := config.Problems(); len(list) != 1 || list[0].Key != c.key {
			t.Errorf("%s: %q: %v", c.key, c.bad, config.Validate())
		}
		if _, err := r.ParseChecked(c.bad); err == nil {
			t.Errorf("%s: %q is taken alone", c.key, c.bad)
		}
	}
}

// TestSizes: bytes may have a unit.
func TestSizes(t *testing.T) {
	r := Lookup("limits.body_bytes")
	for text, want := range map[string]int64{
		"1024": 1 << 10, "512KiB": 512 << 10, "256MiB": 256 << 20, "2GiB": 2 << 30, "010KiB": 10 << 10,
		"8589934591GiB": 8589934591 << 30,
	} {
		if got, err := r.Parse(text); err != nil || got != want {
			t.Errorf("%q is %v, want %d (%v)", text, got, want, err)
		}
	}
	for _, text := range []string{"", "MiB", "1.5GiB", "256MB", "256mib", "256 MiB", "1MiBMiB", "8589934592GiB", "-8589934593GiB", "9223372036854775808", "1e3KiB"} {
		if got, err := r.Parse(text); err == nil || !strings.Contains(err.Error(), "256MiB") {
			t.Errorf("%q is %v (%v)", text, got, err)
		}
	}
}

// TestEveryRowRefuses: of every setting that is a number, a time or one of some
// words, something is refused, alone as with the others, by its own key; what is
// not refused makes no problem.
func TestEveryRowRefuses(t *testing.T) {
	texts := []string{":0", "10.0.0.0/8", "x", "true", "0", "1", "0.5", "16", "1024", "1125899906842624", "-1", "-0.1", "1e300", "NaN", "inf", "1ns", "1s", "0s", "-1s", "ttft=1s,itl=9ms", "http://c:4318", "/llm"}
	for _, r := range Rows() {
		kind := reflect.TypeOf(r.At(&Config{})).Elem().Kind()
		number := kind >= reflect.Int && kind <= reflect.Int64 || kind == reflect.Float64
		good, bad := 0, 0
		for _, text := range append(texts, r.Values...) {
			value, err := r.Parse(text)
			if err != nil {
				continue // not of its type
			}
			config := Default()
			config.Limits.BodyMemory = 1 << 60 // what more than one setting has a part in
			config.AdminTokenFile, config.Tokens.Path = "token", "tokenizer.json"
			config.Keys.File = "keys.yaml"
			config.TLS = ServerTLS{CertFile: "tls.crt", KeyFile: "tls.key"}
			config.AdminTLS, config.EngineTLS = config.TLS, EngineTLS{CertFile: "tls.crt", KeyFile: "tls.key"}
			r.Set(&config, value)
			_, alone := r.ParseChecked(text)
			list := config.Problems()
			switch {
			case len(list) == 0 && alone == nil:
				good++
			case len(list) == 1 && list[0].Key == r.Key && (alone != nil || r.Key == "limits.body_memory"):
				bad++
			default:
				t.Errorf("%s: %q: with the others %v, alone %v", r.Key, text, config.Validate(), alone)
			}
		}
		refuses := (number || r.Values != nil)
		if kind != reflect.Slice && good == 0 || refuses && bad == 0 {
			t.Errorf("%s: of all texts %d are taken and %d refused", r.Key, good, bad)
		}
	}
}

// TestEmptyLists: a list of nothing is the default of those that have none, from
// wherever it comes.
func TestEmptyLists(t *testing.T) {
	def := Default()
	for _, r := range Rows() {
		if _, ok := r.At(&def).(*[]string); !ok || r.Default != nil {
			continue
		}
		value, err := r.Parse(" ")
		if err != nil {
			t.Fatal(err)
		}
		c := Default()
		r.Set(&c, value)
		if list := Changed(&def, &c); len(list) != 0 {
			t.Errorf("%s: nothing is taken for a change", r.Key)
		}
		if c, err := Patch(def, map[string]any{r.Key: []any{}}); err != nil || len(Changed(&def, &c)) != 0 {
			t.Errorf("%s: an empty list of JSON is taken for a change (%v)", r.Key, err)
		}
	}
}

// TestWhatMayChange: what is fixed is reported with what it is now, all at once;
// the rest may change.
func TestWhatMayChange(t *testing.T) {
	old := Default()
	now := old
	now.Routing.Threshold.Tokens, now.Worker, now.Aliases, now.Log.Level = 9, []string{"http://a"}, []Alias{{"a", "b"}}, "debug"
	if err := now.CanFollow(&old); err != nil {
		t.Error(err)
	}
	now.Listen, now.Tokens.CacheBytes, now.Health.Timeout, now.Trace.Sample = ":1", 5, time.Hour, 0.5
	err := now.CanFollow(&old)
	want := `listen cannot change while the router runs (now 127.0.0.1:8000): restart it
tokens.cache_bytes cannot change while the router runs (now 33554432): restart it
health.timeout cannot change while the router runs (now 2s): restart it
trace.sample cannot change while the router runs (now 1): restart it`
	if err == nil || err.Error() != want {
		t.Errorf("%v\nwant\n%s", err, want)
	}
}

// TestPatchConfig: the admin API changes settings in JSON's types.
func TestPatchConfig(t *testing.T) {
	got, err := Patch(Default(), map[string]any{
		"routing.threshold": float64(16777216), "worker": []any{"http://a:1,dp=2", "http://b:1"}, "timeouts.drain": "5s",
		"routing.allow_headers": true, "routing.busy_kv_usage": 0.5,
	})
	if err != nil {
		t.Fatal(err)
	}
	want := Default()
	want.Routing.Threshold.Tokens, want.Worker, want.Timeouts.Drain = 16777216, []string{"http://a:1,dp=2", "http://b:1"}, 5*time.Second
	want.Routing.AllowHeaders, want.Routing.Busy.KVUsage = true, 0.5
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	_, err = Patch(Default(), map[string]any{
		"routing.threshold": 1.5, "routing.treshold": 1.0, "routing": map[string]any{}, "worker": []any{"a b"}, "listen": nil,
		"routing.policy": []any{"kv"}, "receipts": []any{"99"},
	})
	for _, want := range []string{
		`routing.threshold: "1.5" is not a whole number`, `unknown key "routing.treshold"; did you mean "routing.threshold"?`,
		"routing.policy: want one value, not a list", "receipts: want one value", `unknown key "routing"`, "worker: a b is not a text without blanks", "listen: want a text",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v\ndoes not say %q", err, want)
		}
	}
}

// keys are those that problems are of, with blanks between them.
func keys(list []*Problem) string {
	var names []string
	for _, p := range list {
		names = append(names, p.Key)
	}
	return strings.Join(names, " ")
}

// TestAccessIsWhole: half of a pair, keys that are not there, and clients' certificates without
// TLS, are refused by the key that is there.
func TestAccessIsWhole(t *testing.T) {
	for _, c := range []struct {
		set  func(*Config)
		want string
	}{
		{func(c *Config) { c.TLS.CertFile = "a" }, "tls.cert_file"},
		{func(c *Config) { c.TLS.KeyFile = "a" }, "tls.cert_file"},
		{func(c *Config) { c.AdminTLS.CertFile = "a" }, "admin_tls.cert_file"},
		{func(c *Config) { c.EngineTLS.KeyFile = "a" }, "engine_tls.cert_file"},
		{func(c *Config) { c.TLS.ClientCAFile = "a" }, "tls.client_ca_file"},
		{func(c *Config) { c.AdminTLS.ClientCAFile = "a" }, "admin_tls.client_ca_file"},
		{func(c *Config) { c.AdminListen = "0.0.0.0:1" }, "admin_listen"},
		{func(c *Config) { c.AdminListen, c.Keys.File = "0.0.0.0:1", "a" }, "admin_listen"},
		{func(c *Config) { c.AdminListen, c.Keys.File, c.Keys.Admin = "0.0.0.0:1", "a", true }, ""},
		{func(c *Config) { c.Keys.Admin = true }, "keys.admin"},
		{func(c *Config) { c.Keys.Salt = true }, "keys.salt"},
		{func(c *Config) { c.AdminListen, c.AdminTLS = "0.0.0.0:1", ServerTLS{"a", "b", ""} }, "admin_listen"},
		{func(c *Config) { c.AdminListen, c.AdminTLS = "0.0.0.0:1", ServerTLS{"a", "b", "c"} }, ""},
		{func(c *Config) { c.EngineTLS.CAFile = "a" }, ""},
	} {
		config := Default()
		c.set(&config)
		if got := keys(config.Problems()); got != c.want {
			t.Errorf("problems of %q, want %q: %v", got, c.want, config.Validate())
		}
	}
}

// TestNamesOfModels: what is wrong with an alias or the default model is a problem of its
// key, before anything is served.
func TestNamesOfModels(t *testing.T) {
	for _, c := range []struct {
		aliases  []Alias
		fallback string
		key, why string // of the only problem; empty for none
	}{
		{[]Alias{{"claude-*", "a"}, {"claude-haiku-*", "b"}, {"*", "b"}, {"best", "b"}}, "best", "", ""},
		{[]Alias{{"a[1m]?", "a"}}, "", "", ""},
		{[]Alias{{"best", "a"}, {"claude-**", "a"}}, "", "aliases[1]", "write it once"},
		{[]Alias{{"claude-*", "model-*"}}, "", "aliases[0]", "its model is one model"},
		{[]Alias{{"claude-*", "best"}, {"best", "a"}}, "", "aliases[0]", "is an alias itself"},
		{[]Alias{{"claude-*", "a"}, {"claude-*", "b"}}, "", "aliases[1]", "appears twice"},
		{[]Alias{{"claude-*", ""}}, "", "aliases[0]", "needs a name and a model"},
		{nil, "model-*", "routing.default_model", "has a * in it"},
		{[]Alias{{"*", "a"}}, "b", "routing.default_model", `contradicts the alias "*"`},
		{[]Alias{{"*", "a"}, {"best", "b"}}, "best", "routing.default_model", `contradicts the alias "*"`},
	} {
		config := Default()
		config.Aliases, config.Routing.DefaultModel = c.aliases, c.fallback
		list := config.Problems()
		if got := keys(list); got != c.key || got != "" && !strings.Contains(list[0].Error(), c.why) {
			t.Errorf("%v, default %q: problems of %q, want %q of %q: %v", c.aliases, c.fallback, got, c.why, c.key, config.Validate())
		}
	}
}

// TestSpecs: workers have the role and the flag of their list, and every entry that
// cannot be read is named.
func TestSpecs(t *testing.T) {
	c := Default()
	c.Worker, c.Prefill, c.Decode = []string{"http://a:1"}, []string{"http://b:1"}, []string{"http://c:1,dp=2"}
	specs, err := c.Specs()
	if err != nil || len(specs) != 3 {
		t.Fatalf("%v, %v", specs, err)
	}
	for i, want := range []struct {
		role   workers.Role
		origin string
	}{{"", "--worker"}, {workers.Prefill, "--prefill"}, {workers.Decode, "--decode"}} {
		if s := specs[i]; s.Role != want.role || s.Origin != want.origin {
			t.Errorf("%+v, want %v", s, want)
		}
	}
	c.Worker, c.Decode = append(c.Worker, "http://d:1,nosuch=1"), []string{"no URL"}
	if _, err := c.Specs(); err == nil || !strings.Contains(err.Error(), "worker[1]: ") || !strings.Contains(err.Error(), "decode[0]: ") {
		t.Errorf("%v", err)
	}
}

// TestCollectorsPassword: what names a collector may hold a password, which neither what is
// shown nor the error for a bad one has.
func TestCollectorsPassword(t *testing.T) {
	r := Lookup("trace.endpoint")
	for text, shown := range map[string]string{
		"": "", "http://c:4318/v1/traces": "http://c:4318/v1/traces",
		"https://me:s3cret@c:4318/v1": "https://redacted@c:4318/v1", "https://s3cret@c": "https://redacted@c",
	} {
		v, err := r.ParseChecked(text)
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}
		c := Default()
		r.Set(&c, v)
		if got := r.Shown(&c); got != shown || c.Trace.Endpoint != text {
			t.Errorf("%q is shown as %q, want %q; kept as %q", text, got, shown, c.Trace.Endpoint)
		}
	}
	for _, text := range []string{"me:s3cret@c:4318", "grpc://me:s3cret@c", "http://me:s3cret@", "http://me:s3cret%zz@c", "c:4318"} {
		if _, err := r.ParseChecked(text); err == nil || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// TestCollectorOfGRPC: over gRPC a collector's URL is host and port alone: a path would be
// ignored, and without a port gRPC goes to 443. The error does not have the URL.
func TestCollectorOfGRPC(t *testing.T) {
	for text, good := range map[string]bool{
		"": true, "http://c:4317": true, "https://me:s3cret@c:4317/": true,
		"http://me:s3cret@c:4318/v1/traces": false, "http://me:s3cret@c": false, "http://me:s3cret@c:4317?a": false,
	} {
		c := Default()
		c.Trace.Endpoint = text
		if err := c.Validate(); err != nil {
			t.Errorf("%q over HTTP: %v", text, err)
		}
		c.Trace.Protocol = OTLPGRPC
		if err := c.Validate(); (err == nil) != good || err != nil && (strings.Contains(err.Error(), "s3cret") || !strings.Contains(err.Error(), "http://collector:4317")) {
			t.Errorf("%q over gRPC: %v", text, err)
		}
	}
}
