package trace

import (
	"bufio"
	"errors"
	"io"
)

// errLong is a line of more bytes than are allowed.
var errLong = errors.New("the line is too long")

// lines reads lines of a bounded length.
type lines struct {
	br   *bufio.Reader
	max  int
	long []byte
}

// newLines reads the lines of in. Those of more than limit bytes that do not fit into the
// buffer are errLong.
func newLines(in io.Reader, limit int) *lines {
	return &lines{br: bufio.NewReaderSize(in, 1<<18), max: limit}
}

// Next reads the next line, with its end, and returns how many bytes it has in the text, too.
// One that is too long is read to its end. What has no end comes with the error that cut
// it, io.EOF at the end of the text. The line is valid until the next call.
func (l *lines) Next() (line []byte, n int, err error) {
	p, err := l.br.ReadSlice('\n')
	if err == nil {
		return p, len(p), nil
	}
	l.long = l.long[:0]
	for {
		if n += len(p); n <= l.max {
			l.long = append(l.long, p...)
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			break
		}
		p, err = l.br.ReadSlice('\n')
	}
	if n <= l.max {
		return l.long, n, err
	}
	if err == nil || errors.Is(err, io.EOF) {
		err = errLong
	}
	return nil, n, err
}
