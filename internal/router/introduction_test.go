package router

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/request/models"
	"github.com/dynctl/dynctl/internal/settings"
)

// TestModelsMayStillBeReported: for a while after the start a model that no worker serves may
// be that of a worker which has not reported its models yet.
func TestModelsMayStillBeReported(t *testing.T) {
	t.Parallel()
	const known, silent = "http://127.0.0.1:20001,engine=vllm,model=m", "http://127.0.0.1:20002,engine=vllm"
	for _, c := range []struct {
		name   string
		age    time.Duration
		fleet  []string
		status int
	}{
		{"one is silent", 0, []string{known, silent}, http.StatusServiceUnavailable},
		{"all have reported", 0, []string{known}, http.StatusNotFound},
		{"one stays silent", time.Minute, []string{known, silent}, http.StatusNotFound},
		{"none has reported", time.Minute, []string{silent}, http.StatusServiceUnavailable},
	} {
		config := settings.Default()
		config.Worker = c.fleet
		r, err := New(context.Background(), Options{Config: config})
		if err != nil {
			t.Fatal(err)
		}
		r.started = time.Now().Add(-c.age)
		if e := models.NotServed("other", r.registry.Snapshot(), r.starting(time.Now())); e.Status != c.status || (e.RetryAfter > 0) != (c.status == http.StatusServiceUnavailable) {
			t.Errorf("%s: %v", c.name, e)
		}
		if err := r.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}
}
