package kvevent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// EndSeq is the sequence number of the message that ends a replay.
const EndSeq uint64 = math.MaxUint64

// ErrFrames marks a multipart message that is not one of a KV event socket.
var ErrFrames = errors.New("kvevent: unexpected frames")

func parseSeq(f []byte) (uint64, error) {
	if len(f) != 8 {
		return 0, fmt.Errorf("%w: sequence of %d bytes instead of 8", ErrFrames, len(f))
	}
	return binary.BigEndian.Uint64(f), nil
}

// AppendSeq appends a sequence number in its wire form, 8 bytes big endian.
func AppendSeq(dst []byte, seq uint64) []byte {
	return binary.BigEndian.AppendUint64(dst, seq)
}

// ParseLive takes a published message apart: topic, sequence, payload.
func ParseLive(frames [][]byte) (topic []byte, seq uint64, payload []byte, err error) {
	if len(frames) != 3 {
		return nil, 0, nil, fmt.Errorf("%w: live message of %d frames instead of 3", ErrFrames, len(frames))
	}
	if seq, err = parseSeq(frames[1]); err != nil {
		return nil, 0, nil, err
	}
	return frames[0], seq, frames[2], nil
}

// ReplayRequest returns the frames by which a DEALER asks a replay ROUTER for
// every batch it still has from sequence start on. (A ROUTER that does not get
// exactly these two, the first one empty, logs and does not answer.)
func ReplayRequest(start uint64) [][]byte {
	return [][]byte{{}, AppendSeq(nil, start)}
}

// ParseReplayRequest is the ROUTER's side of ReplayRequest, without the identity
// frame.
func ParseReplayRequest(frames [][]byte) (start uint64, err error) {
	if len(frames) != 2 || len(frames[0]) != 0 {
		return 0, fmt.Errorf("%w: replay request of %d frames, want an empty one and a sequence", ErrFrames, len(frames))
	}
	return parseSeq(frames[1])
}

// ParseReplay takes one answer to a replay request apart, as a DEALER sees it:
// ["", seq, payload] from SGLang and vLLM up to 0.23, ["", topic, seq, payload]
// from later ones. The answer with end set closes the replay and carries no
// batch.
func ParseReplay(frames [][]byte) (seq uint64, payload []byte, end bool, err error) {
	n := len(frames)
	if n < 2 || n > 4 {
		return 0, nil, false, fmt.Errorf("%w: replay message of %d frames instead of 2 to 4", ErrFrames, n)
	}
	if seq, err = parseSeq(frames[n-2]); err != nil {
		return 0, nil, false, err
	}
	payload = frames[n-1]
	if seq == EndSeq || len(payload) == 0 {
		return seq, nil, true, nil
	}
	return seq, payload, false, nil
}
