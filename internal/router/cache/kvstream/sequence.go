package kvstream

import (
	"encoding/binary"
	"math/bits"
)

// VerdictKind says what a sequence number means after those before it.
type VerdictKind uint8

// The verdicts. Only Apply moves the Sequence.
const (
	// Apply: the batch is the next one.
	Apply VerdictKind = iota
	// Duplicate: the very batch was applied before.
	Duplicate
	// Gap: the batches From to To, both included, are missing.
	Gap
	// Restart: the publisher started over; nothing known before is true.
	Restart
)

var verdictNames = [...]string{"apply", "duplicate", "gap", "restart", "invalid"}

// String is the lower-case name of the kind.
func (k VerdictKind) String() string { return verdictNames[min(int(k), len(verdictNames)-1)] }

// Verdict is what Observe says of one batch. From and To are set for a Gap.
type Verdict struct {
	Kind     VerdictKind
	From, To uint64
}

// Remembered is how many stamps a Sequence keeps. A publisher's repetition of
// older batches is taken for a restart, which costs a resync and is never wrong.
const Remembered = 256

// Sequence follows the batch numbers of one publisher: 0 first, one more for
// each batch, nothing on the wire that distinguishes one life of the publisher
// from the next. A number that goes back is therefore a restart, unless the
// batch has the stamp of the one that was applied. The zero value waits for the
// first batch.
type Sequence struct {
	next    uint64
	started bool
	stamps  [Remembered]uint64 // of the numbers next-known to next-1
	known   uint64             // how many of them are valid
}

// Stamp condenses a batch's payload, to distinguish it from another batch that
// has the same number. It reads the length and the first 64 bytes, which hold
// the time of the batch and the first hashes.
func Stamp(payload []byte) uint64 {
	h := uint64(len(payload)) * 0x9e3779b97f4a7c15
	p := payload[:min(len(payload), 64)]
	for ; len(p) >= 8; p = p[8:] {
		h = mix64(h ^ binary.LittleEndian.Uint64(p))
	}
	var rest [8]byte
	copy(rest[:], p)
	return mix64(h ^ binary.LittleEndian.Uint64(rest[:]))
}

// mix64 spreads the bits of x over the whole word; it is a bijection.
func mix64(x uint64) uint64 {
	x ^= bits.RotateLeft64(x, 25) ^ bits.RotateLeft64(x, 50)
	x *= 0xa24baed4963ee407
	x ^= bits.RotateLeft64(x, 24) ^ bits.RotateLeft64(x, 49)
	x *= 0x9fb21c651e98df25
	return x ^ x>>28
}

// Observe judges the batch with number seq and the given stamp, and takes it as
// applied when the verdict is Apply. The first batch ever is a Gap from 0
// unless its number is 0.
func (s *Sequence) Observe(seq, stamp uint64) Verdict {
	switch {
	case seq == s.next:
		s.take(stamp)
		return Verdict{Kind: Apply}
	case seq > s.next:
		return Verdict{Kind: Gap, From: s.next, To: seq - 1}
	case s.Holds(seq, stamp):
		return Verdict{Kind: Duplicate}
	default:
		return Verdict{Kind: Restart}
	}
}

func (s *Sequence) take(stamp uint64) {
	s.stamps[s.next%Remembered] = stamp
	s.known = min(s.known+1, Remembered)
	s.next++
	s.started = true
}

// Holds reports whether the batch seq was applied with this stamp, as far as
// the Sequence remembers.
func (s *Sequence) Holds(seq, stamp uint64) bool {
	return seq < s.next && s.next-seq <= s.known && s.stamps[seq%Remembered] == stamp
}

// Last is the number of the newest batch applied or skipped to; ok is false
// before the first one.
func (s *Sequence) Last() (seq uint64, ok bool) { return s.next - 1, s.started && s.next > 0 }

// Next is the number that the next batch must have.
func (s *Sequence) Next() uint64 { return s.next }

// stampOf returns the stamp of seq, if it is remembered.
func (s *Sequence) stampOf(seq uint64) (stamp uint64, ok bool) {
	if seq >= s.next || s.next-seq > s.known {
		return 0, false
	}
	return s.stamps[seq%Remembered], true
}

// Skip gives up the batches before seq: seq becomes the next one. The caller
// has dropped whatever the missing batches could have changed.
func (s *Sequence) Skip(seq uint64) { s.next, s.known, s.started = seq, 0, true }

// Reset forgets everything: the publisher started over.
func (s *Sequence) Reset() { s.next, s.known, s.started = 0, 0, false }

// Resume continues after the batch seq, whose stamp is known from an earlier
// run of the router.
func (s *Sequence) Resume(seq, stamp uint64) {
	s.Skip(seq)
	s.take(stamp)
}
