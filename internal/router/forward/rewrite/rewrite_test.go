package rewrite

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/settings/effective"
	"github.com/dynctl/dynctl/internal/workers"
)

// sourceOf is a request with a body, as the router has it under its defaults but for change.
func sourceOf(t *testing.T, path, body string, change func(*settings.Config)) *Source {
	t.Helper()
	ep, err := api.Lookup(http.MethodPost, path)
	if err != nil {
		t.Fatal(err)
	}
	c := settings.Default()
	if change != nil {
		change(&c)
	}
	conf, err := effective.New(c, nil, 1)
	if err != nil {
		t.Fatal(err)
	}
	from := ClientOf(httptest.NewRequest(http.MethodPost, path, nil))
	s := &Source{Client: &from, Endpoint: ep, View: &api.View{}, Proxies: conf, IdleTimeout: conf.Timeouts.Idle, Body: []byte(body), RequestedModel: "m", Model: "m"}
	if ep.Body == api.JSONBody {
		if err := s.View.Parse(s.Body, ep.Kind, api.Limits{}); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func endpoint(t *testing.T, path string) *api.Endpoint {
	t.Helper()
	ep, err := api.Lookup(http.MethodPost, path)
	if err != nil {
		t.Fatal(err)
	}
	return ep
}

// peerOf is the last rank of a worker with an engine and so many ranks.
func peerOf(e workers.Engine, ranks int) workers.Peer {
	w := &workers.Worker{Facts: workers.Facts{Engine: e}, URL: &url.URL{Scheme: "http", Host: "engine:8000"}, APIKey: "key"}
	for i := range ranks {
		w.Ranks = append(w.Ranks, &workers.Rank{DP: i})
	}
	return workers.Peer{Worker: w, Rank: w.Ranks[ranks-1]}
}

// TestBody: only what must change does; the rest of the body goes on byte by byte.
func TestBody(t *testing.T) {
	t.Parallel()
	const body = `{"model": "m", "prompt":"hi" ,"kv_transfer_params":{"a":1}}`
	vllm := peerOf(workers.VLLM, 1)
	for _, c := range []struct {
		name   string
		peer   workers.Peer
		ids    bool
		more   []api.Edit
		change func(*Source)
		want   string
	}{
		{"as it came", vllm, false, nil, func(s *Source) { s.KeepTransferFields = true }, body},
		{"stripped", vllm, false, nil, nil, `{"model": "m", "prompt":"hi" }`},
		{"renamed", vllm, false, nil, func(s *Source) { s.Model = "big" }, `{"model": "big", "prompt":"hi" }`},
		{"no model named", vllm, false, nil, func(s *Source) { s.RequestedModel, s.Model = "", "big" }, `{"model": "big", "prompt":"hi" }`},
		{"no model named to SGLang's own endpoint", vllm, false, nil, func(s *Source) {
			s.RequestedModel, s.Model, s.Endpoint = "", "big", endpoint(t, "/generate")
		}, `{"model": "m", "prompt":"hi" }`},
		{"renamed there", vllm, false, nil, func(s *Source) { s.Model, s.Endpoint = "big", endpoint(t, "/generate") }, `{"model": "big", "prompt":"hi" }`},
		{"salted", vllm, false, nil, func(s *Source) { s.Salted, s.View.CacheSalt = true, "t" }, `{"model": "m", "prompt":"hi" ,"cache_salt":"t"}`},
		{"withheld", vllm, false, nil, func(s *Source) {
			s.Body, s.Endpoint = []byte(`{"model": "m", "input":"hi", "request_\u0069d":"resp_1"}`), endpoint(t, "/v1/responses")
			if err := s.View.Parse(s.Body, s.Endpoint.Kind, api.Limits{}); err != nil {
				t.Fatal(err)
			}
			s.View.Withheld = []string{"request_id", "absent"}
		}, `{"model": "m", "input":"hi"}`},
		{"a rank of several", peerOf(workers.SGLang, 2), false, nil, nil, `{"model": "m", "prompt":"hi" ,"routed_dp_rank":1}`},
		{"a rank of several of vLLM", peerOf(workers.VLLM, 2), false, nil, nil, `{"model": "m", "prompt":"hi" }`},
		{"with ids", vllm, true, nil, nil, `{"model": "m", "prompt":"hi" ,"return_token_ids":true}`},
		{"with usage", vllm, false, nil, func(s *Source) { s.Usage = true }, `{"model": "m", "prompt":"hi" ,"stream_options":{"include_usage":true}}`},
		{"with more", vllm, false, []api.Edit{api.Set("max_tokens", api.RawOne)}, nil, `{"model": "m", "prompt":"hi" ,"max_tokens":1}`},
	} {
		s := sourceOf(t, "/v1/completions", body, nil)
		if c.change != nil {
			c.change(s)
		}
		var m Scratch
		for range 2 { // the memory is used again
			got := string(bytes.Join(m.Body(s, c.peer, c.ids, c.more), nil))
			if a, b := strings.ReplaceAll(got, " ", ""), strings.ReplaceAll(c.want, " ", ""); a != b {
				t.Errorf("%s: %s, want %s", c.name, got, c.want)
			}
		}
	}
	s := sourceOf(t, "/v1/audio/transcriptions", "--x\r\n", nil)
	var m Scratch
	if got := m.Body(s, vllm, true, []api.Edit{api.Set("a", api.RawOne)}); string(bytes.Join(got, nil)) != "--x\r\n" {
		t.Errorf("%q", got)
	}
	const form = "--b\r\nContent-Disposition: form-data; name=bootstrap_room\r\n\r\n1\r\n--b--"
	s = sourceOf(t, "/v1/audio/translations", form, nil)
	var err error
	if s.Form, err = api.ReadForm(http.Header{"Content-Type": {"multipart/form-data; boundary=b"}}, s.Body, false); err != nil {
		t.Fatal(err)
	}
	for range 2 { // of both phases, and again
		if got := string(bytes.Join(m.Body(s, vllm, false, nil), nil)); got != "--b--" {
			t.Errorf("%q", got)
		}
	}
	s.Form.SetModel("whisper")
	if got, want := string(bytes.Join(m.Body(s, vllm, false, nil), nil)), "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n--b--"; got != want {
		t.Errorf("a form with the engine's name: %q, want %q", got, want)
	}
}

// TestLeg: a leg goes to the engine's address with the request's id and its own key, and
// with the rank where there are several.
func TestLeg(t *testing.T) {
	t.Parallel()
	s := sourceOf(t, "/v1/completions", `{"prompt":"hi"}`, nil)
	var m Scratch
	p := peerOf(workers.VLLM, 2)
	l := m.Leg(s, p, "/v1/completions?a=b", "id-1", [][]byte{s.Body}, time.Second)
	want := upstream.Leg{
		Base: p.Worker.URL, Path: "/v1/completions?a=b", Method: http.MethodPost, APIKey: "key", HeadTimeout: time.Second, IdleTimeout: s.IdleTimeout,
	}
	if d := cmp.Diff(want, *l, cmpopts.IgnoreFields(upstream.Leg{}, "Header", "Set", "Body")); d != "" || l.Base != p.Worker.URL {
		t.Errorf("the leg to %s (-want +got):\n%s", l.Base, d)
	}
	if id, rank := valueOf(l.Set, api.HeaderRequestID), valueOf(l.Set, "X-Data-Parallel-Rank"); id != "id-1" || rank != "1" {
		t.Errorf("%+v", l.Set)
	}
	if l = m.Leg(s, peerOf(workers.VLLM, 1), "/", "id-2", nil, 0); valueOf(l.Set, api.HeaderRequestID) != "id-2" || valueOf(l.Set, "X-Data-Parallel-Rank") != "" {
		t.Errorf("%+v", l.Set)
	}
	for sent, want := range map[string]string{"application/json; charset=utf-8": "", "application/x-www-form-urlencoded": "application/json"} {
		s.Client.Header["Content-Type"] = []string{sent}
		if l = m.Leg(s, p, "/", "id-3", [][]byte{s.Body}, 0); valueOf(l.Set, "Content-Type") != want {
			t.Errorf("JSON that a client calls %s goes on as %q", sent, valueOf(l.Set, "Content-Type"))
		}
	}
	if m.Reset(); len(m.edits)+len(m.body)+len(m.set) != 0 || m.leg.Base != nil {
		t.Errorf("%+v is left", m)
	}
}

func valueOf(set []upstream.HeaderField, key string) (value string) {
	for _, f := range set {
		if f.Key == key {
			value += f.Value
		}
	}
	return value
}

// TestForwarded: what a peer says of the hops before it counts if it is a trusted proxy.
func TestForwarded(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, peer, trusted       string
		chain, proto, host, other string
	}{
		{"a client", "192.0.2.1:99", "10.0.0.0/8", "192.0.2.1", "https", "here", ""},
		{"a proxy", "10.0.0.7:99", "10.0.0.0/8", "203.0.113.9, 10.0.0.7", "http", "api", "for=203.0.113.9, for=10.0.0.7"},
		{"a proxy with IPv6", "[fd00::7]:99", "fd00::/8", "203.0.113.9, fd00::7", "http", "api", `for=203.0.113.9, for="[fd00::7]"`},
	} {
		s := sourceOf(t, "/v1/completions", `{"prompt":"hi"}`, func(k *settings.Config) { k.TrustedProxies = []string{c.trusted} })
		q := s.Client
		q.Remote, q.Host, q.TLS = c.peer, "here", true
		q.Header = http.Header{"X-Forwarded-For": {"203.0.113.9"}, "X-Forwarded-Proto": {"http"}, "X-Forwarded-Host": {"api"}, "Forwarded": {"for=203.0.113.9"}}
		set := appendForwarded(nil, q, s.Proxies)
		got := [...]string{valueOf(set, "X-Forwarded-For"), valueOf(set, "X-Forwarded-Proto"), valueOf(set, "X-Forwarded-Host"), valueOf(set, "Forwarded")}
		if want := [...]string{c.chain, c.proto, c.host, c.other}; got != want {
			t.Errorf("%s: %q, want %q", c.name, got, want)
		}
	}
}
