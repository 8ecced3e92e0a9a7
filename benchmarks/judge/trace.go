package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
)

// The public conversation trace: the file of the FAST'25 release (Apache-2.0) at one commit,
// its SHA-256 and its size.
const (
	traceURL    = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/a2a4b18ac537fd798d50e6e9f57031ce86419a37/FAST25-release/traces/conversation_trace.jsonl"
	traceSHA256 = "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"
	traceBytes  = 3029533
)

// errNoTrace says that the conversation trace is missing.
var errNoTrace = errors.New("no conversation trace: name it with -conversation FILE, or fetch it with -download")

// cachedTrace is where the trace lies in the user's cache. Tests look for it there, too.
func cachedTrace() (string, error) {
	cache, err := os.UserCacheDir()
	return filepath.Join(cache, "dynctl-traces", "conversation_trace.jsonl.gz"), err
}

// readConversation reads the trace from a file, or with an empty path from the user's cache;
// errNoTrace when it is not there. A file with other content is an error.
func readConversation(path string) ([]arrivals.Request, error) {
	if path == "" {
		cached, err := cachedTrace()
		if err != nil {
			return nil, fmt.Errorf("%w (%w)", errNoTrace, err)
		}
		if _, err := os.Stat(cached); errors.Is(err, fs.ErrNotExist) {
			return nil, errNoTrace
		}
		path = cached
	}
	raw, err := unpacked(path)
	if err != nil {
		return nil, err
	}
	if err := checkTrace(raw); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	src, err := arrivals.FromTrace(func() (*trace.Reader, error) { return trace.NewReader(bytes.NewReader(raw), path, trace.Options{}) })
	if err != nil {
		return nil, err
	}
	return arrivals.Keep(src)
}

// unpacked is the content of a file, plain or with gzip, and at most a byte more than the
// trace has.
func unpacked(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	in := io.Reader(f)
	if filepath.Ext(path) == ".gz" {
		if in, err = gzip.NewReader(f); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	raw, err := io.ReadAll(io.LimitReader(in, traceBytes+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return raw, nil
}

// checkTrace reports whether content is that of the public trace.
func checkTrace(raw []byte) error {
	if got := fmt.Sprintf("%x", sha256.Sum256(raw)); got != traceSHA256 {
		return fmt.Errorf("not the public conversation trace: its SHA-256 is %s, want %s", got, traceSHA256)
	}
	return nil
}

// download fetches the trace into the user's cache.
func download(ctx context.Context, url string) error {
	path, err := cachedTrace()
	if err != nil {
		return err
	}
	ctx, stop := context.WithTimeout(ctx, 5*time.Minute)
	defer stop()
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(q)
	if err != nil {
		return fmt.Errorf("conversation trace: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("conversation trace: GET %s: %s", url, resp.Status)
	}
	raw, err := io.ReadAll(io.LimitReader(resp.Body, traceBytes+1))
	if err != nil {
		return fmt.Errorf("conversation trace: GET %s: %w", url, err)
	}
	if err := checkTrace(raw); err != nil {
		return fmt.Errorf("GET %s: %w", url, err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	w, err := trace.Create(path, nil)
	if err != nil {
		return err
	}
	defer w.Discard()
	if _, err := w.Write(raw); err != nil {
		return err
	}
	return w.Commit()
}
