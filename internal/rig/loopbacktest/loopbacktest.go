// Package loopbacktest starts routers with simulated engines in tests.
package loopbacktest

import (
	"context"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/loopback"
)

// Start starts simulated engines and a router in front of them, and does not wait until they are
// ready. It ends them with the test. The test fails when that takes more than 30 s or returns an
// error.
func Start(t testing.TB, o loopback.Options) *loopback.Rig {
	t.Helper()
	g, err := loopback.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := g.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return g
}
