package api

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zlib"
	"github.com/klauspost/compress/zstd"
)

// acceptedEncodings are the codings in which a request's body may come.
const acceptedEncodings = "gzip, zstd, deflate"

// The memory in bytes that decoding takes beside the body. Frames of zstd may ask for a window
// of 8 MiB, as RFC 8878 recommends.
const (
	deflateMemory = 64 << 10
	zstdWindow    = 8 << 20
	zstdMemory    = 2 * zstdWindow
)

// encodingOf is the coding of a request's body, empty for none.
func encodingOf(h http.Header) (string, error) {
	name := strings.ToLower(strings.TrimSpace(strings.Join(h["Content-Encoding"], ",")))
	switch name {
	case "", "identity":
		return "", nil
	case "gzip", "x-gzip", "zstd", "deflate":
		return name, nil
	}
	return "", &Error{
		Status: http.StatusUnsupportedMediaType, Code: CodeUnsupportedMedia, AcceptEncoding: acceptedEncodings,
		Message: fmt.Sprintf("Content-Encoding %q is not supported; send the body as one of %s, or uncompressed", clip(name, 32), acceptedEncodings),
	}
}

// decode replaces a body that came in a coding by what it stands for, which has at most limit
// bytes. Nothing is decoded before all of the body has come, so that a slow client holds
// nothing but its bytes.
func (b *Body) decode(encoding string, limit int64) error {
	take := int64(deflateMemory)
	if encoding == "zstd" {
		take = zstdMemory
	}
	if !b.memory.Take(take) {
		return noMemory()
	}
	defer b.memory.Give(take)
	plain := &Body{class: -1, memory: b.memory}
	err := decoded(encoding, b.B, func(in io.Reader) error { return plain.fill(&decoder{in, encoding}, 4*len(b.B), limit) })
	if err != nil {
		plain.Release()
		return err
	}
	b.Release()
	*b = *plain
	return nil
}

// zstdDecoders keeps decoders, which are large. They decode in the goroutine that reads, and
// piece by piece: a short body may stand for more than fits into the memory.
var zstdDecoders = sync.Pool{New: func() any {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(zstdWindow), zstd.WithDecodeBuffersBelow(0))
	if err != nil {
		panic(err) // the options are constants
	}
	return d
}}

// decoded calls read with what raw stands for in a coding.
func decoded(encoding string, raw []byte, read func(io.Reader) error) error {
	switch encoding {
	case "zstd":
		d := zstdDecoders.Get().(*zstd.Decoder)
		defer func() {
			_ = d.Reset(nil)
			zstdDecoders.Put(d)
		}()
		if err := d.Reset(bytes.NewReader(raw)); err != nil {
			return undecodable(encoding, err)
		}
		return read(d)
	case "deflate":
		d, err := zlib.NewReader(bytes.NewReader(raw))
		if err != nil {
			return undecodable(encoding, err)
		}
		return read(d)
	default:
		d, err := gzip.NewReader(bytes.NewReader(raw))
		if err != nil {
			return undecodable(encoding, err)
		}
		return read(d)
	}
}

// decoder makes the errors of a decoder those of the request.
type decoder struct {
	io.Reader
	encoding string
}

// Read implements io.Reader.
func (d *decoder) Read(p []byte) (int, error) {
	n, err := d.Reader.Read(p)
	if err != nil && err != io.EOF { //nolint:errorlint // io.Reader returns it itself
		err = undecodable(d.encoding, err)
	}
	return n, err
}

func undecodable(encoding string, err error) *Error {
	return BadRequest("", "the request body is cut off or no valid %s (its Content-Encoding): %v", encoding, err)
}
