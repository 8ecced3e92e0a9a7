package disagg

import (
	"slices"
	"testing"

	"github.com/dynctl/dynctl/internal/router/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestEveryConnectorHasARow: what can be set is what can be made, by its own name.
func TestEveryConnectorHasARow(t *testing.T) {
	var names []workers.Connector
	for _, k := range kinds {
		names = append(names, k.name)
		c, err := NewConnector(k.name, Options{})
		if err != nil || c.Kind() != k.name || k.carries == nil {
			t.Errorf("%s: %v, %v", k.name, c, err)
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
