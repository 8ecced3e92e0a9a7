package trace

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"unicode/utf8"
)

// Hashes are 64-bit hashes, in JSON the base64 of their little-endian bytes.
type Hashes []uint64

// MarshalJSON writes base64.
func (h Hashes) MarshalJSON() ([]byte, error) { return appendHashes(nil, h), nil }

// UnmarshalJSON reads base64.
func (h *Hashes) UnmarshalJSON(p []byte) error {
	s, err := textOf(p)
	if err != nil {
		return err
	}
	*h, err = decodeHashes(nil, s)
	return err
}

// Tokens are token ids, in JSON the base64 of their little-endian bytes.
type Tokens []uint32

// MarshalJSON writes base64.
func (t Tokens) MarshalJSON() ([]byte, error) { return appendTokens(nil, t), nil }

// UnmarshalJSON reads base64.
func (t *Tokens) UnmarshalJSON(p []byte) error {
	s, err := textOf(p)
	if err != nil {
		return err
	}
	raw, err := base64.StdEncoding.DecodeString(s)
	if err != nil {
		return fmt.Errorf("token ids: %w", err)
	}
	if len(raw)%4 != 0 {
		return fmt.Errorf("token ids: %d bytes are not a multiple of 4", len(raw))
	}
	*t = make(Tokens, len(raw)/4)
	_, err = binary.Decode(raw, binary.LittleEndian, []uint32(*t))
	return err
}

func textOf(p []byte) (string, error) {
	var s string
	if err := json.Unmarshal(p, &s); err != nil {
		return "", fmt.Errorf("want base64 in a string: %w", err)
	}
	return s, nil
}

// appendHashes appends the JSON string of hashes.
func appendHashes(dst []byte, h []uint64) []byte {
	dst = append(dst, '"')
	var raw [240]byte // a multiple of 3 and 8, so that pieces join
	for len(h) > 0 {
		n := min(len(h), len(raw)/8)
		for i, v := range h[:n] {
			binary.LittleEndian.PutUint64(raw[8*i:], v)
		}
		dst = base64.StdEncoding.AppendEncode(dst, raw[:8*n])
		h = h[n:]
	}
	return append(dst, '"')
}

func appendTokens(dst []byte, t []uint32) []byte {
	dst = append(dst, '"')
	var raw [240]byte
	for len(t) > 0 {
		n := min(len(t), len(raw)/4)
		for i, v := range t[:n] {
			binary.LittleEndian.PutUint32(raw[4*i:], v)
		}
		dst = base64.StdEncoding.AppendEncode(dst, raw[:4*n])
		t = t[n:]
	}
	return append(dst, '"')
}

// decodeHashes appends the hashes of base64 text to dst.
func decodeHashes[T string | []byte](dst []uint64, s T) ([]uint64, error) {
	var raw [240]byte
	var quad [320]byte
	for len(s) > 0 {
		n := copy(quad[:], s)
		m, err := base64.StdEncoding.Decode(raw[:], quad[:n])
		if err != nil {
			return dst, fmt.Errorf("hashes: %w", err)
		}
		if m%8 != 0 {
			return dst, fmt.Errorf("hashes: %d bytes are not a multiple of 8", m)
		}
		for i := 0; i < m; i += 8 {
			dst = append(dst, binary.LittleEndian.Uint64(raw[i:]))
		}
		s = s[n:]
	}
	return dst, nil
}

// object writes JSON members by hand, for all lines of recordings: decisions are written on
// the request path. One among 16 ranks takes 2 µs; encoding/json takes 16 µs for the
// candidates of one phase alone, and it would write some numbers in another form. It appends
// to p; begun says that p holds a member already.
type object struct {
	p     []byte
	begun bool
}

// begin begins a line.
func begin(dst []byte, kind Kind, atUS int64) object {
	o := object{p: append(dst, `{"kind":"`...), begun: true}
	o.p = append(o.p, kind...)
	o.p = append(o.p, `","t_us":`...)
	o.p = strconv.AppendInt(o.p, atUS, 10)
	return o
}

func (o *object) open()  { o.p, o.begun = append(o.p, '{'), false }
func (o *object) close() { o.p, o.begun = append(o.p, '}'), true }

func (o *object) key(k string) {
	if o.begun {
		o.p = append(o.p, ',')
	}
	o.begun = true
	o.p = append(o.p, '"')
	o.p = append(o.p, k...)
	o.p = append(o.p, '"', ':')
}

func (o *object) str(k, v string) {
	if v != "" {
		o.text(k, v)
	}
}

func (o *object) int(k string, v int) { o.key(k); o.p = strconv.AppendInt(o.p, int64(v), 10) }

func (o *object) uint(k string, v uint64) { o.key(k); o.p = strconv.AppendUint(o.p, v, 10) }

func (o *object) some(k string, v int) {
	if v != 0 {
		o.int(k, v)
	}
}

func (o *object) someUint(k string, v uint64) {
	if v != 0 {
		o.uint(k, v)
	}
}

// quoted writes a number as a string: many readers round large ones.
func (o *object) quoted(k string, v uint64) {
	o.key(k)
	o.p = append(strconv.AppendUint(append(o.p, '"'), v, 10), '"')
}

// text writes a string, empty or not.
func (o *object) text(k, v string) {
	o.key(k)
	o.p = appendString(o.p, v)
}

// strs writes a list of strings, unless it is empty.
func (o *object) strs(k string, list []string) {
	if len(list) == 0 {
		return
	}
	o.key(k)
	for i, v := range list {
		o.p = append(o.p, "[,"[min(i, 1)])
		o.p = appendString(o.p, v)
	}
	o.p = append(o.p, ']')
}

func (o *object) yes(k string, v bool) {
	if v {
		o.key(k)
		o.p = append(o.p, "true"...)
	}
}

// num writes a number; JSON has none for NaN and infinities, which read as -1.
func (o *object) num(k string, v float64) {
	o.key(k)
	if math.IsNaN(v) || math.IsInf(v, 0) {
		v = -1
	}
	o.p = strconv.AppendFloat(o.p, v, 'g', -1, 64)
}

// appendString appends s as a JSON string.
func appendString(dst []byte, s string) []byte {
	plain := true
	for i := 0; i < len(s); i++ {
		if c := s[i]; c < ' ' || c == '"' || c == '\\' || c >= utf8.RuneSelf {
			plain = false
			break
		}
	}
	if plain {
		dst = append(dst, '"')
		dst = append(dst, s...)
		return append(dst, '"')
	}
	q, _ := json.Marshal(s) // a string cannot fail
	return append(dst, q...)
}
