package discovery

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/workers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const goodYAML = `# the fleet
version: 1
workers:
  - url: http://10.0.0.1:8000
    name: p0
    role: prefill
    engine: vllm
    connector: nixl
    dp: 2
    events: [tcp://*:5557]
    replay: tcp://*:5657
    labels: &pool {gpu: h200, pool: a}
    models: [llama, lora]
    bootstrap: 8998
    block_size: 16
  - http://10.0.0.2:8000,role=decode,name=d0
  - {url: "http://10.0.0.3:8000", name: d1, role: decode, labels: *pool,
     lmcache: {host: 10.0.0.3, init_ports: [7300, 7301], alloc_ports: [7400, 7401]}}
`

const goodJSON = "{\n\t\"workers\": [\n\t\t{\"url\": \"http://10.0.0.1:8000\", \"name\": \"p\\u0030\", \"role\": \"prefill\",\n\t\t \"dp\": 2, \"labels\": {\"gpu\": \"h200\"}},\n\t\t\"http://10.0.0.2:8000,name=d0\"\n\t]\n}\n"

func TestParse(t *testing.T) {
	got, err := Parse("f.yaml", []byte(goodYAML))
	if err != nil {
		t.Fatal(err)
	}
	p0, err := workers.ParseSpec("prefill", "http://10.0.0.1:8000,name=p0,engine=vllm,connector=nixl,dp=2,events=tcp://*:5557,"+
		"replay=tcp://*:5657,labels=gpu:h200;pool:a,model=llama;lora,bootstrap=8998,block_size=16")
	if err != nil {
		t.Fatal(err)
	}
	d0, err := workers.ParseSpec("decode", "http://10.0.0.2:8000,name=d0")
	if err != nil {
		t.Fatal(err)
	}
	d1, err := workers.ParseSpec("decode", "http://10.0.0.3:8000,name=d1,labels=gpu:h200;pool:a,lmcache=10.0.0.3/7300;7301/7400;7401")
	if err != nil {
		t.Fatal(err)
	}
	p0.Origin, d0.Origin, d1.Origin = "f.yaml:4", "f.yaml:16", "f.yaml:17"
	if diff := cmp.Diff([]workers.Spec{p0, d0, d1}, got); diff != "" {
		t.Errorf("yaml (-want +got):\n%s", diff)
	}

	got, err = Parse("f.json", []byte(goodJSON))
	if err != nil {
		t.Fatal(err)
	}
	p0, err = workers.ParseSpec("prefill", "http://10.0.0.1:8000,name=p0,dp=2,labels=gpu:h200")
	if err != nil {
		t.Fatal(err)
	}
	d0.Role = ""
	p0.Origin, d0.Origin = "f.json:3", "f.json:5"
	if diff := cmp.Diff([]workers.Spec{p0, d0}, got); diff != "" {
		t.Errorf("json (-want +got):\n%s", diff)
	}
	for _, none := range []string{"workers: []", `{"workers": []}`} {
		if got, err := Parse("f", []byte(none)); err != nil || len(got) != 0 {
			t.Errorf("%s: %v, %v", none, got, err)
		}
	}
}

func TestParseNamesEveryProblem(t *testing.T) {
	tests := []struct {
		name, content string
		want          []string
	}{
		{"many at once", `workers:
  - url: http://a:1
    roel: decode
    dp: two
  - url: ftp://b
  - name: c
  - url: http://d:1
    url: http://d:2
    events: {a: b}
  - 12
  - url: http://e:1
    labels: [x]
    engine: vlm
worker: []
`, []string{
			`f:3: unknown key "roel" (did you mean "role"?)`,
			`f:4: dp: "two" is no whole number from 1 to 1024`,
			`f:5: URL "ftp://b": scheme "ftp" is neither http nor https`,
			`f:6: worker c: no url`,
			`f:8: key "url" is already in line 7`,
			`f:9: events: a mapping where a single value must be`,
			`f:10: "12" where a worker must be`,
			`f:12: labels: a list where a single value must be`,
			`f:13: engine: "vlm" is not one of vllm, sglang, trtllm, sim (did you mean "vllm"?)`,
			`f:14: unknown key "worker" (did you mean "workers"?)`,
		}},
		{"twice", "workers:\n- http://a:1\n- http://a:1\n- {url: 'http://a:1', name: x}\n", []string{
			"f:3: worker a:1 is already in line 2", "f:4: worker x has the URL of the worker in line 2 (http://a:1)",
		}},
		{"empty", " \n", []string{`f: the file is empty (write "workers: []" for no workers)`}},
		{"comment only", "# nothing\n", []string{"f:1: EOF"}},
		{"no workers", "version: 1\n", []string{`f:1: no key "workers" (write "workers: []" for no workers)`}},
		{"nothing", "workers:\n", []string{"f:1: workers: nothing where a list must be"}},
		{"list", "- http://a:1\n", []string{`f:1: a list where a mapping with the key "workers" must be`}},
		{"version", "version: 2\nworkers: []\n", []string{`f:1: version "2" is not known (1 is)`}},
		{"yaml syntax", "workers:\n  - url: [\n", []string{"f:2: did not find expected node content"}},
		{"tab", "workers:\n\t- x\n", []string{"f:2: found character that cannot start any token"}},
		{"two documents", "workers: []\n---\nworkers: []\n", []string{"f:2: a second document (one file holds one list)"}},
		{"merge", "workers:\n- <<: {dp: 2}\n  url: http://a:1\n", []string{"f:2: merge keys (<<) are not supported"}},
		{"cycle", "workers: &a\n- *a\n", []string{"f:1: a list where a worker must be"}},
		{"null value", "workers:\n- {url: 'http://a:1', dp: }\n", []string{"f:2: dp has no value"}},
		{"lmcache", "workers:\n- {url: 'http://a:1', lmcache: {host: a, port: 1}}\n", []string{`f:2: lmcache: unknown key "port" (valid: alloc_ports, host, init_ports)`}},
		{"lmcache ports", "workers:\n- {url: 'http://a:1', lmcache: {host: a, init_ports: 1}}\n", []string{`f:2: lmcache: "" is no port (1 to 65535)`}},
		{"json syntax", "{\n\"workers\": [\n{\"url\" 1}]}", []string{"f:3: invalid character '1' after object key"}},
		{"json cut off", "{\n\"workers\": [", []string{"f:2: unexpected EOF"}},
		{"json trailer", "{\"workers\": []}\n{}", []string{"f:2: something follows the end of the object"}},
		{"json deep", `{"workers": ` + strings.Repeat("[", 100) + strings.Repeat("]", 100) + "}", []string{"f:1: more than 32 levels deep"}},
		{"secret in a URL", "workers:\n- http://me:secret@a:1\n", []string{
			`f:2: worker "…@a:1": the URL of host a:1 holds a user name or password (use api_key_file)`,
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			specs, err := Parse("f", []byte(tt.content))
			if err == nil {
				t.Fatalf("accepted: %+v", specs)
			}
			if diff := cmp.Diff(tt.want, strings.Split(err.Error(), "\n")); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseLimitsProblems(t *testing.T) {
	_, err := Parse("f", []byte("workers:\n"+strings.Repeat("- 1\n", 500)))
	if err == nil || strings.Count(err.Error(), "\n") != maxProblems || !strings.HasSuffix(err.Error(), "and 400 more problems") {
		t.Errorf("error %.200v", err)
	}
	if _, err := Parse("f", make([]byte, maxFileBytes+1)); err == nil {
		t.Error("a file over the limit is accepted")
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		goodYAML, goodJSON, "workers: []", `{"workers":[]}`, "workers: &a\n- *a\n", "a: *b", "%YAML 1.1\n---\nworkers: []",
		"workers:\n- <<: {dp: 2}\n", "? [a]\n: b", "{\"workers\": [{\"labels\": {\"\": null}}]}", "workers:\n- !!binary aGk=\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		specs, err := Parse("f", content)
		if err != nil {
			return
		}
		for _, s := range specs {
			if s.URL == nil || s.Name == "" || s.Origin == "" {
				t.Fatalf("incomplete spec %+v", s)
			}
			if s.APIKeyFile != "" {
				return
			}
		}
		if _, err := workers.NewRegistry(nil).Apply("file", specs); err != nil {
			t.Fatalf("parsed but not applicable: %v", err)
		}
	})
}

func write(t testing.TB, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// replace puts content into the place of path in one step.
func replace(t testing.TB, path, content string) {
	t.Helper()
	write(t, path+".new", content)
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// names are the workers of the registry in one line.
func names(reg *workers.Registry) string {
	var out []string
	for _, w := range reg.Snapshot().Workers {
		out = append(out, w.Name)
	}
	return strings.Join(out, " ")
}

func list(workers ...string) string {
	s := "workers:\n"
	for _, w := range workers {
		s += "- http://" + w + ":1,name=" + w + "\n"
	}
	return s
}

// watch runs a File of good content until the test ends. next waits for its next event of a
// kind.
func watch(t *testing.T, opts FileOptions) (reg *workers.Registry, next func(kind string) eventlog.Event) {
	t.Helper()
	reg, next, _ = run(t, opts, nil)
	return reg, next
}

// run runs a File until the test ends, with a registry that prepare has seen. next waits for
// its next event of a kind, problems counts those of bad files.
func run(t *testing.T, opts FileOptions, prepare func(*workers.Registry) error) (reg *workers.Registry, next func(kind string) eventlog.Event, problems *atomic.Int64) {
	t.Helper()
	events := make(chan eventlog.Event, 1000)
	problems = new(atomic.Int64)
	sink := func(e eventlog.Event) {
		if e.Kind == "discovery_file_bad" {
			problems.Add(1)
		}
		events <- e
	}
	reg = workers.NewRegistry(nil)
	if prepare != nil {
		if err := prepare(reg); err != nil {
			t.Fatal(err)
		}
	}
	f := NewFile(reg, opts, sink)
	if err := f.load(true); err != nil && prepare == nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- f.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return reg, func(kind string) eventlog.Event {
		t.Helper()
		deadline := time.After(20 * time.Second)
		for {
			select {
			case e := <-events:
				if e.Kind == kind {
					return e
				}
			case <-deadline:
				t.Fatalf("no event %s; workers: %s", kind, names(reg))
			}
		}
	}, problems
}

func TestFileIsWatched(t *testing.T) {
	path := filepath.Join(t.TempDir(), "workers.yaml")
	write(t, path, list("a", "b"))
	// Polling is too slow to help: what comes, comes from the system.
	reg, next := watch(t, FileOptions{Path: path, Poll: time.Hour, Settle: 10 * time.Millisecond})
	next("discovery_file_loaded")
	if got := names(reg); got != "a b" {
		t.Fatalf("workers %s", got)
	}
	replace(t, path, list("b", "c"))
	next("discovery_file_loaded")
	if got := names(reg); got != "b c" {
		t.Fatalf("after a rename: %s", got)
	}
	write(t, path, list("c", "d", "e"))
	next("discovery_file_loaded")
	if got := names(reg); got != "c d e" {
		t.Fatalf("after a write in place: %s", got)
	}

	before := reg.Snapshot()
	replace(t, path, "workers:\n- url: http://x:1\n  roel: decode\n- url: y\n")
	bad := next("discovery_file_bad")
	want := []string{path + `:3: unknown key "roel" (did you mean "role"?)`, path + `:4: URL "y" has no scheme (did you mean http://y?)`}
	if diff := cmp.Diff(want, bad.Fields["problems"]); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
	if bad.Severity != eventlog.Error || reg.Snapshot() != before {
		t.Error("a bad file changed the fleet or is no error")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	next("discovery_file_bad")
	if reg.Snapshot() != before {
		t.Error("a missing file changed the fleet")
	}
	replace(t, path, list("c", "d", "e"))
	next("discovery_file_fixed")
	if reg.Snapshot() != before {
		t.Error("the same workers made a new fleet")
	}
}

// TestConfigMapSwap changes the file as the kubelet does: the file is a link to
// ..data/workers.yaml, and ..data is a link that is renamed over.
func TestConfigMapSwap(t *testing.T) {
	dir := t.TempDir()
	version := func(name, content string) {
		t.Helper()
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, name, "workers.yaml"), content)
		if err := os.Symlink(name, filepath.Join(dir, "..data_tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	version("..2026_1", list("a"))
	path := filepath.Join(dir, "workers.yaml")
	if err := os.Symlink("..data/workers.yaml", path); err != nil {
		t.Fatal(err)
	}
	reg, next := watch(t, FileOptions{Path: path, Poll: time.Hour, Settle: 10 * time.Millisecond})
	next("discovery_file_loaded")
	version("..2026_2", list("a", "b"))
	next("discovery_file_loaded")
	if got := names(reg); got != "a b" {
		t.Fatalf("workers %s", got)
	}
}

// TestPollingSeesWhatTheSystemDoesNotReport follows a link into another
// directory, where nothing happens in the watched one.
func TestPollingSeesWhatTheSystemDoesNotReport(t *testing.T) {
	real := filepath.Join(t.TempDir(), "real.yaml")
	write(t, real, list("a"))
	path := filepath.Join(t.TempDir(), "workers.yaml")
	if err := os.Symlink(real, path); err != nil {
		t.Fatal(err)
	}
	reg, next := watch(t, FileOptions{Path: path, Poll: 10 * time.Millisecond, Settle: time.Millisecond})
	next("discovery_file_loaded")
	replace(t, real, list("a", "b"))
	next("discovery_file_loaded")
	if got := names(reg); got != "a b" {
		t.Fatalf("workers %s", got)
	}
}

// TestRefusedFileIsTriedAgain: what keeps a file out may lie elsewhere. Once that is gone the
// file is taken over, although nobody has touched it, and there was one event of the problem.
func TestRefusedFileIsTriedAgain(t *testing.T) {
	dir := t.TempDir()
	path, key := filepath.Join(dir, "workers.yaml"), filepath.Join(dir, "secret", "key")
	if err := os.Mkdir(filepath.Dir(key), 0o700); err != nil {
		t.Fatal(err)
	}
	flag, err := workers.ParseSpec("", "http://a:1,name=a")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, content, want string
		prepare, mend       func(*workers.Registry) error
	}{
		{
			"a key file that comes later", "workers:\n- {url: 'http://k:1', name: k, api_key_file: '" + key + "'}\n", "k",
			func(*workers.Registry) error { return nil },
			func(*workers.Registry) error { // renamed, as a key file that is still empty is another problem
				if err := os.WriteFile(key+".new", []byte("one\n"), 0o600); err != nil {
					return err
				}
				return os.Rename(key+".new", key)
			},
		},
		{
			"a name that another source gives up", list("a", "b"), "a b",
			func(r *workers.Registry) error {
				_, err := r.Apply(workers.SourceFlag, []workers.Spec{flag})
				return err
			},
			func(r *workers.Registry) error { _, err := r.Apply(workers.SourceFlag, nil); return err },
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			write(t, path, c.content)
			reg, next, problems := run(t, FileOptions{Path: path, Poll: time.Hour, Settle: time.Millisecond, Again: 5 * time.Millisecond}, c.prepare)
			next("discovery_file_bad")
			if err := c.mend(reg); err != nil {
				t.Fatal(err)
			}
			next("discovery_file_fixed")
			if got := names(reg); got != c.want {
				t.Errorf("workers %s, want %s", got, c.want)
			}
			if n := problems.Load(); n != 1 {
				t.Errorf("%d events of one problem", n)
			}
		})
	}
}

// TestProblemIsToldOnce: a file that is tried again and again is one event for as long as the
// same is wrong with it.
func TestProblemIsToldOnce(t *testing.T) {
	dir := t.TempDir()
	path, key := filepath.Join(dir, "workers.yaml"), filepath.Join(dir, "key")
	write(t, path, "workers:\n- {url: 'http://k:1', name: k, api_key_file: '"+key+"'}\n")
	var kinds []string
	reg := workers.NewRegistry(nil)
	f := NewFile(reg, FileOptions{Path: path}, func(e eventlog.Event) { kinds = append(kinds, e.Kind) })
	if err := f.load(false); err == nil {
		t.Fatal("a key file that is not there is no error")
	}
	for range 5 {
		f.again()
	}
	if len(kinds) != 1 || kinds[0] != "discovery_file_bad" {
		t.Errorf("events %q of one problem", kinds)
	}
	write(t, key, "one\n")
	for range 5 {
		f.again()
	}
	if len(kinds) != 2 || kinds[1] != "discovery_file_fixed" || names(reg) != "k" {
		t.Errorf("events %q, workers %q", kinds, names(reg))
	}
}

// TestKeysAreReadAgain: a key that was replaced is used, and one that cannot be read leaves
// the workers as they are.
func TestKeysAreReadAgain(t *testing.T) {
	dir := t.TempDir()
	path, key := filepath.Join(dir, "workers.yaml"), filepath.Join(t.TempDir(), "key")
	write(t, key, "one\n")
	write(t, path, "workers:\n- {url: 'http://k:1', name: k, api_key_file: '"+key+"'}\n")
	reg, next, _ := run(t, FileOptions{Path: path, Poll: time.Hour, Settle: time.Millisecond, Again: 5 * time.Millisecond}, nil)
	next("discovery_file_loaded")
	replace(t, key, "two\n")
	next("discovery_file_loaded")
	if got := reg.Snapshot().Workers[0].APIKey; got != "two" {
		t.Errorf("key %s", got)
	}
	before := reg.Snapshot()
	if err := os.Remove(key); err != nil {
		t.Fatal(err)
	}
	next("discovery_file_bad")
	if reg.Snapshot() != before {
		t.Error("a missing key changed the fleet")
	}
}

// TestAgainWaitsForWholeFiles: content that was not seen before may be half of what somebody
// writes. It is taken over once it is found a second time, or is reported as changed.
func TestAgainWaitsForWholeFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "workers.yaml")
	reg := workers.NewRegistry(nil)
	f := NewFile(reg, FileOptions{Path: path}, func(eventlog.Event) {})
	if err := f.load(false); err == nil {
		t.Fatal("a missing file is no error")
	}
	f.again()
	write(t, path, list("a"))
	if f.again(); names(reg) != "" {
		t.Errorf("taken over at once: %s", names(reg))
	}
	write(t, path, list("a", "b"))
	if f.again(); names(reg) != "" {
		t.Errorf("taken over while it changes: %s", names(reg))
	}
	if f.again(); names(reg) != "a b" {
		t.Errorf("workers %s", names(reg))
	}
	write(t, path, list("c"))
	if f.again(); names(reg) != "a b" {
		t.Errorf("a file in order was looked at again: %s", names(reg))
	}
	if err := f.Reread(); err != nil || names(reg) != "c" {
		t.Errorf("workers %s, %v", names(reg), err)
	}
}

func TestLoadFailsAtOnce(t *testing.T) {
	reg := workers.NewRegistry(nil)
	dir := t.TempDir()
	if err := NewFile(reg, FileOptions{Path: filepath.Join(dir, "none.yaml")}, nil).load(true); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("missing file: %v", err)
	}
	if err := NewFile(reg, FileOptions{Path: dir}, nil).load(true); err == nil || !strings.Contains(err.Error(), "is not a regular file") {
		t.Errorf("directory: %v", err)
	}
	flag, err := workers.ParseSpec("", "http://a:1,name=a")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := reg.Apply("flag", []workers.Spec{flag}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "workers.yaml")
	write(t, path, list("b", "a"))
	want := "workers file: " + path + ":3: worker a is already there, stated on the command line"
	if err := NewFile(reg, FileOptions{Path: path}, nil).load(true); err == nil || err.Error() != want {
		t.Errorf("error %v\nwant  %s", err, want)
	}
}

// thousand is a file of a thousand workers.
func thousand(t testing.TB) string {
	t.Helper()
	var b strings.Builder
	b.WriteString("workers:\n")
	for i := range 1000 {
		fmt.Fprintf(&b, "  - url: http://10.0.%d.%d:8000\n    role: decode\n    dp: 4\n    events: tcp://*:5557\n    labels: {n: \"%d\"}\n", i/250, i%250, i)
	}
	path := filepath.Join(t.TempDir(), "workers.yaml")
	write(t, path, b.String())
	return path
}

func BenchmarkLoadThousandWorkers(b *testing.B) {
	path := thousand(b)
	for b.Loop() {
		if err := NewFile(workers.NewRegistry(nil), FileOptions{Path: path}, nil).load(true); err != nil {
			b.Fatal(err)
		}
	}
}

func TestThousandWorkersLoad(t *testing.T) {
	reg := workers.NewRegistry(nil)
	if err := NewFile(reg, FileOptions{Path: thousand(t)}, nil).load(true); err != nil {
		t.Fatal(err)
	}
	if s := reg.Snapshot(); len(s.Workers) != 1000 || len(s.Ranks) != 4000 {
		t.Errorf("%d workers, %d ranks", len(s.Workers), len(s.Ranks))
	}
}
