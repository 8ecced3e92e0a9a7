package adminserver

import (
	"errors"
	"net/http"
	"os"
	"time"

	"github.com/dynctl/dynctl/internal/router/request/api"
)

// boundPiece is how much of an answer has one deadline, in bytes: a client that
// takes as much within it is slow, and served to the end.
const boundPiece = 16 << 10

// boundWriter writes an answer of any length in pieces, each with a deadline for a client
// that does not read.
type boundWriter struct {
	http.ResponseWriter
	time time.Duration
	by   api.AnswerDeadline
	late bool // a piece waited too long
}

// Write implements http.ResponseWriter.
func (b *boundWriter) Write(p []byte) (n int, err error) {
	for {
		b.by.Extend(b.ResponseWriter, b.time)
		m, err := b.ResponseWriter.Write(p[n:min(n+boundPiece, len(p))])
		if n += m; err != nil || n == len(p) {
			return n, b.note(err)
		}
	}
}

// FlushError is what http.ResponseController calls.
func (b *boundWriter) FlushError() error {
	b.by.Extend(b.ResponseWriter, b.time)
	return b.note(http.NewResponseController(b.ResponseWriter).Flush())
}

// Unwrap is for http.ResponseController.
func (b *boundWriter) Unwrap() http.ResponseWriter { return b.ResponseWriter }

func (b *boundWriter) note(err error) error {
	b.late = b.late || errors.Is(err, os.ErrDeadlineExceeded)
	return err
}
