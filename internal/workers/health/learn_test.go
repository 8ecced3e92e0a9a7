package health

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/dynctl/dynctl/internal/workers"
)

// engine answers GET requests from a map of pages.
func engine(t *testing.T, pages map[string]string) *workers.Worker {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, ok := pages[r.URL.Path]
		switch {
		case r.Method != http.MethodGet || r.Header.Get("Authorization") != "Bearer key":
			w.WriteHeader(http.StatusUnauthorized)
		case !ok:
			w.WriteHeader(http.StatusNotFound)
		default:
			fmt.Fprint(w, body)
		}
	}))
	t.Cleanup(srv.Close)
	u, err := url.Parse(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	return &workers.Worker{Name: "w", URL: u, APIKey: "key", State: &workers.State{}, Ranks: []*workers.Rank{{}}}
}

func learnFrom(t *testing.T, w *workers.Worker) *answer {
	t.Helper()
	a := newProbeClient(nil, nil, 10*time.Second, nil)
	defer a.close()
	return a.learn(t.Context(), w)
}

var ignoreFrom = cmpopts.IgnoreFields(workers.Learned{}, "From")

func TestLearnVLLM(t *testing.T) {
	w := engine(t, map[string]string{
		"/v1/models":        string(data(t, "vllm-0.32.0-models.json")),
		"/metrics":          string(data(t, "vllm-0.32.0-decode.prom")),
		"/version":          `{"version":"0.32.0"}`,
		"/kv_event_sources": string(data(t, "vllm-0.32.0-kv_event_sources.json")),
	})
	ans := learnFrom(t, w)
	want := workers.Learned{
		Facts: workers.Facts{
			Engine: workers.VLLM, Version: "0.32.0", Connector: workers.ConnectorNIXL, CacheType: "auto", Models: []string{"small"}, MaxModelLen: 8192, BlockSize: 32, KVBlocks: 1024, PoolBlocks: 1024, LastBlock: workers.LastBlockKept,
		},
		DP: 1, DPStart: new(0),
		Events: []workers.EventSource{{Endpoint: "tcp://127.0.0.1:40331", Replay: "tcp://127.0.0.1:39137"}},
	}
	if diff := cmp.Diff(want, ans.learned, ignoreFrom); diff != "" {
		t.Errorf("learned (-want +got):\n%s", diff)
	}
	if ans.notes != nil || ans.retry || ans.loads[0] == nil {
		t.Errorf("notes %q, retry %v, load %+v", ans.notes, ans.retry, ans.loads[0])
	}
	if ans.asleep || ans.sleepPath {
		t.Errorf("asleep %v, known by its path %v", ans.asleep, ans.sleepPath)
	}
	from := map[workers.Field]string{
		workers.FieldBlockSize: "vllm:cache_config_info", workers.FieldModels: "/v1/models", workers.FieldEvents: "/kv_event_sources",
	}
	for f, page := range from {
		if ans.learned.From[f] != page {
			t.Errorf("%s comes from %q", f, ans.learned.From[f])
		}
	}
}

// TestLearnDrafts: vLLM counts drafts where it makes any, and not by which method.
// The last block is taken for dropped then, unless it is stated otherwise.
func TestLearnDrafts(t *testing.T) {
	w := engine(t, map[string]string{
		"/metrics": string(data(t, "vllm-0.32.0-decode.prom")) + "# TYPE vllm:spec_decode_num_drafts_total counter\n" +
			`vllm:spec_decode_num_drafts_total{engine="0",model_name="small"} 0.0` + "\n",
	})
	learned := learnFrom(t, w).learned
	if learned.LastBlock != workers.LastBlockDropped || learned.From[workers.FieldLastBlock] != "vllm:spec_decode_num_drafts" {
		t.Errorf("learned %q from %q", learned.LastBlock, learned.From[workers.FieldLastBlock])
	}
	for stated, want := range map[workers.LastBlock]workers.LastBlock{"": workers.LastBlockDropped, workers.LastBlockKept: workers.LastBlockKept} {
		r := workers.NewRegistry(nil)
		if _, err := r.Apply("test", []workers.Spec{{Name: "w", URL: w.URL, Facts: workers.Facts{LastBlock: stated}}}); err != nil {
			t.Fatal(err)
		}
		got, _ := r.Snapshot().Worker("w")
		if _, err := r.Update(got, learned); err != nil {
			t.Fatal(err)
		}
		if got, _ = r.Snapshot().Worker("w"); got.LastBlock != want {
			t.Errorf("stated %q: %q", stated, got.LastBlock)
		}
	}
}

// TestLearnLayout: an engine that runs some ranks of a deployment labels them by their
// place in it; what is stated otherwise is a contradiction that names both.
func TestLearnLayout(t *testing.T) {
	shifted := strings.NewReplacer(`engine="0"`, `engine="2"`, `engine="1"`, `engine="3"`).Replace(string(data(t, "vllm-0.32.0-dp2.prom")))
	w := engine(t, map[string]string{"/metrics": shifted})
	learned := learnFrom(t, w).learned
	if learned.DP != 2 || learned.DPStart == nil || *learned.DPStart != 2 {
		t.Fatalf("learned %+v", learned)
	}
	zero := learnFrom(t, engine(t, map[string]string{"/metrics": string(data(t, "vllm-0.32.0-dp2.prom"))})).learned
	if zero.DPStart == nil || *zero.DPStart != 0 {
		t.Errorf("learned %+v", zero)
	}
	sources := learnFrom(t, engine(t, map[string]string{
		"/kv_event_sources": `{"5":{"endpoint":"tcp://*:5562","data_parallel_rank":5},"4":{"endpoint":"tcp://*:5561","data_parallel_rank":4}}`,
	})).learned
	if sources.DP != 2 || sources.DPStart == nil || *sources.DPStart != 4 {
		t.Errorf("learned %+v", sources)
	}
	for stated, want := range map[string]string{
		"": "", "lb=hybrid": "", "dp_start=2": "", "lb=hybrid,dp=2,dp_start=2": "",
		"lb=internal":      "load balancing of ranks internal stated by source test, engine says its first rank is 2 (engine labels in /metrics)",
		"lb=external":      "load balancing of ranks external stated by source test, engine says 2 ranks are behind this port",
		"dp_start=4":       "first data-parallel rank 4 stated by source test, engine says 2 (engine labels in /metrics)",
		"lb=internal,dp=4": "data-parallel size 4 stated by source test, engine says 2 (engine labels in /metrics)",
	} {
		text := w.URL.String()
		if stated != "" {
			text += "," + stated
		}
		s, err := workers.ParseSpec("", text)
		if err != nil {
			t.Fatal(err)
		}
		r := workers.NewRegistry(nil)
		if _, err := r.Apply("test", []workers.Spec{s}); err != nil {
			t.Fatal(err)
		}
		got, _ := r.Snapshot().Worker(s.Name)
		_, err = r.Update(got, learned)
		if got, _ = r.Snapshot().Worker(s.Name); want == "" && (err != nil || got.Conflict != "") || !strings.Contains(got.Conflict, want) {
			t.Errorf("%s: conflict %q, want %q", stated, got.Conflict, want)
		}
		if want == "" && (got.LB != workers.LBHybrid || got.DPStart != 2 || len(got.Ranks) != 2) {
			t.Errorf("%s: lb %s, from %d, %d ranks", stated, got.LB, got.DPStart, len(got.Ranks))
		}
		if usable, _ := got.State.Usable(); want != "" && usable {
			t.Errorf("%s: it gets requests", stated)
		}
		// The engine comes back as all of a deployment of two.
		if stated == "" {
			if _, err := r.Update(got, zero); err != nil {
				t.Fatal(err)
			}
			if got, _ = r.Snapshot().Worker(s.Name); got.DPStart != 0 || got.LB != "" {
				t.Errorf("after a restart: lb %s, from %d", got.LB, got.DPStart)
			}
		}
	}
}

// TestLearnChatTokens: what an engine makes of a chat is remembered as a number
// and a hash; an engine that does not tokenize chats reports nothing, and that is
// nothing odd.
func TestLearnChatTokens(t *testing.T) {
	ask := func(status int, answer string) *answer {
		t.Helper()
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/v1/models":
				fmt.Fprint(w, `{"data":[{"id":"lora","owned_by":"vllm","parent":"base"},{"id":"base","owned_by":"vllm"}]}`)
			case "/tokenize":
				var q struct {
					Model    string
					Messages []struct{ Role, Content string }
				}
				if err := json.NewDecoder(r.Body).Decode(&q); err != nil || r.Method != http.MethodPost || q.Model != "base" || len(q.Messages) < 2 {
					t.Errorf("%s %+v %v", r.Method, q, err)
				}
				w.WriteHeader(status)
				fmt.Fprint(w, answer)
			default:
				w.WriteHeader(http.StatusNotFound)
			}
		}))
		defer srv.Close()
		u, err := url.Parse(srv.URL)
		if err != nil {
			t.Fatal(err)
		}
		return learnFrom(t, &workers.Worker{Name: "w", URL: u, State: &workers.State{}, Ranks: []*workers.Rank{{}}})
	}
	one, same, other := ask(200, `{"count":3,"tokens":[1,2,3]}`), ask(200, `{"tokens":[1, 2, 3]}`), ask(200, `{"count":3,"tokens":[1,3,2]}`)
	if a, b, c := one.learned.ChatTokens, same.learned.ChatTokens, other.learned.ChatTokens; !strings.HasPrefix(a, "3:") || a != b || a == c || !strings.HasPrefix(c, "3:") {
		t.Errorf("reported %q, %q, %q", a, b, c)
	}
	if page := one.learned.From[workers.FieldChatTokens]; page != "/tokenize" {
		t.Errorf("reported by %q", page)
	}
	for _, a := range []*answer{ask(404, ""), ask(400, `{"error":{}}`)} {
		if a.learned.ChatTokens != "" || a.retry || a.notes != nil {
			t.Errorf("answer %+v", a)
		}
	}
	for _, body := range []string{`{"tokens":[]}`, `{}`, `[]`, `{"tokens":[-1]}`} {
		if a := ask(200, body); a.learned.ChatTokens != "" || len(a.notes) != 1 {
			t.Errorf("%s: answer %+v", body, a)
		}
	}
}

func TestLearnRanksAndAdapters(t *testing.T) {
	w := engine(t, map[string]string{
		"/v1/models": `{"data":[{"id":"base","owned_by":"vllm","max_model_len":4096},{"id":"sql","parent":"base","max_model_len":null},{"id":"base"},{"id":""}]}`,
		"/metrics":   string(data(t, "vllm-0.32.0-dp2.prom")),
		"/kv_event_sources": `[{"data_parallel_rank":1,"endpoint":"tcp://0.0.0.0:5558","replay_endpoint":null,"topic":"kv"},
			{"data_parallel_rank":0,"endpoint":"tcp://*:5557","replay_endpoint":"tcp://[::]:5657","topic":""}]`,
	})
	ans := learnFrom(t, w)
	want := workers.Learned{
		Facts: workers.Facts{
			Engine: workers.VLLM, CacheType: "auto", Models: []string{"base", "sql"}, MaxModelLen: 4096, BlockSize: 32, KVBlocks: 96, PoolBlocks: 96, LastBlock: workers.LastBlockKept,
		},
		LoRAs: []string{"sql"}, DP: 2, DPStart: new(0),
		Events: []workers.EventSource{
			{DP: 0, Endpoint: "tcp://127.0.0.1:5557", Replay: "tcp://127.0.0.1:5657"}, {DP: 1, Endpoint: "tcp://127.0.0.1:5558", Topic: "kv"},
		},
	}
	if diff := cmp.Diff(want, ans.learned, ignoreFrom); diff != "" {
		t.Errorf("learned (-want +got):\n%s", diff)
	}
	if len(ans.loads) != 2 || ans.loads[1] == nil {
		t.Errorf("loads of a rank that is new are lost: %v", ans.loads)
	}
}

// TestLearnNamesOfOneModel: names of one root are one model; without roots, or with others,
// they may be several.
func TestLearnNamesOfOneModel(t *testing.T) {
	for list, several := range map[string]bool{
		`{"id":"a","root":"/m"}`: false,
		`{"id":"a"}`:             false,
		`{"id":"a","root":"/m"},{"id":"b","root":"/m"}`:                                 false,
		`{"id":"a","root":"/m"},{"id":"b","root":"/n"}`:                                 true,
		`{"id":"a","root":"/m"},{"id":"b","root":"/n"},{"id":"c","root":"/m"}`:          true,
		`{"id":"a","root":"/m"},{"id":"b","root":"/m"},{"id":"c"}`:                      true,
		`{"id":"a"},{"id":"b"}`:                                                         true,
		`{"id":"a","root":null},{"id":"b","root":null}`:                                 true,
		`{"id":"a","root":""},{"id":"b","root":""}`:                                     true,
		`{"id":"a","root":"/m"},{"id":"x","root":"/x","parent":"a"}`:                    false,
		`{"id":"a","root":{"odd":1}},{"id":"x","root":[],"parent":"a"},{"id":"","r":1}`: false,
	} {
		ans := learnFrom(t, engine(t, map[string]string{"/v1/models": `{"data":[` + list + `]}`}))
		if ans.learned.Several != several || len(ans.learned.Models) == 0 {
			t.Errorf("%s: several %v, models %q", list, ans.learned.Several, ans.learned.Models)
		}
	}
}

func TestLearnSGLang(t *testing.T) {
	for _, path := range []string{"/server_info", "/get_server_info"} {
		t.Run(path, func(t *testing.T) {
			w := engine(t, map[string]string{
				"/v1/models": `{"data":[{"id":"small","owned_by":"sglang","max_model_len":32768}]}`,
				path:         string(data(t, "sglang-server_info.json")),
			})
			ans := learnFrom(t, w)
			want := workers.Learned{
				Facts: workers.Facts{
					Engine: workers.SGLang, Version: "0.5.23", Role: workers.Prefill, Connector: workers.ConnectorSGLang, Models: []string{"small"},
					MaxModelLen: 32768, BlockSize: 64, KVBlocks: 10000, MaxBatchedTokens: 8192,
					Bootstrap: &workers.Bootstrap{Host: "127.0.0.1", Port: 8998},
				},
				DP: 2,
				Events: []workers.EventSource{
					{DP: 0, Endpoint: "tcp://127.0.0.1:5557", Replay: "tcp://127.0.0.1:5657", Topic: "kv"},
					{DP: 1, Endpoint: "tcp://127.0.0.1:5558", Replay: "tcp://127.0.0.1:5658", Topic: "kv"},
				},
			}
			if diff := cmp.Diff(want, ans.learned, ignoreFrom); diff != "" {
				t.Errorf("learned (-want +got):\n%s", diff)
			}
			if s := fmt.Sprintf("%+v", ans); strings.Contains(s, "must-not-leak") {
				t.Error("the engine's key is kept")
			}
		})
	}
}

func TestSGLangEvents(t *testing.T) {
	base := &url.URL{Scheme: "http", Host: "[fd00::1]:30000"}
	tests := []struct {
		name, raw string
		dp        int
		want      []workers.EventSource
	}{
		{"none", "null", 1, []workers.EventSource{}},
		{"other publisher", `{"publisher":"null","endpoint_port_base":1}`, 1, []workers.EventSource{}},
		{"own host", `{"publisher":"zmq","endpoint_host":"10.0.0.9","endpoint_port_base":5557}`, 1, []workers.EventSource{{Endpoint: "tcp://10.0.0.9:5557"}}},
		{"all IPv6", `{"publisher":"zmq","endpoint_host":"[::]","endpoint_port_base":5557}`, 2, []workers.EventSource{
			{Endpoint: "tcp://[fd00::1]:5557"}, {DP: 1, Endpoint: "tcp://[fd00::1]:5558"},
		}},
		{"publishers", `{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"publishers":[{"dp_rank":1,"endpoint":"tcp://10.0.0.2:7777"}]}`, 2, []workers.EventSource{
			{Endpoint: "tcp://[fd00::1]:5557"}, {DP: 1, Endpoint: "tcp://10.0.0.2:7777"},
		}},
		{"no port", `{"publisher":"zmq","endpoint_host":"*"}`, 1, []workers.EventSource{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, notes, err := sglangEvents(json.RawMessage(tt.raw), base, tt.dp)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("sources (-want +got):\n%s", diff)
			}
			if (tt.name == "no port") != (len(notes) == 1) {
				t.Errorf("notes %q", notes)
			}
		})
	}
	if _, _, err := sglangEvents(json.RawMessage(`[]`), base, 1); err == nil {
		t.Error("a list is accepted")
	}
}

func TestParseEventSources(t *testing.T) {
	for _, bad := range []string{"", "12", `{"x":{}}`, `{"0":null}`, `[{"data_parallel_rank":-1}]`, `[{"data_parallel_rank":1},{"data_parallel_rank":1}]`, "{"} {
		if got, err := parseEventSources([]byte(bad)); err == nil {
			t.Errorf("%s is taken for %+v", bad, got)
		}
	}
	got, err := parseEventSources([]byte(`{"10":{"endpoint":"c"},"2":{"endpoint":"b"},"0":{"endpoint":"a"}}`))
	if err != nil || len(got) != 3 || *got[0].Endpoint != "a" || *got[2].Endpoint != "c" {
		t.Errorf("ranks are not in order: %+v, %v", got, err)
	}
}

func FuzzParseEventSources(f *testing.F) {
	f.Add(data(f, "vllm-0.32.0-kv_event_sources.json"))
	f.Add([]byte(`[{"data_parallel_rank":1,"endpoint":"tcp://*:5557"}]`))
	f.Fuzz(func(t *testing.T, b []byte) {
		list, err := parseEventSources(b)
		if err != nil {
			return
		}
		for i, s := range list {
			if s.Rank == nil || *s.Rank < 0 || i > 0 && *list[i-1].Rank >= *s.Rank {
				t.Fatalf("ranks out of order: %+v", list)
			}
		}
	})
}

func TestLearnFromEnginesThatReportLittle(t *testing.T) {
	tests := []struct {
		name  string
		pages map[string]string
		want  workers.Learned
		notes []string
	}{
		{"nothing at all", nil, workers.Learned{}, nil},
		{
			"events are off", map[string]string{"/kv_event_sources": `{"0":{"enable_kv_cache_events":false,"publisher":"null","endpoint":"tcp://*:5557"}}`},
			workers.Learned{Events: []workers.EventSource{}, DP: 1, DPStart: new(0)}, nil,
		},
		{
			"rank 3 of a group elsewhere", map[string]string{"/kv_event_sources": `[{"data_parallel_rank":3,"endpoint":"tcp://*:5560"}]`},
			workers.Learned{Events: []workers.EventSource{{DP: 0, Endpoint: "tcp://127.0.0.1:5560"}}, DP: 1, DPStart: new(3)}, nil,
		},
		{
			"event endpoints that cannot be reached", map[string]string{"/kv_event_sources": `[{"endpoint":"ipc:///tmp/x"},{"endpoint":"tcp://*:0"}]`},
			workers.Learned{Events: []workers.EventSource{}, DP: 2}, []string{
				`/kv_event_sources: rank 0: endpoint "ipc:///tmp/x" does not begin with tcp://`,
				`/kv_event_sources: rank 1: endpoint "tcp://*:0": "0" is no port (1 to 65535)`,
			},
		},
		{
			"pages of other programs", map[string]string{
				"/v1/models": "<html>", "/metrics": "<html>", "/version": "[]", "/server_info": `"x"`, "/is_sleeping": "{}", "/kv_event_sources": "12",
			},
			workers.Learned{}, []string{
				"/is_sleeping is not understood: no is_sleeping",
				"/kv_event_sources is not understood: json: cannot unmarshal number into Go value of type []health.eventSource",
				"/server_info is not understood: no JSON object",
				"/v1/models is not understood: invalid character '<' looking for beginning of value",
				"/version is not understood: json: cannot unmarshal array into Go value of type struct { Version string }",
			},
		},
		{
			"vLLM's own /server_info", map[string]string{"/server_info": `{"vllm_config":"…"}`, "/v1/models": `{"data":[]}`},
			workers.Learned{Facts: workers.Facts{Models: []string{}}}, nil,
		},
		{"TensorRT-LLM", map[string]string{"/v1/models": `{"data":[{"id":"m","owned_by":"tensorrt_llm"}]}`}, workers.Learned{Facts: workers.Facts{Engine: workers.TRTLLM, Models: []string{"m"}}}, nil},
		{
			"SGLang without disaggregation", map[string]string{"/server_info": `{"page_size":"x","dp_size":-4,"disaggregation_mode":"null","kv_events":null}`},
			workers.Learned{Facts: workers.Facts{Engine: workers.SGLang, Role: workers.Aggregated}, Events: []workers.EventSource{}}, nil,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			ans := learnFrom(t, engine(t, tt.pages))
			if diff := cmp.Diff(tt.want, ans.learned, ignoreFrom); diff != "" {
				t.Errorf("learned (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.notes, ans.notes, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("notes (-want +got):\n%s", diff)
			}
			if ans.retry {
				t.Error("a page that is not there is asked for again")
			}
		})
	}
}

func TestAskerLimits(t *testing.T) {
	stop := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/huge":
			chunk := make([]byte, 1<<16)
			for range maxAnswer/len(chunk) + 2 {
				if _, err := w.Write(chunk); err != nil {
					return
				}
			}
		case "/hang":
			select {
			case <-stop:
			case <-r.Context().Done():
			}
		case "/redirect":
			http.Redirect(w, r, "/ok", http.StatusFound)
		case "/busy":
			w.WriteHeader(http.StatusServiceUnavailable)
		case "/locked":
			w.WriteHeader(http.StatusUnauthorized)
		case "/loop":
			if r.Header.Get("X-Hop") == "mine" {
				w.WriteHeader(http.StatusLoopDetected)
			}
		case "/ok":
		}
	}))
	defer srv.Close()
	defer close(stop)
	u, err := url.Parse(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	w := &workers.Worker{Name: "w", URL: u, State: new(workers.State)}
	a := newProbeClient(nil, nil, time.Minute, http.Header{"X-Hop": {"mine"}})
	defer a.close()
	tests := []struct {
		path, want string
		gone       bool
	}{
		{"/ok", "", false},
		{"/huge", "longer than 8388608 bytes", false},
		{"/hang", "no answer within 300ms", false},
		{"/redirect", "answers 302", true},
		{"/busy", "answers 503", false},
		{"/loop", "answers 508 (the worker is this router itself", false},
		{"/locked", "answers 401 (state api_key_file if the engine wants a key)", true},
	}
	for _, tt := range tests {
		a.timeout = time.Minute
		if tt.path == "/hang" {
			a.timeout = 300 * time.Millisecond
		}
		err := a.get(t.Context(), w, tt.path, func([]byte) error { return nil })
		if (err == nil) != (tt.want == "") || !strings.Contains(fmt.Sprint(err), tt.want) {
			t.Errorf("%s: error %v lacks %q", tt.path, err, tt.want)
		}
		if notThere(err) != tt.gone {
			t.Errorf("%s: not there: %v", tt.path, notThere(err))
		}
	}
	u2, err := url.Parse("http://127.0.0.1:1")
	if err != nil {
		t.Fatal(err)
	}
	if err := a.get(t.Context(), &workers.Worker{URL: u2, State: new(workers.State)}, "/health", nil); err == nil || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("closed port: %v", err)
	}
}

func TestParseLoads(t *testing.T) {
	got, err := parseLoads([]byte(`{"loads":[{"dp_rank":1,"num_running_reqs":4,"num_waiting_reqs":2,"token_usage":0.5,"max_total_num_tokens":100},
		{"dp_rank":0,"num_running_reqs":9,"max_total_num_tokens":0},{"dp_rank":7,"num_running_reqs":1},{"dp_rank":-1}]}`), 2, time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	if got[0] != nil {
		t.Errorf("a rank that is not ready has load %+v", got[0])
	}
	if l := got[1]; l == nil || l.Running != 4 || l.Waiting != 2 || l.KVUsage != 0.5 {
		t.Errorf("rank 1: %+v", l)
	}
	if _, err := parseLoads([]byte("[]"), 1, time.Time{}); err == nil {
		t.Error("a list is accepted")
	}
}

// An engine closes an idle connection in the moment in which the next question is
// sent on it: the question is asked again, whatever its method.
func TestEngineClosesTheConnectionAsItIsUsed(t *testing.T) {
	var mu sync.Mutex
	used, cut := map[string]bool{}, 0
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if used[r.RemoteAddr] {
			cut++
			panic(http.ErrAbortHandler)
		}
		used[r.RemoteAddr] = true
	}))
	defer srv.Close()
	u, err := url.Parse(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	a := newProbeClient(nil, nil, 10*time.Second, nil)
	defer a.close()
	for range 3 {
		if err := a.send(t.Context(), &workers.Worker{Name: "w", URL: u, State: new(workers.State)}, http.MethodPost, "/tokenize", []byte("{}"), func([]byte) error { return nil }); err != nil {
			t.Error(err)
		}
	}
	if mu.Lock(); cut != 2 {
		t.Errorf("%d connections were closed as they were used again, want 2", cut)
	}
	mu.Unlock()
}
