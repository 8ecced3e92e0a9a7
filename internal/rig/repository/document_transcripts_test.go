package repository

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/cli/commands"
	"github.com/dynctl/dynctl/internal/rig/clitest"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// transcript is a command line of a document, and what is shown below it.
type transcript struct {
	typed      string // without the prompt
	shown      []string
	begin, end int // lines of what is shown
}

// transcripts are those of a document: lines of four blanks from "$ " or "^C" to the next of
// these, or to the end of the block.
func transcripts(lines []string) (out []transcript) {
	for i := 0; i < len(lines); i++ {
		typed, ok := strings.CutPrefix(lines[i], "    ")
		if !ok || typed != "^C" && !strings.HasPrefix(typed, "$ ") {
			continue
		}
		for strings.HasSuffix(typed, "\\") && i+1 < len(lines) {
			i++
			typed = strings.TrimSuffix(typed, "\\") + strings.TrimSpace(lines[i])
		}
		x := transcript{typed: strings.TrimPrefix(typed, "$ "), begin: i + 1, end: i + 1}
		for j := i + 1; j < len(lines) && (lines[j] == "" || strings.HasPrefix(lines[j], "    ") && !strings.HasPrefix(lines[j], "    $ ")); j++ {
			if lines[j] != "" { // blank ones at the end are the document's
				x.end = j + 1
			}
		}
		for _, l := range lines[x.begin:x.end] {
			x.shown = append(x.shown, strings.TrimPrefix(l, "    "))
		}
		out = append(out, x)
	}
	return out
}

// shell runs the command lines of transcripts, with a router of its own behind the addresses
// that a router has by default.
type shell struct {
	t           *testing.T
	data, admin string // URLs
	router      *clitest.Screen
	code        chan int
	seen        int    // how much the router had written at the last command
	decision    string // of the last request, and how the document names it
	named       string
}

const (
	defaultData, defaultAdmin = "http://127.0.0.1:8000", "http://127.0.0.1:8001"
)

// longTime is that of a log that is no terminal's.
var longTime = regexp.MustCompile(`(?m)^\d{4}-\d\d-\d\dT(\d\d:\d\d:\d\d)Z `)

var bound = regexp.MustCompile(`routes on (http://[^\s,]+), admin API and /metrics on (http://\S+)`)

// run is the output of a command line.
func (s *shell) run(line string) string {
	s.t.Helper()
	line, file, redirected := strings.Cut(line, " > ")
	var args []string
	for _, w := range words.FindAllString(line, -1) {
		args = append(args, strings.Trim(w, `'"`))
	}
	for i := range args {
		args[i] = strings.Replace(args[i], defaultData, s.data, 1)
		if i > 0 && args[i-1] == "explain" && !strings.HasPrefix(args[i], "-") {
			args[i], s.named = s.decision, args[i]
		}
	}
	switch {
	case line == "^C":
		if err := syscall.Kill(os.Getpid(), syscall.SIGINT); err != nil {
			s.t.Fatal(err)
		}
		if c := <-s.code; c != cli.ExitOK {
			s.t.Errorf("serve ended with %d", c)
		}
		s.code = nil
		return s.router.String()[s.seen:]
	case args[0] == "curl":
		return s.curl(args[1:])
	case args[1] == "serve":
		return s.serve(args[1:])
	}
	var out bytes.Buffer // both, as a terminal has it
	code := cli.Main(commands.Root(), args[1:], strings.NewReader(""), &out, &out)
	if code != cli.ExitOK {
		s.t.Errorf("%s: exit %d\n%s", line, code, &out)
	}
	if redirected {
		if err := os.WriteFile(file, out.Bytes(), 0o600); err != nil {
			s.t.Fatal(err)
		}
		return ""
	}
	return out.String()
}

// serve starts a router, which runs until ^C, and returns what it writes until it is ready.
func (s *shell) serve(args []string) string {
	s.router, s.code = &clitest.Screen{}, make(chan int, 1)
	args = append(args, "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--log-format", "text")
	go func() { s.code <- cli.Main(commands.Root(), args, strings.NewReader(""), s.router, s.router) }()
	clitest.Until(s.t, "the router", func() error {
		if got := s.router.String(); !strings.Contains(got, "workers ready") || !strings.Contains(got, "See all of it live") {
			return fmt.Errorf("%q", got)
		}
		return nil
	})
	got := s.router.String()
	s.seen = len(got)
	m := bound.FindStringSubmatch(got)
	s.data, s.admin = m[1], m[2]
	s.t.Setenv("DYNCTL_ROUTER", s.admin)
	c, err := admin.NewClient(s.admin, admin.Options{})
	if err != nil {
		s.t.Fatal(err)
	}
	defer c.Close()
	clitest.Until(s.t, "all KV events", func() error {
		status, err := c.Status(s.t.Context())
		if err == nil && status.Index.UntrustedRank > 0 {
			err = fmt.Errorf("%v", status.Reasons)
		}
		return err
	})
	return got
}

// curl is what `curl -i` shows of a request with -H and -d.
func (s *shell) curl(args []string) string {
	s.t.Helper()
	q, err := http.NewRequestWithContext(s.t.Context(), http.MethodPost, s.data, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	for i, a := range args {
		switch {
		case i > 0 && args[i-1] == "-H":
			k, v, _ := strings.Cut(a, ": ")
			q.Header.Set(k, v)
		case i > 0 && args[i-1] == "-d":
			q.Body, q.ContentLength = io.NopCloser(strings.NewReader(a)), int64(len(a))
		case strings.HasPrefix(a, "http"):
			if q.URL, err = q.URL.Parse(a); err != nil {
				s.t.Fatal(err)
			}
		}
	}
	resp, err := http.DefaultClient.Do(q)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	s.decision = resp.Header.Get("X-Dynctl-Decision")
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s\n", resp.Proto, resp.Status)
	for _, k := range slices.Sorted(maps.Keys(resp.Header)) {
		fmt.Fprintf(&b, "%s: %s\n", k, resp.Header.Get(k))
	}
	if len(resp.TransferEncoding) > 0 {
		fmt.Fprintf(&b, "Transfer-Encoding: %s\n", resp.TransferEncoding[0])
	}
	return b.String() + "\n" + string(body)
}

// differs are what differs from run to run, and how it is compared: blanks that align, times,
// names, what was not measured yet, and figures. With exact, whole figures are compared.
func differs(line string, exact bool) string {
	for _, r := range []struct{ from, to string }{
		{`\d{4}-\d\d-\d\dT[\d:.]+(Z|[+-]\d\d:\d\d)|\d\d:\d\d:\d\d(\.\d+)?|\w+, \d\d \w+ \d{4}|\d{4}-\d\d-\d\d`, "TIME"},
		{`(TIME )+GMT`, "TIME"},
		{`\b[0-9a-f]{16,}\b`, "ID"},
		{`dynctl \S+ routes`, "dynctl VERSION routes"},
		{`version \S+,`, "version VERSION,"},
		{`[░▏▎▍▌▋▊▉█]+`, "BAR"},
		{`[-+]?\d+(\.\d+)? ?([uµm]?s|[KM]iB)\b|[-+]?\d[\d,]*\.\d+[kM]?`, "#"},
	} {
		line = regexp.MustCompile(r.from).ReplaceAllString(line, r.to)
	}
	if !exact {
		line = regexp.MustCompile(`[-+]?\b\d[\d,]*[kM]?\b`).ReplaceAllString(line, "#")
		line = regexp.MustCompile(`(^| )-( |%|$)`).ReplaceAllString(line, "$1#$2")
		line = regexp.MustCompile(`(^| )-( |%|$)`).ReplaceAllString(line, "$1#$2") // beside another
	}
	return strings.TrimSpace(clitest.Squeeze(line))
}

// cut leaves out of what a command printed as much as a document does with "…": all between as
// many lines as the document has before and behind it.
func cut(got, shown []string) []string {
	at := slices.Index(shown, "…")
	if at < 0 {
		return got
	}
	tail := len(shown) - at - 1
	if at+tail > len(got) {
		return got
	}
	return slices.Concat(got[:at], []string{"…"}, got[len(got)-tail:])
}

// TestDocumentTranscripts runs the command lines of the first five minutes, one after the
// other, and compares what they print with what the document shows, but for times, names and
// measured figures. With -update it writes what differs.
func TestDocumentTranscripts(t *testing.T) {
	path, err := filepath.Abs(filepath.Join(repository, "docs/first-five-minutes.md"))
	if err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(raw), "\n")
	list := transcripts(lines)
	if len(list) < 8 {
		t.Fatalf("%d transcripts", len(list))
	}
	t.Chdir(t.TempDir())
	s := &shell{t: t}
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		if s.code != nil {
			_ = syscall.Kill(os.Getpid(), syscall.SIGINT)
			<-s.code
		}
	})
	var written []string
	last := 0
	for _, x := range list {
		out := s.run(x.typed)
		if s.named != "" {
			out = strings.ReplaceAll(out, s.decision, s.named)
		}
		out = strings.NewReplacer(" --router "+s.admin, "", s.admin, defaultAdmin, s.data, defaultData,
			strings.TrimPrefix(s.admin, "http://"), "127.0.0.1:8001", strings.TrimPrefix(s.data, "http://"), "127.0.0.1:8000").Replace(out)
		out = longTime.ReplaceAllString(out, "$1 ")
		var got []string
		for l := range strings.Lines(strings.TrimRight(out, "\n")) {
			if !strings.HasPrefix(l, "still examining ") { // only a slow machine shows that
				got = append(got, strings.TrimRight(l, " \n"))
			}
		}
		got = cut(got, x.shown)
		exact := strings.Contains(x.typed, "explain")
		compared := func(lines []string) (out []string) {
			for _, l := range lines {
				if l != "" {
					out = append(out, differs(l, exact))
				}
			}
			if !regexp.MustCompile(`curl|explain|doctor`).MatchString(x.typed) {
				// Parts of a router, and policies, do not wait for each other, and the busiest
				// ranks stand first.
				slices.Sort(out)
			}
			return out
		}
		d := cmp.Diff(compared(x.shown), compared(got))
		switch {
		case d == "":
			got = x.shown // with the times that it has
		case !*update:
			t.Errorf("$ %s (-document +printed):\n%s", x.typed, d)
		}
		written = append(written, lines[last:x.begin]...)
		for _, l := range got {
			written = append(written, strings.TrimRight("    "+l, " "))
		}
		last = x.end
	}
	if *update {
		File(t, path, strings.Join(append(written, lines[last:]...), "\n"), "", true)
	}
}
