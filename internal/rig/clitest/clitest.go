// Package clitest runs command lines in tests.
package clitest

import (
	"bytes"
	"context"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/loopback"
)

// Run runs a command line without a terminal to its end.
func Run(root *cobra.Command, stdin string, args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = cli.Main(root, args, strings.NewReader(stdin), &out, &errs)
	return code, out.String(), errs.String()
}

// Screen is an output that can be read while a command writes to it.
type Screen struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

// Write implements io.Writer.
func (s *Screen) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buf.Write(b)
}

// String is all that was written so far.
func (s *Screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buf.String()
}

// Until waits 30 s for a condition, and ends the test when it does not come.
func Until(t *testing.T, what string, cond func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := loopback.Wait(ctx, what, cond); err != nil {
		t.Fatal(err)
	}
}

var blanks = regexp.MustCompile(` +`)

// Squeeze makes one blank of several: tables pad their cells.
func Squeeze(text string) string { return blanks.ReplaceAllString(text, " ") }
