package page

import (
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/tui/feed"
)

// TestRoomOfTheIndex: an index that holds more than tokens would fill is no fault where
// cache groups share a pool, only one that holds more than the pool.
func TestRoomOfTheIndex(t *testing.T) {
	for blocks, more := range map[int64]bool{90: false, 300: false, 301: true} {
		k := &feed.Rank{Rank: admin.Rank{IndexBlocks: blocks, CapacityBlock: 100, IndexRoom: 300}}
		if text := strings.Join(compareLines(k, true, true), "\n"); strings.Contains(text, "overcounts") != more {
			t.Errorf("%d blocks of 300:\n%s", blocks, text)
		}
	}
}
