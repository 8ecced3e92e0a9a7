package sse

// UsageGate is a [Gate] that also takes out the event that engines add to a stream because of
// stream_options.include_usage: usage without a choice. Everything else passes unchanged. It
// costs memory for the pieces with such an event only.
type UsageGate struct {
	Gate *Gate
	// Scanner reads along. It must be fed each piece before Pass gets it.
	Scanner *Scanner
	taken   int // the scanner's count of such events that Pass has taken out
}

// Pass is [Gate.Pass].
func (g *UsageGate) Pass(p []byte) (held, ready []byte) {
	held, ready = g.Gate.Pass(p)
	if g.taken == g.Scanner.usages {
		return held, ready
	}
	g.taken = g.Scanner.usages
	return nil, withoutUsage(append(append(make([]byte, 0, len(held)+len(ready)), held...), ready...))
}

// Rest is [Gate.Rest].
func (g *UsageGate) Rest() []byte { return withoutUsage(g.Gate.Rest()) }

// withoutUsage returns text without the events that hold usage and no choice. It begins at the
// start of text and overwrites it.
func withoutUsage(text []byte) []byte {
	out := text[:0]
	for len(text) > 0 {
		n := eventEnd(text)
		if n == 0 {
			n = len(text)
		}
		var s Scanner
		s.Feed(text[:n])
		s.Finish()
		if s.usages == 0 {
			out = append(out, text[:n]...)
		}
		text = text[n:]
	}
	return out
}
