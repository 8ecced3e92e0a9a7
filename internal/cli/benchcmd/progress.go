package benchcmd

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"

	"github.com/dynctl/dynctl/internal/bench/experiment"
	"github.com/dynctl/dynctl/internal/bench/loadgen"
	"github.com/dynctl/dynctl/internal/bench/report"
	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/wait"
)

// benchProgress shows on standard error how a run goes: a region of lines that
// is drawn again and again on a terminal, one line for each cell elsewhere.
type benchProgress struct {
	w    io.Writer
	mode string // region, lines, jsonl or none
	cell loadgen.Progress

	mu      sync.Mutex  // guards the following
	control *runControl // set when keys are read
	unkey   func()
	drawn   int // lines of the region on the screen
	last    experiment.Event
	at      time.Time // of that
	lastN   string
	stop    context.CancelFunc
	done    chan struct{}
}

func newBenchProgress(w io.Writer, mode string) *benchProgress {
	p := &benchProgress{w: w, mode: mode}
	if mode == "auto" {
		p.mode = "lines"
		if cli.IsTerminal(w) && os.Getenv("TERM") != "dumb" {
			p.mode = "region"
		}
	}
	if p.mode == "region" {
		ctx, stop := context.WithCancel(context.Background())
		p.stop, p.done = stop, make(chan struct{})
		go p.redraw(ctx)
	}
	return p
}

func (p *benchProgress) redraw(ctx context.Context) {
	defer close(p.done)
	for range wait.Every(ctx, 250*time.Millisecond) {
		p.mu.Lock()
		p.draw()
		p.mu.Unlock()
	}
}

// listen lets keys steer the run, where a person sees the live region and can
// type: anywhere else input is not ours to read.
func (p *benchProgress) listen(in io.Reader, c *runControl) error {
	f, ok := in.(*os.File)
	if p.mode != "region" || !ok || !cli.IsTerminal(f) {
		return nil
	}
	stop, err := readKeys(f, c.press)
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.control, p.unkey = c, stop
	p.mu.Unlock()
	return nil
}

// close ends the drawing and gives the keyboard back; what was said stays. It
// may be called twice.
func (p *benchProgress) close() {
	if p.mode != "region" {
		return
	}
	p.mu.Lock()
	unkey := p.unkey
	p.mu.Unlock()
	if unkey != nil {
		unkey()
	}
	p.mu.Lock()
	stop := p.stop
	p.stop = nil
	p.mu.Unlock()
	if stop == nil {
		return
	}
	stop()
	<-p.done
	p.mu.Lock()
	p.erase()
	p.mu.Unlock()
}

func (p *benchProgress) erase() {
	if p.drawn > 0 {
		fmt.Fprintf(p.w, "\x1b[%dA\x1b[J", p.drawn)
		p.drawn = 0
	}
}

// say prints a line that stays.
func (p *benchProgress) say(format string, a ...any) {
	text := printable.Sprintf(format, a...)
	p.mu.Lock()
	defer p.mu.Unlock()
	switch p.mode {
	case "none":
	case "jsonl":
		p.json(map[string]any{"kind": "note", "text": text})
	default:
		p.erase()
		fmt.Fprintln(p.w, text)
		if p.stop != nil { // a region that is not closed yet
			p.draw()
		}
	}
}

func (p *benchProgress) json(v any) {
	if b, err := json.Marshal(v); err == nil {
		fmt.Fprintf(printable.JSON(p.w), "%s\n", b)
	}
}

// event gets everything that the experiment does.
func (p *benchProgress) event(e experiment.Event) {
	if e.Kind == "phase" {
		p.say("run     %s", e.Text)
		return
	}
	if e.Kind == "skip" {
		p.say("skip    %s: void, %s, not measured again", e.Cell.ID, e.Text)
		return
	}
	if e.Kind == "void" {
		p.say("void    %s: %s, measured again", e.Cell.ID, e.Text)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if e.Kind == "start" {
		p.cell.Ended.Store(0)
		p.cell.Failed.Store(0)
		e.Remaining = p.last.Remaining
	}
	p.last, p.at = e, time.Now()
	if e.Kind != "cell" {
		return
	}
	line := report.CellLine(e.Result)
	switch p.mode {
	case "lines":
		printable.Fprintf(p.w, "%3d/%d %s%s\n", e.Done, e.Total, line, eta(e.Remaining))
	case "jsonl":
		p.json(map[string]any{"kind": "cell", "done": e.Done, "total": e.Total, "elapsed_seconds": e.Elapsed.Seconds(), "remaining_seconds": e.Remaining.Seconds(), "result": e.Result})
	case "region":
		p.lastN = line
	}
}

// eta is what is left as the end of a line, empty while that is not known and at the end.
func eta(left time.Duration) string {
	if left <= 0 {
		return ""
	}
	return "  eta " + shortTime(left)
}

func (p *benchProgress) draw() {
	e := p.last
	if e.Total == 0 && e.Cell.ID == "" {
		return
	}
	p.erase()
	width := terminalWidth(p.w)
	var lines []string
	if e.Total > 0 {
		const bar = 24
		n := bar * e.Done / e.Total
		lines = append(lines, fmt.Sprintf("run     [%s%s] %d/%d %.1f%%  elapsed %s%s", strings.Repeat("#", n), strings.Repeat("-", bar-n), e.Done, e.Total, 100*float64(e.Done)/float64(e.Total), shortTime(e.Elapsed+time.Since(p.at)), eta(e.Remaining)))
	}
	c := e.Cell
	lines = append(lines, fmt.Sprintf("  now   %s  isl %d  %s  %s  rep %d  in flight %d  ended %d/%d  failed %d", c.Phase, c.ISL(), c.Load, c.Arm, c.Repeat+1, p.cell.InFlight.Load(), p.cell.Ended.Load(), c.Requests+c.Ramp, p.cell.Failed.Load()))
	if p.lastN != "" {
		lines = append(lines, "  last  "+p.lastN)
	}
	hint := "ctrl-c once: finish the cell and keep what is done, twice: end now"
	if p.control != nil {
		hint = p.control.hint()
	}
	lines = append(lines, "  key   "+hint)
	for _, l := range lines {
		l = printable.Line(l)
		if len(l) >= width {
			l = l[:max(width-1, 0)]
		}
		fmt.Fprintln(p.w, l)
	}
	p.drawn = len(lines)
}

func terminalWidth(v any) int {
	if f, ok := v.(*os.File); ok {
		if w, _, err := term.GetSize(int(f.Fd())); err == nil && w > 20 {
			return w
		}
	}
	return 120
}

// clientCeiling is how many streams a second this process can read here, from
// a stub that answers at once.
func clientCeiling(ctx context.Context) (float64, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	stub := loadgen.NewStub(ln)
	defer stub.Close()
	n := 2000
	sum, err := loadgen.Run(ctx, loadgen.Options{Base: "http://" + ln.Addr().String(), Concurrency: 16}, loadgen.Repeated(n))
	if err != nil {
		return 0, err
	}
	return float64(sum.Requests) / sum.Wall.Seconds(), nil
}
