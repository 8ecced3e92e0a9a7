// Package media knows how many tokens the images, sounds and videos in prompts have: by their
// content where an engine has reported it, else by model and kind.
package media

import (
	"math"
	"strings"
	"sync"

	"github.com/dynctl/dynctl/internal/router/request/api"
)

const (
	// FirstGuess is the tokens of an item without any experience: those of an image of about a
	// megapixel in current models.
	FirstGuess = 1000
	// recent is over how many items a mean is taken: older ones fade.
	recent = 50
	// maxMeans and maxItems bound one generation of means and of items. A full one replaces
	// the one before, of which what was not used since is forgotten.
	maxMeans = 1024
	maxItems = 1 << 14
)

// Counts are how many items of each kind a prompt has.
type Counts [api.MediaOther]int

// Count counts the media of a request.
func Count(v *api.View) (n Counts) {
	for i := range v.Media {
		n[v.Media[i].Kind]++
	}
	return n
}

// Table is what was learned. It is safe for concurrent use. A nil Table knows nothing.
type Table struct {
	mu    sync.RWMutex // guards the fields below
	means generations[kindOf, mean]
	items generations[content, int] // tokens
}

type kindOf struct {
	model string
	kind  api.MediaKind
}

// mean is a mean of tokens over so many items, at most recent.
type mean struct {
	tokens float64
	items  int
}

type content struct {
	model string
	name  [16]byte
}

// generations is a map of bounded size that forgets what was not used for the longest time.
type generations[K comparable, V any] struct {
	newest, before map[K]V
	max            int
}

func (g *generations[K, V]) get(k K) (V, bool) {
	if v, ok := g.newest[k]; ok {
		return v, true
	}
	v, ok := g.before[k]
	return v, ok
}

func (g *generations[K, V]) put(k K, v V) {
	if _, ok := g.newest[k]; !ok && len(g.newest) >= g.max || g.newest == nil {
		g.before, g.newest = g.newest, map[K]V{}
	}
	g.newest[k] = v
}

// NewTable makes an empty table.
func NewTable() *Table {
	return &Table{means: generations[kindOf, mean]{max: maxMeans}, items: generations[content, int]{max: maxItems}}
}

// Expect returns how many tokens an item of the kind has on average; learned is false for
// [FirstGuess].
func (t *Table) Expect(model string, kind api.MediaKind) (tokens int, learned bool) {
	if t != nil {
		t.mu.RLock()
		defer t.mu.RUnlock()
		if m, ok := t.means.get(kindOf{model, kind}); ok {
			return int(math.Round(m.tokens)), true
		}
	}
	return FirstGuess, false
}

// Learn learns that an item of the kind had that many tokens.
func (t *Table) Learn(model string, kind api.MediaKind, tokens int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := kindOf{strings.Clone(model), kind} // may be a part of a body
	m, _ := t.means.get(k)
	m.items = min(m.items+1, recent)
	m.tokens += (float64(tokens) - m.tokens) / float64(m.items)
	t.means.put(k, m)
}

// LearnFromUsage learns from an engine's count of the tokens of a prompt whose text is estimated
// to have text tokens. It learns from prompts with one kind of media that are text for the
// smaller part: elsewhere the error of the estimate is larger than what is to be learned.
func (t *Table) LearnFromUsage(model string, n Counts, text, prompt int) {
	kind, items := api.MediaNone, 0
	for k, c := range n {
		switch {
		case c == 0:
		case items > 0:
			return
		default:
			kind, items = api.MediaKind(k), c
		}
	}
	if items > 0 && prompt > 2*text {
		t.Learn(model, kind, (prompt-text)/items)
	}
}

// Item returns how many tokens the content of an item has, by the name that
// [api.View.MediaName] gives it; false where that is not known.
func (t *Table) Item(model string, name [16]byte) (tokens int, ok bool) {
	if t == nil {
		return 0, false
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.items.get(content{model, name})
}

// Keep keeps how many tokens an engine has reported of the content of an item.
func (t *Table) Keep(model string, name [16]byte, tokens int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.items.put(content{strings.Clone(model), name}, tokens)
}

// Tokens returns how many tokens each of the media of a request is expected to have, in their
// order, in the memory of dst, and their sum.
func (t *Table) Tokens(dst []int, model string, v *api.View) (each []int, sum int) {
	each = dst[:0]
	for i := range v.Media {
		m := &v.Media[i]
		n, _ := t.Expect(model, m.Kind)
		if own, ok := t.Item(model, v.MediaName(m)); ok {
			n = own
		}
		each, sum = append(each, n), sum+n
	}
	return each, sum
}
