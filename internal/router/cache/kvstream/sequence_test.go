package kvstream

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
)

func TestSequenceObserve(t *testing.T) {
	t.Parallel()
	type step struct {
		seq, stamp uint64
		want       Verdict
		skip       bool // accept the batch after a gap
		reset      bool // start over after a restart
	}
	ok := Verdict{Kind: Apply}
	tests := map[string][]step{
		"from the beginning": {{seq: 0, stamp: 1, want: ok}, {seq: 1, stamp: 2, want: ok}},
		"joined midway": {
			{seq: 5, stamp: 1, want: Verdict{Gap, 0, 4}, skip: true},
			{seq: 6, stamp: 2, want: ok},
		},
		"gap": {
			{seq: 0, stamp: 1, want: ok},
			{seq: 3, stamp: 4, want: Verdict{Gap, 1, 2}},
			{seq: 1, stamp: 2, want: ok},
			{seq: 2, stamp: 3, want: ok},
			{seq: 3, stamp: 4, want: ok},
		},
		"repetition": {
			{seq: 0, stamp: 1, want: ok},
			{seq: 1, stamp: 2, want: ok},
			{seq: 1, stamp: 2, want: Verdict{Kind: Duplicate}},
			{seq: 0, stamp: 1, want: Verdict{Kind: Duplicate}},
			{seq: 2, stamp: 3, want: ok},
		},
		"restart": {
			{seq: 0, stamp: 1, want: ok},
			{seq: 1, stamp: 2, want: ok},
			{seq: 0, stamp: 9, want: Verdict{Kind: Restart}, reset: true},
			{seq: 0, stamp: 9, want: ok},
			{seq: 1, stamp: 10, want: ok},
		},
		"nothing is known before a skip": {
			{seq: 9, stamp: 1, want: Verdict{Gap, 0, 8}, skip: true},
			{seq: 8, stamp: 0, want: Verdict{Kind: Restart}},
			{seq: 9, stamp: 1, want: Verdict{Kind: Duplicate}},
		},
	}
	for name, steps := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s Sequence
			for i, st := range steps {
				got := s.Observe(st.seq, st.stamp)
				if d := cmp.Diff(st.want, got); d != "" {
					t.Fatalf("step %d, batch %d (-want +got):\n%s", i, st.seq, d)
				}
				if st.skip {
					s.Skip(st.seq)
					if got := s.Observe(st.seq, st.stamp); got != ok {
						t.Fatalf("step %d: after Skip %v", i, got)
					}
				}
				if st.reset {
					s.Reset()
				}
			}
		})
	}
}

func TestSequenceLast(t *testing.T) {
	t.Parallel()
	var s Sequence
	if seq, ok := s.Last(); ok {
		t.Fatalf("a new sequence has a last batch %d", seq)
	}
	s.Observe(0, 7)
	if seq, ok := s.Last(); !ok || seq != 0 {
		t.Fatalf("last is %d, %v; want 0, true", seq, ok)
	}
	s.Resume(41, 5)
	if v := s.Observe(41, 5); v.Kind != Duplicate {
		t.Fatalf("the batch resumed from is %v, want a duplicate", v.Kind)
	}
	if v := s.Observe(41, 6); v.Kind != Restart {
		t.Fatalf("another batch under the number resumed from is %v, want a restart", v.Kind)
	}
	if v := s.Observe(42, 8); v.Kind != Apply {
		t.Fatalf("the next batch is %v", v.Kind)
	}
}

func TestStamp(t *testing.T) {
	t.Parallel()
	seen := map[uint64]string{}
	for n := range 130 {
		p := make([]byte, n)
		for i := -1; i < min(n, 64); i++ {
			if i >= 0 {
				p[i] = 1
			}
			name := fmt.Sprintf("%d bytes, byte %d set", n, i)
			if by, ok := seen[Stamp(p)]; ok {
				t.Errorf("%s has the stamp of %s", name, by)
			}
			seen[Stamp(p)] = name
			if i >= 0 {
				p[i] = 0
			}
		}
	}
}

// Whatever arrives, the batches that Observe accepts are consecutive.
func TestSequenceAcceptsInOrder(t *testing.T) {
	t.Parallel()
	property.Check(t, func(t *rapid.T) {
		var s Sequence
		var applied []uint64
		for range rapid.IntRange(1, 200).Draw(t, "n") {
			seq := rapid.Uint64Range(0, 12).Draw(t, "seq")
			switch v := s.Observe(seq, seq); v.Kind {
			case Apply:
				applied = append(applied, seq)
			case Gap:
				if v.From != uint64(len(applied)) || v.To != seq-1 {
					t.Fatalf("gap %d to %d after %d batches and at batch %d", v.From, v.To, len(applied), seq)
				}
			case Duplicate:
				if seq >= uint64(len(applied)) {
					t.Fatalf("batch %d called a duplicate of %d batches", seq, len(applied))
				}
			case Restart:
				t.Fatalf("repetition of batch %d called a restart", seq)
			}
		}
		for i, seq := range applied {
			if seq != uint64(i) {
				t.Fatalf("applied %v", applied)
			}
		}
	})
}
