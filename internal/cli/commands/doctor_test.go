package commands

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/cli"
)

func TestDoctorUsage(t *testing.T) {
	for _, args := range []string{"--sim 1x", "-o xml"} {
		code, stdout, stderr := typed(append([]string{"doctor"}, strings.Fields(args)...)...)
		if option, _, _ := strings.Cut(args, " "); code != cli.ExitUsage || stdout != "" || !strings.Contains(stderr, option) {
			t.Errorf("%s: code %d\nstdout %q\nstderr %q", args, code, stdout, stderr)
		}
	}
	if code, _, stderr := typed("doctor", "--router", "http://127.0.0.1:1"); code != cli.ExitUnreachable {
		t.Errorf("nobody there: code %d %s", code, stderr)
	}
}

func TestDoctorOfSimulatedEngines(t *testing.T) {
	code, stdout, stderr := typed("doctor", "--sim", "1p1d:profile=instant")
	if code != cli.ExitOK || !strings.HasPrefix(stdout, "nothing is wrong") || !strings.Contains(stdout, " 0 failed") || !strings.Contains(stdout, "tokens moved") {
		t.Errorf("code %d\n%s\n%s", code, stdout, stderr)
	}
	code, stdout, _ = typed("doctor", "--sim", "1p:block=16,profile=instant+1d:block=32,profile=instant", "--passive", "-o", "json")
	var r struct{ Failed int }
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || code != cli.ExitInvalid || r.Failed == 0 {
		t.Errorf("contradicting block sizes: code %d, %d failed, %v", code, r.Failed, err)
	}
}

// TestDoctorShowsProgress: nothing for two seconds, then what it is at.
func TestDoctorShowsProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out lockedBuffer
		p := startProgress(t.Context(), &out)
		p.step("engine d0")
		<-time.After(progressEvery - time.Millisecond)
		synctest.Wait()
		if out.String() != "" {
			t.Errorf("early: %q", out.String())
		}
		<-time.After(2 * time.Millisecond)
		synctest.Wait()
		p.step("the tokenizer")
		p.stop()
		p.stop()
		if out.String() != "still examining engine d0\n" {
			t.Errorf("%q", out.String())
		}
	})
}

// lockedBuffer is a buffer that may be read while it is written to.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// TestAnEngineIsRecognised: a command that is given the address of an engine says so.
func TestAnEngineIsRecognised(t *testing.T) {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if q.URL.Path != "/v1/models" {
			w.WriteHeader(http.StatusNotFound)
			_, _ = w.Write([]byte(`{"detail":"Not Found"}`))
			return
		}
		_, _ = w.Write([]byte(`{"object":"list","data":[{"id":"Qwen/Qwen3-32B","owned_by":"vllm"}]}`))
	}))
	t.Cleanup(engine.Close)
	for _, args := range []string{"doctor", "workers list", "explain --prompt a", "config view"} {
		code, _, stderr := typed(append(strings.Fields(args), "--router", engine.URL)...)
		if code != cli.ExitUsage || !strings.Contains(stderr, "is an engine (it serves Qwen/Qwen3-32B), not a router") {
			t.Errorf("%s: code %d %s", args, code, stderr)
		}
	}
	plain := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(plain.Close)
	if code, _, stderr := typed("doctor", "--router", plain.URL); code != cli.ExitRuntime || strings.Contains(stderr, "engine") {
		t.Errorf("a server that is neither: code %d %s", code, stderr)
	}
}
