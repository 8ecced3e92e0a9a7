package disagg

import (
	"net/url"
	"slices"
	"testing"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestEveryConnectorHasARow: what can be set is what can be made, by its own name.
func TestEveryConnectorHasARow(t *testing.T) {
	var names []workers.Connector
	w := &workers.Worker{
		Facts: workers.Facts{LMCache: &workers.LMCacheDecoder{Host: "10.0.0.1", InitPorts: []int{1}, AllocPorts: []int{2}}},
		Name:  "w", URL: &url.URL{Scheme: "http", Host: "10.0.0.1:8000"},
	}
	for _, k := range kinds {
		names = append(names, k.name)
		c, err := NewConnector(k.name, Options{})
		if err != nil || k.carries == nil {
			t.Fatalf("%s: %v, %v", k.name, c, err)
		}
		tr, err := c.Begin(Dispatch{RequestID: "r", Facts: api.Facts{Kind: api.Completion}, Prefill: workers.Peer{Worker: w}, Decode: workers.Peer{Worker: w}})
		if err != nil || tr.Kind() != k.name {
			t.Errorf("%s: %+v, %v", k.name, tr, err)
		}
	}
	if !slices.Equal(names, workers.Connectors()) {
		t.Errorf("rows %q, connectors %q", names, workers.Connectors())
	}
	for _, c := range []workers.Connector{workers.ConnectorNone, "pigeon"} {
		if made, err := NewConnector(c, Options{}); err == nil || made != nil {
			t.Errorf("%q makes %v", c, made)
		}
		if CountsTransfers(c) || Carries(c, api.Generate, &workers.Worker{}) || !Carries(c, api.Chat, &workers.Worker{}) {
			t.Errorf("%q is taken for a connector", c)
		}
	}
}
