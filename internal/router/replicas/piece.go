package replicas

import (
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"
)

// MaxPiece is how much of a copy one message carries, in bytes. It leaves room for the rest
// of a message of [MaxMessage].
const MaxPiece = 192 << 10

// MaxCopy is the size of the copy of one rank in bytes.
const MaxCopy = 64 << 20

// Piece is a request for a piece of one rank's copy, or the answer to it.
type Piece struct {
	// Identity is the sender's, without Version and Settings.
	Identity
	Rank Rank
	// Copy distinguishes one copy from the next. It is 0 in a request for a new one.
	Copy uint64
	// Offset is where the piece begins, Total the size of the copy; 0 in a request.
	Offset, Total int
	// Data is the piece; empty in a request.
	Data []byte
	// Why is the reason of an answer without a piece, Busy that another router gets a copy.
	Why  string
	Busy bool
}

const (
	keyRank   = "r"
	keyCopy   = "i"
	keyOffset = "p"
	keyTotal  = "t"
	keyData   = "d"
	keyWhy    = "x"
	keyBusy   = "w"
)

// Append appends the encoded piece to b. The caller keeps the limits of this package.
func (p *Piece) Append(b []byte) []byte {
	b = p.appendHead(b, 7)
	b = msgp.AppendUint64(msgp.AppendString(b, keyRank), uint64(p.Rank))
	b = msgp.AppendUint64(msgp.AppendString(b, keyCopy), p.Copy)
	b = msgp.AppendInt(msgp.AppendString(b, keyOffset), p.Offset)
	b = msgp.AppendInt(msgp.AppendString(b, keyTotal), p.Total)
	b = msgp.AppendBytes(msgp.AppendString(b, keyData), p.Data)
	b = msgp.AppendString(msgp.AppendString(b, keyWhy), p.Why)
	return msgp.AppendBool(msgp.AppendString(b, keyBusy), p.Busy)
}

// Decode reads a piece from b, whose data it keeps. The error describes what is wrong;
// p must not be used then.
func (p *Piece) Decode(b []byte) error {
	*p = Piece{}
	err := p.read(b, p.member)
	if err == nil && p.Total > 0 && p.Offset+len(p.Data) > p.Total {
		err = errors.New("it ends behind the end of its copy")
	}
	return err
}

func (p *Piece) member(key string, b []byte) (rest []byte, err error) {
	size := func(limit int) (n int, rest []byte, err error) {
		n, rest, err = msgp.ReadIntBytes(b)
		if err == nil && (n < 0 || n > limit) {
			err = fmt.Errorf("%d is not from 0 to %d", n, limit)
		}
		return n, rest, err
	}
	switch key {
	case keyRank:
		var r uint64
		r, rest, err = msgp.ReadUint64Bytes(b)
		p.Rank = Rank(r)
	case keyCopy:
		p.Copy, rest, err = msgp.ReadUint64Bytes(b)
	case keyOffset:
		p.Offset, rest, err = size(MaxCopy)
	case keyTotal:
		p.Total, rest, err = size(MaxCopy)
	case keyData:
		p.Data, rest, err = msgp.ReadBytesZC(b)
		if err == nil && len(p.Data) > MaxPiece {
			err = fmt.Errorf("%d bytes of a copy, at most %d are read", len(p.Data), MaxPiece)
		}
	case keyWhy:
		p.Why, rest, err = readText(b)
	case keyBusy:
		p.Busy, rest, err = msgp.ReadBoolBytes(b)
	default:
		return msgp.Skip(b)
	}
	return rest, err
}

// because makes the piece an answer without data.
func (p *Piece) because(why string) {
	for len(why) > MaxText || !utf8.ValidString(why) {
		why = why[:min(len(why), MaxText+1)-1]
	}
	p.Why, p.Data, p.Total, p.Copy = why, nil, 0, 0
}
