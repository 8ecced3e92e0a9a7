package report

import (
	"bufio"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/klauspost/compress/zstd"
	"go.yaml.in/yaml/v3"

	"github.com/dynctl/dynctl/internal/bench/experiment"
	"github.com/dynctl/dynctl/internal/bench/loadgen"
	"github.com/dynctl/dynctl/internal/bench/plan"
	"github.com/dynctl/dynctl/internal/bench/sweep"
	"github.com/dynctl/dynctl/internal/rawjson"
)

// Names of the files of a run.
const (
	resultFile   = "result.json"
	planFile     = "plan.yaml"
	cellsFile    = "cells.csv"
	journalFile  = "cells.jsonl" // as cells finish; what --resume reads
	requestsFile = "requests.jsonl.zst"
	htmlFile     = "report.html"
	plotFile     = "plot.svg"
)

// Folder is where a run writes. Cells are kept as they finish, so that a run
// that is cut can be resumed.
type Folder struct {
	Path    string
	journal *os.File
	reqFile *os.File
	reqs    *zstd.Encoder
	line    []byte
	err     error // of requests; reported at the end
}

// CreateFolder makes a folder for a new run. It must not exist yet.
func CreateFolder(path string, run *plan.Run) (*Folder, error) {
	if err := makeFolder(path); err != nil {
		return nil, err
	}
	raw, err := yaml.Marshal(run)
	if err == nil {
		err = os.WriteFile(filepath.Join(path, planFile), raw, 0o644)
	}
	if err != nil {
		return nil, err
	}
	return openFolder(path)
}

func makeFolder(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.Mkdir(path, 0o755); err != nil {
		return fmt.Errorf("run folder: %w", err)
	}
	return nil
}

// Absent returns an error when the folder of a new run is there already, with the ways on.
// resumes says whether a run of this kind can be resumed.
func Absent(path string, resumes bool) error {
	if _, err := os.Lstat(path); err != nil {
		return nil // what else is wrong shows when the folder is made
	}
	if resumes {
		return fmt.Errorf("--out %s exists already: name another folder, or continue the run in it: dynctl bench --resume %s", path, path)
	}
	return fmt.Errorf("--out %s exists already: name another folder, or move that one away (a sweep is not resumed)", path)
}

// Finished returns an error that says so when the run in a folder has nothing left to measure.
// A run whose cells were skipped by hand can still measure them.
func Finished(path string) error {
	r, err := ReadResult(path)
	if err != nil || r.Partial != "" || r.Skipped > 0 {
		return nil // no result: the run was cut
	}
	return fmt.Errorf("%s is finished: all its %d cells are measured. dynctl bench report %s shows the result; to measure again, begin a new run without --resume", path, len(r.Cells), path)
}

// WriteSweep writes the folder of a sweep. It must not exist yet.
func WriteSweep(path string, res *sweep.Result) error {
	if err := makeFolder(path); err != nil {
		return err
	}
	return errors.Join(
		writeFile(filepath.Join(path, resultFile), func(w io.Writer) error {
			enc := json.NewEncoder(w)
			enc.SetIndent("", " ")
			return enc.Encode(res)
		}),
		writeFile(filepath.Join(path, cellsFile), func(w io.Writer) error { return CSV(w, res.Cells) }),
		writeFile(filepath.Join(path, htmlFile), func(w io.Writer) error { return SweepHTML(w, res) }),
	)
}

// ResumeFolder opens the folder of a run that was cut and gives its plan and
// its finished cells.
func ResumeFolder(path string) (*Folder, *plan.Run, map[string]experiment.CellResult, error) {
	raw, err := os.ReadFile(filepath.Join(path, planFile))
	if err != nil {
		return nil, nil, nil, fmt.Errorf("%s is not the folder of a run: %w", path, err)
	}
	var run plan.Run
	if err := yaml.Unmarshal(raw, &run); err != nil {
		return nil, nil, nil, fmt.Errorf("%s: %w", filepath.Join(path, planFile), err)
	}
	if run.Schema != plan.Schema {
		return nil, nil, nil, fmt.Errorf("%s has schema %q, this dynctl reads %s", filepath.Join(path, planFile), run.Schema, plan.Schema)
	}
	done := make(map[string]experiment.CellResult)
	j, err := os.Open(filepath.Join(path, journalFile))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, nil, nil, err
	}
	if err == nil {
		defer j.Close()
		br := bufio.NewReaderSize(j, 1<<20)
		for {
			line, err := br.ReadBytes('\n')
			if err != nil {
				break // a last line without its end was cut off: that cell is measured again
			}
			var c experiment.CellResult
			if json.Unmarshal(line, &c) == nil && c.Measure != nil {
				done[c.Cell.ID] = c
			}
		}
	}
	f, err := openFolder(path)
	return f, &run, done, err
}

func openFolder(path string) (*Folder, error) {
	f := &Folder{Path: path}
	var err error
	if f.journal, err = os.OpenFile(filepath.Join(path, journalFile), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644); err != nil {
		return nil, err
	}
	if f.reqFile, err = os.OpenFile(filepath.Join(path, requestsFile), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644); err != nil {
		f.journal.Close()
		return nil, err
	}
	// A resumed run appends a frame of its own; readers take frames as one.
	if f.reqs, err = zstd.NewWriter(f.reqFile, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(1<<20)); err != nil {
		f.journal.Close()
		f.reqFile.Close()
		return nil, err
	}
	return f, nil
}

// Cell keeps a finished cell.
func (f *Folder) Cell(c experiment.CellResult) error {
	raw, err := json.Marshal(c)
	if err != nil {
		return err
	}
	if _, err := f.journal.Write(append(raw, '\n')); err != nil {
		return fmt.Errorf("keep cell: %w", err)
	}
	return f.reqs.Flush()
}

// Request keeps one request. It is called for one at a time.
func (f *Folder) Request(c plan.Cell, r *loadgen.Result) {
	if f.err != nil {
		return
	}
	f.line = appendRequest(f.line[:0], c, r)
	_, f.err = f.reqs.Write(f.line)
}

// appendRequest appends a request as a line of JSON; times are µs since the
// start of the cell.
func appendRequest(b []byte, c plan.Cell, r *loadgen.Result) []byte {
	str := func(key, v string) {
		b = append(b, ',', '"')
		b = append(b, key...)
		b = append(b, '"', ':')
		b = rawjson.AppendString(b, v)
	}
	num := func(key string, v int64) {
		b = append(b, ',', '"')
		b = append(b, key...)
		b = append(b, '"', ':')
		b = strconv.AppendInt(b, v, 10)
	}
	b = append(b, `{"id":`...)
	b = rawjson.AppendString(b, r.ID)
	str("cell", c.ID)
	num("isl_tokens", int64(r.ISL))
	num("osl_tokens", int64(r.OSL))
	num("intended_us", r.Intended.Microseconds())
	num("sent_us", r.Sent.Microseconds())
	if r.Err == "" {
		num("first_byte_us", r.FirstByte.Microseconds())
		num("first_token_us", r.First.Microseconds())
		num("last_token_us", r.Last.Microseconds())
		num("output_tokens", int64(r.OutputTokens))
		num("prompt_tokens", int64(r.PromptTokens))
		num("cached_tokens", int64(r.CachedTokens))
		num("pieces", int64(r.Pieces))
		b = append(b, `,"good":`...)
		b = strconv.AppendBool(b, r.Good)
	} else {
		num("status", int64(r.Status))
		msg, _ := json.Marshal(r.Kind + ": " + r.Err) // a string always can
		b = append(b, `,"error":`...)
		b = append(b, msg...)
	}
	if r.Warm {
		b = append(b, `,"warm":true`...)
	}
	if r.Decision != "" {
		str("decision", r.Decision)
	}
	if r.Path != "" {
		str("path", r.Path)
	}
	return append(b, '}', '\n')
}

// Finish writes the result and everything made of it, and closes the folder.
func (f *Folder) Finish(r *experiment.Result) error {
	errs := []error{f.Close()}
	errs = append(errs, writeFile(filepath.Join(f.Path, resultFile), func(w io.Writer) error {
		enc := json.NewEncoder(w)
		enc.SetEscapeHTML(false)
		enc.SetIndent("", " ")
		return enc.Encode(r)
	}))
	errs = append(errs, writeFile(filepath.Join(f.Path, cellsFile), func(w io.Writer) error { return CSV(w, r.Cells) }))
	errs = append(errs, writeFile(filepath.Join(f.Path, htmlFile), func(w io.Writer) error { return HTML(w, r) }))
	errs = append(errs, writeFile(filepath.Join(f.Path, plotFile), func(w io.Writer) error { return plot(w, r) }))
	return errors.Join(errs...)
}

// Close closes the folder of a run without a result.
func (f *Folder) Close() error {
	return errors.Join(f.err, f.reqs.Close(), f.reqFile.Close(), f.journal.Close())
}

// writeFile writes a file that appears only when it is whole.
func writeFile(path string, write func(io.Writer) error) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	bw := bufio.NewWriter(tmp)
	err = errors.Join(write(bw), bw.Flush(), tmp.Chmod(0o644), tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		os.Remove(tmp.Name())
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// maxResult bounds a result file.
const maxResult = 512 << 20

// ReadResult reads the result of a run: its folder or its result.json.
func ReadResult(path string) (*experiment.Result, error) {
	var r experiment.Result
	return &r, read(path, &r, func() string { return r.Schema }, experiment.Schema)
}

// ReadSweep reads the result of a sweep: its folder or its result.json.
func ReadSweep(path string) (*sweep.Result, error) {
	var r sweep.Result
	return &r, read(path, &r, func() string { return r.Schema }, sweep.Schema)
}

// ErrSchema says that a file holds something else than what was wanted.
var ErrSchema = errors.New("another schema")

func read(path string, into any, schema func() string, want string) error {
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		path = filepath.Join(path, resultFile)
	}
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("no result: %w", err)
	}
	defer f.Close()
	err = json.NewDecoder(io.LimitReader(f, maxResult)).Decode(into)
	if got := schema(); got != "" && got != want {
		return fmt.Errorf("%s has %w: %q, this reads %s", path, ErrSchema, got, want)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// CSV writes one line for each cell.
func CSV(w io.Writer, cells []experiment.CellResult) error {
	c := csv.NewWriter(w)
	head := []string{
		"cell", "phase", "arm", "concurrency", "rate_per_second", "eff_isl_tokens", "cached_tokens", "osl_tokens", "repeat", "start_s",
		"requests", "failed", "ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms", "ttft_intended_p50_ms", "tpot_p50_ms", "itl_p50_ms", "itl_p99_ms", "e2e_p50_ms",
		"dispatch_p95_ms", "late_sends", "in_flight_share", "achieved_rate_share", "good", "goodput_rps", "requests_per_second", "output_tokens_per_second",
		"cache_hit_share", "transfer_tokens", "expected_transfer_tokens", "silent_recomputes", "fallbacks", "router_ms", "prefill_queue_ms", "prefill_ms", "transfer_ms", "first_decode_ms", "threshold_tokens",
	}
	if err := c.Write(head); err != nil {
		return err
	}
	f := func(v float64) string { return strconv.FormatFloat(v, 'g', 8, 64) }
	p := func(v *float64) string {
		if v == nil {
			return ""
		}
		return f(*v)
	}
	for i := range cells {
		x := &cells[i]
		m := x.Measure
		row := []string{
			x.Cell.ID, x.Cell.Phase, string(x.Cell.Arm), strconv.Itoa(x.Cell.Load.Concurrency), f(x.Cell.Load.Rate), strconv.Itoa(x.Cell.EffISL), strconv.Itoa(x.Cell.CachedTokens), strconv.Itoa(x.Cell.OSL), strconv.Itoa(x.Cell.Repeat), f(x.Start.Seconds()),
			strconv.Itoa(m.Requests), strconv.Itoa(m.Failed), f(m.TTFT.P50), f(m.TTFT.P95), f(m.TTFT.P99), f(m.TTFTIntended.P50), f(m.TPOT.P50), f(m.ITL.P50), f(m.ITL.P99), f(m.E2E.P50),
			f(m.Dispatch.P95), strconv.Itoa(m.Late), f(m.InFlight), f(m.Achieved), strconv.Itoa(m.Good), f(m.GoodPerSecond), f(m.RequestsPerSecond), f(m.TokensPerSecond),
			p(m.HitShare), p(m.TransferTokens), f(m.ExpectedTransferTokens), strconv.Itoa(m.Recomputes), strconv.Itoa(m.Fallbacks), p(m.Stages.Router), p(m.Stages.PrefillQueue), p(m.Stages.Prefill), p(m.Stages.Transfer), p(m.Stages.FirstDecode), strconv.Itoa(x.Cell.Threshold),
		}
		if len(row) != len(head) {
			return fmt.Errorf("a row has %d columns, the head %d", len(row), len(head))
		}
		if err := c.Write(row); err != nil {
			return err
		}
	}
	c.Flush()
	return c.Error()
}

// loads lists the loads of a result's groups with the given cached share.
func loads(r *experiment.Result, cached float64) []*experiment.GroupResult {
	var out []*experiment.GroupResult
	for i := range r.Groups {
		if r.Groups[i].Group.Cached == cached {
			out = append(out, &r.Groups[i])
		}
	}
	slices.SortStableFunc(out, func(a, b *experiment.GroupResult) int {
		return a.Group.Load.Concurrency - b.Group.Load.Concurrency
	})
	return out
}
