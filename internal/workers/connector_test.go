package workers

import (
	"net/url"
	"strings"
	"testing"
)

// TestWrongConnector: a stated connector that the engine's metrics contradict is named with
// both sides; connectors of one family have the same metrics.
func TestWrongConnector(t *testing.T) {
	for _, c := range []struct {
		stated, reported Connector
		wrong            bool
	}{
		{ConnectorNIXL, ConnectorMooncake, true},
		{ConnectorMooncake, ConnectorNIXL, true},
		{ConnectorNIXLPush, ConnectorMooncake, true},
		{ConnectorSharedStorage, ConnectorMooncake, false}, // both, in a MultiConnector
		{ConnectorMooncake, ConnectorMooncake, false},
		{ConnectorNIXLPush, ConnectorNIXL, false},
		{ConnectorNIXLOffload, ConnectorNIXL, false},
		{ConnectorMooncake, ConnectorNone, false},
		{ConnectorNone, ConnectorMooncake, false},
	} {
		s := &Spec{Facts: Facts{Connector: c.stated, Role: Prefill}, Name: "w", URL: &url.URL{Scheme: "http", Host: "w:1"}}
		l := &Learned{Facts: Facts{Connector: c.reported, From: map[Field]string{FieldConnector: "its metrics"}}}
		w, err := describe(s, SourceFlag, l)
		if (err != nil) != c.wrong || (w.Conflict != "") != c.wrong || c.wrong && !strings.Contains(w.Conflict, "connector "+string(c.stated)+" stated on the command line, engine says "+string(c.reported)+" (its metrics)") {
			t.Errorf("%q stated, %q reported: %v, %q", c.stated, c.reported, err, w.Conflict)
		}
	}
}

// TestHandshakeDiffers: what NIXL's handshake compares, as far as engines report it.
func TestHandshakeDiffers(t *testing.T) {
	w := func(e Engine, version, cache string) *Worker {
		return &Worker{Facts: Facts{Engine: e, Version: version, CacheType: cache}}
	}
	for _, c := range []struct {
		a, b *Worker
		want string
	}{
		{w(VLLM, "0.33.0", "auto"), w(VLLM, "0.33.0", "auto"), ""},
		{w(VLLM, "0.32.0", "auto"), w(VLLM, "0.33.0", "auto"), "vLLM 0.32.0 and 0.33.0 (connector versions 14 and 15)"},
		{w(VLLM, "0.33.0", "auto"), w(VLLM, "0.33.1", "auto"), "vLLM 0.33.0 and 0.33.1"},
		{w(VLLM, "0.40.0", "auto"), w(VLLM, "0.33.0", "auto"), "vLLM 0.40.0 and 0.33.0"},
		{w(VLLM, "", "auto"), w(VLLM, "0.33.0", "auto"), ""},
		{w(VLLM, "0.33.0", "fp8"), w(VLLM, "0.33.0", "auto"), "cache_dtype fp8 and auto"},
		{w(VLLM, "0.33.0", ""), w(VLLM, "0.33.0", "auto"), ""},
		{w(SGLang, "0.5.22", ""), w(SGLang, "0.5.23", ""), ""},
	} {
		if got := HandshakeDiffers(c.a, c.b); got != c.want {
			t.Errorf("%+v and %+v: %q, want %q", c.a.Facts, c.b.Facts, got, c.want)
		}
	}
}
