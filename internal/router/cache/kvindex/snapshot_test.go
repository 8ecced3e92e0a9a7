package kvindex

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/blockhash"
)

// scramble fills an index and a model with the same random history: three ranks, two of which use the
// same names, with gaps in the middle of chains.
func scramble(t testing.TB, x *Index, seed uint64, steps int) (*model, [][]uint64) {
	t.Helper()
	m := newModel(1 << 40)
	groups := []uint64{1, 1, 2}
	for r := range groups {
		name := fmt.Sprint("rank-", r)
		if err := x.AddRank(Rank(r), name); err != nil {
			t.Fatal(err)
		}
		m.add(Rank(r), name)
	}
	rnd := rand.New(rand.NewPCG(seed, 1))
	var prompts [][]uint64
	for range steps {
		var p []uint64
		if len(prompts) > 0 && rnd.IntN(4) > 0 {
			p = prompts[rnd.IntN(len(prompts))]
			p = p[: 1+rnd.IntN(len(p)) : len(p)]
			p = p[:len(p):len(p)]
		}
		for range rnd.IntN(60) + 1 {
			p = append(p, rnd.Uint64N(1000))
		}
		prompts = append(prompts, p)
		r := rnd.IntN(len(groups))
		seq := blockhash.Chain(nil, p)
		names := make([]uint64, len(seq))
		for i, s := range seq {
			names[i] = nameOf(groups[r], s, false)
		}
		var b Batch
		b.Store(0, false, names, p)
		if rnd.IntN(2) == 0 {
			b.Remove(names[rnd.IntN(len(names)):]...)
		}
		if rnd.IntN(3) == 0 {
			at := rnd.IntN(len(names))
			b.Remove(names[at])
		}
		if d := cmp.Diff(m.apply(Rank(r), &b), x.Apply(Rank(r), &b)); d != "" {
			t.Fatalf("result (-want +got):\n%s", d)
		}
	}
	return m, prompts
}

// whole and unnoted keep every rank and note nothing.
func whole(_ Rank, _ string, take func()) []byte { take(); return nil }

func unnoted(Rank, string, []byte) error { return nil }

func TestSnapshot(t *testing.T) {
	t.Parallel()
	x := New(Options{MaxRanks: 8})
	defer x.Close()
	m, prompts := scramble(t, x, 1, 150)
	var b Batch
	b.Store(99, true, []uint64{1}, []uint64{1}) // rank 2 loses trust
	m.apply(2, &b)
	x.Apply(2, &b)
	compare(t, x, m, prompts)

	var file bytes.Buffer
	if err := x.Snapshot(&file, whole); err != nil {
		t.Fatal(err)
	}
	y := New(Options{MaxRanks: 8})
	defer y.Close()
	if err := y.Restore(bytes.NewReader(file.Bytes()), unnoted); err != nil {
		t.Fatal(err)
	}
	compare(t, y, m, prompts)
	if x.Checksum() != y.Checksum() || x.Checksum() == 0 {
		t.Errorf("checksums %x before and %x after", x.Checksum(), y.Checksum())
	}
	if err := y.Restore(bytes.NewReader(file.Bytes()), unnoted); !errors.Is(err, ErrNotEmpty) {
		t.Errorf("restore into a full index: %v, want ErrNotEmpty", err)
	}
	// Names came along: a removal that comes after the restart finds its block.
	b.Reset()
	for _, n := range m.ranks[1].held {
		b.Remove(n)
	}
	if res := y.Apply(1, &b); res.Removed != len(m.ranks[1].held) || res.Unknown != 0 {
		t.Errorf("removals after restore: %+v, want %d removed", res, len(m.ranks[1].held))
	}

	// Every cut and every flipped byte is refused, and leaves nothing behind.
	z := New(Options{MaxRanks: 8})
	defer z.Close()
	step := file.Len()/150 + 1
	for n := 0; n < file.Len(); n += step {
		flipped := bytes.Clone(file.Bytes())
		flipped[n] ^= 0x10
		for what, data := range map[string][]byte{"cut": file.Bytes()[:n], "flipped": flipped} {
			if err := z.Restore(bytes.NewReader(data), unnoted); !errors.Is(err, ErrSnapshot) {
				t.Fatalf("%s at byte %d of %d: %v, want ErrSnapshot", what, n, file.Len(), err)
			}
			if s := z.Stats(); s.Ranks != 0 || s.Memberships != 0 || s.Blocks != 0 {
				t.Fatalf("%s at byte %d left %+v", what, n, s)
			}
		}
	}
	if err := z.Restore(bytes.NewReader(append(bytes.Clone(file.Bytes()), 0)), unnoted); !errors.Is(err, ErrSnapshot) {
		t.Errorf("data after the end: %v, want ErrSnapshot", err)
	}
	small := New(Options{MaxRanks: 8, MaxBlocks: 10})
	defer small.Close()
	if err := small.Restore(bytes.NewReader(file.Bytes()), unnoted); !errors.Is(err, ErrSnapshot) {
		t.Errorf("restore beyond MaxBlocks: %v, want ErrSnapshot", err)
	}
	few := New(Options{MaxRanks: 1})
	defer few.Close()
	if err := few.Restore(bytes.NewReader(file.Bytes()), unnoted); !errors.Is(err, ErrSnapshot) {
		t.Errorf("restore beyond MaxRanks: %v, want ErrSnapshot", err)
	}
	if err := x.Snapshot(failing{}, whole); err == nil {
		t.Error("writer that fails: no error")
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, errors.New("disk full") }

// TestSnapshotKeepsCopiesAndNotes: what was taken with a rank comes back with
// it, and so do the copies of its blocks, so that the same removals lead to the
// same index as without a restart; a rank that was not taken is left out.
func TestSnapshotKeepsCopiesAndNotes(t *testing.T) {
	t.Parallel()
	x := New(Options{MaxRanks: 8})
	defer x.Close()
	names, locals := []uint64{11, 12, 13}, []uint64{1, 2, 3}
	var b Batch
	for r, times := range []int{3, 1, maxCopy + 2} {
		if err := x.AddRank(Rank(r), fmt.Sprint("rank-", r)); err != nil {
			t.Fatal(err)
		}
		for range times {
			b.Reset()
			b.StoreCopies(0, false, names, locals)
			x.Apply(Rank(r), &b)
		}
	}
	b.Reset()
	b.Remove(12, 12, 12)
	b.StoreCopies(12, true, names[2:], locals[2:]) // an orphan, so that its copy must not come along either
	x.Apply(0, &b)
	var file bytes.Buffer
	if err := x.Snapshot(&file, func(r Rank, name string, take func()) []byte {
		if r != 1 {
			take()
		}
		return []byte("note of " + name)
	}); err != nil {
		t.Fatal(err)
	}
	y := New(Options{MaxRanks: 8})
	defer y.Close()
	notes := map[Rank]string{}
	if err := y.Restore(&file, func(r Rank, name string, note []byte) error {
		notes[r] = name + ": " + string(note)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(map[Rank]string{0: "rank-0: note of rank-0", 2: "rank-2: note of rank-2"}, notes); d != "" {
		t.Errorf("notes (-want +got):\n%s", d)
	}
	if _, ok := y.RankStats(1); ok {
		t.Error("a rank that was not taken came back")
	}
	for round := range 4 {
		for _, r := range []Rank{0, 2} {
			b.Reset()
			b.Remove(13, 11)
			if round == 1 {
				b.StoreCopies(0, false, names, locals)
			}
			if d := cmp.Diff(x.Apply(r, &b), y.Apply(r, &b)); d != "" {
				t.Errorf("rank %d, round %d (-stopped never +restored):\n%s", r, round, d)
			}
			was, _ := x.RankStats(r)
			now, _ := y.RankStats(r)
			if was.Blocks != now.Blocks || was.Copies != now.Copies || x.RankChecksum(r) != y.RankChecksum(r) {
				t.Errorf("rank %d, round %d: %d blocks and %d copies, restored %d and %d", r, round, was.Blocks, was.Copies, now.Blocks, now.Copies)
			}
		}
	}
	if err := y.Restore(&file, unnoted); !errors.Is(err, ErrNotEmpty) {
		t.Errorf("restore into a full index: %v", err)
	}
	file.Reset()
	if err := x.Snapshot(&file, whole); err != nil {
		t.Fatal(err)
	}
	z := New(Options{MaxRanks: 8})
	defer z.Close()
	refused := errors.New("not this one")
	if err := z.Restore(&file, func(Rank, string, []byte) error { return refused }); !errors.Is(err, refused) || z.Stats().Ranks != 0 {
		t.Errorf("a note that is refused: %v, %+v", err, z.Stats())
	}
	if err := x.Snapshot(&file, func(_ Rank, _ string, take func()) []byte { take(); return make([]byte, MaxNote+1) }); err == nil {
		t.Error("a note beyond the limit was written")
	}
	for _, n := range []int{0, snapHead, snapHead + 1, snapHead + snapFrame, 3 * snapFrame} {
		file.Reset()
		note := bytes.Repeat([]byte("0123456"), n/7+1)[:n]
		if err := x.Snapshot(&file, func(_ Rank, _ string, take func()) []byte { take(); return note }); err != nil {
			t.Fatal(err)
		}
		long := New(Options{MaxRanks: 8})
		noted := 0
		if err := long.Restore(&file, func(_ Rank, _ string, got []byte) error {
			if noted++; !bytes.Equal(got, note) {
				t.Errorf("of a note of %d bytes %d came back, or others", n, len(got))
			}
			return nil
		}); err != nil || noted != x.Stats().Ranks {
			t.Errorf("notes of %d bytes: %v, notes of %d of %d ranks", n, err, noted, x.Stats().Ranks)
		}
		_ = long.Close()
	}
}

// TestSnapshotWhileRanksAreReplaced: a rank that is removed between the look at it and its copy is not
// copied: what the note says is of the other, of the same slot and name.
func TestSnapshotWhileRanksAreReplaced(t *testing.T) {
	t.Parallel()
	x := New(Options{MaxRanks: 8})
	defer x.Close()
	for r := range Rank(3) {
		if err := x.AddRank(r, fmt.Sprint("rank-", r)); err != nil {
			t.Fatal(err)
		}
		var b Batch
		b.Store(0, false, []uint64{11}, []uint64{1})
		x.Apply(r, &b)
	}
	var file bytes.Buffer
	if err := x.Snapshot(&file, func(r Rank, name string, take func()) []byte {
		switch r {
		case 1:
			x.RemoveRank(r)
		case 2:
			x.RemoveRank(r)
			if err := x.AddRank(r, name); err != nil {
				t.Error(err)
			}
		}
		take()
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	y := New(Options{MaxRanks: 8})
	defer y.Close()
	if err := y.Restore(&file, unnoted); err != nil {
		t.Fatal(err)
	}
	if k, ok := y.RankStats(0); !ok || k.Blocks != 1 || y.Stats().Ranks != 1 {
		t.Errorf("rank 0 %v %+v, %d ranks", ok, k, y.Stats().Ranks)
	}
}

// TestRestoreRank: one rank comes back in another slot under its name there, beside others; a
// snapshot of several ranks, of none, or a broken one leaves it empty, and the others as they were.
func TestRestoreRank(t *testing.T) {
	t.Parallel()
	x := New(Options{MaxRanks: 8})
	defer x.Close()
	scramble(t, x, 3, 60)
	only := func(r Rank) []byte {
		var file bytes.Buffer
		if err := x.Snapshot(&file, func(k Rank, _ string, take func()) []byte {
			if k == r {
				take()
			}
			return []byte("note")
		}); err != nil {
			t.Fatal(err)
		}
		return file.Bytes()
	}
	y := New(Options{MaxRanks: 8})
	defer y.Close()
	scramble(t, y, 4, 60)
	if err := y.AddRank(7, "seven"); err != nil {
		t.Fatal(err)
	}
	before := y.Checksum()
	var all bytes.Buffer
	if err := x.Snapshot(&all, whole); err != nil {
		t.Fatal(err)
	}
	file := only(1)
	accept := func([]byte) error { return nil }
	refused := errors.New("not this one")
	for what, c := range map[string]struct {
		file []byte
		note func([]byte) error
		want error
	}{
		"all ranks": {all.Bytes(), accept, ErrSnapshot}, "no rank": {only(6), accept, ErrSnapshot}, "cut": {file[:len(file)-3], accept, ErrSnapshot},
		"its note": {file, func([]byte) error { return refused }, refused},
	} {
		if err := y.RestoreRank(bytes.NewReader(c.file), 7, c.note); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", what, err)
		}
		if s, _ := y.RankStats(7); s.Blocks != 0 || y.Checksum() != before {
			t.Errorf("%s left %d blocks", what, s.Blocks)
		}
	}
	got := ""
	if err := y.RestoreRank(bytes.NewReader(file), 7, func(note []byte) error { got = string(note); return nil }); err != nil || got != "note" {
		t.Fatalf("note %q, %v", got, err)
	}
	was, _ := x.RankStats(1)
	now, _ := y.RankStats(7)
	if y.RankChecksum(7) != x.RankChecksum(1) || was.Blocks == 0 || now.Blocks != was.Blocks || now.Name != "seven" {
		t.Errorf("%+v, want the blocks of %+v", now, was)
	}
	checkTree(t, y)
	for _, r := range []Rank{7, 6} {
		if err := y.RestoreRank(bytes.NewReader(file), r, accept); !errors.Is(err, ErrNotEmpty) {
			t.Errorf("slot %d: %v", r, err)
		}
	}
}

func TestSnapshotOfNothing(t *testing.T) {
	t.Parallel()
	x := New(Options{})
	defer x.Close()
	var file bytes.Buffer
	if err := x.Snapshot(&file, whole); err != nil {
		t.Fatal(err)
	}
	if err := x.Restore(&file, unnoted); err != nil {
		t.Fatal(err)
	}
}

func FuzzRestore(f *testing.F) {
	x := New(Options{MaxRanks: 8})
	scramble(f, x, 2, 3)
	for range 2 {
		var b Batch
		b.StoreCopies(0, false, []uint64{7, 8}, []uint64{1, 2})
		x.Apply(0, &b)
	}
	var file bytes.Buffer
	if err := x.Snapshot(&file, whole); err != nil {
		f.Fatal(err)
	}
	x.Close()
	f.Add(file.Bytes())
	f.Add([]byte(snapMagic))
	y := New(Options{MaxRanks: 8, MaxBlocks: 10000})
	f.Fuzz(func(t *testing.T, data []byte) {
		// Most mutations die at a checksum, so another copy gets its checksums mended.
		for _, d := range [][]byte{data, mend(data)} {
			err := y.Restore(bytes.NewReader(d), unnoted)
			if err != nil && !errors.Is(err, ErrSnapshot) {
				t.Fatalf("error is not ErrSnapshot: %v", err)
			}
			if s := y.Stats(); err != nil && (s.Ranks != 0 || s.Memberships != 0 || s.Blocks != 0) {
				t.Fatalf("refused snapshot left %+v", s)
			}
			checkTree(t, y)
			for _, r := range y.Ranks() {
				y.RemoveRank(r.Rank)
			}
		}
	})
}

// mend recomputes the checksums of all whole frames.
func mend(data []byte) []byte {
	if len(data) < len(snapMagic) {
		return data
	}
	out := bytes.Clone(data[:len(snapMagic)])
	rest := data[len(snapMagic):]
	for len(rest) > 9 {
		n := int(uint32(rest[0]) | uint32(rest[1])<<8 | uint32(rest[2])<<16)
		n = min(n, len(rest)-9)
		out = appendFrame(out, rest[8], rest[9:9+n])
		rest = rest[9+n:]
	}
	return append(out, rest...)
}
