package tokenize

import (
	"container/list"
	"crypto/sha256"
	"sync"
)

// answerCache keeps answers by the hash of the question, least recently used out
// first, within a bound on bytes.
type answerCache struct {
	max int64

	mu    sync.Mutex // guards what follows
	size  int64
	items map[[sha256.Size]byte]*list.Element // of *answerEntry
	order list.List                           // front is the newest
}

type answerEntry struct {
	key [sha256.Size]byte
	answer
}

func (e *answerEntry) bytes() int64 {
	n := 4*len(e.ids) + 200
	for _, m := range e.media {
		n += len(m.ID) + len(m.Modality) + 64
	}
	return int64(n)
}

func (c *answerCache) get(key [sha256.Size]byte) (answer, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	el, ok := c.items[key]
	if !ok {
		return answer{}, false
	}
	c.order.MoveToFront(el)
	return el.Value.(*answerEntry).answer, true
}

func (c *answerCache) put(key [sha256.Size]byte, a answer) {
	e := &answerEntry{key, a}
	if e.bytes() > c.max {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.items[key]; ok {
		return
	}
	if c.items == nil {
		c.items = make(map[[sha256.Size]byte]*list.Element)
	}
	c.items[key] = c.order.PushFront(e)
	for c.size += e.bytes(); c.size > c.max; {
		el := c.order.Back()
		old := el.Value.(*answerEntry)
		c.order.Remove(el)
		delete(c.items, old.key)
		c.size -= old.bytes()
	}
}
