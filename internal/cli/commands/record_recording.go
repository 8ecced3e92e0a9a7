package commands

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/cache/kvfeed"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/observe/trace/recorder"
)

// recordFlags say what is recorded, and where to.
type recordFlags struct {
	// Path is that of the file, "" for none. Tokens records prompts as token ids, too.
	Path   string
	Tokens bool
	file   recorder.FileOptions
	buffer int
}

// Add adds the flags; path names the one of the file: "record" of serve, "write"
// of record.
func (f *recordFlags) Add(cmd *cobra.Command, path string) {
	flags := cmd.Flags()
	short, prefix := "w", ""
	if path == "record" {
		short, prefix = "", "record-"
	}
	flags.StringVarP(&f.Path, path, short, "", "record KV events, decisions and outcomes to `FILE` (.gz and .zst compress)")
	flags.Int64Var(&f.file.MaxBytes, prefix+"max-bytes", 1<<30, "begin a new file after `BYTES`, before compression; 0 is never")
	flags.DurationVar(&f.file.MaxAge, prefix+"max-age", 0, "begin a new file after so long; 0 is never")
	flags.IntVar(&f.file.Keep, prefix+"keep", 0, "keep only the newest `N` files; 0 keeps all")
	flags.IntVar(&f.buffer, prefix+"buffer", recorder.DefaultBuffer, "`BYTES` that may wait for the disk; more is dropped and counted")
}

// newTap makes the tap of a router.
func newTap(source, router string) *recorder.Tap {
	return recorder.NewTap(trace.Header{Source: source, Version: cli.BuildVersion().Version, Router: router})
}

// recordingObserver feeds a tap with what a router does.
func recordingObserver(t *recorder.Tap) router.Observer {
	return router.Observer{
		Batch:    func(o kvfeed.Observation) { observeBatch(t, o) },
		Decision: t.Decision,
		Outcome:  t.Outcome,
	}
}

// observeBatch records what a feed did.
func observeBatch(t *recorder.Tap, o kvfeed.Observation) {
	rank := kvfeed.Key{Worker: o.Worker, DP: o.DP}.String()
	switch {
	case o.OfFeed && o.Began:
		t.Rank(rank, trace.RankInfo{Slot: uint32(o.Rank), BlockSize: o.BlockSize, Traits: o.Traits, New: !o.Kept, Kept: o.Kept})
	case o.OfFeed:
		t.Feed(rank, o.Trusted)
	case o.Cleared:
		t.Clear(rank, o.ForgotPublisher, o.Reason)
	default:
		t.Batch(rank, o.Seq, o.At, o.Replayed, o.Payload)
	}
}

// recording is a tap's lines on their way to a file.
type recording struct {
	log    *slog.Logger
	sub    *recorder.Subscription
	file   *recorder.File
	cancel context.CancelFunc
	done   chan struct{} // closed when err is set
	err    error
}

// startRecording begins to write a tap's lines to a file. Stop ends it, and must be called.
func startRecording(t *recorder.Tap, f *recordFlags, log *slog.Logger) (*recording, error) {
	sub, err := t.Subscribe(f.buffer)
	if err != nil {
		return nil, err
	}
	f.file.Path = f.Path
	file, err := recorder.NewFile(sub, f.file)
	if err != nil {
		sub.Close()
		return nil, err
	}
	log.Info("recording", "file", file.Path())
	ctx, cancel := context.WithCancel(context.Background())
	r := &recording{log: log, sub: sub, file: file, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(r.done)
		if r.err = file.Run(ctx); r.err != nil {
			log.Error("the recording ended", "err", r.err)
		}
	}()
	return r, nil
}

// Ended is closed when nothing is written any more.
func (r *recording) Ended() <-chan struct{} { return r.done }

// State is the recording as the status shows it.
func (r *recording) State() *admin.Recorder {
	s := &admin.Recorder{Path: r.file.Path(), Bytes: r.file.Bytes()}
	s.Records, s.Dropped = r.sub.Counts()
	select {
	case <-r.done:
		if r.err != nil {
			s.Error = r.err.Error()
		}
	default:
	}
	return s
}

// Stop ends the recording and waits for the file to be complete.
func (r *recording) Stop() error {
	r.cancel()
	<-r.done
	records, dropped := r.sub.Counts()
	if r.err != nil {
		return fmt.Errorf("recording: %w", r.err)
	}
	r.log.Info("recorded", "file", r.file.Path(), "records", records, "bytes", r.file.Bytes(), "dropped", dropped)
	if dropped > 0 {
		r.log.Warn("records were dropped: give --record-buffer more bytes, or a faster disk", "dropped", dropped)
	}
	return nil
}
