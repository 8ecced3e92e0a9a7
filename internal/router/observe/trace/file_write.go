package trace

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// Compressor is a writer whose data can be read after a Flush even if it is
// never closed.
type Compressor interface {
	io.WriteCloser
	Flush() error
}

// plain is the Compressor of uncompressed files.
type plain struct{ *bufio.Writer }

func (p plain) Close() error { return p.Flush() }

// Compress wraps w as a file's name says: .gz, .zst or not at all.
func Compress(w io.Writer, path string) (Compressor, error) {
	switch filepath.Ext(path) {
	case ".gz":
		return gzip.NewWriterLevel(w, gzip.BestSpeed)
	case ".zst":
		return zstd.NewWriter(w, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(1<<20))
	default:
		return plain{bufio.NewWriterSize(w, 1<<16)}, nil
	}
}

// Writer writes a file that appears under its name only when it is whole, and
// that only its owner may read.
type Writer struct {
	path string
	tmp  *os.File
	z    Compressor
}

// Create begins a file, compressed by its name; "-" writes to stdout.
func Create(path string, stdout io.Writer) (*Writer, error) {
	if path == "-" {
		return &Writer{z: plain{bufio.NewWriterSize(stdout, 1<<16)}}, nil
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return nil, fmt.Errorf("create %s: %w", path, err)
	}
	z, err := Compress(tmp, path)
	if err != nil {
		tmp.Close()
		_ = os.Remove(tmp.Name())
		return nil, fmt.Errorf("create %s: %w", path, err)
	}
	return &Writer{path: path, tmp: tmp, z: z}, nil
}

// Write appends to the file.
func (f *Writer) Write(p []byte) (int, error) { return f.z.Write(p) }

// Commit completes the file and gives it its name.
func (f *Writer) Commit() error {
	err := f.z.Close()
	if f.tmp == nil {
		return err
	}
	err = errors.Join(err, f.tmp.Close())
	if err == nil {
		err = os.Rename(f.tmp.Name(), f.path)
	}
	if err != nil {
		_ = os.Remove(f.tmp.Name())
		return fmt.Errorf("write %s: %w", f.path, err)
	}
	f.tmp = nil
	return nil
}

// Discard drops a file that was not committed; after Commit it does nothing.
func (f *Writer) Discard() {
	if f.tmp != nil {
		f.tmp.Close()
		_ = os.Remove(f.tmp.Name())
		f.tmp = nil
	}
}
