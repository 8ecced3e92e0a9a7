package sim

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/dynctl/dynctl/internal/workers/sim/cache"
)

// promptStore is the shared-storage connector (vLLM's ExampleConnector): whole
// prompts, found by all their blocks but never by a part of them. It lives in
// memory, or in a folder with one file a prompt.
type promptStore struct {
	dir string

	mu      sync.Mutex
	prompts map[uint64][]cache.Content
}

// maxStored bounds the prompts in memory; a full store takes no more, as a
// full disk does.
const maxStored = 1 << 16

// Load returns the contents of the chain from block from on, if the whole chain
// was saved.
func (s *promptStore) Load(seqs []uint64, from int) []cache.Content {
	if len(seqs) == 0 || from >= len(seqs) {
		return nil
	}
	key := seqs[len(seqs)-1]
	s.mu.Lock()
	all := s.prompts[key]
	s.mu.Unlock()
	if all == nil && s.dir != "" {
		b, err := os.ReadFile(s.file(key))
		if err != nil || json.Unmarshal(b, &all) != nil {
			return nil // not there, or not whole yet
		}
	}
	if len(all) != len(seqs) {
		return nil
	}
	return all[from:]
}

// Save keeps the contents of the whole chain.
func (s *promptStore) Save(seqs []uint64, contents []cache.Content) {
	if len(seqs) == 0 {
		return
	}
	key := seqs[len(seqs)-1]
	if s.dir != "" {
		if _, err := os.Stat(s.file(key)); errors.Is(err, fs.ErrNotExist) {
			if b, err := json.Marshal(contents); err == nil {
				tmp := fmt.Sprintf("%s.%p", s.file(key), &b)
				if os.WriteFile(tmp, b, 0o600) == nil {
					_ = os.Rename(tmp, s.file(key)) // a store that cannot write forgets
				}
			}
		}
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.prompts == nil {
		s.prompts = make(map[uint64][]cache.Content)
	}
	if s.prompts[key] == nil && len(s.prompts) < maxStored {
		s.prompts[key] = contents
	}
}

func (s *promptStore) file(key uint64) string {
	return filepath.Join(s.dir, fmt.Sprintf("%016x.kv", key))
}

// blockStore is the host memory of an LMCache decode: single blocks.
type blockStore struct {
	mu     sync.Mutex
	blocks map[uint64]cache.Content
	order  []uint64 // oldest first
}

// maxBlocks bounds a blockStore; the oldest blocks go.
const maxBlocks = 1 << 18

func newBlockStore() *blockStore { return &blockStore{blocks: make(map[uint64]cache.Content)} }

// Load returns the contents of the blocks that are there without a hole.
func (s *blockStore) Load(seqs []uint64, from int) []cache.Content {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []cache.Content
	for _, q := range seqs[from:] {
		c, ok := s.blocks[q]
		if !ok {
			break
		}
		out = append(out, c)
	}
	return out
}

// Save keeps the blocks of a chain.
func (s *blockStore) Save(seqs []uint64, contents []cache.Content) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, q := range seqs {
		if _, ok := s.blocks[q]; !ok {
			s.order = append(s.order, q)
		}
		s.blocks[q] = contents[i]
	}
	for len(s.order) > maxBlocks {
		delete(s.blocks, s.order[0])
		s.order = s.order[1:]
	}
}
