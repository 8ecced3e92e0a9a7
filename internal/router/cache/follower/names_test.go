package follower

import (
	"fmt"
	"testing"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestNamesOfEveryHash: for each way to name blocks that a worker may state, the names can
// be computed; a worker without the seed is refused where they cannot.
func TestNamesOfEveryHash(t *testing.T) {
	for _, h := range workers.KVHashes() {
		for _, seed := range []string{"", "7"} {
			text := fmt.Sprintf("http://127.0.0.1:1,kv_hash=%s", h)
			if seed != "" {
				text += ",kv_hash_seed=" + seed
			}
			_, err := workers.ParseSpec(workers.Decode, text)
			if computed := blockhash.NewEngineNames(h, seed) != nil; computed != (err == nil) {
				t.Errorf("%s: computed %v, refused as %v", text, computed, err)
			}
		}
	}
}
