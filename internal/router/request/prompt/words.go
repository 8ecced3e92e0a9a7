package prompt

import (
	"context"
	"encoding/binary"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/router/request/tokenize"
	"github.com/dynctl/dynctl/internal/workers"
)

// Bounds of Words.
const (
	// wordsBlocks is how many blocks of tokens are kept, in each of two generations.
	wordsBlocks = 1 << 15
	// wordsDeep is how many leading blocks of a prompt are kept.
	wordsDeep = 1024
	// wordsTexts is how many texts of engines are kept.
	wordsTexts = 4096
	// wordsTime is how long one look waits for engines, wordsAtOnce how many are asked at once.
	wordsTime   = time.Second
	wordsAtOnce = 8
	// wordsBytes bounds a text.
	wordsBytes = 512
)

// Words keeps the token ids of the blocks that prompts begin with, so that what a run of
// the index begins with can be shown in words. It keeps what the newest prompts began
// with and forgets the rest. Words is safe for concurrent use; a nil one keeps nothing.
type Words struct {
	stage  *Stage
	tokens int // of a run

	mu       sync.Mutex
	now, old map[uint64]tokens // by the block's local hash
	texts    map[string]string // by the model and the ids
}

// tokens are the ids of a block, its first ones where it is longer than what is shown.
type tokens struct {
	model string
	ids   []uint32
}

// NewWords keeps what is needed to show n tokens of a run; nil with 0.
func NewWords(s *Stage, n int) *Words {
	if n <= 0 {
		return nil
	}
	return &Words{stage: s, tokens: n, now: map[uint64]tokens{}, texts: map[string]string{}}
}

// Note keeps the first blocks of a prompt, whose local hashes are locals. The ids are copied.
func (w *Words) Note(model string, locals []uint64, ids []uint32, blockSize int) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	own := ""
	for i, l := range locals[:min(len(locals), wordsDeep)] {
		if _, ok := w.now[l]; ok {
			continue
		}
		t, ok := w.old[l]
		if !ok {
			if own == "" {
				own = strings.Clone(model) // which may be in the request's own memory
			}
			t = tokens{own, slices.Clone(ids[i*blockSize:][:min(blockSize, w.tokens)])}
		}
		if len(w.now) >= wordsBlocks {
			w.old, w.now = w.now, make(map[uint64]tokens, wordsBlocks)
		}
		w.now[l] = t
	}
}

// Blocks is how many leading blocks of a run Texts has a use for.
func (w *Words) Blocks() int { return w.tokens }

// run are the ids that a run begins with and their model, as far as they are kept; block after
// block, because what followed a block in one prompt need not follow it in another.
func (w *Words) run(locals []uint64) tokens {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out tokens
	for _, l := range locals {
		t, ok := w.now[l]
		if !ok {
			t, ok = w.old[l]
		}
		if !ok || len(out.ids) >= w.tokens {
			break
		}
		if out.model == "" {
			out.model = t.model
		}
		out.ids = append(out.ids, t.ids...)
	}
	out.ids = out.ids[:min(len(out.ids), w.tokens)]
	return out
}

// Texts are the words that runs begin with, given the local hashes of each one's leading
// blocks; empty where they are not known. The local tokenizer gives them, or an engine of the
// fleet, which is asked for a second at most. The error is the last that an engine gave.
func (w *Words) Texts(ctx context.Context, fleet *workers.Snapshot, runs [][]uint64) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, wordsTime)
	defer cancel()
	out := make([]string, len(runs))
	var mu sync.Mutex
	var last error
	var g errgroup.Group
	g.SetLimit(wordsAtOnce)
	for i, locals := range runs {
		t := w.run(locals)
		if len(t.ids) == 0 {
			continue
		}
		if text, ok := w.stage.spell(t); ok {
			out[i] = oneWordLine(text)
			continue
		}
		g.Go(func() error {
			text, err := w.asked(ctx, fleet, t)
			if err != nil {
				mu.Lock()
				last = err
				mu.Unlock()
			}
			out[i] = oneWordLine(text)
			return nil
		})
	}
	_ = g.Wait() // none has an error
	return out, last
}

// spell is what the local tokenizer makes of ids, if it knows them all and is not known to
// make other ids than the model's engines do.
func (t *Stage) spell(of tokens) (string, bool) {
	decode, m := t.Decoder(), t.model(of.model)
	if decode == nil || m == nil {
		return "", false
	}
	if a := m.agrees.Load(); a != nil && !a.Has(tokenize.AspectPrompt) {
		return "", false
	}
	var b []byte
	for _, id := range of.ids {
		var ok bool
		if b, ok = decode(b, id); !ok {
			return "", false
		}
	}
	return string(b), true
}

// asked is what an engine makes of ids, or made of them before.
func (w *Words) asked(ctx context.Context, fleet *workers.Snapshot, t tokens) (string, error) {
	key := []byte(t.model + "\x00")
	for _, id := range t.ids {
		key = binary.LittleEndian.AppendUint32(key, id)
	}
	w.mu.Lock()
	text, ok := w.texts[string(key)]
	w.mu.Unlock()
	if ok {
		return text, nil
	}
	if ctx.Err() != nil {
		return "", tokenize.ErrUnavailable
	}
	text, err := w.stage.Text(ctx, t.model, fleet.Model(t.model), t.ids)
	if err != nil {
		return "", err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.texts) >= wordsTexts {
		clear(w.texts)
	}
	w.texts[string(key)] = text
	return text, nil
}

// oneWordLine is a text on one line, without what would steer a terminal, at most wordsBytes long.
func oneWordLine(text string) string {
	text = strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case r == utf8.RuneError || !unicode.IsPrint(r):
			return -1 // half of a character at the end, or a control character
		}
		return r
	}, text)
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > wordsBytes {
		text = strings.ToValidUTF8(text[:wordsBytes], "")
	}
	return text
}
