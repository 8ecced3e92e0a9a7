package commands

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/router/cache/kvfeed"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/observe/trace/recorder"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// newRecordCmd makes the command record, which records a running router or the KV events of
// engines.
func newRecordCmd() *cobra.Command {
	var flags recordFlags
	var target cli.RouterFlags
	var events []string
	var blockSize int
	var duration time.Duration
	cmd := &cobra.Command{
		Use:   "record -w FILE",
		Short: "Record a running router, or the KV events of engines",
		Long: `Record what a running router does: KV events, decisions with everything that
they were made from, and outcomes. Prompts are in it as block hashes, KV events
with the token ids that the engine sends; a tokenizer makes text of those. No
text of prompts or answers is recorded; an engine's error message may quote one.

With --events the recording comes straight from the engines' ZeroMQ sockets and
needs no router: NAME=ENDPOINT, or NAME=ENDPOINT,REPLAY with the replay socket.

The recording ends with ctrl-c or after --duration. A file that was cut by a
crash can be read up to the cut. See also: dynctl serve --record FILE.`,
		Example: `  dynctl record -w trace.jsonl.zst
  dynctl record --router http://127.0.0.1:8001 -w trace.jsonl.zst --duration 10m
  dynctl record --events decode-0=tcp://127.0.0.1:5557,tcp://127.0.0.1:5558 -w events.jsonl.gz`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if flags.Path == "" {
				return cli.WithCode(cli.ExitUsage, errors.New("give the file to record to: -w FILE"))
			}
			ctx := cmd.Context()
			if duration > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, duration)
				defer cancel()
			}
			if len(events) > 0 {
				return recordEvents(ctx, &flags, events, blockSize, cmd.ErrOrStderr())
			}
			return recordRouter(ctx, &target, &flags, cmd.ErrOrStderr())
		},
	}
	flags.Add(cmd, "write")
	target.Add(cmd)
	cmd.Flags().StringArrayVar(&events, "events", nil, "record a rank's socket: `NAME=ENDPOINT[,REPLAY]`, NAME being worker or worker/dpN (repeatable)")
	cmd.Flags().IntVar(&blockSize, "block-size", 16, "`TOKENS` per router block, with --events")
	cmd.Flags().DurationVar(&duration, "duration", 0, "stop after so long; 0 is until ctrl-c")
	return cmd
}

// recordEvents feeds ranks without a router.
func recordEvents(ctx context.Context, flags *recordFlags, sources []string, blockSize int, stderr io.Writer) error {
	for _, text := range sources { // before there is a file
		if name, rest, _ := strings.Cut(text, "="); name == "" || rest == "" || rest[0] == ',' {
			return cli.WithCode(cli.ExitUsage, fmt.Errorf("--events %s: want NAME=ENDPOINT[,REPLAY]", text))
		}
	}
	log := cli.NewLogger(settings.Log{Level: "info", Format: "text"}, stderr)
	index := kvindex.New(kvindex.Options{})
	defer func() { _ = index.Close() }() // memory only
	tap := newTap("record", "")
	m, err := kvfeed.New(kvfeed.Options{
		Index: index, BlockSize: blockSize, Logger: log,
		Observer: func(o kvfeed.Observation) { observeBatch(tap, o) },
		Events: func(e eventlog.Event) {
			log.Info(e.Text, "kind", e.Kind, "rank", e.Rank)
		},
	})
	if err != nil {
		return cli.WithCode(cli.ExitUsage, err)
	}
	file, err := startRecording(tap, flags, log)
	if err != nil {
		return err
	}
	for i, text := range sources {
		name, rest, _ := strings.Cut(text, "=")
		endpoint, replay, _ := strings.Cut(rest, ",")
		worker, dp, _ := trace.SplitRank(name)
		slot := kvindex.Rank(i)
		key := kvfeed.Key{Worker: worker, DP: dp}
		err := index.AddRank(slot, key.String())
		if err == nil {
			err = m.Add(slot, key, workers.EventSource{DP: dp, Endpoint: endpoint, Replay: replay}, nil)
		}
		if err != nil {
			return errors.Join(cli.WithCode(cli.ExitUsage, fmt.Errorf("--events %s: %w", text, err)), file.Stop())
		}
	}
	err = m.Run(ctx)
	for _, s := range m.Status() {
		printable.Fprintf(stderr, "%s/dp%d: %d batches, %d stored and %d removed blocks, %d gaps, %d lost batches\n",
			s.Worker, s.DP, s.Batches, s.Stored, s.Removed, s.Gaps, s.Lost)
	}
	return errors.Join(err, file.Stop())
}

// recordRouter copies the stream of a router's admin API to files.
func recordRouter(ctx context.Context, r *cli.RouterFlags, flags *recordFlags, stderr io.Writer) error {
	c, err := r.Client()
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.Stream(ctx)
	if err != nil {
		return cli.AdminError(err)
	}
	defer stream.Close()
	copied := recorder.NewCopy(flags.buffer)
	flags.file.Path = flags.Path
	f, err := recorder.NewFile(copied.Subscription(), flags.file)
	if err != nil {
		return err
	}
	var g errgroup.Group
	g.Go(func() error {
		if err := copied.From(stream); err != nil && ctx.Err() == nil {
			return fmt.Errorf("stream of %s: %w", c.URL(), err)
		}
		return nil // ctrl-c, the duration is over, or the router has ended
	})
	// The end of the stream ends the file, so that nothing of it is lost.
	g.Go(func() error {
		defer cancel()
		return f.Run(context.WithoutCancel(ctx))
	})
	err = g.Wait()
	records, dropped := copied.Subscription().Counts()
	printable.Fprintf(stderr, "recorded %d lines, %d bytes before compression, to %s; dropped %d\n", records, f.Bytes(), f.Path(), dropped)
	return err
}
