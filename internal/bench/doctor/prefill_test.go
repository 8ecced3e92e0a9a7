package doctor

import (
	"testing"

	"github.com/dynctl/dynctl/internal/router/receipt"
)

// TestPrefillFailureIsTheLastPrefills: a failed prefill after which another one
// delivered is no failure of the transfer.
func TestPrefillFailureIsTheLastPrefills(t *testing.T) {
	failed := receipt.Leg{Kind: "prefill", Worker: "p0", Error: "broken", RetryReason: "missing_params"}
	good := receipt.Leg{Kind: "prefill", Worker: "p1"}
	decode := receipt.Leg{Kind: "decode", Worker: "d0"}
	for name, c := range map[string]struct {
		legs []receipt.Leg
		want string
	}{
		"none":             {nil, ""},
		"good":             {[]receipt.Leg{good, decode}, ""},
		"failed":           {[]receipt.Leg{failed, decode}, "p0: broken"},
		"failed then good": {[]receipt.Leg{failed, good, decode}, ""},
		"good then failed": {[]receipt.Leg{good, failed, decode}, "p0: broken"},
	} {
		why, advice := prefillFailure(&receipt.Receipt{Legs: c.legs})
		if why != c.want || (advice == "") != (c.want == "") {
			t.Errorf("%s: %q, advice %q", name, why, advice)
		}
	}
}
