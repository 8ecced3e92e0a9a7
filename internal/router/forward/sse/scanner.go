package sse

import "bytes"

// DefaultMaxEvent is the largest event in bytes that is looked into.
const DefaultMaxEvent = 256 << 10

// Summary is what a stream, or the body of an answer, has said so far.
type Summary struct {
	// Events counts events with data, Comments keep-alives, Oversized events
	// that were too large to be looked into.
	Events, Comments, Oversized int
	// Tokens counts events that hold generated content. An event may hold
	// several tokens.
	Tokens int
	// Done is whether the end of the stream was announced: [DONE], or the last
	// event of an API that has no [DONE].
	Done bool
	// FinishReason is the last one seen; "" for none.
	FinishReason string
	// Usage is the last count of each kind.
	Usage Usage
	// Failed is whether an error event was seen, ErrorFirst whether it came
	// before any content, and Error the start of its data.
	Failed, ErrorFirst bool
	Error              string
}

// Piece is what one piece of a stream added.
type Piece struct {
	// Events and Tokens count as in Summary.
	Events, Tokens int
}

// Scanner reads along with one stream. Its zero value is ready for use. It is
// not safe for concurrent use.
type Scanner struct {
	// MaxEvent is the largest event in bytes that is looked into; 0 means
	// DefaultMaxEvent. Larger ones are counted in Oversized.
	MaxEvent int

	sum      Summary
	hasUsage bool   // sum.Usage was set at least once
	line     []byte // the start of a line whose end has not arrived
	data     []byte // data of the event under way: own memory or part of a piece
	own      []byte // memory for data that outlives its piece
	has      bool   // the event has data
	isError  bool   // the event is of type "error"
	skip     bool   // the event is too large
	begun    bool   // at least one byte was seen
	usages   int    // events that hold usage and no choice
	p        payload
}

// Reset makes the scanner ready for another stream and keeps its memory.
func (s *Scanner) Reset() {
	if cap(s.line) > 16<<10 {
		s.line = nil
	}
	if cap(s.own) > 16<<10 {
		s.own = nil
	}
	*s = Scanner{MaxEvent: s.MaxEvent, line: s.line[:0], own: s.own[:0]}
}

// Summary is what the stream has said so far.
func (s *Scanner) Summary() Summary {
	out := s.sum
	if !s.hasUsage {
		out.Usage = noUsage
	}
	return out
}

// Tokens is that of the Summary.
func (s *Scanner) Tokens() int { return s.sum.Tokens }

// Started reports whether content has come, or the end without any.
func (s *Scanner) Started() bool {
	return s.sum.Tokens > 0 || s.sum.FinishReason != "" || s.sum.Done
}

func (s *Scanner) limit() int {
	if s.MaxEvent > 0 {
		return s.MaxEvent
	}
	return DefaultMaxEvent
}

// Feed looks at the next piece of the stream. It neither changes nor keeps p.
func (s *Scanner) Feed(p []byte) Piece {
	before := Piece{s.sum.Events, s.sum.Tokens}
	if !s.begun && len(p) > 0 {
		s.begun = true
		p = bytes.TrimPrefix(p, []byte("\xef\xbb\xbf"))
	}
	for len(p) > 0 {
		k := bytes.IndexByte(p, '\n')
		if k < 0 {
			s.keepLine(p)
			break
		}
		if len(s.line) > 0 {
			s.keepLine(p[:k])
			s.oneLine(s.line, true)
			s.line = s.line[:0]
		} else {
			s.oneLine(p[:k], false)
		}
		p = p[k+1:]
	}
	if s.has && len(s.data) > 0 && !s.owns() {
		s.own = append(s.own[:0], s.data...) // p will be overwritten
		s.data = s.own
	}
	return Piece{s.sum.Events - before.Events, s.sum.Tokens - before.Tokens}
}

// Finish looks at an event that the end of the stream cut off before its empty
// line.
func (s *Scanner) Finish() {
	if len(s.line) > 0 {
		s.oneLine(s.line, true)
		s.line = s.line[:0]
	}
	s.dispatch()
}

func (s *Scanner) owns() bool {
	return len(s.own) > 0 && len(s.data) > 0 && &s.own[0] == &s.data[0]
}

// keepLine keeps the part of a line that ends with a piece.
func (s *Scanner) keepLine(p []byte) {
	if len(s.line)+len(s.data)+len(p) > s.limit() {
		s.skip = true
	}
	if s.skip {
		if len(s.line) == 0 && len(p) > 0 { // only that it is not empty matters
			s.line = append(s.line, p[0])
		}
		if len(s.line) < 2 && len(p) > 1 {
			s.line = append(s.line, p[1])
		}
		return
	}
	s.line = append(s.line, p...)
}

// oneLine reads a line without its line feed.
func (s *Scanner) oneLine(l []byte, kept bool) {
	if n := len(l); n > 0 && l[n-1] == '\r' {
		l = l[:n-1]
	}
	if len(l) == 0 {
		s.dispatch()
		return
	}
	if s.skip {
		return
	}
	if l[0] == ':' {
		s.sum.Comments++
		return
	}
	field, value := l, []byte(nil)
	if c := bytes.IndexByte(l, ':'); c >= 0 {
		field, value = l[:c], l[c+1:]
		if len(value) > 0 && value[0] == ' ' {
			value = value[1:]
		}
	}
	switch string(field) {
	case "data":
		s.addData(value, kept)
	case "event":
		s.isError = string(value) == "error"
	}
}

func (s *Scanner) addData(v []byte, kept bool) {
	switch {
	case len(s.data)+len(v) > s.limit():
		s.skip = true
	case !s.has && !kept:
		s.data = v
	case !s.has:
		s.own = append(s.own[:0], v...)
		s.data = s.own
	default: // data of several lines is joined by line feeds
		if !s.owns() {
			s.own = append(s.own[:0], s.data...)
		}
		s.own = append(append(s.own, '\n'), v...)
		s.data = s.own
	}
	s.has = true
}

// dispatch reads the event that an empty line has ended.
func (s *Scanner) dispatch() {
	data, has, isError, skip := s.data, s.has, s.isError, s.skip
	s.data, s.has, s.isError, s.skip = nil, false, false, false
	if skip {
		s.sum.Events++
		s.sum.Oversized++
		// Nothing but content grows that large.
		s.sum.Tokens++
		return
	}
	if !has {
		return
	}
	s.sum.Events++
	if string(data) == "[DONE]" {
		s.sum.Done = true
		return
	}
	s.p.read(data)
	s.note(data, isError)
}

func (s *Scanner) note(data []byte, isError bool) {
	p := &s.p
	if (p.fails || isError) && !s.sum.Failed {
		s.sum.Failed = true
		s.sum.ErrorFirst = s.sum.Tokens == 0
		s.sum.Error = string(data[:min(len(data), maxError)])
	} else if p.token && !p.fails && !isError {
		s.sum.Tokens++
	}
	if len(p.finish) > 0 {
		s.sum.FinishReason = reason(p.finish)
	}
	if p.ends {
		s.sum.Done = true
	}
	if p.usage != noUsage {
		if !s.hasUsage {
			s.sum.Usage, s.hasUsage = noUsage, true
		}
		s.sum.Usage.merge(p.usage)
		if p.empty {
			s.usages++
		}
	}
}

// Inspect reads the body of an answer that is not streamed: one JSON object.
func Inspect(body []byte) Summary {
	var s Scanner
	s.sum.Events = 1
	s.p.read(body)
	s.note(body, false)
	s.sum.Done = true
	return s.Summary()
}
