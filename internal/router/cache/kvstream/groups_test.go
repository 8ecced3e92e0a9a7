package kvstream

import (
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
)

// groupsPrompt is what the events of FuzzGroups are about, in router blocks. A
// block's name is the length of the prefix that it ends.
const groupsPrompt = 16

// naiveGroup is a cache group of FuzzGroups as its engine knows it.
type naiveGroup struct {
	kind   kvevent.CacheKind
	window int
	parts  int // router blocks in a block
	chunk  int // router blocks, 0 = not stated
	copies map[uint64]int
	stored bool
}

// reusable reports whether the group has what it needs at a length.
func (g *naiveGroup) reusable(n int) bool {
	var from, to int // needed are the blocks that end in (from, to]
	switch {
	case g.kind == kvevent.FullAttention:
		to = (n + g.parts - 1) / g.parts * g.parts
	case g.kind == kvevent.Mamba:
		from, to = n-1, n
	case g.kind == kvevent.SlidingWindow && g.window > 0:
		from, to = n, n
		for from > 0 && (n-from)*kvmodel.Block < g.window-1 {
			from -= g.parts
		}
	case g.kind == kvevent.ChunkedLocal && g.chunk > 0:
		from, to = n/g.chunk*g.chunk/g.parts*g.parts, n
	default: // the size of a chunk is not stated
		to = n
	}
	for end := max(from, 0) + 1; end <= to; end++ {
		if (end%g.parts == 0 || g.kind == kvevent.Mamba) && g.copies[uint64(end)] == 0 {
			return false
		}
	}
	return true
}

// groupsProgram reads four groups off the first bytes of a program, and events off
// the others, three for each: what happens and in which tier, the group, the blocks.
func groupsProgram(program []byte) (groups [4]naiveGroup, events []kvevent.Event) {
	kinds := []kvevent.CacheKind{kvevent.FullAttention, kvevent.SlidingWindow, kvevent.Mamba, kvevent.ChunkedLocal, kvevent.FullAttention}
	for i := range groups {
		g := naiveGroup{parts: 1, copies: map[uint64]int{}}
		if len(program) > 0 {
			b := program[0]
			g.kind, g.parts = kinds[int(b)%len(kinds)], 1+int(b>>7)
			if g.kind == kvevent.SlidingWindow {
				g.window = int(b>>3&7) * 5
			}
			program = program[1:]
		}
		if g.kind == kvevent.CacheAbsent {
			g.kind = kvevent.FullAttention
		}
		groups[i] = g
	}
	prompt := kvmodel.Tokens(0, groupsPrompt*kvmodel.Block)
	for ; len(program) >= 3 && len(events) < 64; program = program[3:] {
		what, at := program[0], program[2]
		e := kvevent.Event{Group: int32(program[1] % 4)}
		g := &groups[e.Group]
		if what >= 224 {
			e.Medium, e.MediumName = kvevent.CPU, "CPU"
		}
		first := int(at%16) / g.parts * g.parts
		last := min(groupsPrompt/g.parts*g.parts, first+(1+int(at>>4%4))*g.parts)
		for end := first + g.parts; end <= last; end += g.parts {
			e.Hashes = append(e.Hashes, uint64(end))
		}
		switch {
		case what%8 == 0:
			e = kvevent.Event{Kind: kvevent.Cleared, Group: -1, Medium: e.Medium, MediumName: e.MediumName}
		case what%8 < 4:
			e.Kind = kvevent.Removed
		default:
			e.Kind, e.BlockSize = kvevent.Stored, int32(g.parts*kvmodel.Block)
			e.CacheKind, e.SlidingWindow = g.kind, int32(g.window)
			e.Parent, e.HasParent = uint64(first), first > 0
			e.Tokens = prompt[first*kvmodel.Block : last*kvmodel.Block]
			if n := len(e.Hashes); what%8 == 7 && g.kind != kvevent.FullAttention && n > 0 {
				e.Hashes = e.Hashes[n-1:] // the tail only
			}
		}
		events = append(events, e)
	}
	return groups, events
}

// FuzzGroups: whatever groups, kinds, windows and tiers an engine reports, and in
// whatever order, no prefix is counted at which one of the groups that have stored
// something could not go on, whatever else is known of the engine.
func FuzzGroups(f *testing.F) {
	f.Add([]byte{0, 1 | 3<<3, 2, 3, 4, 0, 0x30, 4, 1, 0x30, 4, 2, 0x33, 7, 1, 0x34, 1, 1, 2, 4, 0, 0x34})
	f.Add([]byte{0, 2, 2, 2, 4, 0, 0x70, 7, 1, 0x70, 228, 1, 0x30, 1, 1, 0x03, 0, 0, 0, 4, 0, 0x30, 7, 1, 0x10})
	f.Add([]byte{128, 1 | 2<<3, 0, 0, 4, 0, 0x70, 4, 1, 0x70, 1, 0, 2, 4, 0, 2, 1, 1, 7})
	f.Add([]byte{0, 130, 0, 0, 4, 0, 0x70, 4, 1, 0x70, 4, 0, 0x74, 7, 1, 0x35})
	f.Add([]byte{0, 0, 3, 1, 4, 0, 0x70, 4, 1, 0x70, 1, 1, 3})
	f.Add([]byte("0100711$00")) // the first full group stores a child of a block from before
	x := newIndex(f, kvindex.Options{MaxBlocks: 1 << 12})
	prompt := kvmodel.Tokens(0, groupsPrompt*kvmodel.Block+1)
	locals := blockhash.Locals(nil, prompt, kvmodel.Block, blockhash.Key{})
	asked := kvgroup.Prompt{Seq: blockhash.Chain(nil, locals), Tokens: len(prompt)}
	f.Fuzz(func(t *testing.T, program []byte) {
		x.ClearRank(0)
		s := New(x, 0, kvmodel.Block)
		groups, events := groupsProgram(program)
		known := kvgroup.Traits{Drops: len(program)&1 != 0, IgnoreCopies: len(program)&2 != 0, Chunk: len(program) & 4 * kvmodel.Block}
		if len(program)&8 != 0 {
			known.HashAlgorithm = "sha256" // whose names these are not: nothing changes
		}
		s.Know(known)
		for i := range groups {
			groups[i].chunk = known.Chunk / kvmodel.Block
		}
		var q kvindex.Query
		for i, e := range events {
			payload := kvevent.AppendBatch(nil, &kvevent.Batch{TS: 1e9 + float64(i), Events: []kvevent.Event{e}}, kvevent.Encoding{Form: kvevent.VLLMMap})
			if v := s.Offer(uint64(i), payload); v.Kind != Apply || s.Counters().Skipped+s.Counters().Unreadable > 0 {
				t.Fatalf("event %d: %v, %+v", i, v, s.Counters())
			}
			for g := range groups {
				if k := &groups[g]; e.Medium != kvevent.GPU {
					continue
				} else if e.Kind == kvevent.Cleared {
					clear(k.copies)
				} else if e.Group == int32(g) {
					k.stored = k.stored || e.Kind == kvevent.Stored
					for _, h := range e.Hashes {
						switch {
						case e.Kind == kvevent.Stored && known.IgnoreCopies:
							k.copies[h] = 1
						case e.Kind == kvevent.Stored:
							k.copies[h]++
						default:
							k.copies[h] = max(0, k.copies[h]-1)
						}
					}
				}
			}
			if s.Mismatch() != "" {
				continue // the rank is not trusted
			}
			x.Overlap(locals, &q)
			n, _ := s.Usable(q.Depth(0), asked)
			for g := range groups {
				if k := &groups[g]; k.stored && !k.reusable(n) {
					t.Fatalf("event %d %+v: %d router blocks are usable, but group %d (%s, window %d, blocks of %d) has %v", i, e, n, g, k.kind, k.window, k.parts, k.copies)
				}
			}
		}
	})
}

// What a rank with several groups cannot be followed for is said in words.
func TestGroupsThatCannotBeFollowed(t *testing.T) {
	t.Parallel()
	event := func(group int32, kind kvevent.CacheKind, size int) kvevent.Event {
		e := kvmodel.Stored(0, []uint64{1, 2}, kvmodel.Tokens(0, 2*size), int32(size))
		e.Group, e.CacheKind = group, kind
		return e
	}
	full := event(0, kvevent.FullAttention, kvmodel.Block)
	many := []kvevent.Event{full}
	for i := range int32(16) {
		many = append(many, event(i+1, kvevent.Mamba, kvmodel.Block))
	}
	for want, events := range map[string][]kvevent.Event{
		"more than 16 cache groups":               many,
		"cache group 1 has blocks of 5 tokens":    {full, event(1, kvevent.Mamba, kvmodel.Block+1)},
		"has reported a cache of kind mamba only": {event(1, kvevent.Mamba, kvmodel.Block)},
		"":                                     {full, event(1, kvevent.Mamba, kvmodel.Block)},
		"cache group 0 has blocks of 5 tokens": {event(0, kvevent.FullAttention, kvmodel.Block+1), event(1, kvevent.Mamba, kvmodel.Block)},
	} {
		s := New(kvmodel.NewIndex(t), 0, kvmodel.Block)
		s.Offer(0, kvevent.AppendBatch(nil, &kvevent.Batch{TS: 1, Events: events}, kvevent.Encoding{Form: kvevent.VLLMMap}))
		if why := s.Mismatch(); want == "" && why != "" || !strings.Contains(why, want) {
			t.Errorf("mismatch %q, want %q", why, want)
		}
	}
}

// An engine that reports hits as stores, as vLLM does for requests that ask for it,
// seems to have ever more copies of a block; soon they are no longer counted.
func TestHitsReportedAsStores(t *testing.T) {
	t.Parallel()
	x := kvmodel.NewIndex(t)
	s := New(x, 0, kvmodel.Block)
	toks := kvmodel.Tokens(0, kvmodel.Block+1)
	locals := blockhash.Locals(nil, toks, kvmodel.Block, blockhash.Key{})
	asked := kvgroup.Prompt{Seq: blockhash.Chain(nil, locals), Tokens: len(toks)}
	var seq uint64
	offer := func(group int32, kind kvevent.CacheKind, remove bool) int {
		e := kvmodel.Stored(0, []uint64{1}, toks[:kvmodel.Block], kvmodel.Block)
		if remove {
			e = kvmodel.Removed(1)
		}
		e.Group, e.CacheKind = group, kind
		s.Offer(seq, kvevent.AppendBatch(nil, &kvevent.Batch{TS: 1 + float64(seq), Events: []kvevent.Event{e}}, kvevent.Encoding{Form: kvevent.VLLMMap}))
		seq++
		var q kvindex.Query
		x.Overlap(locals, &q)
		n, _ := s.Usable(q.Depth(0), asked)
		return n
	}
	offer(0, kvevent.FullAttention, false)
	for range 3 {
		if n := offer(1, kvevent.Mamba, false); n != 1 {
			t.Fatalf("%d blocks, want 1", n)
		}
	}
	if n := offer(1, kvevent.CacheAbsent, true); n != 1 {
		t.Errorf("one of three copies was removed: %d blocks", n)
	}
	for range 100 {
		offer(1, kvevent.Mamba, false)
	}
	if n := offer(1, kvevent.CacheAbsent, true); n != 0 {
		t.Errorf("removed, after more stores than there can be copies: %d blocks", n)
	}
}
