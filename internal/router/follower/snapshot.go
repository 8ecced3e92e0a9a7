package follower

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/dynctl/dynctl/internal/router/eventlog"
	"github.com/dynctl/dynctl/internal/router/kvfeed"
	"github.com/dynctl/dynctl/internal/router/kvindex"
	"github.com/dynctl/dynctl/internal/workers"
)

// The snapshot file is one line of JSON, which says which ranks the index
// holds and up to which batch, followed by the index's own snapshot. It is
// written to a temporary file and renamed, so that a crash leaves the old one.
const (
	snapshotSchema = "dynctl.snapshot/v1"
	// maxSnapshotHead bounds the line of JSON in bytes.
	maxSnapshotHead = 64 << 20
	snapshotEvery   = time.Minute
	// restoredKeep is how long a restored rank waits for its worker.
	restoredKeep = time.Minute
)

type snapshotHead struct {
	Schema string         `json:"schema"`
	At     time.Time      `json:"at"`
	Ranks  []snapshotRank `json:"ranks"`
}

type snapshotRank struct {
	Slot     uint32           `json:"slot"`
	Label    string           `json:"label"`
	Block    int              `json:"block_size_tokens"`
	Endpoint string           `json:"endpoint"`
	Position *kvfeed.Position `json:"position,omitempty"`
}

// save writes the index and the feeds' positions to the snapshot file.
func (f *Follower) save() (err error) {
	path := f.Snapshot
	head := snapshotHead{Schema: snapshotSchema, At: time.Now(), Ranks: []snapshotRank{}}
	f.mu.Lock()
	for k, o := range f.open {
		head.Ranks = append(head.Ranks, snapshotRank{Slot: k.Slot, Label: k.Label, Block: o.block, Endpoint: o.source.Endpoint})
	}
	f.mu.Unlock()
	// Positions first: what the index takes in after them is applied again
	// after a restore, which changes nothing.
	for i := range head.Ranks {
		if p, ok := f.feeds.Position(kvindex.Rank(head.Ranks[i].Slot)); ok {
			head.Ranks[i].Position = &p
		}
	}
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
	if err := json.NewEncoder(w).Encode(head); err != nil {
		return err
	}
	if err := f.Index.Snapshot(w); err != nil {
		return err
	}
	if err := errors.Join(w.Flush(), tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}

// saveEvery writes snapshots until ctx ends.
func (f *Follower) saveEvery(ctx context.Context) error {
	tick := time.NewTicker(snapshotEvery)
	defer tick.Stop()
	failed := false
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		err := f.save()
		if err != nil && !failed {
			f.Event(eventlog.Event{Kind: "snapshot_failed", Severity: eventlog.Error, Text: fmt.Sprintf("the index is not kept across restarts: %v", err)})
		}
		failed = err != nil
	}
}

// restore fills the index from a file, if there is one. A bad one is refused
// whole and told; the router then begins with an empty index.
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
	f.restored = map[uint32]snapshotRank{}
	for _, k := range head.Ranks {
		f.restored[k.Slot] = k
	}
	s := f.Index.Stats()
	f.Event(eventlog.Event{Kind: "snapshot_restored", Text: fmt.Sprintf("the index begins with %d blocks on %d rank(s) as of %s; each rank is used once its engine has proven to be the same", s.Memberships, len(head.Ranks), head.At.Format(time.RFC3339))})
}

func (f *Follower) load(path string) (*snapshotHead, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	r := bufio.NewReaderSize(file, 1<<20)
	line, err := readLine(r, maxSnapshotHead)
	if err != nil {
		return nil, fmt.Errorf("index snapshot %s: %w", path, err)
	}
	var head snapshotHead
	if err := json.Unmarshal(line, &head); err != nil || head.Schema != snapshotSchema {
		return nil, fmt.Errorf("index snapshot %s: not a %s file", path, snapshotSchema)
	}
	if err := f.Index.Restore(r); err != nil {
		return nil, fmt.Errorf("index snapshot %s: %w", path, err)
	}
	return &head, nil
}

// readLine reads up to a line feed, of at most limit bytes.
func readLine(r *bufio.Reader, limit int) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part...)
		if err == nil {
			return line, nil
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
		if len(line) > limit {
			return nil, fmt.Errorf("the first line is longer than %d bytes", limit)
		}
	}
}

// claim gives a rank its place in the index. It reports whether the place
// holds what was restored for this very rank.
func (f *Follower) claim(k *workers.Rank) error {
	slot := kvindex.Rank(k.Slot)
	if old, ok := f.restored[k.Slot]; ok {
		if old.Label == k.Label {
			return nil // AddRank was done by Restore
		}
		delete(f.restored, k.Slot)
	}
	if _, taken := f.Index.RankStats(slot); taken {
		f.Index.RemoveRank(slot)
	}
	return f.Index.AddRank(slot, k.Label)
}

// resume is where a rank's feed goes on, nil to begin anew. What was restored
// under other circumstances is dropped.
func (f *Follower) resume(k *workers.Rank, source workers.EventSource, block int) *kvfeed.Position {
	old, ok := f.restored[k.Slot]
	if !ok || old.Label != k.Label {
		return nil
	}
	delete(f.restored, k.Slot)
	if old.Block != block || old.Position == nil {
		f.Index.ClearRank(kvindex.Rank(k.Slot))
		return nil
	}
	return old.Position
}

// expire drops restored ranks whose worker has not come back.
func (f *Follower) expire() {
	for slot, k := range f.restored {
		owned := false
		if f.last != nil {
			if _, r, ok := f.last.Slot(slot); ok && r.Label == k.Label {
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
