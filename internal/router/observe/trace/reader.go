package trace

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"
)

// Options configure a Reader; the zero value reads any format and stops at the
// first bad line.
type Options struct {
	// Format is how the lines are written; empty is Auto.
	Format Format
	// MaxBad is how many bad lines are skipped before the reading ends with
	// ErrTooManyBad; negative is any number.
	MaxBad int
	// MaxLine bounds a line in bytes (default 64 MiB); longer ones are bad.
	MaxLine int
	// OnBad is called with each bad line that is skipped; may be nil.
	OnBad func(*LineError)
	// OnCut is called once, with the last line that could be read, if the trace is cut;
	// may be nil.
	OnCut func(line int64)
	// Start, when set, is the time that records' times count from in the place
	// of the header's own: that of a recording's first part.
	Start time.Time
}

// DefaultMaxLine is the longest line in bytes unless Options say otherwise.
const DefaultMaxLine = 64 << 20

// maxNames bounds the remembered rank names.
const maxNames = 1 << 16

// Stats are what a Reader has met so far.
type Stats struct {
	// Lines and Bytes of the uncompressed file.
	Lines, Bytes int64
	// Bad lines were skipped; FirstBad is the first one's number.
	Bad, FirstBad int64
	// Unknown lines are of a kind that is not known here, Skipped ones are not
	// part of what is read (replay answers in a capture).
	Unknown, Skipped int64
	// Reordered counts records that are earlier than the one before them.
	Reordered int64
	// Cut says that the file ends within a line or within its compression, as
	// after a crash. All before was read.
	Cut bool
	// Parts counts headers after the first: files put together.
	Parts int64
	// Forgotten is how often there were more settings and descriptions of workers
	// than are kept: the oldest were forgotten, and decisions that refer to them
	// cannot be made again.
	Forgotten int64
}

// Reader reads the records of one trace.
type Reader struct {
	name  string
	o     Options
	file  *file
	lines *lines

	format     Format
	header     Header
	stats      Stats
	last       int64  // time of the record before
	first      []byte // the line that showed the format, still to be read
	firstBytes int
	shift      time.Duration // of this part's start after the first one's
	base       int64         // of formats with absolute times
	based      bool

	payload       []byte
	names, locals []uint64
	ranks         map[string]string
	known         descriptions
	chats         map[int64]int64 // the first request of each one's conversation
}

// Open opens a trace file; "-" is stdin, which is not closed.
func Open(path string, stdin io.Reader, o Options) (*Reader, error) {
	if path == "-" {
		return NewReader(stdin, "stdin", o)
	}
	file, err := openFile(path)
	if err != nil {
		return nil, err
	}
	return newReader(file, path, o)
}

// NewReader reads a trace from in, which is called name in messages. It reads
// the header and finds out the format; a file that is no trace is ErrSchema.
func NewReader(in io.Reader, name string, o Options) (*Reader, error) {
	file, err := readFile(in)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return newReader(file, name, o)
}

// OpenAll opens the parts of one recording, in their order, as one trace. Lines
// and bytes are counted over all of them.
func OpenAll(paths []string, o Options) (*Reader, error) {
	if len(paths) == 0 {
		return nil, errors.New("no trace file")
	}
	return newReader(openParts(paths), fmt.Sprintf("%s and %d more", paths[0], len(paths)-1), o)
}

func newReader(file *file, name string, o Options) (*Reader, error) {
	o.MaxLine = cmp.Or(max(o.MaxLine, 0), DefaultMaxLine)
	o.Format = cmp.Or(o.Format, Auto)
	r := &Reader{name: name, o: o, file: file, lines: newLines(file, o.MaxLine), ranks: map[string]string{}, known: newDescriptions(), chats: map[int64]int64{}}
	if err := r.begin(); err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// Close frees the reader's resources, the file it opened included.
func (r *Reader) Close() { r.file.Close() }

// Header is the newest header; zero for formats without one.
func (r *Reader) Header() Header { return r.header }

// Format is the format that was found.
func (r *Reader) Format() Format { return r.format }

// cut notes that the trace ends where nobody ended it.
func (r *Reader) cut() {
	reported := r.stats.Cut
	r.stats.Cut = true
	if !reported && r.o.OnCut != nil {
		r.o.OnCut(r.stats.Lines)
	}
}

// Stats is what was met so far.
func (r *Reader) Stats() Stats { return r.stats }

// Name is the file's name in messages.
func (r *Reader) Name() string { return r.name }

// Consumed is how many bytes of the file, as it is stored, were taken. It may
// be called while Next runs.
func (r *Reader) Consumed() int64 { return r.file.Consumed() }

// begin reads the first line and finds out the format.
func (r *Reader) begin() error {
	p, n, err := r.lines.Next()
	for err == nil && len(bytes.TrimSpace(p)) == 0 {
		r.count(n)
		p, n, err = r.lines.Next()
	}
	switch {
	case errors.Is(err, io.EOF) && len(p) == 0:
		return fmt.Errorf("%s: %w", r.name, ErrEmpty)
	case errors.Is(err, errLong):
		return &LineError{r.name, 1, 0, fmt.Errorf("%w: longer than %d bytes", ErrSchema, r.o.MaxLine)}
	case err != nil && isCut(err):
		return fmt.Errorf("%s: %w: the file is cut within its first line", r.name, ErrEmpty)
	case err != nil && !errors.Is(err, io.EOF):
		return fmt.Errorf("%s: %w", r.name, err)
	}
	whole := err == nil
	p = bytes.TrimSuffix(p, []byte{'\n'})
	format, ferr := detect(p)
	if r.o.Format != Auto {
		if format == Own && ferr != nil || ferr == nil && format != r.o.Format {
			if ferr == nil {
				ferr = fmt.Errorf("%w: this is %s, not %s", ErrSchema, format, r.o.Format)
			}
		} else {
			ferr = nil
		}
		format = r.o.Format
	}
	if ferr != nil {
		return &LineError{r.name, r.stats.Lines + 1, r.stats.Bytes + jsonOffset(ferr), ferr}
	}
	r.format = format
	if format != Own {
		// The line is a record: Next begins with it.
		r.first, r.firstBytes = append([]byte{}, p...), n
		if !whole {
			if !json.Valid(p) {
				r.cut()
			}
		}
		return nil
	}
	r.count(n)
	if err := json.Unmarshal(p, &r.header); err != nil {
		return &LineError{r.name, r.stats.Lines, 0, fmt.Errorf("header: %w", err)}
	}
	if r.o.Start.IsZero() {
		r.o.Start = r.header.Start
	}
	r.shift = r.header.Start.Sub(r.o.Start)
	return nil
}

// count counts a line of n bytes.
func (r *Reader) count(n int) {
	r.stats.Lines++
	r.stats.Bytes += int64(n)
}

// detect finds out the format by a file's first line.
func detect(p []byte) (Format, error) {
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(p, &keys); err != nil {
		return "", fmt.Errorf("%w: the first line is no JSON object: %w", ErrSchema, err)
	}
	if raw, ok := keys["schema"]; ok {
		var schema string
		if err := json.Unmarshal(raw, &schema); err != nil {
			return "", fmt.Errorf("%w: schema is no string", ErrSchema)
		}
		switch {
		case schema == Schema:
			return Own, nil
		case schema == dynamoReqSchema:
			return DynamoRequests, nil
		case strings.HasPrefix(schema, schemaName):
			return Own, fmt.Errorf("%w: it has schema %s, this dynctl reads %s: use the version of dynctl that wrote it", ErrSchema, schema, Schema)
		}
		return "", fmt.Errorf("%w: it has schema %q", ErrSchema, schema)
	}
	has := func(names ...string) bool {
		return !slices.ContainsFunc(names, func(n string) bool { return keys[n] == nil })
	}
	switch {
	case has("frames_b64"):
		return Capture, nil
	case has("timestamp", "event"):
		return DynamoEvents, nil
	case has("chat_id", "timestamp", "input_length", "output_length"):
		return Bailian, nil
	case has("kind", "t_us"):
		return "", fmt.Errorf("%w: the header line is missing (%q expected in the first line)", ErrSchema, Schema)
	}
	found := slices.Sorted(maps.Keys(keys))
	if has("input_length") {
		_, err := mooncake(p)
		other := slices.DeleteFunc(slices.Clone(found), func(name string) bool { return slices.Contains(mooncakeMembers, name) })
		switch {
		case err != nil:
			return "", fmt.Errorf("%w: the first line resembles Mooncake's, but cannot be read as one: %w; docs/trace-format.md has the form of its lines", ErrSchema, err)
		case len(other) > 0:
			return "", fmt.Errorf("%w: the first line has what Mooncake's have, and also %s; state --format mooncake if its timestamps are milliseconds and its hash_ids name blocks of %d tokens", ErrSchema, quoted(other), mooncakeBlock)
		}
		return Mooncake, nil
	}
	var known []string
	for _, f := range Formats()[1:] {
		known = append(known, string(f))
	}
	return "", fmt.Errorf("%w: none of the known formats (%s): the first line has the members %s; write the lines in one of these formats (docs/trace-format.md)", ErrSchema, strings.Join(known, ", "), quoted(found))
}

// quoted lists names of members in an error, the first of them where there are many.
func quoted(names []string) string {
	const most = 12
	var b strings.Builder
	for i, name := range names[:min(most, len(names))] {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%.40q", name)
	}
	if n := len(names) - most; n > 0 {
		fmt.Fprintf(&b, " and %d more", n)
	}
	return b.String()
}

// restart meets a header within a file: parts that were put together.
func (r *Reader) restart(p []byte) error {
	var h Header
	if err := json.Unmarshal(p, &h); err != nil {
		return err
	}
	if h.Schema != Schema {
		return fmt.Errorf("%w: schema %q within the file", ErrSchema, h.Schema)
	}
	r.stats.Parts++
	r.header, r.known = h, newDescriptions() // each part has its own
	r.shift = h.Start.Sub(r.o.Start)
	return nil
}

// Next reads the next record into rec. At the end it returns io.EOF; a file
// that was cut ends in the same way, see Stats.
func (r *Reader) Next(rec *Record) error {
	for {
		var p []byte
		var n int
		var err error
		at := r.stats.Bytes
		if r.first != nil {
			p, n, r.first = r.first, r.firstBytes, nil
		} else {
			p, n, err = r.lines.Next()
		}
		whole := err == nil
		switch {
		case errors.Is(err, errLong):
			r.count(n)
			if berr := r.bad(at, fmt.Errorf("%w: more than %d bytes", errLong, r.o.MaxLine)); berr != nil {
				return berr
			}
			continue
		case errors.Is(err, io.EOF) && len(p) == 0:
			return io.EOF
		case err != nil && !errors.Is(err, io.EOF):
			if isCut(err) {
				r.cut()
				return io.EOF
			}
			return &LineError{r.name, r.stats.Lines + 1, at, err}
		}
		r.count(n)
		if p = bytes.TrimRight(p, "\r\n \t"); len(p) == 0 {
			continue
		}
		*rec = Record{Line: r.stats.Lines, Offset: at}
		if err := r.parse(p, rec); err != nil {
			if !whole {
				r.cut() // a last line without its end
				return io.EOF
			}
			if berr := r.bad(at+jsonOffset(err), err); berr != nil {
				return berr
			}
			continue
		}
		if rec.Kind == "" {
			continue
		}
		if r.shift != 0 {
			rec.Time += r.shift
			rec.Batch.Received += r.shift
			if rec.Decision != nil {
				rec.Decision.BeganUS += r.shift.Microseconds()
			}
			if rec.Outcome != nil {
				rec.Outcome.ReceivedUS += r.shift.Microseconds()
			}
		}
		if t := int64(rec.Time); t < r.last {
			r.stats.Reordered++
		} else {
			r.last = t
		}
		return nil
	}
}

// All are the records from the next one on, each in the same Record; an error is
// the last.
func (r *Reader) All() iter.Seq2[*Record, error] {
	return func(yield func(*Record, error) bool) {
		var rec Record
		for {
			err := r.Next(&rec)
			if errors.Is(err, io.EOF) || !yield(&rec, err) || err != nil {
				return
			}
		}
	}
}

// parse reads one line of the file's format.
func (r *Reader) parse(p []byte, rec *Record) error {
	switch r.format {
	case DynamoEvents:
		return r.parseDynamoEvent(p, rec)
	case DynamoRequests:
		return r.parseDynamoRequest(p, rec)
	case Mooncake:
		return r.parseMooncake(p, rec)
	case Bailian:
		return r.parseBailian(p, rec)
	case Capture:
		return r.parseCapture(p, rec)
	default:
		return r.parseOwn(p, rec)
	}
}

// bad counts a bad line. It returns an error when there are too many.
func (r *Reader) bad(at int64, err error) error {
	e := &LineError{r.name, r.stats.Lines, at, err}
	if errors.Is(err, ErrSchema) {
		return e
	}
	if r.stats.Bad == 0 {
		r.stats.FirstBad = r.stats.Lines
	}
	r.stats.Bad++
	if r.o.MaxBad >= 0 && r.stats.Bad > int64(r.o.MaxBad) {
		if r.o.MaxBad > 0 {
			e.Err = fmt.Errorf("%w (%d allowed): %w", ErrTooManyBad, r.o.MaxBad, err)
		}
		return e
	}
	if r.o.OnBad != nil {
		r.o.OnBad(e)
	}
	return nil
}

// jsonOffset is where in a line a JSON error is.
func jsonOffset(err error) int64 {
	if e, ok := errors.AsType[*json.SyntaxError](err); ok {
		return max(0, e.Offset-1)
	}
	if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return max(0, e.Offset-1)
	}
	return 0
}

// intern is the string of a rank's name, made once.
func (r *Reader) intern(name []byte) string {
	if s, ok := r.ranks[string(name)]; ok {
		return s
	}
	s := string(name)
	if len(r.ranks) < maxNames {
		r.ranks[s] = s
	}
	return s
}
