// Command dynctl routes requests of large language models to fleets of GPU
// engines, and shows, explains, replays and measures what the router does.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

// Exit codes, part of the public contract.
const (
	exitOK          = 0
	exitRuntime     = 1
	exitUsage       = 2
	exitInvalid     = 3   // a result is not valid: a gate failed
	exitUnreachable = 4   // the target cannot be reached
	exitMissed      = 5   // --fail-if or --min-match was missed
	exitInterrupted = 130 // ctrl-c
)

// exitError carries an exit code with an error.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string { return e.err.Error() }
func (e *exitError) Unwrap() error { return e.err }

// withCode makes err end the process with code.
func withCode(code int, err error) error {
	if err == nil {
		return nil
	}
	return &exitError{code: code, err: err}
}

func main() {
	os.Exit(runMain(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// runMain runs one command line and returns its exit code.
func runMain(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(ctx, args, stdin, stdout, stderr)
	if err == nil {
		return exitOK
	}
	var coded *exitError
	code := exitRuntime
	switch {
	case errors.As(err, &coded):
		code = coded.code
	case errors.Is(err, context.Canceled) && ctx.Err() != nil:
		code = exitInterrupted
	}
	if code != exitInterrupted || coded != nil {
		fmt.Fprintln(stderr, "dynctl:", err)
	}
	return code
}

func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	root := newRoot()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	return root.ExecuteContext(ctx)
}
