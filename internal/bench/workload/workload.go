// Package workload makes the prompts of a benchmark: token ids, exact in
// length, unlike any other prompt of this or another run unless they are meant
// to share a prefix.
package workload

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// Pool is the token ids that prompts are made of. They should be plain words:
// no special tokens.
type Pool []uint32

// DefaultPool is used when a target cannot tokenize for us: ids that any
// vocabulary has and that are seldom special.
func DefaultPool() Pool {
	p := make(Pool, 0, 700)
	for id := uint32(300); id < 1000; id++ {
		p = append(p, id)
	}
	return p
}

// Seed is a seed made of words: equal words, equal seed.
func Seed(parts ...string) uint64 {
	var h xxh3.Hasher
	for _, p := range parts {
		_, _ = h.WriteString(p) // never fails
		_, _ = h.Write([]byte{0})
	}
	return h.Sum64()
}

// Tokens appends n random ids to dst.
func (p Pool) Tokens(dst []uint32, rng *rand.Rand, n int) []uint32 {
	for range n {
		dst = append(dst, p[rng.IntN(len(p))])
	}
	return dst
}

// Block appends the n tokens that a block's id stands for in a run: the same
// id gives the same tokens.
func (p Pool) Block(dst []uint32, salt string, id uint64, n int) []uint32 {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], id)
	rng := rand.New(rand.NewPCG(Seed("block", salt), xxh3.Hash(b[:])))
	return p.Tokens(dst, rng, n)
}

// Body appends the JSON of a streamed completion of exactly osl tokens.
func Body(dst []byte, model string, prompt []uint32, osl int) []byte {
	dst = append(dst, `{"model":`...)
	dst = rawjson.AppendString(dst, model)
	dst = append(dst, `,"prompt":[`...)
	for i, id := range prompt {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(dst, uint64(id), 10)
	}
	dst = append(dst, `],"max_tokens":`...)
	dst = strconv.AppendInt(dst, int64(osl), 10)
	dst = append(dst, `,"min_tokens":`...)
	dst = strconv.AppendInt(dst, int64(osl), 10)
	return append(dst, `,"ignore_eos":true,"temperature":0,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`...)
}

// Dist is a distribution of lengths in tokens.
type Dist struct {
	kind       byte // 'D', 'U', 'N', 'L'
	a, b       float64
	text       string
	weights    []float64
	values     []int
	totalShare float64
}

// ParseDist reads a distribution of lengths:
//
//	512            always 512
//	U(128,2048)    even between the two
//	N(1024,256)    normal with mean and standard deviation
//	L(1024,0.8)    log-normal with median and sigma
//	128:0.7,4096:0.3   these lengths with these weights
func ParseDist(text string) (Dist, error) {
	d := Dist{text: strings.TrimSpace(text)}
	if n, err := strconv.Atoi(d.text); err == nil {
		d.kind, d.a = 'D', float64(n)
		return d, d.check()
	}
	if len(d.text) > 3 && strings.ContainsRune("UNLD", rune(d.text[0])) && d.text[1] == '(' && d.text[len(d.text)-1] == ')' {
		a, b, two := strings.Cut(d.text[2:len(d.text)-1], ",")
		var err1, err2 error
		d.kind = d.text[0]
		d.a, err1 = strconv.ParseFloat(strings.TrimSpace(a), 64)
		if two {
			d.b, err2 = strconv.ParseFloat(strings.TrimSpace(b), 64)
		}
		if err1 != nil || err2 != nil || two == (d.kind == 'D') {
			return d, fmt.Errorf("length %q is not a distribution such as N(1024,256)", text)
		}
		return d, d.check()
	}
	for _, part := range strings.Split(d.text, ",") {
		n, w, ok := strings.Cut(part, ":")
		v, err := strconv.Atoi(strings.TrimSpace(n))
		share, err2 := strconv.ParseFloat(strings.TrimSpace(w), 64)
		if !ok || err != nil || err2 != nil || v < 1 || v > maxLength || !(share > 0) || math.IsInf(share, 0) {
			return d, fmt.Errorf("length %q is not a number, U(a,b), N(mean,sd), L(median,sigma) or LENGTH:WEIGHT,…", text)
		}
		d.kind = 'W'
		d.values, d.weights = append(d.values, v), append(d.weights, share)
		d.totalShare += share
	}
	return d, nil
}

const maxLength = 1 << 24

func (d Dist) check() error {
	bad := !(d.a >= 1 && d.a <= maxLength) || math.IsNaN(d.b)
	switch d.kind {
	case 'U':
		bad = bad || d.b < d.a || d.b > maxLength
	case 'N':
		bad = bad || !(d.b >= 0 && d.b <= maxLength)
	case 'L':
		bad = bad || !(d.b >= 0 && d.b <= 10)
	}
	if bad {
		return fmt.Errorf("length %q is out of range (1 to %d tokens)", d.text, maxLength)
	}
	return nil
}

// String is the text it was read from.
func (d Dist) String() string { return d.text }

// Draw is one length, at least 1.
func (d Dist) Draw(rng *rand.Rand) int {
	v := d.a
	switch d.kind {
	case 'U':
		v = d.a + rng.Float64()*(d.b-d.a)
	case 'N':
		v = d.a + rng.NormFloat64()*d.b
	case 'L':
		v = d.a * math.Exp(rng.NormFloat64()*d.b)
	case 'W':
		x := rng.Float64() * d.totalShare
		for i, w := range d.weights {
			if x -= w; x <= 0 || i == len(d.weights)-1 {
				return d.values[i]
			}
		}
	}
	return int(min(max(math.Round(v), 1), maxLength))
}

// Mean is the expected length.
func (d Dist) Mean() float64 {
	switch d.kind {
	case 'U':
		return (d.a + d.b) / 2
	case 'L':
		return d.a * math.Exp(d.b*d.b/2)
	case 'W':
		var s float64
		for i, w := range d.weights {
			s += w * float64(d.values[i])
		}
		return s / d.totalShare
	}
	return d.a
}

// ErrEmpty says that a trace has no request that can be sent.
var ErrEmpty = errors.New("the trace has no request that can be sent")
