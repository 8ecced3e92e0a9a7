package page

import (
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/tui/feed"
)

// TestEveryColumnIsExplained: each column of the tables of ranks and of the radix index has
// its text in the help.
func TestEveryColumnIsExplained(t *testing.T) {
	for _, l := range legends() {
		for _, m := range l.Meanings {
			if m.Title == "" || m.Text == "" || len(m.Text) > 40 {
				t.Errorf("%s: %q: %q", l.View, m.Title, m.Text)
			}
		}
	}
	c := &Ctx{R: &feed.Router{}, W: 1000}
	for _, col := range (&radix{}).columns(c, 1000) {
		if col.title != "" && !slices.ContainsFunc(radixMeanings, func(m meaning) bool { return m.Title == col.title }) {
			t.Errorf("the radix column %q is not explained", col.title)
		}
	}
	for _, title := range strings.Fields("ISL CACHED EFF PATH MARGIN") {
		if !slices.ContainsFunc(decisionMeanings, func(m meaning) bool { return m.Title == title }) {
			t.Errorf("the column of decisions %q is not explained", title)
		}
	}
}
