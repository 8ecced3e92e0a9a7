package virtualsoak

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/rig/property"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/health"
	"github.com/dynctl/dynctl/internal/workers/sim"
	"github.com/dynctl/dynctl/internal/workers/sim/cache"
	"github.com/dynctl/dynctl/internal/workers/sim/virtual"
)

// hybrid is what vLLM's own cache manager published for a model with several cache groups,
// and what it found of each prompt that it was asked.
type hybrid struct {
	name    string
	size    int // of a block in tokens
	batches []batch
	after   [][]prompted // by batch
	chunk   bool         // it has chunked attention, of which less may be known
}

type prompted struct {
	tokens []uint32
	cached int
}

// hybrids are the recordings of testdata whose group with full attention has the smallest
// blocks.
func hybrids(t *testing.T) (all []*hybrid) {
	t.Helper()
	files, err := filepath.Glob("../../../testdata/hybrid/*full*.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		z, err := gzip.NewReader(f)
		if err != nil {
			t.Fatal(err)
		}
		h, full, groups := &hybrid{name: filepath.Base(name)}, 0, 0
		var d kvevent.Decoder
		group := int32(-1)
		lines := bufio.NewScanner(z)
		lines.Buffer(nil, 16<<20)
		for lines.Scan() {
			var l struct {
				Type   string
				Groups []struct {
					Spec  string
					Size  int `json:"block_size"`
					Chunk int
				}
				Unit    int `json:"hash_block_size"`
				Payload []byte
				Tokens  []uint32
				Cached  int
			}
			if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
				t.Fatal(err)
			}
			switch l.Type {
			case "header":
				h.size, groups = l.Unit, len(l.Groups)
				for _, g := range l.Groups {
					if strings.Contains(g.Spec, "FullAttention") {
						full = g.Size
					}
					h.chunk = h.chunk || g.Chunk > 0
				}
			case "batch":
				m := batch{seq: uint64(len(h.batches)), payload: l.Payload}
				var b kvevent.Batch
				if err := d.Decode(l.Payload, &b); err != nil {
					t.Fatal(err)
				}
				for _, e := range b.Events {
					if group < 0 && e.Kind == kvevent.Stored && e.CacheKind == kvevent.FullAttention {
						group = e.Group
					}
					if e.Group == group {
						m.events = append(m.events, cache.Event{Kind: map[kvevent.Kind]cache.Kind{kvevent.Stored: cache.Stored, kvevent.Removed: cache.Removed}[e.Kind], Names: append([]uint64(nil), e.Hashes...)})
					}
				}
				h.batches, h.after = append(h.batches, m), append(h.after, nil)
			case "request":
				if n := len(h.after); n > 0 {
					h.after[n-1] = append(h.after[n-1], prompted{l.Tokens, l.Cached})
				}
			}
		}
		if err := lines.Err(); err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		if groups > 1 && full == h.size {
			all = append(all, h)
		}
	}
	if len(all) < 6 {
		t.Fatalf("%d recordings", len(all))
	}
	return all
}

func (h *hybrid) look(f *feed, seq uint64) {
	n, s := f.n, f.n.s
	var q kvindex.Query
	for _, p := range h.after[seq] {
		locals := blockhash.Locals(nil, p.tokens, h.size, blockhash.Key{})
		s.index.Overlap(locals, &q)
		usable, _ := f.stream.Usable(q.Depth(n.slot()), kvgroup.Prompt{Seq: blockhash.Chain(nil, locals), Tokens: len(p.tokens)})
		got := min(usable, (len(p.tokens)-1)/h.size) * h.size
		s.out.Requests++
		if got > 0 {
			s.out.Completed++
		}
		switch {
		case got > p.cached:
			s.violate("after batch %d of %s a prompt counts as cached up to %d tokens, vLLM found %d", seq, h.name, got, p.cached)
		case got < p.cached && f.stream.Complete() && !h.chunk:
			s.violate("after batch %d of %s a prompt counts as cached up to %d tokens, vLLM found %d, and every batch was applied", seq, h.name, got, p.cached)
		}
	}
}

// playGroups plays recordings of hybrid models to a router: batches are lost, late or
// spoiled, the engine is replaced by another one, the router restarts with an older
// snapshot or a new one.
func playGroups(all []*hybrid, seed uint64, p plant) *Outcome {
	s := &stage{
		out: &Outcome{Seed: seed}, plant: p, rng: rand.New(rand.NewPCG(seed, 0x67726f757073)), w: virtual.NewWorld(),
		open: map[*request]bool{}, used: map[string]string{}, byHost: map[string]*node{}, began: time.Now(),
	}
	s.openLedger()
	first := all[s.rng.IntN(len(all))]
	s.group = sim.DefaultGroup()
	s.group.BlockSize, s.group.Blocks = first.size, 64
	s.limits = health.OutlierOptions{Now: s.now}
	s.registry = workers.NewRegistry(nil)
	s.drawSettings()
	s.pace(1)
	s.openRouter()
	defer s.close()
	s.join(workers.Aggregated)
	n := s.nodes[0]
	if n.silent {
		n.silent = false
		n.feed.connect()
	}
	var h *hybrid
	lives, at := 0, 0
	begin := func() {
		for h = all[s.rng.IntN(len(all))]; h.size != first.size; h = all[s.rng.IntN(len(all))] {
		}
		n.recorded, at = h, 0
		lives++
		s.note("the engine is that of %s", h.name)
	}
	begin()
	var next func()
	next = func() {
		rest := len(h.batches) - at
		switch k := s.rng.IntN(200); {
		case rest == 0:
			if n.endFaults(); lives < 3 {
				n.kill("another one")
				n.boot()
				begin()
				break
			}
			return
		case rest < 10:
			n.drop, n.late, n.spoil = 0, 0, 0
		case k < 2 && lives < 3:
			n.kill("replaced")
			n.boot()
			begin()
		case k < 6:
			n.drop, n.late, n.spoil = 0, 0, 0
		case k < 10:
			*[]*float64{&n.drop, &n.late, &n.spoil}[s.rng.IntN(3)] = 0.3 * s.rng.Float64()
		case k < 13:
			s.saveIndex()
		case k < 15 && s.file != nil && !s.away:
			if s.chance(0.5) {
				s.saveIndex()
			}
			s.restartRouter()
		}
		if at < len(h.batches) {
			n.emit(h.batches[at])
			at++
		}
		s.w.At(s.w.Now()+s.between(0, 8*time.Millisecond), next)
	}
	s.w.At(0, next)
	for s.out.Steps < maxSteps && len(s.out.Violations) == 0 {
		if _, ok := s.w.Next(); !ok {
			break
		}
		s.out.Steps++
		s.w.Step()
	}
	if last, ok := n.feed.stream.Last(); len(s.out.Violations) == 0 && (!ok || last+1 != uint64(len(n.log)) || n.feed.catching) {
		s.violate("the feed is at batch %d of %d", last, len(n.log))
	}
	s.out.Digest = s.digest
	return s.out
}

// TestVirtualGroups is the soak of hybrid models, with vLLM's own manager as the judge:
// whatever becomes of its batches and of the router, no prompt is counted as cached for
// more than it found, nor for less once every batch was applied.
func TestVirtualGroups(t *testing.T) {
	t.Parallel()
	n := uint64(60)
	if testing.Short() {
		n = 20
	}
	n, from := property.FromEnv(t, "DYNCTL_SOAK_SEEDS", n), property.FromEnv(t, "DYNCTL_SOAK_SEED", 1)
	all := hybrids(t)
	var sum Outcome
	for seed := from; seed < from+n; seed++ {
		o := playGroups(all, seed, nothing)
		if err := o.Err(); err != nil {
			t.Fatal(err)
		}
		if seed == from && playGroups(all, seed, nothing).Digest != o.Digest {
			t.Errorf("seed %d has another history when it is run again", seed)
		}
		sum.add(o)
	}
	text := fmt.Sprintf("%d prompts, %d of them counted as cached; %d batches, %d gaps, %d resyncs, %d restarts of the router", sum.Requests, sum.Completed, sum.Batches, sum.Gaps, sum.Resyncs, sum.Restarts)
	t.Log(text)
	if sum.Completed < sum.Requests/10 || sum.Gaps == 0 || sum.Restarts == 0 {
		t.Errorf("the seeds did too little: %s", text)
	}
}

// TestPlantedGroupBugIsFound: a router that does not hear what groups beside the first lose
// is found out by few seeds.
func TestPlantedGroupBugIsFound(t *testing.T) {
	t.Parallel()
	all := hybrids(t)
	for seed := uint64(1); seed <= 24; seed++ {
		if o := playGroups(all, seed, firstGroupOnly); len(o.Violations) > 0 {
			if !strings.Contains(o.Violations[0], "vLLM found") || strings.Contains(o.Violations[0], "every batch") {
				t.Fatalf("found for another reason: %v", o.Err())
			}
			t.Logf("found after %d seeds: %v", seed, o.Err())
			return
		}
	}
	t.Fatal("not found in 24 seeds")
}
