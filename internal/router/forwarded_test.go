package router_test

import (
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/settings"
)

// forwardedHeaders: engines learn of the hops before the router from the
// router and from proxies that it trusts, never from a client.
func forwardedHeaders(t *testing.T, r *rig, p *tap) {
	said := []string{
		"X-Forwarded-For", "203.0.113.9", "X-Forwarded-For", "198.51.100.7", "X-Forwarded-Proto", "https", "X-Forwarded-Host", "api.example",
		"X-Forwarded-Port", "443", "X-Forwarded-Prefix", "/llm", "X-Real-Ip", "203.0.113.9", "Forwarded", "for=203.0.113.9;proto=https",
	}
	for i, c := range []struct {
		name    string
		trusted []string
		header  []string
		want    map[string]string // HOST stands for the router's own
	}{
		{"nobody trusted", nil, said, map[string]string{"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "http", "X-Forwarded-Host": "HOST"}},
		{"others trusted", []string{"10.0.0.0/8", "127.0.0.2"}, said, map[string]string{"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "http", "X-Forwarded-Host": "HOST"}},
		{"named as of one hop", nil, append(slices.Clone(said), "Connection", "X-Forwarded-For, X-Real-Ip"), map[string]string{"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "http", "X-Forwarded-Host": "HOST"}},
		{"trusted", []string{"10.0.0.0/8", "127.0.0.0/8"}, said, map[string]string{
			"X-Forwarded-For": "203.0.113.9, 198.51.100.7, 127.0.0.1", "X-Forwarded-Proto": "https", "X-Forwarded-Host": "api.example",
			"X-Forwarded-Port": "443", "X-Forwarded-Prefix": "/llm", "X-Real-Ip": "203.0.113.9", "Forwarded": "for=203.0.113.9;proto=https, for=127.0.0.1",
		}},
		{"trusted by its address, says nothing", []string{"127.0.0.1"}, nil, map[string]string{"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "http", "X-Forwarded-Host": "HOST"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := r.in(t)
			r.set(func(k *settings.Config) { k.TrustedProxies = c.trusted })
			p.reset()
			r.complete(ids(100, 600+i), c.header...)
			legs := p.legs()
			if len(legs) != 2 {
				t.Fatalf("%d legs", len(legs))
			}
			want := maps.Clone(c.want)
			for k, v := range want {
				want[k] = strings.ReplaceAll(v, "HOST", strings.TrimPrefix(r.URL, "http://"))
			}
			for _, l := range legs {
				got := map[string]string{}
				for k, v := range l.header {
					if k == "Forwarded" || k == "X-Real-Ip" || strings.HasPrefix(k, "X-Forwarded-") {
						got[http.CanonicalHeaderKey(k)] = strings.Join(v, " | ")
					}
				}
				if !maps.Equal(got, want) {
					t.Errorf("%s got %v, want %v", l.engine, got, want)
				}
			}
		})
	}
	c := settings.Default()
	c.TrustedProxies = []string{"10.0.0.0/8", "proxy.example"}
	if err := c.Validate(); err == nil || !strings.Contains(err.Error(), `trusted_proxies: "proxy.example"`) {
		t.Errorf("%v", err)
	}
}
