package kvstream

import (
	"encoding/json"
	"testing"

	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
)

// Whatever bytes come, a stream neither fails nor keeps what it cannot know.
func FuzzStream(f *testing.F) {
	e := kvmodel.New(40, 2)
	for range 6 {
		e.Step()
	}
	for i, p := range e.Log {
		f.Add(uint64(i), p, uint64(i)+1, e.Log[0])
	}
	f.Add(uint64(0), []byte("\x93"), uint64(1<<63), []byte{})
	x := newIndex(f, kvindex.Options{MaxBlocks: 1 << 16})
	f.Fuzz(func(t *testing.T, seq1 uint64, p1 []byte, seq2 uint64, p2 []byte) {
		s := New(x, 0, kvmodel.Block)
		x.ClearRank(0)
		for _, b := range []struct {
			seq     uint64
			payload []byte
		}{{0, e.Log[0]}, {1, e.Log[1]}, {seq1, p1}, {seq2, p2}, {2, e.Log[2]}} {
			before := s.Counters().Batches
			v := s.Offer(b.seq, b.payload)
			if v.Kind == Gap {
				s.Skip(b.seq)
				if v = s.Offer(b.seq, b.payload); v.Kind != Apply {
					t.Fatalf("batch %d after a skip to it is %v", b.seq, v.Kind)
				}
			}
			if (v.Kind == Apply) != (s.Counters().Batches == before+1) {
				t.Fatalf("verdict %v, %d batches after %d", v.Kind, s.Counters().Batches, before)
			}
			if s.TakeFault() != "" && s.Mismatch() == "" && len(kvmodel.Holds(t, x)) != 0 {
				t.Fatal("entries survived a fault")
			}
		}
		s.Reset()
		if n := len(kvmodel.Holds(t, x)); n != 0 {
			t.Fatalf("%d blocks survived a reset", n)
		}
	})
}

// A position that another router made up harms no stream that continues there.
func FuzzResume(f *testing.F) {
	e := kvmodel.New(40, 2)
	for range 6 {
		e.Step()
	}
	x := newIndex(f, kvindex.Options{MaxBlocks: 1 << 16})
	s := New(x, 0, kvmodel.Block)
	for i, p := range e.Log[:3] {
		s.Offer(uint64(i), p)
	}
	at, _ := s.Position()
	good, err := json.Marshal(at)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"seq":18446744073709551615,"engine_block_tokens":4,"parts":1}`))
	f.Add([]byte(`{"seq":1,"engine_block_tokens":4,"parts":-3,"lookahead_tokens":-1}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		var p Position
		if json.Unmarshal(raw, &p) != nil {
			return
		}
		x.ClearRank(0)
		s := New(x, 0, kvmodel.Block)
		s.Resume(p)
		prompt := kvgroup.Prompt{Tokens: 64, Block: kvmodel.Block, Seq: []uint64{1, 2, 3}}
		for _, b := range e.Log[3:] {
			s.Offer(s.Next(), b)
			if n, _ := s.Usable(3, prompt); n < 0 || n > 3 {
				t.Fatalf("%d of 3 blocks are usable", n)
			}
		}
		if _, ok := s.Position(); ok {
			s.Reset()
		}
	})
}
