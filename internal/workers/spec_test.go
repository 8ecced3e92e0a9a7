package workers

import (
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func mustURL(t testing.TB, s string) *url.URL {
	t.Helper()
	u, err := url.Parse(s)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func TestParseSpec(t *testing.T) {
	tests := []struct {
		name string
		role Role
		text string
		want Spec
	}{
		{"url alone", Decode, "http://10.0.0.1:8000", Spec{Facts: Facts{Role: Decode}, Name: "10.0.0.1:8000", URL: mustURL(t, "http://10.0.0.1:8000")}},
		{"slash and default port", "", "https://engine.example/", Spec{Name: "engine.example:443", URL: mustURL(t, "https://engine.example")}},
		{"path", "", "http://Host/api/", Spec{Name: "host:80.api", URL: mustURL(t, "http://host/api")}},
		{"base URL of OpenAI clients", "", "http://host:8000/v1/", Spec{Name: "host:8000", URL: mustURL(t, "http://host:8000")}},
		{"base URL below a path", "", "http://host:8000/a%2Fb/v1", Spec{Name: "host:8000.a_2Fb", URL: mustURL(t, "http://host:8000/a%2Fb")}},
		{"an engine below /v1", "", "http://host:8000/v1/v1", Spec{Name: "host:8000.v1", URL: mustURL(t, "http://host:8000/v1")}},
		{"a path that only ends in v1", "", "http://host:8000/llm-v1", Spec{Name: "host:8000.llm-v1", URL: mustURL(t, "http://host:8000/llm-v1")}},
		{"ipv6", Aggregated, "http://[::1]:8000", Spec{Facts: Facts{Role: Aggregated}, Name: "[::1]:8000", URL: mustURL(t, "http://[::1]:8000")}},
		{"role as a key", "", "http://a:1,role=prefill", Spec{Facts: Facts{Role: Prefill}, Name: "a:1", URL: mustURL(t, "http://a:1")}},
		{
			"everything", Decode,
			"http://a:1, name=d0, engine=vllm,connector=nixl,dp=2,events=tcp://*:5557,replay=tcp://*:5657,topic=kv@,model=llama;lora-1,model=m2," +
				"labels=gpu:h200;pool:a,bootstrap=10.0.0.9:8998,block_size=16,kv_blocks=100,max_model_len=4096,max_batched_tokens=8192,kv_copies=single,kv_last_block=dropped,attention_chunk=8192,kv_hash=sha256_cbor,kv_hash_seed=42,lmcache=10.0.0.2/7300;7301/7400;7401",
			Spec{
				Facts: Facts{
					Engine: VLLM, Role: Decode, Connector: ConnectorNIXL,
					Models:    []string{"llama", "lora-1", "m2"},
					Bootstrap: &Bootstrap{"10.0.0.9", 8998}, BlockSize: 16, KVBlocks: 100, MaxModelLen: 4096, MaxBatchedTokens: 8192, KVCopies: CopiesSingle, LastBlock: LastBlockDropped, AttentionChunk: 8192, KVHash: "sha256_cbor", KVHashSeed: "42",
					LMCache: &LMCacheDecoder{Host: "10.0.0.2", InitPorts: []int{7300, 7301}, AllocPorts: []int{7400, 7401}},
				},
				Name: "d0", URL: mustURL(t, "http://a:1"), DP: 2,
				Events: []string{"tcp://*:5557"}, Replay: []string{"tcp://*:5657"}, Topic: "kv@", Labels: map[string]string{"gpu": "h200", "pool": "a"},
			},
		},
		{"router listens", Prefill, "http://a:1,events=bind:tcp://127.0.0.1:5557", Spec{
			Facts: Facts{Role: Prefill},
			Name:  "a:1", URL: mustURL(t, "http://a:1"), Events: []string{"tcp://127.0.0.1:5557"}, EventsBind: true,
		}},
		{"no events", Prefill, "http://a:1,events=none,bootstrap=8998,connector=none", Spec{
			Facts: Facts{Role: Prefill, Bootstrap: &Bootstrap{Port: 8998}},
			Name:  "a:1", URL: mustURL(t, "http://a:1"), EventsOff: true,
		}},
		{"simulated sglang", Prefill, "http://a:1,engine=sim,dialect=sglang", Spec{
			Facts: Facts{Role: Prefill, Engine: Sim, Dialect: SGLang},
			Name:  "a:1", URL: mustURL(t, "http://a:1"),
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ParseSpec(tt.role, tt.text)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("spec (-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseSpecRefuses(t *testing.T) {
	tests := []struct{ text, want string }{
		{"", "the URL is empty"},
		{"10.0.0.1:8000", "did you mean http://10.0.0.1:8000?"},
		{"localhost:8000", "did you mean http://localhost:8000?"},
		{"ftp://a:1", `scheme "ftp" is neither http nor https`},
		{"http://", "has no host"},
		{"http://:8000", "has no host"},
		{"http://a:", "empty port"},
		{"http://a:0", "is no port"},
		{"http://a:70000", "is no port"},
		{"http://a:8000x", "invalid port"},
		{"http://a:1/?x=1", "has a query"},
		{"http://a:1#top", "has a fragment"},
		{"http://a b:1", "space or a control character"},
		{"http://[::zz]:1", "invalid host"},
		{"http://me:secret@a:1", "user name or password"},
		{"http://a:1,", "an empty option"},
		{"http://a:1,dp", `option "dp" is not key=value`},
		{"http://a:1,dp=2,dp=2", "dp is given twice"},
		{"http://a:1,dp=0", `"0" is no whole number from 1 to 1024`},
		{"http://a:1,blocksize=16", `unknown key "blocksize" (did you mean "block_size"?)`},
		{"http://a:1,block-size=16", `did you mean "block_size"?`},
		{"http://a:1,event=tcp://*:5557", `did you mean "events"?`},
		{"http://a:1,api_key=sk-1", `did you mean "api_key_file"?`},
		{"http://a:1,lb=external,dp=2", "lb=external has one rank behind each port, not dp=2"},
		{"http://a:1,lb=internal,dp_start=2", "lb=internal has all ranks behind one port, from 0 on"},
		{"http://a:1,lb=nodes", "is not one of internal, hybrid, external"},
		{"http://a:1,zzzzzzzzzzzz=1", "(valid: api_key_file, attention_chunk, block_size,"},
		{"http://a:1,engine=vlm", `"vlm" is not one of vllm, sglang, trtllm, sim (did you mean "vllm"?)`},
		{"http://a:1,connector=shared_storage", `did you mean "shared-storage"?`},
		{"http://a:1,role=decode", "but the flag says prefill"},
		{"http://a:1,events=ipc:///tmp/x", "does not begin with tcp://"},
		{"http://a:1,events=tcp://a", "not tcp://host:port"},
		{"http://a:1,events=tcp://a:1,events=bind:tcp://a:2", "some endpoints with bind:"},
		{"http://a:1,events=none,events=tcp://a:1", "events=none beside"},
		{"http://a:1,replay=tcp://a:1", "replay without events"},
		{"http://a:1,dp=3,events=tcp://a:1;tcp://a:2", "2 endpoints for 3 data-parallel ranks"},
		{"http://a:1,dp=8,events=tcp://a:65530", "above 65535"},
		{"http://a:1,labels=x", `"x" is not key:value`},
		{"http://a:1,labels=x:1;x:2", `label "x" is given twice`},
		{"http://a:1,bootstrap=a:b", `"b" is no port`},
		{"http://a:1,lmcache=h/1", "is not host/init-port/alloc-port"},
		{"http://a:1,lmcache=h/1;2/3", "2 init ports but 1 alloc ports"},
		{"http://a:1,name=a/b", `holds '/'`},
		{"http://a:1,dialect=vllm", "dialect is for engine=sim only"},
		{"http://a:1,model=", "model is empty"},
	}
	for _, tt := range tests {
		t.Run(tt.text, func(t *testing.T) {
			_, err := ParseSpec(Prefill, tt.text)
			if err == nil {
				t.Fatal("accepted")
			}
			if !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %q lacks %q", err, tt.want)
			}
			if strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "\n") {
				t.Errorf("error %q holds a secret or a line break", err)
			}
		})
	}
}

func TestParseSpecReportsAllProblems(t *testing.T) {
	_, err := ParseSpec(Decode, "ftp://a:1,dp=x,roel=decode")
	for _, want := range []string{"ftp", `"x" is no whole number`, `did you mean "role"?`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v lacks %q", err, want)
		}
	}
}

func TestEventSources(t *testing.T) {
	tests := []struct {
		name string
		text string
		dp   int
		want []EventSource
	}{
		{"wildcard host, port counts up", "http://10.0.0.1:8000,events=tcp://*:5557,replay=tcp://0.0.0.0:5657,topic=t", 2, []EventSource{
			{DP: 0, Endpoint: "tcp://10.0.0.1:5557", Replay: "tcp://10.0.0.1:5657", Topic: "t"},
			{DP: 1, Endpoint: "tcp://10.0.0.1:5558", Replay: "tcp://10.0.0.1:5658", Topic: "t"},
		}},
		{"ipv6 worker", "http://[fd00::1]:8000,events=tcp://[::]:5557", 1, []EventSource{{Endpoint: "tcp://[fd00::1]:5557"}}},
		{"one for each rank", "http://a:1,events=tcp://x:7;tcp://y:9", 2, []EventSource{{DP: 0, Endpoint: "tcp://x:7"}, {DP: 1, Endpoint: "tcp://y:9"}}},
		{"router listens on all", "http://a:1,events=bind:tcp://*:5557", 2, []EventSource{
			{DP: 0, Endpoint: "tcp://*:5557", Bind: true}, {DP: 1, Endpoint: "tcp://*:5558", Bind: true},
		}},
		{"ranks 2 and 3 of a deployment", "http://a:1,lb=hybrid,dp_start=2,events=tcp://*:5557,replay=tcp://*:5657", 2, []EventSource{
			{DP: 0, Endpoint: "tcp://a:5559", Replay: "tcp://a:5659"}, {DP: 1, Endpoint: "tcp://a:5560", Replay: "tcp://a:5660"},
		}},
		{"rank 3 of a deployment", "http://a:1,lb=external,dp_start=3,events=tcp://*:5557", 1, []EventSource{{Endpoint: "tcp://a:5560"}}},
		{"ranks 2 and 3, each named", "http://a:1,dp_start=2,events=tcp://x:7;tcp://y:9", 2, []EventSource{{Endpoint: "tcp://x:7"}, {DP: 1, Endpoint: "tcp://y:9"}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s, err := ParseSpec(Decode, tt.text)
			if err != nil {
				t.Fatal(err)
			}
			got, err := s.eventSources(tt.dp)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("sources (-want +got):\n%s", diff)
			}
		})
	}
}

func TestReadAPIKey(t *testing.T) {
	dir := t.TempDir()
	tests := []struct {
		name, content, key, want string
	}{
		{"good", "sk-123\n", "sk-123", ""},
		{"empty", "\n", "", "is empty"},
		{"two lines", "a\nb", "", "more than one word"},
		{"header injection", "a\r\nX-Evil: 1", "", "more than one word"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(dir, tt.name)
			if err := os.WriteFile(path, []byte(tt.content), 0o600); err != nil {
				t.Fatal(err)
			}
			s := Spec{Name: "w", APIKeyFile: path}
			err := s.ReadAPIKey()
			if tt.want == "" && (err != nil || s.APIKey != tt.key) {
				t.Errorf("got %q, %v", s.APIKey, err)
			}
			if tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("error %v lacks %q", err, tt.want)
			}
		})
	}
	s := Spec{Name: "w", APIKeyFile: filepath.Join(dir, "none")}
	if err := s.ReadAPIKey(); err == nil || !strings.Contains(err.Error(), "worker w: api_key_file") {
		t.Errorf("missing file: %v", err)
	}
}

func TestNearest(t *testing.T) {
	for word, want := range map[string]string{
		"roel": "role", "max-model-len": "max_model_len", "replays": "replay", "lbels": "labels", "qqqqqq": "", "ROLE": "role",
	} {
		if got := Nearest(word, specKeys); got != want {
			t.Errorf("Nearest(%q) = %q, want %q", word, got, want)
		}
	}
}

func FuzzParseSpec(f *testing.F) {
	for _, s := range []string{
		"http://10.0.0.1:8000,engine=vllm,dp=2,events=tcp://*:5557,replay=tcp://*:5657",
		"http://a:1/v1", "http://a:1/%761/", "https://[::1]:8000/x,labels=a:b;c:d,lmcache=h/1;2/3;4,bootstrap=h:1,model=a;b",
		"http://a:1,events=bind:tcp://*:65535,dp=2", "http://u:p@a", ",,,", "http://a:1,=",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := ParseSpec("", text)
		if err != nil {
			if strings.Contains(err.Error(), "%!") && !strings.Contains(text, "%!") {
				t.Fatalf("bad message: %s", err)
			}
			return
		}
		if s.URL == nil || s.Name == "" {
			t.Fatalf("accepted without URL or name: %+v", s)
		}
		if _, err := ParseURL(s.URL.String()); err != nil {
			t.Fatalf("own URL %s is refused: %v", s.URL, err)
		}
		if _, err := NewRegistry(nil).Apply("flag", []Spec{s}); err != nil && s.APIKeyFile == "" {
			t.Fatalf("parsed but not applicable: %v", err)
		}
	})
}

// TestOwnLabelsStated: labels of dynctl's own state settings of a worker wherever it
// was stated, but what it states itself has precedence.
func TestOwnLabelsStated(t *testing.T) {
	got, err := ParseSpec("", "http://a:1,connector=nixl,labels=dynctl.io/connector:nixl-push;dynctl.io/role:decode;dynctl.io/kv-copies:single;dynctl.io/slice:3")
	if err != nil {
		t.Fatal(err)
	}
	if got.Connector != ConnectorNIXL || got.Role != Decode || got.KVCopies != CopiesSingle || got.Slice != "3" {
		t.Errorf("%+v", got)
	}
	if from := got.From[FieldRole]; from != "label dynctl.io/role=decode" || got.From[FieldConnector] != "" {
		t.Errorf("from %v", got.From)
	}
	_, err = ParseSpec("", "http://a:1,labels=dynctl.io/name:x;dynctl.io/lb:inner;dynctl.io/revision:")
	for _, part := range []string{`unknown key "dynctl.io/name"`, "label dynctl.io/lb=inner: lb: ", "dynctl.io/revision=: revision is empty"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%v does not say %q", err, part)
		}
	}
	for _, key := range ownKeys {
		if key != "revision" && key != "slice" && !slices.Contains(specKeys, key) {
			t.Errorf("%s is no key of a worker", key)
		}
	}
}
