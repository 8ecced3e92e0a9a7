package sse

import "bytes"

// maxHeld is the largest beginning of an event in bytes that a Gate holds back.
const maxHeld = 64 << 10

// Gate lets the bytes of a stream through by whole events and comments, so that
// a stream that breaks off within an event can still be given a last one: a
// client cannot take back the half of an event. Its zero value is ready for
// use; it is not safe for concurrent use.
type Gate struct {
	held []byte // the beginning of an event
	out  int    // bytes of held that the last Pass has let through
	last [2]byte
	open bool // an event larger than maxHeld is passing
}

// Reset makes the gate ready for another stream and keeps its memory.
func (g *Gate) Reset() {
	if cap(g.held) > 16<<10 {
		g.held = nil
	}
	*g = Gate{held: g.held[:0]}
}

// Pass takes the next piece and returns what may be sent, in this order: what was held back,
// and the part of p that follows it. Both are valid until the next call.
func (g *Gate) Pass(p []byte) (held, ready []byte) {
	if g.out > 0 {
		g.held = append(g.held[:0], g.held[g.out:]...)
		g.out = 0
	}
	if len(p) == 0 {
		return nil, nil
	}
	n := g.ended(p)
	g.keepTail(p)
	if n > 0 {
		g.open = false
	}
	if n == 0 && len(g.held) > 0 {
		g.held = append(g.held, p...)
		if g.out = comments(g.held); g.out == 0 && len(g.held) > maxHeld {
			g.open, g.out = true, len(g.held)
		}
		return g.held[:g.out], nil
	}
	if g.open {
		return nil, p
	}
	n += comments(p[n:])
	rest := p[n:]
	if len(g.held)+len(rest) == 0 {
		return nil, p
	}
	held = g.held
	if len(rest) > maxHeld {
		g.open, g.held = true, g.held[:0]
		return held, p
	}
	g.held, g.out = append(g.held, rest...), len(held)
	return held, p[:n]
}

// Rest is what is still held back when the stream has ended.
func (g *Gate) Rest() []byte { return g.held[g.out:] }

// Open reports whether what was let through ends within an event.
func (g *Gate) Open() bool { return g.open }

// ended is the index in p after the last empty line, which ends an event; 0 for
// none. The line may have begun with an earlier piece.
func (g *Gate) ended(p []byte) int {
	at := func(i int) byte {
		if i < 0 {
			return g.last[2+i]
		}
		return p[i]
	}
	n := 0
	if bytes.IndexByte(p, '\r') >= 0 { // few streams have one, and LastIndex reads slowly
		if n = bytes.LastIndex(p, []byte("\r\r")) + 2; n < 2 {
			if n = 0; p[0] == '\r' && at(-1) == '\r' {
				n = 1
			}
		}
	}
	for i := len(p); i > n; {
		if i = bytes.LastIndexByte(p[:i], '\n'); i < 0 {
			break
		}
		if at(i-1) == '\n' || at(i-1) == '\r' && at(i-2) == '\n' {
			return i + 1
		}
	}
	return n
}

// keepTail keeps the last two bytes.
func (g *Gate) keepTail(p []byte) {
	if len(p) == 1 {
		g.last = [2]byte{g.last[1], p[0]}
		return
	}
	g.last = [2]byte(p[len(p)-2:])
}

// comments is the size of the comment lines that p, which begins a line outside
// of any event, begins with: keep-alives may come without an empty line.
func comments(p []byte) (n int) {
	for n < len(p) && p[n] == ':' {
		k := bytes.IndexByte(p[n:], '\n')
		if k < 0 {
			break
		}
		n += k + 1
	}
	return n
}
