package recorder

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"

	"github.com/dynctl/dynctl/internal/router/observe/trace"
)

// Bounds of what an opening remembers, beside maxRanks. A Tap's references are full long
// before.
const maxKept, maxKeptBytes = 1 << 16, 128 << 20

// opening is what a part of a recording begins with, so that it can be read alone:
// the header, and what the lines before it say of settings, workers and ranks.
// It is made from the lines, not from what the router knows, which is ahead of them. Of
// settings and workers that are more than may be, the older half goes; so do ranks
// beyond maxRanks.
type opening struct {
	header    trace.Header
	begun     bool   // the header was seen
	described []line // settings, workers and costs
	bytes     int
	most      struct{ lines, bytes int }
	ranks     map[string]*[2]line // of a rank: its description, and whether it is trusted
	order     []string
	last      int64 // time of the newest line
}

// line is a line without the figure of its time.
type line struct{ head, tail []byte }

func newOpening() (o opening) {
	o.ranks = map[string]*[2]line{}
	o.most.lines, o.most.bytes = maxKept, maxKeptBytes
	return o
}

// note remembers of lines what later parts must repeat.
func (o *opening) note(lines []byte) error {
	var l []byte
	for len(lines) > 0 {
		l, lines, _ = bytes.Cut(lines, []byte("\n"))
		if !o.begun {
			if err := json.Unmarshal(l, &o.header); err != nil {
				return err
			}
			o.begun = true
			continue
		}
		switch kind := kindOf(l); kind {
		case trace.KindSettings, trace.KindWorker, trace.KindCosts:
			o.describe(split(l))
		case trace.KindRank, trace.KindFeed:
			o.rank(l, kind == trace.KindFeed)
		default:
		}
	}
	if s := split(l); s.tail != nil {
		o.last = s.time(l)
	}
	return nil
}

// time is the time of the line that l was split from.
func (l line) time(from []byte) int64 {
	us, _ := strconv.ParseInt(string(from[len(l.head):len(from)-len(l.tail)]), 10, 64)
	return us
}

var timeKey = []byte(`"t_us":`)

// kindOf is the kind of a line as it is written here.
func kindOf(p []byte) trace.Kind {
	rest, ok := bytes.CutPrefix(p, []byte(`{"kind":"`))
	kind, _, end := bytes.Cut(rest, []byte(`"`))
	if !ok || !end {
		return ""
	}
	return trace.Kind(kind)
}

// split finds the time of a line.
func split(p []byte) line {
	i := bytes.Index(p, timeKey)
	if i < 0 {
		return line{}
	}
	i += len(timeKey)
	n := i
	for n < len(p) && (p[n] == '-' || p[n] >= '0' && p[n] <= '9') {
		n++
	}
	return line{p[:i], p[n:]}
}

func (l line) clone() line { return line{bytes.Clone(l.head), bytes.Clone(l.tail)} }

func (l line) len() int { return len(l.head) + len(l.tail) }

func (o *opening) describe(l line) {
	o.described, o.bytes = append(o.described, l.clone()), o.bytes+l.len()
	if len(o.described) > o.most.lines || o.bytes > o.most.bytes {
		n := 0
		for ; n < len(o.described)/2 || o.bytes > o.most.bytes/2; n++ {
			o.bytes -= o.described[n].len()
		}
		o.described = slices.Clone(o.described[n:])
	}
}

func (o *opening) rank(p []byte, feed bool) {
	var l struct {
		Rank string `json:"rank"`
	}
	if json.Unmarshal(p, &l) != nil {
		return
	}
	k := o.ranks[l.Rank]
	if k == nil {
		if len(o.ranks) >= maxRanks {
			return
		}
		k = new([2]line)
		o.ranks[l.Rank] = k
		o.order = append(o.order, l.Rank)
	}
	if feed {
		k[1] = split(p).clone()
		return
	}
	// In a later part the rank is in the middle of its life, and not trusted until
	// the next line says so.
	for _, begins := range []string{`,"new":true`, `,"kept":true`} {
		p = bytes.Replace(p, []byte(begins), nil, 1)
	}
	*k = [2]line{split(p).clone()}
}

// lines are those with which a part begins.
func (o *opening) lines(part int) ([]byte, error) {
	h := o.header
	h.Part = part
	p, err := trace.AppendHeader(nil, h)
	if err != nil {
		return nil, err
	}
	add := func(l line) {
		if l.tail != nil {
			p = append(p, l.head...)
			p = strconv.AppendInt(p, o.last, 10)
			p = append(append(p, l.tail...), '\n')
		}
	}
	for _, l := range o.described {
		add(l)
	}
	for _, name := range o.order {
		add(o.ranks[name][0])
		add(o.ranks[name][1])
	}
	return p, nil
}
