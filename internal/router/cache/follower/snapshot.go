package follower

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/cache/kvstream"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
)

// The snapshot file is one line of JSON, which says what it is, followed by the
// index's own snapshot, which has for each rank a snapshotRank in JSON: a rank is
// copied together with where its feed stands. The file is written to a temporary
// one and renamed, so that a crash leaves the old one.
const (
	snapshotSchema = "dynctl.snapshot/v2"
	// maxSnapshotHead bounds the line of JSON in bytes.
	maxSnapshotHead = 1 << 16
	snapshotEvery   = time.Minute
	// restoredKeep is how long a restored rank waits for its worker.
	restoredKeep = time.Minute
)

type snapshotHead struct {
	Schema string    `json:"schema"`
	At     time.Time `json:"at"`
}

// snapshotRank is what the feed of a rank needs to go on from its blocks.
type snapshotRank struct {
	Block        int               `json:"block_size_tokens"`
	IgnoreCopies bool              `json:"once,omitempty"`
	Position     kvstream.Position `json:"position"`
}

// restoredRank is a rank from a snapshot whose worker has not come yet.
type restoredRank struct {
	label string
	note  []byte
	snapshotRank
}

// note copies a rank into a snapshot, with where its feed stands at that very
// moment. Were the blocks newer than the position, the batches between the two
// would be applied to them again, and a block that is stored again counts as a
// further copy. A rank whose feed has nothing to go on from is left out.
func (f *Follower) note(slot kvindex.Rank, label string, take func()) (note []byte) {
	f.ranksMu.Lock()
	defer f.ranksMu.Unlock()
	if k, ok := f.restored[uint32(slot)]; ok && k.label == label {
		take()
		return k.note // its feed has not begun
	}
	k := f.fed(uint32(slot))
	if k == nil || k.Label != label {
		return nil
	}
	f.mu.Lock()
	of := f.open[k]
	f.mu.Unlock()
	f.feeds.Freeze(slot, func(p kvstream.Position, ok bool) {
		if !ok {
			return
		}
		b, err := json.Marshal(snapshotRank{Block: of.block, IgnoreCopies: f.ignoreCopies[k], Position: p})
		if err == nil { // numbers and words always can be
			take()
			note = b
		}
	})
	return note
}

// save writes the index and the feeds' positions to the snapshot file.
func (f *Follower) save() (err error) {
	path := f.Snapshot
	tmp, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".tmp*")
	if err != nil {
		return fmt.Errorf("index snapshot: %w", err)
	}
	defer func() {
		if err != nil {
			_ = tmp.Close()
			_ = os.Remove(tmp.Name())
			err = fmt.Errorf("index snapshot %s: %w", path, err)
		}
	}()
	w := bufio.NewWriterSize(tmp, 1<<20)
	if err := json.NewEncoder(w).Encode(snapshotHead{Schema: snapshotSchema, At: time.Now()}); err != nil {
		return err
	}
	if err := f.Index.Snapshot(w, f.note); err != nil {
		return err
	}
	if err := errors.Join(w.Flush(), tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}

// saveEvery writes snapshots until ctx ends.
func (f *Follower) saveEvery(ctx context.Context) error {
	failed := false
	for range wait.Every(ctx, snapshotEvery) {
		err := f.save()
		if err != nil && !failed {
			f.Event(eventlog.Event{Kind: "snapshot_failed", Severity: eventlog.Error, Text: fmt.Sprintf("the index is not kept across restarts: %v", err)})
		}
		failed = err != nil
	}
	return nil
}

// restore fills the index from a file, if there is one. A bad one is refused
// as a whole and reported; the router then begins with an empty index.
func (f *Follower) restore() {
	if f.Snapshot == "" {
		return
	}
	head, err := f.load(f.Snapshot)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return
	case err != nil:
		f.Event(eventlog.Event{Kind: "snapshot_refused", Severity: eventlog.Warn, Text: fmt.Sprintf("the index begins empty: %v", err)})
		return
	}
	s := f.Index.Stats()
	f.Event(eventlog.Event{Kind: "snapshot_restored", Text: fmt.Sprintf("the index begins with %d blocks on %d rank(s) as of %s; each rank is used once its engine has proven to be the same", s.Memberships, s.Ranks, head.At.Format(time.RFC3339))})
}

func (f *Follower) load(path string) (*snapshotHead, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	r := bufio.NewReaderSize(file, maxSnapshotHead)
	line, err := r.ReadSlice('\n')
	switch {
	case errors.Is(err, bufio.ErrBufferFull):
		return nil, fmt.Errorf("index snapshot %s: the first line is longer than %d bytes", path, maxSnapshotHead)
	case errors.Is(err, io.EOF):
		return nil, fmt.Errorf("index snapshot %s: %w", path, io.ErrUnexpectedEOF)
	case err != nil:
		return nil, fmt.Errorf("index snapshot %s: %w", path, err)
	}
	var head snapshotHead
	if err := json.Unmarshal(line, &head); err != nil || head.Schema != snapshotSchema {
		return nil, fmt.Errorf("index snapshot %s: not a %s file", path, snapshotSchema)
	}
	restored := map[uint32]restoredRank{}
	if err := f.Index.Restore(r, func(slot kvindex.Rank, label string, note []byte) error {
		k := restoredRank{label: label, note: bytes.Clone(note)}
		if err := json.Unmarshal(note, &k.snapshotRank); err != nil {
			return fmt.Errorf("where rank %s stands: %w", label, err)
		}
		restored[uint32(slot)] = k
		return nil
	}); err != nil {
		return nil, fmt.Errorf("index snapshot %s: %w", path, err)
	}
	f.restored = restored
	return &head, nil
}

// claim gives a rank its place in the index. It reports whether the place
// holds what was restored for this very rank.
func (f *Follower) claim(k *workers.Rank) error {
	slot := kvindex.Rank(k.Slot)
	if _, taken := f.Index.RankStats(slot); taken {
		if f.restored[k.Slot].label == k.Label {
			return nil // AddRank was done by Restore
		}
		f.Index.RemoveRank(slot)
	}
	delete(f.restored, k.Slot)
	return f.Index.AddRank(slot, k.Label)
}

// resume is where a rank's feed goes on, nil to start over. What was restored
// under other circumstances is dropped; single says that copies do not count.
func (f *Follower) resume(k *workers.Rank, block int, single bool) *kvstream.Position {
	old, ok := f.restored[k.Slot]
	if !ok || old.label != k.Label {
		return nil
	}
	delete(f.restored, k.Slot)
	if old.Block != block || single && !old.IgnoreCopies {
		f.Index.ClearRank(kvindex.Rank(k.Slot))
		return nil
	}
	f.ignoreCopies[k] = old.IgnoreCopies
	return &old.Position
}

// expire drops restored ranks whose worker has not come back.
func (f *Follower) expire() {
	f.ranksMu.Lock()
	defer f.ranksMu.Unlock()
	for slot, k := range f.restored {
		owned := false
		if f.last != nil {
			if _, r, ok := f.last.Slot(slot); ok && r.Label == k.label {
				owned = true
			}
		}
		if owned {
			f.Index.ClearRank(kvindex.Rank(slot))
		} else {
			f.Index.RemoveRank(kvindex.Rank(slot))
		}
	}
	f.restored = nil
}
