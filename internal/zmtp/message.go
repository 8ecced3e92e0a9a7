package zmtp

// Message is one received multipart message. Its frames share one buffer that
// the next Recv into the same Message overwrites, so receiving allocates nothing
// once the buffer has grown to the size of the traffic. To keep a message
// beyond that, keep the Message and receive into another one.
type Message struct {
	buf    []byte
	ends   []int
	frames [][]byte
	small  int // messages in a row that used little of an oversized buffer
}

// Frames returns the frames in order. They are valid until the next Recv into
// the same Message.
func (m *Message) Frames() [][]byte { return m.frames }

// Size returns the sum of the frame lengths in bytes.
func (m *Message) Size() int { return len(m.buf) }

const (
	keepBuffer  = 1 << 20 // buffers up to this size are kept for good
	shrinkAfter = 256     // small messages after which a larger one is given back
)

func (m *Message) reset() {
	if cap(m.buf) > keepBuffer {
		if len(m.buf) < cap(m.buf)/4 {
			m.small++
		} else {
			m.small = 0
		}
		if m.small >= shrinkAfter {
			m.buf, m.small = nil, 0
		}
	}
	m.buf, m.ends, m.frames = m.buf[:0], m.ends[:0], m.frames[:0]
}

// seal turns the recorded frame ends into slices; the buffer no longer moves.
func (m *Message) seal() {
	start := 0
	for _, end := range m.ends {
		m.frames = append(m.frames, m.buf[start:end:end])
		start = end
	}
}

// appendFrame appends one message frame in wire form.
func appendFrame(dst, body []byte, more bool) []byte {
	var flags byte
	if more {
		flags = flagMore
	}
	return append(appendHeader(dst, flags, len(body)), body...)
}

// appendMessage appends a whole message in wire form.
func appendMessage(dst []byte, frames [][]byte) []byte {
	for i, f := range frames {
		dst = appendFrame(dst, f, i < len(frames)-1)
	}
	return dst
}
