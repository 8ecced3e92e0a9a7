// Package cli is what the commands of dynctl share: exit codes, how a command line is
// run and its mistakes are reported, output formats, the router that a command asks,
// settings, and the log. The commands are in the packages below, one or a few that
// belong together in each.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/printable"
)

// Exit codes, part of the public contract.
const (
	ExitOK          = 0
	ExitRuntime     = 1
	ExitUsage       = 2
	ExitInvalid     = 3   // a result is not valid: a gate failed
	ExitUnreachable = 4   // the target cannot be reached
	ExitMissed      = 5   // --fail-if or --min-match was missed
	ExitInterrupted = 130 // ctrl-c
)

// ExitError carries an exit code with an error.
type ExitError struct {
	Code int
	Err  error
}

// Error implements error.
func (e *ExitError) Error() string { return e.Err.Error() }

// Unwrap is for errors.Is and errors.As.
func (e *ExitError) Unwrap() error { return e.Err }

// WithCode makes err end the process with code; nil stays nil.
func WithCode(code int, err error) error {
	if err == nil {
		return nil
	}
	return &ExitError{Code: code, Err: err}
}

// Main runs one command line, ends it with ctrl-c and SIGTERM, prints its error and
// returns its exit code.
func Main(root *cobra.Command, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := Run(ctx, root, args, stdin, stdout, stderr)
	if err == nil {
		return ExitOK
	}
	var coded *ExitError
	code := ExitRuntime
	switch {
	case errors.As(err, &coded):
		code = coded.Code
	case errors.Is(err, context.Canceled) && ctx.Err() != nil:
		code = ExitInterrupted
	}
	if code != ExitInterrupted || coded != nil {
		fmt.Fprintln(stderr, "dynctl:", printable.Lines(err.Error())) // the errors of several mistakes are lines
	}
	return code
}

// Run runs one command line until it ends, which it does early when ctx ends.
func Run(ctx context.Context, root *cobra.Command, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	return root.ExecuteContext(ctx)
}
