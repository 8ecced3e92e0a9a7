package lifecycle

// progressEvery is after how many streamed tokens Progress reports them.
const progressEvery = 16

// Progress reports the tokens of a stream to Leg.Held, at most once in 16 tokens.
func Progress() Subscriber {
	return Subscriber{
		Piece: func(e *Event) {
			if l := e.Leg; l.Held != nil && l.Tokens-l.progress >= progressEvery {
				l.progress = l.Tokens
				l.Held.Progress(l.Tokens)
			}
		},
	}
}
