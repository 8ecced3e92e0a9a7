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
	"slices"
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

// snapshotRank is what the feed of a rank needs to continue from its blocks.
type snapshotRank struct {
	Block        int  `json:"block_size_tokens"`
	IgnoreCopies bool `json:"once,omitempty"`
	// Hash and HashSeed are how the engine names blocks, Models what it serves; empty where
	// that was not known.
	Hash     string            `json:"kv_hash,omitempty"`
	HashSeed string            `json:"kv_hash_seed,omitempty"`
	Models   []string          `json:"models,omitempty"`
	Position kvstream.Position `json:"position"`
}

// fits returns why the rank's blocks are not those of a worker's rank that is followed in
// blocks of that many tokens; nil if they may be.
func (s *snapshotRank) fits(w *workers.Worker, block int) error {
	traits := stated(w)
	switch {
	case s.Block != block:
		return fmt.Errorf("its blocks have %d tokens, and here they have %d", s.Block, block)
	case traits.IgnoreCopies && !s.IgnoreCopies:
		return errors.New("copies of its blocks are counted, and here they are not")
	case s.Hash != "" && traits.HashAlgorithm != "" && (s.Hash != traits.HashAlgorithm || s.HashSeed != traits.HashSeed):
		return fmt.Errorf("its blocks are named by %q with seed %q, and here by %q with seed %q", s.Hash, s.HashSeed, traits.HashAlgorithm, traits.HashSeed)
	case len(s.Models) > 0 && len(w.Models) > 0 && !slices.ContainsFunc(s.Models, func(m string) bool { return slices.Contains(w.Models, m) }):
		return fmt.Errorf("it serves %.80q, and here %.80q", s.Models[0], w.Models[0])
	}
	return nil
}

// restoredRank is a rank from a snapshot whose worker has not come yet.
type restoredRank struct {
	label string
	note  []byte
	snapshotRank
}

// read reads the note.
func (k *restoredRank) read() error {
	if err := json.Unmarshal(k.note, &k.snapshotRank); err != nil {
		return fmt.Errorf("where rank %s stands: %w", k.label, err)
	}
	return nil
}

// note copies a rank into a snapshot, with where its feed stands at that very
// moment. Were the blocks newer than the position, the batches between the two
// would be applied to them again, and a block that is stored again counts as a
// further copy. A rank whose feed has nothing to continue from is left out.
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
		w := of.worker
		b, err := json.Marshal(snapshotRank{Block: of.block, IgnoreCopies: f.ignoreCopies[k], Hash: w.KVHash, HashSeed: w.KVHashSeed, Models: w.Models, Position: p})
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
	if err := f.write(w, f.note); err != nil {
		return err
	}
	if err := errors.Join(w.Flush(), tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}

// write writes a snapshot of the ranks that note copies.
func (f *Follower) write(w io.Writer, note func(slot kvindex.Rank, label string, take func()) []byte) error {
	if err := json.NewEncoder(w).Encode(snapshotHead{Schema: snapshotSchema, At: time.Now()}); err != nil {
		return err
	}
	return f.Index.Snapshot(w, note)
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
	r, head, err := readHead(file)
	if err != nil {
		return nil, fmt.Errorf("index snapshot %s: %w", path, err)
	}
	restored := map[uint32]restoredRank{}
	if err := f.Index.Restore(r, func(slot kvindex.Rank, label string, note []byte) error {
		k := restoredRank{label: label, note: bytes.Clone(note)}
		if err := k.read(); err != nil {
			return err
		}
		restored[uint32(slot)] = k
		return nil
	}); err != nil {
		return nil, fmt.Errorf("index snapshot %s: %w", path, err)
	}
	f.restored = restored
	return head, nil
}

// readHead reads the first line of a snapshot; the rest of it follows in r.
func readHead(from io.Reader) (r *bufio.Reader, head *snapshotHead, err error) {
	r = bufio.NewReaderSize(from, maxSnapshotHead)
	line, err := r.ReadSlice('\n')
	switch {
	case errors.Is(err, bufio.ErrBufferFull):
		return nil, nil, fmt.Errorf("the first line is longer than %d bytes", maxSnapshotHead)
	case errors.Is(err, io.EOF):
		return nil, nil, io.ErrUnexpectedEOF
	case err != nil:
		return nil, nil, err
	}
	head = &snapshotHead{}
	if err := json.Unmarshal(line, head); err != nil || head.Schema != snapshotSchema {
		return nil, nil, fmt.Errorf("not of the form %s", snapshotSchema)
	}
	return r, head, nil
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

// resume is where the feed of a worker's rank goes on, nil to start over. What was
// restored under other circumstances is dropped.
func (f *Follower) resume(w *workers.Worker, k *workers.Rank, block int) *kvstream.Position {
	old, ok := f.restored[k.Slot]
	if !ok || old.label != k.Label {
		return nil
	}
	delete(f.restored, k.Slot)
	if old.fits(w, block) != nil {
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
