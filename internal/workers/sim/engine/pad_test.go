package engine

import (
	"testing"
	"time"
)

// TestPad: a padded profile takes the time of the next multiple, and of nothing none.
func TestPad(t *testing.T) {
	p := Profile{Prefill: [3]float64{10, 0.01, 0}, Decode: [3]float64{5, 1, 0}, PrefillPad: 1000, DecodePad: 8}
	if err := p.Validate(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		b    Batch
		want time.Duration
	}{
		{Batch{}, 0},
		{Batch{PrefillTokens: 1}, 20 * time.Millisecond},
		{Batch{PrefillTokens: 1000}, 20 * time.Millisecond},
		{Batch{PrefillTokens: 1001}, 30 * time.Millisecond},
		{Batch{DecodeRequests: 8}, 13 * time.Millisecond},
		{Batch{DecodeRequests: 9, PrefillTokens: 500}, 41 * time.Millisecond},
	} {
		if got := p.Step(c.b); got != c.want {
			t.Errorf("%+v takes %v, want %v", c.b, got, c.want)
		}
	}
	for _, bad := range []Profile{{PrefillPad: -1}, {DecodePad: 1<<20 + 1}} {
		if bad.Validate() == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
}
