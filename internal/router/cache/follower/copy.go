package follower

import (
	"bytes"
	"context"
	"fmt"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
)

const (
	// copyUntil is how long after its start a router copies the ranks that join. Another
	// router knows no more of an engine that came later.
	copyUntil = time.Minute
	// copyWithin is how long the feeds of ranks wait for their copies.
	copyWithin = 30 * time.Second
)

// Copy is a snapshot of one rank as of this moment, of at most limit bytes, for a router that
// starts. Its blocks count there once the rank's engine has proven by its replay that they are
// its own.
func (f *Follower) Copy(k *workers.Rank, limit int) ([]byte, error) {
	w := limited{limit: limit}
	taken := false
	err := f.write(&w, func(slot kvindex.Rank, label string, take func()) []byte {
		if slot != kvindex.Rank(k.Slot) || label != k.Label {
			return nil
		}
		return f.note(slot, label, func() { taken = true; take() })
	})
	switch {
	case err != nil:
		return nil, fmt.Errorf("copy rank %s: %w", k.Label, err)
	case !taken:
		return nil, fmt.Errorf("nothing is known of the cache of rank %s", k.Label)
	}
	return w.Bytes(), nil
}

// limited is a buffer that takes that many bytes.
type limited struct {
	bytes.Buffer
	limit int
}

func (l *limited) Write(p []byte) (int, error) {
	if l.Len()+len(p) > l.limit {
		return 0, fmt.Errorf("it needs more than %d bytes", l.limit)
	}
	return l.Buffer.Write(p)
}

// Copied is what the index of a router began with that another router had.
type Copied struct {
	// Router is where the last copy came from.
	Router string
	// Ranks and Blocks were copied. Missing ranks began empty because no router had
	// them, Refused ones because their copy was refused.
	Ranks, Missing, Refused int
	Blocks                  int64
	// Why is the reason of the last rank that began empty.
	Why string
}

// Copied returns what the index began with that another router had.
func (f *Follower) Copied() Copied {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.copied
}

// waits reports whether the feed of a rank begins later, with another router's copy. Without
// a replay a copy proves nothing, and what the router's own file has of a rank is as good. The
// caller holds ranksMu.
func (f *Follower) waits(k *workers.Rank, from workers.EventSource, fed bool) bool {
	if waits, known := f.copying[k]; known {
		return waits
	}
	if f.Sibling == nil || from.Replay == "" || fed || f.restored[k.Slot].label == k.Label || f.began.IsZero() || time.Since(f.began) > copyUntil {
		return false
	}
	if _, known := f.Index.RankStats(kvindex.Rank(k.Slot)); !known {
		return false // the index refused it
	}
	f.copying[k] = true
	wait.Poke(f.toCopy)
	return true
}

// copyRanks copies the ranks that wait, one after the other, until ctx ends.
func (f *Follower) copyRanks(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-f.toCopy:
		}
		was := f.Copied()
		within, cancel := context.WithTimeout(ctx, copyWithin)
		for {
			w, k := f.nextCopy()
			if k == nil {
				break
			}
			copied, router, err := f.Sibling(within, w, k)
			if ctx.Err() != nil {
				break
			}
			f.beginWith(k, copied, router, err)
		}
		cancel()
		if ctx.Err() == nil {
			f.reportCopies(&was)
		}
	}
}

// nextCopy is a rank that waits, nil for none.
func (f *Follower) nextCopy() (*workers.Worker, *workers.Rank) {
	f.ranksMu.Lock()
	defer f.ranksMu.Unlock()
	if f.last == nil {
		return nil, nil
	}
	for _, w := range f.last.Workers {
		for _, k := range w.Ranks {
			if f.copying[k] {
				return w, k
			}
		}
	}
	return nil, nil
}

// beginWith starts the feed of a rank with another router's copy, or without one.
func (f *Follower) beginWith(k *workers.Rank, copied []byte, router string, missing error) {
	f.ranksMu.Lock()
	defer f.ranksMu.Unlock()
	w, now, ok := f.last.Slot(k.Slot)
	if !ok || now != k || !f.copying[k] {
		return // it has left
	}
	f.copying[k] = false
	refused := missing
	if missing == nil {
		refused = f.take(w, k, copied)
	}
	f.mu.Lock()
	switch {
	case missing != nil:
		f.copied.Missing++
		f.copied.Why = missing.Error()
	case refused != nil:
		f.copied.Refused++
		f.copied.Router, f.copied.Why = router, fmt.Sprintf("the copy of rank %s from router %s is refused: %v", k.Label, router, refused)
	default:
		s, _ := f.Index.RankStats(kvindex.Rank(k.Slot))
		f.copied.Ranks++
		f.copied.Blocks += s.Blocks
		f.copied.Router = router
	}
	f.mu.Unlock()
	f.feed(w, k)
	f.publish()
}

// take fills a rank from another router's copy, as if it were from this router's file. The
// caller holds ranksMu.
func (f *Follower) take(w *workers.Worker, k *workers.Rank, copied []byte) error {
	r, _, err := readHead(bytes.NewReader(copied))
	if err != nil {
		return err
	}
	kept := restoredRank{label: k.Label}
	if err := f.Index.RestoreRank(r, kvindex.Rank(k.Slot), func(note []byte) error {
		kept.note = bytes.Clone(note)
		if err := kept.read(); err != nil {
			return err
		}
		return kept.fits(w, f.BlockOf(w))
	}); err != nil {
		return err
	}
	if f.restored == nil {
		f.restored = map[uint32]restoredRank{}
	}
	f.restored[k.Slot] = kept
	return nil
}

// reportCopies reports how the ranks began that waited together. was is of before.
func (f *Follower) reportCopies(was *Copied) {
	now := f.Copied()
	ranks, missing, refused := now.Ranks-was.Ranks, now.Missing-was.Missing, now.Refused-was.Refused
	if ranks > 0 {
		f.Event(eventlog.Event{Kind: "index_copied", Text: fmt.Sprintf("the index begins with %d blocks on %d rank(s) of router %s; each rank is used once its engine has proven to be the same", now.Blocks-was.Blocks, ranks, now.Router)})
	}
	if missing+refused == 0 || refused == 0 && now.Why == was.Why {
		return // the reason is known
	}
	e := eventlog.Event{Kind: "index_not_copied", Text: fmt.Sprintf("the index begins without blocks of %d rank(s) from another router: %s", missing+refused, now.Why)}
	if refused > 0 {
		e.Severity = eventlog.Warn
	}
	f.Event(e)
}
