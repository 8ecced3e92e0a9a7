package e2e

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestOpenAIClient runs the OpenAI Python library, unmodified and as its
// registry has it, through the router in front of simulated engines: chat,
// streaming, tools, completions, embeddings, responses, models, errors, a stream that
// is left.
func TestOpenAIClient(t *testing.T) {
	need(t)
	s := runClient(t, openAI.python(t), "openai_client.py", "/v1", 1)
	if s.Local == 0 {
		t.Errorf("traffic %+v: want both paths", s)
	}
}

// simulated is a process with one simulated engine, which can be killed as a whole.
func simulated(t *testing.T, bin, spec string) (url string, kill func()) {
	t.Helper()
	addr := freeAddr(t)
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bin, "sim", spec+",port="+port)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	t.Cleanup(kill)
	return "http://" + addr, kill
}

// TestOpenAIClientKeepsItsStream: the OpenAI Python library reads one ordinary stream
// while the engine behind it is killed: one id, one role, one end, usage once, and the
// text of an engine that lives.
func TestOpenAIClientKeepsItsStream(t *testing.T) {
	need(t)
	python := openAI.python(t)
	bin := built(t)
	kill, args := map[string]func(){}, []string{"--continue", "exact"}
	for _, name := range []string{"a", "b", "c"} { // two die
		url, k := simulated(t, bin, "1a:answers=letters,speed=2")
		kill[name], args = k, append(args, "--worker", url+",name="+name)
	}
	r := serve(t, args...)
	cmd := exec.Command(python, filepath.Join("testdata", "openai_continued.py"), r.url+"/v1")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var died []string
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if id, ok := strings.CutPrefix(lines.Text(), "ok "); ok {
			rec, err := r.admin.Decision(t.Context(), id)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Contains(rec, []byte(`"from":"`+died[len(died)-1]+`"`)) {
				t.Errorf("the stream was not continued: %s", rec)
			}
			continue
		}
		name, _, _ := strings.Cut(lines.Text(), "/")
		kill[name]()
		died = append(died, name)
		if _, err := io.WriteString(in, "\n"); err != nil {
			t.Fatal(err)
		}
	}
	if err := cmd.Wait(); err != nil || len(died) != 2 {
		t.Fatalf("the client ended with %v, after %q were killed\n%s", err, died, stderr.Bytes())
	}
	t.Logf("%q were killed under a chat and a completion", died)
}
