package sim_test

import (
	"context"
	"testing"

	"github.com/dynctl/dynctl/internal/workers/sim"
)

// BenchmarkRequest is a whole request over a socket: 1,000 tokens in, 16 out.
func BenchmarkRequest(b *testing.B) {
	f, err := sim.ParseFleet("1a:profile=instant,kv_blocks=16384")
	if err != nil {
		b.Fatal(err)
	}
	r, err := sim.Start(context.Background(), f)
	if err != nil {
		b.Fatal(err)
	}
	defer r.Close()
	prompt := ids(1000, 1)
	for name, stream := range map[string]bool{"whole": false, "stream": true} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				prompt[0] = 300 + (prompt[0]+1)%3000
				if status, body, err := tryPost(b.Context(), r.Engine(0).URL()+"/v1/completions", object{"prompt": prompt, "max_tokens": 16, "ignore_eos": true, "stream": stream}); err != nil || status != 200 {
					b.Fatal(err, status, string(body))
				}
			}
		})
	}
}
