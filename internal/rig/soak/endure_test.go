package soak

import (
	"context"
	"encoding/json"
	"os"
	"os/signal"
	"path/filepath"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/rig/property"
)

// TestEndurance is the real-time form: ten seconds here, as long as
// DYNCTL_SOAK says with `make soak`, there from a new seed each time. DYNCTL_SOAK_DIR
// keeps its files, DYNCTL_SOAK_SEED names the seed of requests and faults.
func TestEndurance(t *testing.T) {
	o := Options{Duration: 10 * time.Second, Seed: 1, Log: t.Logf}
	if testing.Short() {
		o.Duration = 4 * time.Second
	}
	text := os.Getenv("DYNCTL_SOAK")
	if text != "" {
		var err error
		if o.Duration, err = time.ParseDuration(text); err != nil {
			t.Fatalf("DYNCTL_SOAK: %v", err)
		}
		began := time.Now()
		o.Seed = uint64(began.UnixNano())
		o.Log = func(format string, a ...any) {
			t.Logf("%8s "+format, append([]any{time.Since(began).Round(time.Second)}, a...)...)
		}
	}
	o.Seed = property.FromEnv(t, "DYNCTL_SOAK_SEED", o.Seed)
	if o.Duration < time.Minute {
		o.Gap, o.Hold, o.RouterEvery, o.Timeout = 300*time.Millisecond, 400*time.Millisecond, o.Duration/4, 4*time.Second
	}
	if o.Dir = os.Getenv("DYNCTL_SOAK_DIR"); o.Dir == "" {
		o.Dir = t.TempDir()
	} else if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if text != "" {
		// An interrupt ends the load early, with all checks.
		ctx, stop := signal.NotifyContext(t.Context(), os.Interrupt)
		defer stop()
		o.End = ctx.Done()
	}
	ctx := t.Context()
	if end, ok := t.Deadline(); ok {
		// What a run waits for in vain is lost where the test itself is ended.
		var stop context.CancelFunc
		ctx, stop = context.WithDeadline(ctx, end.Add(-time.Minute))
		defer stop()
	}
	sum, err := Endure(ctx, o)
	if sum == nil {
		t.Fatal(err)
	}
	if text != "" {
		t.Logf("\n%s", sum.Text())
		raw, jerr := json.MarshalIndent(sum, "", "  ")
		if jerr != nil {
			t.Fatal(jerr)
		}
		for name, b := range map[string][]byte{"summary.json": raw, "summary.txt": []byte(sum.Text())} {
			if werr := os.WriteFile(filepath.Join(o.Dir, name), b, 0o600); werr != nil {
				t.Error(werr)
			}
		}
	}
	if err != nil {
		t.Error(err)
	}
	if sum.Requests["end: completed"] == 0 || sum.Requests["outputs compared"] == 0 {
		t.Errorf("nothing was served:\n%s", sum.Text())
	}
}
