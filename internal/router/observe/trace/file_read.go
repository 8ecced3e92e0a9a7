package trace

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// maxZstdWindow bounds what a compressed file makes the reader allocate.
const maxZstdWindow = 128 << 20

// file reads the text of a file, or of several one after the other. Compression is
// recognized by the first bytes, not by the name. A part that is cut is followed by the next
// on a line of its own.
type file struct {
	paths []string // still to come
	raw   counter
	text  io.Reader // of the present file, nil between two
	file  *os.File
	done  func()
	last  byte
}

// counter counts the bytes that are taken from a file.
type counter struct {
	r io.Reader
	n atomic.Int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n.Add(int64(n))
	return n, err
}

// readFile reads in, which is not closed.
func readFile(in io.Reader) (*file, error) {
	r := &file{}
	r.raw.r = in
	return r, r.decompress()
}

// openFile reads a file.
func openFile(path string) (*file, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open trace: %w", err)
	}
	r, err := readFile(f)
	if r.file = f; err != nil {
		r.Close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return r, nil
}

// openParts reads files, in their order. Each is opened when those before it have ended.
func openParts(paths []string) *file { return &file{paths: paths} }

// Consumed is how many bytes of the files, as they are stored, were taken. It may be
// called while Read runs.
func (r *file) Consumed() int64 { return r.raw.n.Load() }

// isCut reports whether an error is the end of a compressed file that was not finished.
func isCut(err error) bool {
	return errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, gzip.ErrHeader)
}

// decompress recognizes the compression of a file by its first bytes.
func (r *file) decompress() error {
	br := bufio.NewReaderSize(&r.raw, 1<<16)
	r.text = br
	magic, _ := br.Peek(4)
	switch {
	case len(magic) >= 2 && magic[0] == 0x1f && magic[1] == 0x8b:
		z, err := gzip.NewReader(br)
		if err != nil && (isCut(err) || errors.Is(err, io.EOF)) {
			return fmt.Errorf("%w: the file is cut within its first line", ErrEmpty)
		}
		if err != nil {
			return fmt.Errorf("gzip: %w", err)
		}
		r.text = z
	case bytes.Equal(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		z, err := zstd.NewReader(br, zstd.WithDecoderMaxWindow(maxZstdWindow), zstd.WithDecoderConcurrency(2), zstd.WithDecoderLowmem(true))
		if err != nil {
			return fmt.Errorf("zstd: %w", err)
		}
		r.text, r.done = z, z.Close
	}
	return nil
}

// Read reads text.
func (r *file) Read(b []byte) (int, error) {
	for len(b) > 0 {
		if r.text == nil {
			if len(r.paths) == 0 {
				return 0, io.EOF
			}
			f, err := os.Open(r.paths[0])
			if err != nil {
				return 0, err
			}
			r.paths, r.file, r.raw.r = r.paths[1:], f, f
			if err := r.decompress(); err != nil {
				return 0, fmt.Errorf("%s: %w", f.Name(), err)
			}
		}
		n, err := r.text.Read(b)
		if n > 0 {
			r.last = b[n-1]
			return n, nil
		}
		if err != nil && !errors.Is(err, io.EOF) && (!isCut(err) || len(r.paths) == 0) {
			return 0, err
		}
		if err != nil {
			if err := r.end(); err != nil {
				return 0, err
			}
			if r.last != '\n' && len(r.paths) > 0 {
				r.last, b[0] = '\n', '\n'
				return 1, nil
			}
		}
	}
	return 0, nil
}

// end ends the present file.
func (r *file) end() error {
	if r.done != nil {
		r.done()
	}
	f := r.file
	r.text, r.done, r.file = nil, nil, nil
	if f == nil {
		return nil
	}
	return f.Close()
}

// Close ends the reading.
func (r *file) Close() {
	r.paths = nil
	_ = r.end() // nothing was written
}
