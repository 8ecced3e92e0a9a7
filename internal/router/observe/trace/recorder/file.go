package recorder

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/trace"
)

// FileOptions say where a recording goes.
type FileOptions struct {
	// Path of the first file; its ending (.gz, .zst) says how it is compressed.
	// Further parts get ".0001" and so on before the ends. A file that exists is
	// never overwritten: the first free number is taken.
	Path string
	// MaxBytes and MaxAge begin a new part when one has as many bytes (before
	// compression) or is as old; 0 is never. What a part repeats of those before it
	// counts as half of MaxBytes at most.
	MaxBytes int64
	MaxAge   time.Duration
	// Keep is how many parts are kept, the oldest go first; 0 keeps all.
	Keep int
	// FlushEvery is how much a crash may lose (default 1 s). Lines that are fewer
	// than 64 KiB wait as long before they are compressed and written.
	FlushEvery time.Duration
}

// File writes a subscription to files. Run does the work.
type File struct {
	o     FileOptions
	sub   *Subscription
	parts []string
	bytes atomic.Int64
	path  atomic.Pointer[string]

	f     *os.File
	z     trace.Compressor
	part  int
	first opening // what the next part begins with
	size  int64
	begun time.Time
}

// NewFile creates the first file.
func NewFile(sub *Subscription, o FileOptions) (*File, error) {
	if o.Path == "" {
		return nil, errors.New("recording: no file name")
	}
	o.FlushEvery = cmp.Or(max(o.FlushEvery, 0), time.Second)
	sub.collect(fileBatch)
	r := &File{o: o, sub: sub, first: newOpening()}
	return r, r.open()
}

// Path is the file that is written now.
func (r *File) Path() string { return *r.path.Load() }

// Bytes is how much was written so far, before compression.
func (r *File) Bytes() int64 { return r.bytes.Load() }

// partPath is the name of a part: "t.jsonl.zst", "t.0001.jsonl.zst".
func partPath(path string, part int) string {
	if part == 0 {
		return path
	}
	dir, name := filepath.Split(path)
	stem, ends := name, ""
	for _, end := range []string{".gz", ".zst", ".jsonl"} {
		if s, ok := strings.CutSuffix(stem, end); ok && s != "" {
			stem, ends = s, end+ends
		}
	}
	return dir + fmt.Sprintf("%s.%04d%s", stem, part, ends)
}

const maxParts = 1 << 20

// open begins the next part that has no file yet.
func (r *File) open() error {
	for ; r.part < maxParts; r.part++ {
		path := partPath(r.o.Path, r.part)
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if errors.Is(err, os.ErrExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("recording: %w", err)
		}
		z, err := trace.Compress(f, path)
		if err != nil {
			f.Close()
			return fmt.Errorf("recording %s: %w", path, err)
		}
		r.f, r.z, r.size, r.begun = f, z, 0, time.Now()
		r.path.Store(&path)
		r.parts = append(r.parts, path)
		if r.o.Keep > 0 && len(r.parts) > r.o.Keep {
			if err := os.Remove(r.parts[0]); err != nil && !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("recording: %w", err)
			}
			r.parts = r.parts[1:]
		}
		return nil
	}
	return fmt.Errorf("recording: %s has %d parts already", r.o.Path, maxParts)
}

// Run writes until the subscription is closed or ctx ends, then completes the
// file. An error of the disk ends it; the subscription is closed then, so that
// the router does not continue making lines.
func (r *File) Run(ctx context.Context) error {
	defer r.sub.Close()
	tick := time.NewTicker(r.o.FlushEvery)
	defer tick.Stop()
	dirty := false
	for {
		flush := false
		select {
		case <-ctx.Done():
			return r.finish()
		case <-tick.C:
			flush = true
		case <-r.sub.wake:
		}
		if p := r.sub.take(); len(p) > 0 {
			if err := r.write(p); err != nil {
				return errors.Join(err, r.f.Close())
			}
			dirty = true
		}
		if flush {
			if dirty {
				if err := r.z.Flush(); err != nil {
					return errors.Join(fmt.Errorf("recording: %w", err), r.f.Close())
				}
			}
			dirty = false
			if r.o.MaxAge > 0 && time.Since(r.begun) >= r.o.MaxAge {
				if err := r.rotate(); err != nil {
					return err
				}
			}
		}
		r.sub.mu.Lock()
		done := r.sub.closed
		r.sub.mu.Unlock()
		if done {
			return r.finish()
		}
	}
}

// write writes whole lines, beginning new parts where they are due.
func (r *File) write(p []byte) error {
	for len(p) > 0 {
		n := len(p)
		if room := r.o.MaxBytes - r.size; r.o.MaxBytes > 0 && int64(n) > room {
			// The line that passes the limit is the part's last.
			at := int(max(room, 0))
			if i := bytes.IndexByte(p[at:], '\n'); i >= 0 {
				n = at + i + 1
			}
		}
		if _, err := r.z.Write(p[:n]); err != nil {
			return fmt.Errorf("recording: %w", err)
		}
		if err := r.first.note(p[:n]); err != nil {
			return fmt.Errorf("recording: %w", err)
		}
		r.size += int64(n)
		r.bytes.Add(int64(n))
		if p = p[n:]; r.o.MaxBytes > 0 && r.size >= r.o.MaxBytes {
			if err := r.rotate(); err != nil {
				return err
			}
		}
	}
	return nil
}

// rotate completes the part and begins the next with a header of its own.
func (r *File) rotate() error {
	if err := r.close(); err != nil {
		return err
	}
	r.part++
	if err := r.open(); err != nil {
		return err
	}
	p, err := r.first.lines(r.part)
	if err != nil {
		return fmt.Errorf("recording: %w", err)
	}
	// Whatever the size of its opening, half of the limit is for what is new: else each
	// line would become a part of its own.
	r.size = min(int64(len(p)), r.o.MaxBytes/2)
	if _, err := r.z.Write(p); err != nil {
		return fmt.Errorf("recording: %w", err)
	}
	return nil
}

func (r *File) close() error {
	if err := errors.Join(r.z.Close(), r.f.Close()); err != nil {
		return fmt.Errorf("recording: %w", err)
	}
	return nil
}

// finish takes what is left and writes the last record.
func (r *File) finish() error {
	r.sub.Close()
	if err := r.write(r.sub.take()); err != nil {
		return errors.Join(err, r.f.Close())
	}
	records, dropped := r.sub.Counts()
	end, _ := trace.AppendRecord(nil, &trace.Record{Kind: trace.KindEnd, Time: time.Duration(r.first.last) * time.Microsecond, End: &trace.End{Records: records, Dropped: dropped}})
	if err := r.write(end); err != nil {
		return errors.Join(err, r.f.Close())
	}
	return r.close()
}
