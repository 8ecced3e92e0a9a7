package page

import (
	"fmt"
	"strings"
	"testing"

	"github.com/muesli/termenv"

	"github.com/dynctl/dynctl/internal/router/decision"
	"github.com/dynctl/dynctl/internal/router/receipt"
	"github.com/dynctl/dynctl/internal/tui/theme"
	"github.com/dynctl/dynctl/internal/tui/widget"
)

// TestExplainOfSeveralAttempts: every attempt's table is that attempt's own, also
// where one of them had nobody to choose from.
func TestExplainOfSeveralAttempts(t *testing.T) {
	var c receipt.Receipt
	for n := 1; n <= 3; n++ {
		d := decision.Decision{Attempt: n, Decode: decision.Phase{Policy: "kv", Verdict: "all_excluded"}}
		if n != 2 {
			d.Decode.Candidates = []decision.Candidate{{Rank: fmt.Sprintf("of-%d/dp0", n), Excluded: "draining"}, {Rank: fmt.Sprintf("of-%d/dp1", n), Excluded: "draining"}}
		}
		c.Earlier = append(c.Earlier, d)
	}
	c.Decision, c.Earlier = c.Earlier[2], c.Earlier[:2]
	text := strings.Join(explainLines(&c, widget.NewPainter(theme.New("dark", termenv.Ascii, true), 100)), "\n")
	last := 0
	for _, want := range []string{"attempt 1", "of-1/dp0", "of-1/dp1", "attempt 2", "attempt 3, the last", "of-3/dp0", "of-3/dp1"} {
		i := strings.Index(text[last:], want)
		if i < 0 || strings.Count(text, want) != 1 {
			t.Fatalf("%q is not in its place, once:\n%s", want, text)
		}
		last += i
	}
}
