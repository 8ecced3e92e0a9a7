package fleet

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// Fingerprint distinguishes targets: a line for the router and the model, and one for
// each kind of worker that serves it, with their number. Names and addresses are
// left out: they change when the same fleet is started again.
func (f *Facts) Fingerprint() []string {
	kinds := map[string]int{}
	for i := range f.Workers {
		if w := &f.Workers[i]; slices.Contains(w.Models, f.Model) {
			kinds[kind(w)]++
		}
	}
	out := []string{"router " + f.Version, "model " + f.Model, fmt.Sprintf("block %d tokens", f.Block)}
	var lines []string
	for k, n := range kinds {
		lines = append(lines, fmt.Sprintf("%d x %s", n, k))
	}
	slices.Sort(lines)
	return append(out, lines...)
}

func kind(w *admin.Worker) string {
	return fmt.Sprintf("%s %s %s, %d ranks, connector %s, block %d, %d KV blocks a rank, %d tokens of context", w.Role, w.Engine, w.Version, w.DP, cmp.Or(w.Connector, "none"), w.BlockSizeTokens, w.KVBlocks, w.MaxModelLen)
}
