package doctor_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/doctor"
	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// TestRouterThatIsItsOwnWorker: the examination names it, with the cause.
func TestRouterThatIsItsOwnWorker(t *testing.T) {
	t.Parallel()
	r := examineAfter(t, loopback.Options{Fleet: "1a:profile=instant"}, true, func(ctx context.Context, g *loopback.Rig) {
		if _, err := g.Admin.AddWorker(ctx, admin.AddWorker{Spec: g.URL + ",name=me"}); err != nil {
			t.Fatal(err)
		}
		if err := loopback.Wait(ctx, "a probe", func() error {
			list, err := g.Admin.Workers(ctx)
			if err != nil {
				return err
			}
			for _, w := range list.Workers {
				if w.Name == "me" && w.Health == "unhealthy" {
					return nil
				}
			}
			return errors.New("not probed")
		}); err != nil {
			t.Fatal(err)
		}
	})
	found := false
	for _, f := range r.Findings {
		found = found || f.Check == "engine" && f.Subject == "me" && f.State == doctor.Fail && strings.Contains(f.Text, "the worker is this router itself")
	}
	if !found {
		t.Errorf("%+v", r.Findings)
	}
}
