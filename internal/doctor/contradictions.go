package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/workers"
)

// contradictions compares what workers of one model say of themselves.
func (e *exam) contradictions(ws []admin.Worker) {
	type seen struct {
		value int
		who   string
	}
	blocks := map[string]seen{}
	lens := map[string]seen{}
	roles := map[string]map[string]bool{}
	bad := false
	for _, w := range ws {
		if w.Conflict != "" {
			bad = true
			e.add("contradiction", w.Name, Fail, w.Conflict, "")
		}
		for _, m := range w.Models {
			if roles[m] == nil {
				roles[m] = map[string]bool{}
			}
			roles[m][w.Role] = true
			if b := w.BlockSizeTokens; b > 0 {
				if s, ok := blocks[m]; ok && s.value != b {
					bad = true
					e.add("block size", w.Name, Fail, fmt.Sprintf("model %s: block size %d here, %d on %s", m, b, s.value, s.who), "transfer between them fails or gives wrong text: give all engines of a model the same --block-size")
				} else {
					blocks[m] = seen{b, w.Name}
				}
			}
			if n := w.MaxModelLen; n > 0 {
				if s, ok := lens[m]; ok && s.value != n {
					e.add("model length", w.Name, Warn, fmt.Sprintf("model %s: %d tokens here, %d on %s", m, n, s.value, s.who), "long prompts are refused by some workers only")
				} else {
					lens[m] = seen{n, w.Name}
				}
			}
		}
		if strings.HasPrefix(w.Connector, string(workers.ConnectorNIXL)) && slices.ContainsFunc(w.Ranks, func(k admin.Rank) bool { return len(k.Feed.CacheGroups) > 1 }) {
			e.add("hybrid over NIXL", w.Name, Warn, "the model has caches of several kinds, and "+workers.HybridDefect, "compare answers with those of one engine alone before you trust them; without prefill workers nothing is moved")
		}
		if w.DP != len(w.Ranks) {
			bad = true
			e.add("dp", w.Name, Fail, fmt.Sprintf("the worker has dp %d and the router follows %d ranks", w.DP, len(w.Ranks)), "give the worker's dp=N")
		}
		reporting, silent := 0, []string{}
		for _, r := range w.Ranks {
			if r.Engine != nil {
				reporting++
			} else {
				silent = append(silent, r.Label)
			}
		}
		if reporting > 0 && len(silent) > 0 {
			bad = true
			e.add("dp", w.Name, Fail, fmt.Sprintf("its metrics have no figures of %s", strings.Join(silent, ", ")), "the engine may have fewer data-parallel ranks than dp says")
		}
	}
	if e.handshakes(ws) {
		bad = true
	}
	for m, r := range roles {
		switch {
		case r["prefill"] && !r["decode"] && !r["aggregated"]:
			bad = true
			e.add("roles", m, Fail, "the model has prefill workers and no worker that decodes", "")
		case r["decode"] && !r["prefill"] && !r["aggregated"]:
			e.add("roles", m, Warn, "the model has decode workers and no prefill worker: every prompt is prefilled locally", "")
		}
	}
	if !bad {
		e.add("contradictions", "engines", OK, "block sizes, ranks and roles agree", "")
	}
}

// smallBlock is the block size in tokens up to which NIXL is slow. Of a handover of 5,000
// tokens the transfer took 105 of 263 ms with blocks of 16, and 29 of 197 ms with blocks of 64
// (vllm-project/vllm#50913).
const smallBlock = 16

// handshakes looks for pairs of vLLM's engines over NIXL that cannot work together, or slowly.
func (e *exam) handshakes(ws []admin.Worker) (bad bool) {
	overNIXL := func(w *admin.Worker) bool { return workers.Connector(w.Connector).Reported() == workers.ConnectorNIXL }
	facts := func(w *admin.Worker) *workers.Worker {
		return &workers.Worker{Facts: workers.Facts{Engine: workers.Engine(w.Engine), Version: w.Version, CacheType: w.CacheType}}
	}
	for i := range ws {
		d := &ws[i]
		if !overNIXL(d) || d.Role == string(workers.Aggregated) {
			continue
		}
		if b := d.BlockSizeTokens; d.Engine == string(workers.VLLM) && b > 0 && b <= smallBlock {
			e.add("block size over NIXL", d.Name, Warn, fmt.Sprintf("blocks of %d tokens: each is a transfer of its own, and a handover takes longer than with blocks of 64", b), "--block-size 64 on all engines that pair")
		}
		if !workers.Role(d.Role).CanDecode() {
			continue
		}
		pairs, apart, why := 0, []string{}, ""
		for k := range ws {
			p := &ws[k]
			if p.Name == d.Name || !overNIXL(p) || !workers.Role(p.Role).CanPrefill() || !slices.ContainsFunc(p.Models, func(m string) bool { return slices.Contains(d.Models, m) }) {
				continue
			}
			if differ := workers.HandshakeDiffers(facts(p), facts(d)); differ != "" {
				apart, why = append(apart, p.Name), differ
			} else {
				pairs++
			}
		}
		switch {
		case len(apart) == 0:
		case pairs == 0:
			bad = true
			e.add("handshake", d.Name, Fail, fmt.Sprintf("NIXL would refuse every prefill worker of its model: %s (%s)", why, strings.Join(apart, ", ")), "give prefill and decode engines one version of vLLM and one type of cache; until then prompts stay local")
		default:
			e.add("handshake", d.Name, Warn, fmt.Sprintf("it pairs with %s, and NIXL would refuse %s: %s", count(pairs, "prefill worker"), strings.Join(apart, ", "), why), "as in a rolling update; pairs are kept within a version")
		}
	}
	return bad
}
