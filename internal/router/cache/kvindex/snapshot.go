package kvindex

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
)

// A snapshot is, all integers little-endian and uv an unsigned LEB128 varint:
//
//	"DYNKVIX3"
//	frames: u32 length, u32 CRC-32C of kind and body, u8 kind, body
//
//	kind 'R', a rank:  uv slot, u8 flags (1 = lost, 2 = copies are not counted), uv length of name, name,
//	          the beginning of the caller's note
//	kind 'N', more of the note, at once after the rank
//	kind 'B', a run of the rank before, its parent's run first:
//	          uv parent (0 = none, else 1 + number of the run within its rank), uv offset in the parent,
//	          uv n, stretches of (uv held, uv not held) that add up to n, n × u64 local hash,
//	          u64 name of each held block
//	kind 'C', copies of the rank before, after its runs: (u64 name, uv further copies) of each block
//	          that has any
//	kind 'E', the end: uv ranks, uv memberships
//
// Blocks that are not held are there because held ones follow them. Each rank is consistent in itself;
// ranks are written one after the other while the others go on.
const (
	snapMagic = "DYNKVIX3"
	snapFrame = 4 << 20 // bytes of a frame at most; the longest run and all copies need less
	snapName  = 4096    // bytes of a rank's name at most
	snapHead  = 1 << 16 // bytes of a rank's note that stand in its own frame at most
	snapBatch = 1 << 16 // blocks applied at a time

	flagLost   = 1
	flagSingle = 2
)

// MaxNote is how long the note of a rank may be in a snapshot, in bytes.
const MaxNote = 64 << 20

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func appendFrame(b []byte, kind byte, body []byte) []byte {
	crc := crc32.Update(crc32.Update(0, castagnoli, []byte{kind}), castagnoli, body)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(body)))
	b = binary.LittleEndian.AppendUint32(b, crc)
	b = append(b, kind)
	return append(b, body...)
}

// Snapshot writes ranks and what they hold, with the engines' names and counts of copies. Events of a
// rank wait while it is copied, not while it is written; nothing else waits.
//
// For each rank, note is called with its slot and name. It calls take at the moment at which the rank is
// to be copied, and returns what Restore is to give back with it: whatever must be true of that very
// moment, such as the last event that the rank has. A rank is left out whose note does not call take, or
// that has been removed by then.
func (x *Index) Snapshot(w io.Writer, note func(r Rank, name string, take func()) []byte) error {
	if _, err := io.WriteString(w, snapMagic); err != nil {
		return fmt.Errorf("write snapshot: %w", err)
	}
	var ranks, total uint64
	var d dump
	for i := range x.ranks {
		k := x.ranks[i].Load()
		if k == nil || len(k.name) > snapName {
			continue
		}
		taken := false
		kept := note(k.slot, k.name, func() {
			if x.ranks[i].Load() != k {
				return // it has left, and its note is of another that has its slot and maybe its name
			}
			x.dumpRank(k, &d)
			taken = true
		})
		if !taken {
			continue
		}
		if len(kept) > MaxNote {
			return fmt.Errorf("write snapshot of rank %s: a note of %d bytes, at most %d", k.name, len(kept), MaxNote)
		}
		head := append(binary.AppendUvarint(nil, uint64(k.slot)), d.flags)
		head = append(binary.AppendUvarint(head, uint64(len(k.name))), k.name...)
		ranks++
		total += uint64(d.held)
		frames := [][]byte{appendFrame(nil, 'R', append(head, kept[:min(len(kept), snapHead)]...))}
		for more := kept[min(len(kept), snapHead):]; len(more) > 0; more = more[min(len(more), snapFrame):] {
			frames = append(frames, appendFrame(nil, 'N', more[:min(len(more), snapFrame)]))
		}
		for _, b := range append(frames, d.frames) {
			if _, err := w.Write(b); err != nil {
				return fmt.Errorf("write snapshot of rank %s: %w", k.name, err)
			}
		}
	}
	body := binary.AppendUvarint(binary.AppendUvarint(nil, ranks), total)
	if _, err := w.Write(appendFrame(nil, 'E', body)); err != nil {
		return fmt.Errorf("write snapshot: %w", err)
	}
	return nil
}

// dump is a copy of one rank.
type dump struct {
	flags  byte
	held   int
	frames []byte // but the first
}

// dumpRank copies one rank into d.
func (x *Index) dumpRank(k *rankState, d *dump) {
	k.mu.Lock()
	defer k.mu.Unlock()
	v := x.ep.enter(uint32(k.slot))
	defer x.ep.exit(uint32(k.slot), v)
	type position struct{ n, off, ref uint32 }
	positions := make([]position, 0, k.tab.count)
	k.tab.all(func(ref uint32) bool {
		n, off := x.m.at(ref)
		positions = append(positions, position{n, off, ref})
		return true
	})
	slices.SortFunc(positions, func(a, b position) int {
		return cmp.Or(cmp.Compare(a.n, b.n), cmp.Compare(a.off, b.off))
	})
	type run struct {
		need   uint32 // blocks
		number uint64 // 1 + place in the file
		from   int    // first of its places
		to     int
	}
	runs := map[uint32]*run{}
	var ids []uint32
	need := func(n, blocks uint32) *run {
		r := runs[n]
		if r == nil {
			r = &run{}
			runs[n] = r
			ids = append(ids, n)
		}
		r.need = max(r.need, blocks)
		return r
	}
	for i, p := range positions {
		r := need(p.n, p.off+1)
		if r.to == 0 {
			r.from = i
		}
		r.to = i + 1
	}
	for i := 0; i < len(ids); i++ {
		if nd := x.m.node(ids[i]); nd.parent != 0 {
			need(nd.parent, nd.off)
		}
	}
	// A run's parent has less depth.
	slices.SortFunc(ids, func(a, b uint32) int { return cmp.Compare(x.m.node(a).depth, x.m.node(b).depth) })
	d.flags, d.held = 0, len(positions)
	if k.lost.Load() {
		d.flags |= flagLost
	}
	if k.ignoreCopies {
		d.flags |= flagSingle
	}
	out := d.frames[:0]
	var body []byte
	for i, n := range ids {
		nd, r := x.m.node(n), runs[n]
		r.number = uint64(i) + 1
		parent := uint64(0)
		if nd.parent != 0 {
			parent = runs[nd.parent].number
		}
		body = binary.AppendUvarint(body[:0], parent)
		body = binary.AppendUvarint(body, uint64(nd.off))
		body = binary.AppendUvarint(body, uint64(r.need))
		mine := positions[r.from:r.to]
		for at, j := uint32(0), 0; at < r.need; {
			start := at
			for j < len(mine) && mine[j].off == at {
				at, j = at+1, j+1
			}
			body = binary.AppendUvarint(body, uint64(at-start))
			end := r.need
			if j < len(mine) {
				end = mine[j].off
			}
			body = binary.AppendUvarint(body, uint64(end-at))
			at = end
		}
		chunks := x.m.dir(nd.dir.Load())
		for o := range r.need {
			body = binary.LittleEndian.AppendUint64(body, loadWord(&x.m.locals(loadHalf(&chunks[o/chunkLen]))[o%chunkLen]))
		}
		for _, p := range mine {
			body = binary.LittleEndian.AppendUint64(body, k.tab.nameOf(p.ref))
		}
		out = appendFrame(out, 'B', body)
	}
	if len(k.copies) > 0 {
		body = body[:0]
		for name, n := range k.copies {
			body = binary.AppendUvarint(binary.LittleEndian.AppendUint64(body, name), uint64(n))
		}
		out = appendFrame(out, 'C', body)
	}
	d.frames = out
}

// Restore fills an index that has no ranks from a snapshot: its ranks come back in their slots
// under their names, and noted is called for each with its note, which it must not keep. The
// caller has to find out what the engines did since the snapshot was written. When the snapshot
// is cut, damaged or of another version, or does not fit the limits, the index is left empty and
// the error wraps [ErrSnapshot]. An error of noted has the same effect and is returned.
func (x *Index) Restore(r io.Reader, noted func(r Rank, name string, note []byte) error) error {
	if x.live.Load() > 0 {
		return fmt.Errorf("restore: %w", ErrNotEmpty)
	}
	s := restorer{x: x, r: bufio.NewReaderSize(r, 1<<16), noted: noted}
	if err := s.run(); err != nil {
		for _, r := range s.added {
			x.RemoveRank(r)
		}
		return fmt.Errorf("restore: %w", err)
	}
	return nil
}

// RestoreRank fills rank at, which holds nothing, from a snapshot of one rank, whatever slot and name
// that had. noted is called with the rank's note, which it must not keep. Errors are as for
// [Index.Restore], and leave the rank without blocks.
func (x *Index) RestoreRank(r io.Reader, at Rank, noted func(note []byte) error) error {
	if k, ok := x.RankStats(at); !ok || k.Blocks > 0 {
		return fmt.Errorf("restore rank in slot %d: %w", at, ErrNotEmpty)
	}
	s := restorer{x: x, r: bufio.NewReaderSize(r, 1<<16), noted: func(_ Rank, _ string, note []byte) error { return noted(note) }, into: &at}
	err := s.run()
	if err == nil && len(s.added) == 0 {
		err = bad("no rank")
	}
	if err == nil {
		return nil
	}
	x.ClearRank(at)
	k := x.ranks[at].Load()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.ignoreCopies = false
	return fmt.Errorf("restore: %w", err)
}

type restorer struct {
	x     *Index
	r     *bufio.Reader
	noted func(Rank, string, []byte) error
	into  *Rank // where the only rank comes; nil for all of them, each in its slot
	body  []byte
	added []Rank
	total uint64

	// of the rank being read
	batch Batch
	flags byte
	name  string
	note  []byte // read so far
	// noting says that more of the note may follow.
	noting bool
	runs   [][]uint64 // names of its runs' blocks
	gaps   []uint64   // names made up for blocks that are not held
	salt   uint64
}

func bad(what string) error { return fmt.Errorf("%s: %w", what, ErrSnapshot) }

func (s *restorer) run() error {
	magic := make([]byte, len(snapMagic))
	if _, err := io.ReadFull(s.r, magic); err != nil || string(magic) != snapMagic {
		return bad("not a snapshot of this version")
	}
	for {
		kind, err := s.frame()
		if err != nil {
			return err
		}
		if kind != 'N' {
			if err := s.endNote(); err != nil {
				return err
			}
		}
		switch kind {
		case 'N':
			err = s.more()
		case 'R':
			err = errors.Join(s.endRank(), s.rank())
		case 'B':
			err = s.blocks()
		case 'C':
			err = s.copies()
		case 'E':
			if err := s.endRank(); err != nil {
				return err
			}
			ranks, n := binary.Uvarint(s.body)
			total, m := binary.Uvarint(s.body[max(n, 0):])
			if n <= 0 || m <= 0 || ranks != uint64(len(s.added)) || total != s.total {
				return bad("the end does not fit what came before")
			}
			if _, err := s.r.ReadByte(); err != io.EOF {
				return bad("data after the end")
			}
			return nil
		default:
			return bad("unknown frame")
		}
		if err != nil {
			return err
		}
	}
}

// frame reads the next frame into s.body.
func (s *restorer) frame() (kind byte, err error) {
	var head [9]byte
	if _, err := io.ReadFull(s.r, head[:]); err != nil {
		return 0, bad("cut in a frame's head")
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n > snapFrame {
		return 0, bad("frame too long")
	}
	// The buffer grows with what is really there, not with what the head claims.
	b := bytes.NewBuffer(s.body[:0])
	if _, err := io.CopyN(b, s.r, int64(n)); err != nil {
		return 0, bad("cut in a frame")
	}
	s.body = b.Bytes()
	crc := crc32.Update(crc32.Update(0, castagnoli, head[8:]), castagnoli, s.body)
	if crc != binary.LittleEndian.Uint32(head[4:]) {
		return 0, bad("wrong checksum")
	}
	return head[8], nil
}

func (s *restorer) uvarint() (uint64, error) {
	v, n := binary.Uvarint(s.body)
	if n <= 0 {
		return 0, bad("cut in a number")
	}
	s.body = s.body[n:]
	return v, nil
}

func (s *restorer) rank() error {
	slot, err := s.uvarint()
	if err != nil || len(s.body) < 1 || slot >= uint64(len(s.x.ranks)) {
		return bad("rank")
	}
	s.flags, s.body = s.body[0], s.body[1:]
	n, err := s.uvarint()
	if err != nil || n > snapName || n > uint64(len(s.body)) || uint64(len(s.body))-n > snapHead {
		return bad("name of a rank")
	}
	name := string(s.body[:n])
	switch {
	case s.into == nil:
		if err := s.x.AddRank(Rank(slot), name); err != nil {
			return errors.Join(err, ErrSnapshot)
		}
	case len(s.added) > 0:
		return bad("a second rank")
	default:
		slot = uint64(*s.into)
	}
	s.added = append(s.added, Rank(slot))
	s.name, s.note, s.noting = name, append(s.note[:0], s.body[n:]...), true
	return nil
}

// more is a further part of the rank's note.
func (s *restorer) more() error {
	if !s.noting || len(s.note)+len(s.body) > MaxNote {
		return bad("note of a rank")
	}
	s.note = append(s.note, s.body...)
	return nil
}

// endNote passes the rank's note to the caller when all of it is there.
func (s *restorer) endNote() error {
	if !s.noting {
		return nil
	}
	s.noting = false
	return s.noted(s.added[len(s.added)-1], s.name, s.note)
}

// copies gives the rank the copies of its blocks.
func (s *restorer) copies() error {
	if len(s.added) == 0 {
		return bad("copies without a rank")
	}
	s.batch.Remove(s.gaps...) // they can have no copies
	s.gaps = s.gaps[:0]
	if err := s.apply(); err != nil {
		return err
	}
	k := s.x.ranks[s.added[len(s.added)-1]].Load()
	for len(s.body) > 0 {
		if len(s.body) < 8 {
			return bad("cut in a name")
		}
		name := binary.LittleEndian.Uint64(s.body)
		s.body = s.body[8:]
		n, err := s.uvarint()
		if err != nil {
			return err
		}
		if n < 1 || n > maxCopy || s.flags&flagSingle != 0 || !k.recopy(name, uint32(n)) {
			return bad("copies")
		}
	}
	return nil
}

// apply performs what the batch has.
func (s *restorer) apply() error {
	res := s.x.Apply(s.added[len(s.added)-1], &s.batch)
	s.batch.Reset()
	switch {
	case res.Refused > 0:
		return bad("more blocks than the index may hold")
	case res.Lost || res.Duplicate > 0 || res.Unknown > 0:
		return bad("runs contradict each other")
	}
	return nil
}

func (s *restorer) endRank() error {
	if len(s.added) == 0 {
		return nil
	}
	s.batch.Remove(s.gaps...)
	if err := s.apply(); err != nil {
		return err
	}
	k := s.x.ranks[s.added[len(s.added)-1]].Load()
	s.total += uint64(s.x.sizes[k.slot].Load())
	k.lost.Store(s.flags&flagLost != 0)
	k.mu.Lock()
	k.ignoreCopies = s.flags&flagSingle != 0
	k.mu.Unlock()
	s.runs, s.gaps = s.runs[:0], s.gaps[:0]
	return nil
}

func (s *restorer) blocks() error {
	if len(s.added) == 0 {
		return bad("run without a rank")
	}
	var v [3]uint64
	for i := range v {
		var err error
		if v[i], err = s.uvarint(); err != nil {
			return err
		}
	}
	parent, off, n := v[0], v[1], v[2]
	if n == 0 || n > maxRun || parent > uint64(len(s.runs)) || (parent == 0) != (off == 0) ||
		parent > 0 && off > uint64(len(s.runs[parent-1])) {
		return bad("run")
	}
	names := make([]uint64, 0, min(n, uint64(len(s.body))))
	var held uint64
	var stretches []uint64
	for at := uint64(0); at < n; {
		for range 2 {
			c, err := s.uvarint()
			if err != nil || c > n-at {
				return bad("stretch")
			}
			at += c
			stretches = append(stretches, c)
		}
		if l := len(stretches); stretches[l-1]+stretches[l-2] == 0 {
			return bad("empty stretch")
		}
		held += stretches[len(stretches)-2]
	}
	if uint64(len(s.body)) != 8*(n+held) {
		return bad("length of a run")
	}
	word := func(i uint64) uint64 { return binary.LittleEndian.Uint64(s.body[8*i:]) }
	at := n
	for i, c := range stretches {
		for range c {
			if i%2 == 0 {
				names = append(names, word(at))
				at++
				continue
			}
			// The block gets a name that is as good as unique, and loses it when the rank is complete.
			s.salt++
			gap := (s.salt ^ 0x5bd1e9955bd1e995) * 0x9e3779b97f4a7c15
			s.gaps = append(s.gaps, gap)
			names = append(names, gap)
		}
	}
	locals := make([]uint64, n)
	for i := range locals {
		locals[i] = word(uint64(i))
	}
	up := uint64(0)
	if parent > 0 {
		up = s.runs[parent-1][off-1]
	}
	s.batch.Store(up, parent > 0, names, locals)
	s.runs = append(s.runs, names)
	if s.batch.Blocks() >= snapBatch {
		return s.apply()
	}
	return nil
}
