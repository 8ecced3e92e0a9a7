package kvstream

import (
	"encoding/json"
	"path/filepath"
	"testing"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/route"
)

// tiered is an event about another tier, without tokens if it has none.
func tiered(m kvevent.Medium, e kvevent.Event) kvevent.Event {
	e.Medium, e.MediumName = m, map[kvevent.Medium]string{kvevent.CPU: "CPU", kvevent.Disk: "STORAGE", kvevent.External: "EXTERNAL"}[m]
	return e
}

// placeholder is what vLLM's offloading connector publishes of a stored block.
func placeholder(m kvevent.Medium, names ...uint64) kvevent.Event {
	return tiered(m, kvevent.Event{Kind: kvevent.Stored, Group: -1, Hashes: names})
}

// asked is a prompt of n router blocks and one token.
func asked(n int) (kvgroup.Prompt, []uint64) {
	toks := kvmodel.Tokens(0, n*kvmodel.Block+1)
	locals := blockhash.Locals(nil, toks, kvmodel.Block, blockhash.Key{})
	return kvgroup.Prompt{Seq: blockhash.Chain(nil, locals), Tokens: len(toks)}, locals
}

// TestTiers: what an engine has outside its device counts behind the device's blocks, by
// whichever way its place becomes known, and goes when its tier loses it.
func TestTiers(t *testing.T) {
	t.Parallel()
	const bs = kvmodel.Block
	device := kvmodel.Stored(0, []uint64{1, 2, 3, 4}, kvmodel.Tokens(0, 4*bs), bs)
	type batch = []kvevent.Event
	cleared := kvevent.Event{Kind: kvevent.Cleared, Group: -1}
	for name, tt := range map[string]struct {
		batches []batch
		device  int
		want    route.Tiers
		other   uint64
	}{
		"a copy of what the device has counts nothing more": {
			batches: []batch{{device}, {placeholder(kvevent.CPU, 1, 2)}}, device: 4},
		"a removal that leaves a copy is a change of tier": {
			batches: []batch{{device}, {placeholder(kvevent.CPU, 3, 4)}, {kvmodel.Removed(4, 3)}}, device: 2, want: route.Tiers{CPU: 2}},
		"all in one batch, the removal first": {
			batches: []batch{{device}, {kvmodel.Removed(4, 3), placeholder(kvevent.CPU, 3, 4)}}, device: 2, want: route.Tiers{CPU: 2}},
		"stored on the device and elsewhere in one batch": {
			batches: []batch{{device, placeholder(kvevent.CPU, 4)}, {kvmodel.Removed(4)}}, device: 3, want: route.Tiers{CPU: 1}},
		"tiers continue each other": {
			batches: []batch{{device}, {placeholder(kvevent.Disk, 2, 4), placeholder(kvevent.CPU, 3)}, {placeholder(kvevent.External, 3)}, {kvmodel.Removed(4, 3, 2)}},
			device:  1, want: route.Tiers{CPU: 1, Disk: 2}},
		"a gap ends it, on the device, too": {
			batches: []batch{{device}, {placeholder(kvevent.CPU, 2)}, {kvmodel.Removed(3, 2)}}, device: 1, want: route.Tiers{CPU: 1}},
		"nothing is left on the device": {
			batches: []batch{{device}, {placeholder(kvevent.CPU, 1, 2)}, {kvmodel.Removed(1, 2, 3, 4)}}, want: route.Tiers{CPU: 2}},
		"the tier loses it": {
			batches: []batch{{device}, {placeholder(kvevent.CPU, 3, 4)}, {kvmodel.Removed(4, 3)}, {tiered(kvevent.CPU, kvmodel.Removed(4))}}, device: 2, want: route.Tiers{CPU: 1}},
		"a move to disk": {
			batches: []batch{{device}, {placeholder(kvevent.CPU, 4)}, {kvmodel.Removed(4)}, {tiered(kvevent.CPU, kvmodel.Removed(4)), placeholder(kvevent.Disk, 4)}}, device: 3},
		"a copy on disk before the move": {
			batches: []batch{{device}, {placeholder(kvevent.CPU, 4)}, {kvmodel.Removed(4)}, {placeholder(kvevent.Disk, 4), tiered(kvevent.CPU, kvmodel.Removed(4))}}, device: 3, want: route.Tiers{Disk: 1}},
		"with tokens, never on the device": {
			batches: []batch{{tiered(kvevent.CPU, kvmodel.Stored(0, []uint64{1, 2}, kvmodel.Tokens(0, 2*bs), bs))}, {tiered(kvevent.CPU, kvmodel.Stored(2, []uint64{3}, kvmodel.Tokens(2*bs, bs), bs))}},
			want:    route.Tiers{CPU: 3}},
		"with tokens, behind a block of the same batch": {
			batches: []batch{{tiered(kvevent.CPU, kvmodel.Stored(0, []uint64{1, 2}, kvmodel.Tokens(0, 2*bs), bs)), tiered(kvevent.Disk, kvmodel.Stored(2, []uint64{3}, kvmodel.Tokens(2*bs, bs), bs))}},
			want:    route.Tiers{CPU: 2, Disk: 1}},
		"with tokens behind a block of the device": {
			batches: []batch{{kvmodel.Stored(0, []uint64{1}, kvmodel.Tokens(0, bs), bs)}, {tiered(kvevent.External, kvmodel.Stored(1, []uint64{2}, kvmodel.Tokens(bs, bs), bs))}},
			device:  1, want: route.Tiers{Remote: 1}},
		"a name that nobody knows counts when the device has had it": {
			batches: []batch{{placeholder(kvevent.CPU, 2, 1)}, {device}, {kvmodel.Removed(4, 3, 2, 1)}}, want: route.Tiers{CPU: 2}},
		"a name that nobody knows": {batches: []batch{{placeholder(kvevent.CPU, 1, 2)}}},
		"larger blocks of a tier, the first of them on the device in part": {
			batches: []batch{{device}, {with(placeholder(kvevent.CPU, 2, 4), func(e *kvevent.Event) { e.BlockSize = 2 * bs })}, {kvmodel.Removed(4, 3, 2)}},
			device:  1, want: route.Tiers{CPU: 3}},
		"nothing shorter than a tier's block is loaded": {
			batches: []batch{{device}, {with(placeholder(kvevent.CPU, 4), func(e *kvevent.Event) { e.BlockSize = 2 * bs })}, {kvmodel.Removed(4)}}, device: 3},
		"blocks of others are remote": {
			batches: []batch{{device}, {with(placeholder(kvevent.CPU, 4), func(e *kvevent.Event) { e.Locality = kvevent.Remote })}, {kvmodel.Removed(4)}},
			device:  3, want: route.Tiers{Remote: 1}},
		"a clearing of the device leaves the host": {
			batches: []batch{{device}, {placeholder(kvevent.CPU, 1)}, {with(cleared, func(e *kvevent.Event) { e.MediumName = "GPU" })}}, want: route.Tiers{CPU: 1}},
		"a clearing of the host leaves the disk": {
			batches: []batch{{device}, {placeholder(kvevent.CPU, 1), placeholder(kvevent.Disk, 1)}, {kvmodel.Removed(1), tiered(kvevent.CPU, cleared)}}, want: route.Tiers{Disk: 1}},
		"a clearing without a medium is of all": {
			batches: []batch{{device}, {placeholder(kvevent.CPU, 1)}, {cleared}}},
		"a medium that nobody knows": {
			batches: []batch{{device}, {with(placeholder(kvevent.OtherMedium, 4), func(e *kvevent.Event) { e.MediumName = "TAPE" })}, {kvmodel.Removed(4)}}, device: 3, other: 1},
		"a hybrid model": {
			batches: []batch{{device}, {placeholder(kvevent.CPU, 4)}, {kvmodel.Removed(4)}, {
				with(kvmodel.Stored(0, []uint64{1}, kvmodel.Tokens(0, bs), bs), func(e *kvevent.Event) { e.Group, e.CacheKind, e.SlidingWindow = 1, kvevent.SlidingWindow, 8 }),
				with(placeholder(kvevent.CPU, 1), func(e *kvevent.Event) { e.Group = 1 }),
			}}, device: 1, other: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			x := kvmodel.NewIndexOf(t)
			defer x.Close()
			s := New(x, 0, kvmodel.Block)
			p, locals := asked(8)
			var n int
			var beyond route.Tiers
			for i := range tt.batches {
				payload := kvevent.AppendBatch(nil, &kvevent.Batch{TS: 1e9 + float64(i), Events: tt.batches[i]}, kvevent.Encoding{Form: kvevent.VLLMMap})
				if v := s.Offer(uint64(i), payload); v.Kind != Apply || s.Counters().Skipped > 0 {
					t.Fatalf("batch %d: %v, %+v", i, v, s.Counters())
				}
				var q kvindex.Query
				x.Overlap(locals, &q)
				n, beyond = s.Usable(q.Depth(0), p)
			}
			if n != tt.device || beyond != tt.want || s.Counters().OtherTier != tt.other {
				t.Errorf("%d blocks on the device, then %+v, %d events set aside; want %d, %+v, %d", n, beyond, s.Counters().OtherTier, tt.device, tt.want, tt.other)
			}
			s.Skip(1 << 20) // batches are lost: removals among them
			for _, emptied := range []string{"once", "since its publisher started over"} {
				left, known, hybrid := s.Tiers(), s.TiersReported(), s.app.groups != nil
				if left != (route.Tiers{}) || known == hybrid {
					t.Errorf("%+v left of a rank that was emptied %s, known: %t, hybrid: %t", left, emptied, known, hybrid)
				}
				if !hybrid {
					s.Reset()
				}
			}
		})
	}
}

// tierModel is a naive account of a rank with one prompt's blocks, named from 1 on.
type tierModel struct {
	device [17]bool
	in     [3][17]bool
	placed [17]bool
}

func (m *tierModel) somewhere(b int) bool { return m.in[0][b] || m.in[1][b] || m.in[2][b] }

// take does what an event says to blocks from to to, on the device where tier is -1.
func (m *tierModel) take(kind kvevent.Kind, tier, from, to int, withTokens bool) {
	switch {
	case kind == kvevent.Cleared && tier < 0:
		*m = tierModel{}
		return
	case kind == kvevent.Cleared:
		m.in[tier] = [17]bool{}
	case kind == kvevent.Removed && tier < 0:
		for b := from; b <= to; b++ {
			m.device[b] = false
		}
	case kind == kvevent.Removed:
		for b := from; b <= to; b++ {
			m.in[tier][b] = false
		}
	case tier < 0:
		if from > 1 && !m.device[from-1] {
			return // an orphan
		}
		for b := from; b <= to; b++ {
			m.device[b] = true
			m.placed[b] = m.somewhere(b)
		}
	default:
		known := withTokens && (from == 1 || m.device[from-1] || m.placed[from-1])
		for b := from; b <= to; b++ {
			m.in[tier][b] = true
			m.placed[b] = m.placed[b] || known || m.device[b]
		}
	}
	for b := range m.placed {
		m.placed[b] = m.placed[b] && m.somewhere(b)
	}
}

func (m *tierModel) usable() (n int, beyond route.Tiers) {
	for n < 16 && m.device[n+1] {
		n++
	}
	for b := n + 1; b <= 16 && m.placed[b]; b++ {
		switch {
		case m.in[0][b]:
			beyond.CPU++
		case m.in[1][b]:
			beyond.Disk++
		default:
			beyond.Remote++
		}
	}
	return n, beyond
}

// FuzzTiers: whatever a rank reports of its tiers, one event a batch, its usable prefix
// is that of a naive model, device and tiers alike.
func FuzzTiers(f *testing.F) {
	f.Add([]byte{0, 0xf0, 5, 0x30, 1, 0x73, 5, 0x31, 2, 0x10})
	f.Add([]byte{4, 0x21, 8, 0x33, 0, 0x20, 1, 0x51, 12, 0x70, 13, 0x11})
	f.Add([]byte{16, 0x20, 16, 0x23, 0, 0x30, 6, 0x20, 1, 0x30, 2, 0})
	x := newIndex(f, kvindex.Options{MaxBlocks: 1 << 12})
	p, locals := asked(16)
	f.Fuzz(func(t *testing.T, program []byte) {
		x.ClearRank(0)
		s := New(x, 0, kvmodel.Block)
		var m tierModel
		var q kvindex.Query
		for i := 0; i+1 < len(program) && i < 256; i += 2 {
			kind := [...]kvevent.Kind{kvevent.Stored, kvevent.Removed, kvevent.Cleared, kvevent.Stored}[program[i]&3]
			tier, withTokens := int(program[i]>>2&3)-1, program[i]&16 != 0
			from := 1 + int(program[i+1]&15)
			to := min(16, from+int(program[i+1]>>4))
			e := kvevent.Event{Kind: kind, Group: -1}
			if kind != kvevent.Cleared {
				for b := from; b <= to; b++ {
					e.Hashes = append(e.Hashes, uint64(b))
				}
			}
			if kind == kvevent.Stored && (tier < 0 || withTokens) {
				e = kvmodel.Stored(uint64(from-1), e.Hashes, kvmodel.Tokens((from-1)*kvmodel.Block, len(e.Hashes)*kvmodel.Block), kvmodel.Block)
			}
			if tier >= 0 {
				e = tiered([...]kvevent.Medium{kvevent.CPU, kvevent.Disk, kvevent.External}[tier], e)
			}
			payload := kvevent.AppendBatch(nil, &kvevent.Batch{TS: 1e9 + float64(i), Events: []kvevent.Event{e}}, kvevent.Encoding{Form: kvevent.VLLMMap})
			if v := s.Offer(uint64(i/2), payload); v.Kind != Apply || s.Counters().Skipped+s.Counters().Unreadable > 0 {
				t.Fatalf("event %d: %v, %+v", i/2, v, s.Counters())
			}
			m.take(kind, tier, from, to, withTokens)
			x.Overlap(locals, &q)
			n, beyond := s.Usable(q.Depth(0), p)
			if wantN, want := m.usable(); n != wantN || beyond != want {
				t.Fatalf("event %d %+v: %d blocks on the device, then %+v; want %d, %+v", i/2, e, n, beyond, wantN, want)
			}
			var held route.Tiers
			for b := 1; b <= 16; b++ {
				for tier, at := range [...]*uint32{&held.CPU, &held.Disk, &held.Remote} {
					if m.in[tier][b] {
						*at++
					}
				}
			}
			if got := s.Tiers(); got != held {
				t.Fatalf("event %d %+v: tiers hold %+v, want %+v", i/2, e, got, held)
			}
		}
	})
}

// TestTiersAsVLLM plays what vLLM's cache manager and its offloading to the host's memory
// published (testdata/tiers/record.py): what they then find of a prompt, on the device
// and behind that in the host's memory, is what the rank is taken to have, in every
// request, also where the router restarts after every fifth batch and goes on from its
// snapshot. Where the engine drafts (--eagle), it is that of the host's memory less one block
// if the drafter has no cache group of its own.
func TestTiersAsVLLM(t *testing.T) {
	t.Parallel()
	for name, every := range map[string]uint64{"in one life": 0, "over restarts": 5} {
		t.Run(name, func(t *testing.T) { tiersAsVLLM(t, every) })
	}
}

func tiersAsVLLM(t *testing.T, every uint64) {
	t.Parallel()
	files, err := filepath.Glob(filepath.Join("..", "..", "..", "..", "testdata", "tiers", "*.jsonl.gz"))
	if err != nil || len(files) < 3 {
		t.Fatalf("%d recordings, %v", len(files), err)
	}
	for _, name := range files {
		t.Run(filepath.Base(name), func(t *testing.T) {
			t.Parallel()
			const size = 16
			x := kvmodel.NewIndexOf(t)
			defer x.Close()
			s := New(x, 0, size)
			var q kvindex.Query
			asked, warm, mixed, restarts, eagle := 0, 0, 0, 0, ""
			linesOf(t, name, func(line []byte) {
				var l struct {
					Type           string
					Eagle          string
					ID             string
					Seq            uint64
					Payload        []byte
					Tokens         []uint32
					Cached, Beyond int
				}
				if err := json.Unmarshal(line, &l); err != nil {
					t.Fatal(err)
				}
				switch l.Type {
				case "header":
					eagle = l.Eagle
					s.Know(kvgroup.Traits{Drops: eagle != ""})
				case "batch":
					if v := s.Offer(l.Seq, l.Payload); v.Kind != Apply || s.Counters().Skipped+s.Counters().Unreadable+s.Counters().OtherTier > 0 {
						t.Fatalf("batch %d: %v, %+v", l.Seq, v, s.Counters())
					}
					if every > 0 && l.Seq%every == 0 {
						was, reported := s.Tiers(), s.TiersReported()
						if x, s = restarted(t, x, s); s == nil || s.Tiers() != was || s.TiersReported() != reported {
							t.Fatalf("after batch %d a restart leaves other tiers than %+v", l.Seq, was)
						}
						restarts++
					}
				case "request":
					locals := blockhash.Locals(nil, l.Tokens, size, blockhash.Key{})
					x.Overlap(locals, &q)
					n, beyond := s.Usable(q.Depth(0), kvgroup.Prompt{Seq: blockhash.Chain(nil, locals), Tokens: len(l.Tokens)})
					n = min(n, (len(l.Tokens)-1)/size) // the last token is computed in any case
					if eagle == "merged" && int(beyond.CPU) == l.Beyond-1 {
						beyond.CPU++ // of such a drafter the connector drops no block
					}
					if want := (route.Tiers{CPU: uint32(l.Beyond)}); n*size != l.Cached || beyond != want {
						t.Fatalf("%s: %d tokens on the device, then %+v; vLLM found %d, then %d blocks", l.ID, n*size, beyond, l.Cached, l.Beyond)
					}
					asked++
					if l.Beyond > 0 {
						warm++
					}
					if l.Cached > 0 && l.Beyond > 0 {
						mixed++
					}
				}
			})
			if every > 0 && restarts < 10 {
				t.Errorf("%d restarts", restarts)
			}
			if asked < 100 || warm < 10 || mixed < 1 {
				t.Errorf("%d requests, %d of them in the host's memory, %d on both", asked, warm, mixed)
			}
		})
	}
}

// TestTiersKeptElsewhere: an account of tiers in a form that is not known leaves the tiers
// empty and the device as it was; a hybrid rank keeps none.
func TestTiersKeptElsewhere(t *testing.T) {
	t.Parallel()
	x := kvmodel.NewIndexOf(t)
	defer x.Close()
	s := New(x, 0, kvmodel.Block)
	for i, e := range []kvevent.Event{
		kvmodel.Stored(0, []uint64{1, 2}, kvmodel.Tokens(0, 2*kvmodel.Block), kvmodel.Block), placeholder(kvevent.CPU, 1, 2), kvmodel.Removed(2),
	} {
		s.Offer(uint64(i), kvevent.AppendBatch(nil, &kvevent.Batch{TS: 1e9 + float64(i), Events: []kvevent.Event{e}}, kvevent.Encoding{Form: kvevent.VLLMMap}))
	}
	was, ok := s.Position()
	if !ok || len(was.Tiers) == 0 {
		t.Fatalf("%+v, %t", was, ok)
	}
	p, locals := asked(4)
	var q kvindex.Query
	x.Overlap(locals, &q)
	for name, tt := range map[string]struct {
		kept []byte
		want route.Tiers
	}{
		"as it was":            {was.Tiers, route.Tiers{CPU: 1}},
		"of a router before":   {nil, route.Tiers{}},
		"of another version":   {append([]byte{was.Tiers[0] + 1}, was.Tiers[1:]...), route.Tiers{}},
		"of a file that lacks": {was.Tiers[:len(was.Tiers)-1], route.Tiers{}},
	} {
		again, from := New(x, 0, kvmodel.Block), was
		from.Tiers = tt.kept
		again.Resume(from)
		if n, beyond := again.Usable(q.Depth(0), p); n != 1 || beyond != tt.want {
			t.Errorf("%s: %d blocks on the device, then %+v; want 1, %+v", name, n, beyond, tt.want)
		}
	}
}
