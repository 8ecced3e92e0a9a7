package router_test

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/settings"
)

// offloadingLegs: without a prefill the decode leg names no transfer that its engine would wait
// for, and the request is served all the same. When the client leaves, the leg that runs is
// ended, the prefill's as the decode's.
func offloadingLegs(t *testing.T, r *rig, p *tap) {
	for _, in := range []string{"prefill", "decode"} {
		arrived, left := make(chan struct{}), make(chan struct{})
		p.set(func(engine string, _ http.ResponseWriter, q *http.Request, _ []byte) bool {
			if !strings.HasPrefix(engine, in) || q.URL.Path != "/v1/completions" {
				return false
			}
			close(arrived)
			<-q.Context().Done()
			close(left)
			panic(http.ErrAbortHandler)
		})
		ctx, leave := context.WithCancel(t.Context())
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			if a, err := r.try(ctx, http.MethodPost, "/v1/completions", encode(t, object{"model": r.model, "prompt": ids(200, 3), "max_tokens": 12})); err == nil {
				t.Errorf("answered %s", a.body)
			}
		}()
		<-arrived
		leave()
		<-left
		<-gone
	}
	r.set(func(c *settings.Config) { c.Retry.Attempts = 1 })
	defer r.set(func(*settings.Config) {})
	p.reset()
	p.set(func(engine string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		if !strings.HasPrefix(engine, "prefill") || q.URL.Path != "/v1/completions" {
			return false
		}
		w.WriteHeader(http.StatusInternalServerError)
		return true
	})
	a, got := r.complete(ids(200, 2))
	if want := r.right(ids(200, 2)); got != want || a.header.Get("X-Dynctl-Path") != "local" {
		t.Errorf("%q by %s, want %q by local", got, a.header.Get("X-Dynctl-Path"), want)
	}
	for _, leg := range p.legsOf("decode") {
		if rawjson.Value(leg.body).Get("kv_transfer_params").Exists() {
			t.Errorf("the decode leg is %s", leg.body)
		}
	}
	p.set(nil)
}
