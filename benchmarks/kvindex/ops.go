package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
)

// Kinds of op in a KVOPS1 file.
const (
	kindQuery  = 1
	kindStore  = 2
	kindRemove = 3
	kindExpect = 4
	kindCheck  = 5
)

// event is one op, or a part of one as an engine would publish it. Its hashes are
// locals[at:at+n] and seqs[at:at+n] of the workload; those of an expectation are scores[at:at+n].
type event struct {
	kind      uint8
	hasParent bool
	rank      uint32
	at, n     uint32
	parent    uint64
}

type score struct{ rank, depth uint32 }

// workload is a KVOPS1 file in memory. The format is that of version 1 of the shared harness: a header
// of 128 bytes, a table of (local hash, sequence hash) pairs, and ops that name stretches of the table.
type workload struct {
	ranks       uint32
	ops         uint64 // in the file
	queryHashes uint64
	blockOps    uint64
	memberships uint64
	resident    uint64
	mid         int // first event of the second half
	events      []event
	locals      []uint64
	seqs        []uint64
	scores      []score
}

// maxStore is the number of blocks in one store event of the vLLM form.
const maxStore = 512

// load reads a workload, in the form of one event per removed block and bounded stores if vllm is set.
func load(path string, vllm bool) (*workload, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if len(raw) < 128 || string(raw[:8]) != "KVOPS1\n\x00" || binary.LittleEndian.Uint32(raw[8:]) != 1 {
		return nil, fmt.Errorf("%s: not a KVOPS1 file of version 1", path)
	}
	u64 := func(at int) uint64 { return binary.LittleEndian.Uint64(raw[at:]) }
	w := &workload{
		ranks: binary.LittleEndian.Uint32(raw[16:]), ops: u64(32), queryHashes: u64(72),
		blockOps: u64(72) + u64(80) + u64(88), memberships: u64(96), resident: u64(104),
	}
	blocks, midOp := u64(24), u64(120)
	if blocks > uint64(len(raw)-128)/16 {
		return nil, fmt.Errorf("%s: block table is cut", path)
	}
	d := decoder{b: raw[128+16*blocks:], table: raw[128 : 128+16*blocks], w: w, vllm: vllm}
	w.locals = make([]uint64, 0, w.blockOps+w.blockOps/8)
	w.seqs = make([]uint64, 0, w.blockOps+w.blockOps/8)
	for i := uint64(0); len(d.b) > 0; i++ {
		if i == midOp {
			w.mid = len(w.events)
		}
		if err := d.op(); err != nil {
			return nil, fmt.Errorf("%s: op %d: %w", path, i, err)
		}
	}
	return w, nil
}

// opaque gives each rank names of its own for the same blocks, as engines do that do not share a hash
// seed.
func (w *workload) opaque() {
	for i := range w.events {
		e := &w.events[i]
		if e.kind != kindStore && e.kind != kindRemove {
			continue
		}
		key := uint64(e.rank+1) * 0x9e3779b97f4a7c15
		e.parent ^= key
		for j := e.at; j < e.at+e.n; j++ {
			w.seqs[j] ^= key
		}
	}
}

type decoder struct {
	b     []byte
	table []byte
	w     *workload
	vllm  bool
}

var errCut = errors.New("cut or corrupt")

func (d *decoder) uvarint() (uint64, error) {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		return 0, errCut
	}
	d.b = d.b[n:]
	return v, nil
}

func (d *decoder) varint() (int64, error) {
	v, n := binary.Varint(d.b)
	if n <= 0 {
		return 0, errCut
	}
	d.b = d.b[n:]
	return v, nil
}

// block returns the hashes of a block of the table.
func (d *decoder) block(id uint64) (local, seq uint64, err error) {
	if id >= uint64(len(d.table)/16) {
		return 0, 0, errCut
	}
	p := d.table[16*id:]
	return binary.LittleEndian.Uint64(p), binary.LittleEndian.Uint64(p[8:]), nil
}

func (d *decoder) op() error {
	w := d.w
	e := event{kind: d.b[0]}
	d.b = d.b[1:]
	r, err := d.uvarint()
	if err != nil || e.kind != kindExpect && r >= uint64(w.ranks) {
		return errCut
	}
	e.rank = uint32(r)
	switch e.kind {
	case kindExpect:
		return d.expect(e)
	case kindStore:
		p, err := d.uvarint()
		if err != nil {
			return err
		}
		if p > 0 {
			e.hasParent = true
			if _, e.parent, err = d.block(p - 1); err != nil {
				return err
			}
		}
	case kindQuery, kindRemove, kindCheck:
	default:
		return fmt.Errorf("kind %d", e.kind)
	}
	e.at = uint32(len(w.locals))
	if err := d.runs(); err != nil {
		return err
	}
	e.n = uint32(len(w.locals)) - e.at
	step := e.n
	if d.vllm && e.kind == kindRemove {
		step = 1
	} else if d.vllm && e.kind == kindStore {
		step = maxStore
	}
	if e.n == 0 {
		w.events = append(w.events, e)
	}
	for end := e.at + e.n; e.at < end; {
		p := e
		p.n = min(step, end-e.at)
		w.events = append(w.events, p)
		e.at += p.n
		e.hasParent, e.parent = true, w.seqs[e.at-1]
	}
	return nil
}

func (d *decoder) expect(e event) error {
	n, err := d.uvarint()
	if err != nil || n > uint64(d.w.ranks) {
		return errCut
	}
	e.at, e.n = uint32(len(d.w.scores)), uint32(n)
	for range n {
		r, err := d.uvarint()
		if err != nil || r >= uint64(d.w.ranks) {
			return errCut
		}
		depth, err := d.uvarint()
		if err != nil {
			return err
		}
		d.w.scores = append(d.w.scores, score{uint32(r), uint32(depth)})
	}
	d.w.events = append(d.w.events, e)
	return nil
}

// runs appends the hashes of a list of stretches of the table.
func (d *decoder) runs() error {
	n, err := d.uvarint()
	if err != nil {
		return err
	}
	for range n {
		first, err := d.uvarint()
		if err != nil {
			return err
		}
		length, err := d.varint()
		if err != nil {
			return err
		}
		id, step := int64(first), int64(1)
		if length < 0 {
			length, step = -length, -1
		}
		for ; length > 0; length-- {
			l, s, err := d.block(uint64(id))
			if err != nil {
				return err
			}
			d.w.locals, d.w.seqs = append(d.w.locals, l), append(d.w.seqs, s)
			id += step
		}
	}
	return nil
}
