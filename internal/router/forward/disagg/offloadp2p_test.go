package disagg

import (
	"errors"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// offloaded is the answer of a vLLM engine with an OffloadingConnector to 200 tokens.
const offloaded = `{"id":"cmpl-810f561d65b277a9","object":"text_completion","created":1795408800,"model":"small",
"choices":[{"index":0,"text":".com","logprobs":null,"finish_reason":"length","stop_reason":null}],
"usage":{"prompt_tokens":200,"total_tokens":201,"completion_tokens":1},"kv_transfer_params":null}`

// TestOffloadP2P: the bodies of both legs. Each dispatch has a name of its own, the
// decode leg waits for the prefill's answer, and gets its parameters once.
func TestOffloadP2P(t *testing.T) {
	d := dispatch(workers.ConnectorOffloadP2P)
	c, err := NewConnector(workers.ConnectorOffloadP2P, legs())
	if err != nil {
		t.Fatal(err)
	}
	tr, err := c.Begin(d)
	if err != nil {
		t.Fatal(err)
	}
	if tr.Mode() != Sequential || tr.RequestID() != d.RequestID || tr.Leased() || !CountsTransfers(tr.Kind()) {
		t.Errorf("%s, as %s, leased: %v", tr.Mode(), tr.RequestID(), tr.Leased())
	}
	sameJSON(t, `{"prompt":"a","max_tokens":1,"stream":false,"kv_transfer_params":{"remote_decoder":{"kv_request_id":"810f561d65b277a9-0000000000000007"}}}`,
		spliced(t, api.Completion, pushBody, tr.PrefillEdits()))
	if _, err := tr.DecodeEdits(); !errors.Is(err, ErrUnchecked) {
		t.Errorf("edits before the answer: %v", err)
	}
	if err := tr.CheckPrefill([]byte(offloaded)); err != nil {
		t.Fatal(err)
	}
	sameJSON(t, `{"prompt":"a","max_tokens":8,"kv_transfer_params":{"remote_prefiller":{"kv_request_id":"810f561d65b277a9-0000000000000007","remote_host":"127.0.0.1","remote_port":5710}}}`,
		decodeBody(t, tr, api.Completion, pushBody))
	if _, err := tr.DecodeEdits(); !errors.Is(err, ErrUsed) {
		t.Errorf("a second time: %v", err)
	}
	again, err := c.Begin(d)
	if err != nil {
		t.Fatal(err)
	}
	if body := spliced(t, api.Completion, pushBody, again.PrefillEdits()); !strings.Contains(body, "-0000000000000008") {
		t.Errorf("the next dispatch is %s", body)
	}
}

// TestOffloadP2PAddress: the tier's ports count by the place of a rank in its
// deployment, wherever the rank lies behind ports.
func TestOffloadP2PAddress(t *testing.T) {
	for _, tt := range []struct {
		name      string
		bootstrap *workers.Bootstrap
		start, dp int
		host      string
		port      int
	}{
		{"the default", nil, 0, 0, "127.0.0.1", 5710},
		{"the second rank", nil, 0, 1, "127.0.0.1", 5711},
		{"a node of its own", nil, 4, 1, "127.0.0.1", 5715},
		{"stated", &workers.Bootstrap{Host: "10.0.0.9", Port: 7777}, 2, 1, "10.0.0.9", 7780},
		{"no port", &workers.Bootstrap{Host: "10.0.0.9", Port: 65535}, 0, 1, "", 0},
	} {
		w := worker("prefill-0", workers.Prefill, workers.ConnectorOffloadP2P, 2)
		w.Bootstrap, w.DPStart = tt.bootstrap, tt.start
		d := dispatch(workers.ConnectorOffloadP2P)
		d.Prefill = workers.Peer{Worker: w, Rank: w.Ranks[tt.dp]}
		c, err := NewConnector(workers.ConnectorOffloadP2P, legs())
		if err != nil {
			t.Fatal(err)
		}
		tr, err := c.Begin(d)
		if (err != nil) != (tt.port == 0) || err == nil && (tr.at.Host != tt.host || tr.at.Port != tt.port) {
			t.Errorf("%s: %+v, %v", tt.name, tr, err)
		}
	}
}

func TestCheckOffloadP2P(t *testing.T) {
	for _, tt := range []struct {
		name, from, to string
		want           error
		field          string
	}{
		{"as it is", "", "", nil, ""},
		{"ended by itself, its blocks are kept", `"length"`, `"stop"`, nil, ""},
		{"another connector", `"kv_transfer_params":null`, `"kv_transfer_params":{"do_remote_prefill":true}`, ErrBadParams, transferParams},
		{"another prompt", `"prompt_tokens":200`, `"prompt_tokens":199`, ErrBadParams, "prompt_tokens"},
		{"aborted", `"length"`, `"abort"`, ErrPrefillFailed, ""},
		{"an error", `"id":`, `"error":{"message":"no"},"id":`, ErrPrefillFailed, ""},
	} {
		tr := begin(t, workers.ConnectorOffloadP2P, legs(), dispatch(workers.ConnectorOffloadP2P))
		err := tr.CheckPrefill([]byte(strings.Replace(offloaded, tt.from, tt.to, 1)))
		var p *ParamsError
		if errors.As(err, &p); !errors.Is(err, tt.want) || p != nil && p.Field != tt.field {
			t.Errorf("%s: %v", tt.name, err)
		}
		if _, e := tr.DecodeEdits(); (e == nil) != (tt.want == nil) {
			t.Errorf("%s: a decode leg: %v", tt.name, e)
		}
	}
}
