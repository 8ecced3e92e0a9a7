package bpe

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"github.com/tidwall/gjson"
	"golang.org/x/text/unicode/norm"
)

// Errors a caller branches on.
var (
	// ErrUnknown: the file uses something (a pattern, a normalizer, a model
	// type) whose exact behaviour this package does not implement. It is
	// refused, because guessing gives ids that are almost right.
	ErrUnknown = errors.New("not implemented exactly")

	// ErrMalformed: the file is not a tokenizer.json.
	ErrMalformed = errors.New("malformed tokenizer file")

	// ErrTooLarge: the file is over a limit.
	ErrTooLarge = errors.New("over the size limit")
)

// Options sets the limits of a Tokenizer. The zero value means the defaults.
type Options struct {
	MaxFileBytes    int64 // size of tokenizer.json; default 64 MiB
	WordCacheWords  int   // slots of the word cache, rounded up to a power of two; default 1<<15 (1.5 MiB)
	ChunkCacheBytes int64 // bound of the prefix cache, text and ids; default 32 MiB, negative for none
}

func (o Options) withDefaults() Options {
	o.MaxFileBytes = cmp.Or(max(o.MaxFileBytes, 0), 64<<20)
	o.WordCacheWords = cmp.Or(max(o.WordCacheWords, 0), 1<<15)
	o.ChunkCacheBytes = cmp.Or(o.ChunkCacheBytes, 32<<20)
	return o
}

// Limits on what a file may hold; real files have under 300,000 of each.
const (
	maxVocab  = 4 << 20
	maxID     = 1 << 24
	maxAdded  = 1 << 16
	maxTokLen = 1 << 16
)

// Load reads a tokenizer.json, given as the file or as the folder it is in.
func Load(path string, o Options) (*Tokenizer, error) {
	o = o.withDefaults()
	if st, err := os.Stat(path); err != nil {
		return nil, fmt.Errorf("load tokenizer: %w", err)
	} else if st.IsDir() {
		path = filepath.Join(path, "tokenizer.json")
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("load tokenizer: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, o.MaxFileBytes+1))
	if err != nil {
		return nil, fmt.Errorf("load tokenizer %s: %w", path, err)
	}
	if int64(len(data)) > o.MaxFileBytes {
		return nil, fmt.Errorf("load tokenizer %s: file is over %d bytes: %w", path, o.MaxFileBytes, ErrTooLarge)
	}
	t, err := Parse(data, o)
	if err != nil {
		return nil, fmt.Errorf("load tokenizer %s: %w", path, err)
	}
	return t, nil
}

// Parse builds a Tokenizer from the bytes of a tokenizer.json.
//
// Truncation and padding of the file are ignored: engines turn both off.
func Parse(data []byte, o Options) (*Tokenizer, error) {
	o = o.withDefaults()
	if int64(len(data)) > o.MaxFileBytes {
		return nil, fmt.Errorf("%d bytes: %w", len(data), ErrTooLarge)
	}
	if !gjson.ValidBytes(data) || !utf8.Valid(data) {
		return nil, fmt.Errorf("not valid JSON in UTF-8: %w", ErrMalformed)
	}
	root := gjson.ParseBytes(data)
	if !root.IsObject() || !root.Get("model").IsObject() {
		return nil, fmt.Errorf("no model object: %w", ErrMalformed)
	}
	t := &Tokenizer{}
	form, normalizes, err := parseNormalizer(root.Get("normalizer"))
	if err != nil {
		return nil, err
	}
	if normalizes {
		t.norm = newNormalizer(form)
	}
	if t.family, err = parsePreTokenizer(root.Get("pre_tokenizer")); err != nil {
		return nil, err
	}
	vocab, err := t.parseModel(root.Get("model"))
	if err != nil {
		return nil, err
	}
	if err := t.parseAdded(root.Get("added_tokens"), vocab); err != nil {
		return nil, err
	}
	if err := t.parsePost(root.Get("post_processor")); err != nil {
		return nil, err
	}
	t.decodes = byteLevelDecoder(root.Get("decoder"))
	t.classes = sharedClasses()
	t.cuts = t.safeCuts()
	t.words = newWordCache(o.WordCacheWords)
	if o.ChunkCacheBytes > 0 {
		t.chunks = newChunkCache(o.ChunkCacheBytes)
	}
	return t, nil
}

// unknown builds the refusal of one part of a file.
func unknown(part string, v gjson.Result) error {
	raw := v.Raw
	if len(raw) > 200 {
		raw = strings.ToValidUTF8(raw[:200], "") + "…"
	}
	return fmt.Errorf("%s: %s: %w", part, raw, ErrUnknown)
}

func absent(v gjson.Result) bool { return !v.Exists() || v.Type == gjson.Null }

func parseNormalizer(v gjson.Result) (form norm.Form, ok bool, err error) {
	if absent(v) {
		return 0, false, nil
	}
	switch v.Get("type").String() {
	case "NFC":
		return norm.NFC, true, nil
	case "NFKC":
		return norm.NFKC, true, nil
	case "Sequence":
		list := v.Get("normalizers").Array()
		switch len(list) {
		case 0:
			return 0, false, nil
		case 1:
			return parseNormalizer(list[0])
		}
	}
	return 0, false, unknown("normalizer", v)
}

func parsePreTokenizer(v gjson.Result) (family, error) {
	if absent(v) {
		return "", unknown("pre_tokenizer", v)
	}
	list := []gjson.Result{v}
	if v.Get("type").String() == "Sequence" {
		list = v.Get("pretokenizers").Array()
	}
	var patterns []string
	for i, p := range list {
		switch p.Get("type").String() {
		case "Split":
			behavior, invert := p.Get("behavior").String(), p.Get("invert").Bool()
			// "Removed" and inverted keeps the matches alone. The known single
			// patterns match every character, so that this is the same.
			same := behavior == "Removed" && invert && len(list) == 2
			if behavior != "Isolated" && !same || behavior == "Isolated" && invert || p.Get("pattern.Regex").Type != gjson.String {
				return "", unknown("pre_tokenizer", p)
			}
			patterns = append(patterns, p.Get("pattern.Regex").String())
			continue
		case "ByteLevel":
			useRegex := !p.Get("use_regex").Exists() || p.Get("use_regex").Bool()
			if i == len(list)-1 && !p.Get("add_prefix_space").Bool() && useRegex == (len(patterns) == 0) {
				return familyOf(patterns)
			}
		}
		return "", unknown("pre_tokenizer", p)
	}
	return "", unknown("pre_tokenizer", v)
}

// byteAlphabet is the byte-level alphabet of GPT-2: the character that stands
// for each byte in a vocabulary, and back.
func byteAlphabet() (back map[rune]byte) {
	back = make(map[rune]byte, 256)
	next := rune(256)
	for b := range 256 {
		if b >= '!' && b <= '~' || b >= 0xa1 && b <= 0xac || b >= 0xae {
			back[rune(b)] = byte(b)
			continue
		}
		back[next] = byte(b)
		next++
	}
	return back
}

func (t *Tokenizer) parseModel(m gjson.Result) (map[string]uint32, error) {
	if typ := m.Get("type").String(); typ != "BPE" && (typ != "" || !m.Get("merges").Exists()) {
		return nil, fmt.Errorf("model: type %q: %w (known: BPE)", typ, ErrUnknown)
	}
	for _, k := range []string{"continuing_subword_prefix", "end_of_word_suffix"} {
		if v := m.Get(k); !absent(v) && v.String() != "" {
			return nil, unknown("model: "+k, v)
		}
	}
	if v := m.Get("dropout"); !absent(v) && v.Float() != 0 {
		return nil, unknown("model: dropout", v)
	}
	t.ignoreMerges = m.Get("ignore_merges").Bool()

	vocab := make(map[string]uint32, len(m.Get("vocab").Raw)/16)
	var err error
	m.Get("vocab").ForEach(func(k, v gjson.Result) bool {
		id := v.Uint()
		switch {
		case v.Type != gjson.Number || v.Num != float64(id) || id >= maxID:
			err = fmt.Errorf("model: vocab: id %s of %q: %w", v.Raw, k.String(), ErrMalformed)
		case len(vocab) >= maxVocab || len(k.Raw) > maxTokLen:
			err = fmt.Errorf("model: vocab: %w", ErrTooLarge)
		}
		// Cloned, because the parser's strings keep the whole file alive.
		vocab[strings.Clone(k.String())] = uint32(id)
		return err == nil
	})
	if err != nil {
		return nil, err
	}
	if err := t.indexVocab(vocab); err != nil {
		return nil, err
	}
	return vocab, t.parseMerges(m.Get("merges"), vocab)
}

// indexVocab fills the tables from bytes to ids and back.
func (t *Tokenizer) indexVocab(vocab map[string]uint32) error {
	back := byteAlphabet()
	var top uint32
	size := 0
	for k, id := range vocab {
		top = max(top, id)
		size += len(k)
	}
	if uint64(top) > 2*uint64(len(vocab))+1<<16 {
		return fmt.Errorf("model: vocab: id %d with %d entries: %w", top, len(vocab), ErrMalformed)
	}
	t.tokens = make([][]byte, top+1)
	if t.ignoreMerges {
		t.whole = make(map[string]uint32, len(vocab))
	}
	var have [256]bool
	arena := make([]byte, 0, size)
	for k, id := range vocab {
		if t.tokens[id] != nil {
			return fmt.Errorf("model: vocab: id %d stands for two tokens: %w", id, ErrMalformed)
		}
		start, inAlphabet := len(arena), true
		for _, r := range k {
			b, ok := back[r]
			if !ok {
				inAlphabet = false
				break
			}
			arena = append(arena, b)
		}
		if !inAlphabet { // an added token that is in the vocabulary too
			arena = append(arena[:start], k...)
		}
		w := arena[start:len(arena):len(arena)]
		t.tokens[id] = w
		if inAlphabet && len(w) == 1 {
			t.byteID[w[0]], have[w[0]] = id, true
		}
		if inAlphabet && t.ignoreMerges {
			t.whole[string(w)] = id
		}
	}
	for b, ok := range have {
		if !ok {
			return fmt.Errorf("model: vocab: no token for byte 0x%02x, so not a byte-level vocabulary: %w", b, ErrUnknown)
		}
	}
	return nil
}

func (t *Tokenizer) parseMerges(v gjson.Result, vocab map[string]uint32) error {
	n := 0
	var err error
	var ab []byte
	byteOf := make(map[uint32]byte, 256)
	for b, id := range t.byteID {
		byteOf[id] = byte(b)
	}
	t.merges = newMergeTable(strings.Count(v.Raw, ",") + 1)
	v.ForEach(func(_, e gjson.Result) bool {
		var a, b string
		ok := true
		if e.IsArray() {
			i := 0
			e.ForEach(func(_, s gjson.Result) bool {
				ok = ok && s.Type == gjson.String && i < 2
				if i == 0 {
					a = s.String()
				} else {
					b = s.String()
				}
				i++
				return ok
			})
			ok = ok && i == 2
		} else {
			a, b, ok = strings.Cut(e.String(), " ")
			ok = ok && e.Type == gjson.String && !strings.Contains(b, " ")
		}
		ab = append(append(ab[:0], a...), b...)
		ia, ok1 := vocab[a]
		ib, ok2 := vocab[b]
		iab, ok3 := vocab[string(ab)]
		switch {
		case !ok:
			err = fmt.Errorf("model: merge %d: %w", n, ErrMalformed)
		case !ok1 || !ok2 || !ok3:
			err = fmt.Errorf("model: merge %d of %q and %q is not in the vocabulary: %w", n, a, b, ErrMalformed)
		case n >= maxVocab:
			err = fmt.Errorf("model: merges: %w", ErrTooLarge)
		default:
			t.merges.put(ia, ib, uint32(n), iab)
			ba, okA := byteOf[ia]
			bb, okB := byteOf[ib]
			if okA && okB {
				t.merges.bytes[int(ba)<<8|int(bb)] = uint64(n)<<32 | uint64(iab)
			}
		}
		n++
		return err == nil
	})
	return err
}

func (t *Tokenizer) parseAdded(v gjson.Result, vocab map[string]uint32) error {
	var raw, normalized []addedToken
	known := make(map[string]bool)
	t.texts = make(map[uint32]addedText)
	byID := make(map[uint32]string)
	for _, a := range v.Array() {
		content := strings.Clone(a.Get("content").String())
		id := a.Get("id").Uint()
		if len(known) >= maxAdded || len(content) > maxTokLen || id >= maxID {
			return fmt.Errorf("added_tokens: %w", ErrTooLarge)
		}
		if a.Get("id").Type != gjson.Number || float64(id) != a.Get("id").Num {
			return fmt.Errorf("added_tokens: id %s: %w", a.Get("id").Raw, ErrMalformed)
		}
		if content == "" {
			continue // the reference ignores them
		}
		if in, ok := vocab[content]; ok && in != uint32(id) {
			return fmt.Errorf("added_tokens: %q has id %d here and %d in the vocabulary: %w", content, id, in, ErrMalformed)
		}
		if other, ok := byID[uint32(id)]; ok && other != content {
			return fmt.Errorf("added_tokens: id %d stands for %q and %q: %w", id, other, content, ErrMalformed)
		}
		if _, ok := vocab[content]; !ok && id < uint64(len(t.tokens)) && t.tokens[id] != nil {
			return fmt.Errorf("added_tokens: id %d of %q is taken by the vocabulary: %w", id, content, ErrMalformed)
		}
		if known[content] {
			continue
		}
		known[content] = true
		byID[uint32(id)] = content
		tok := addedToken{
			id: uint32(id), content: content, lstrip: a.Get("lstrip").Bool(),
			rstrip: a.Get("rstrip").Bool(), single: a.Get("single_word").Bool(),
		}
		t.added = append(t.added, tok)
		special := a.Get("special").Bool()
		t.texts[tok.id] = addedText{alphabetBytes(content), special}
		if norm := a.Get("normalized"); norm.Exists() && !norm.Bool() || !norm.Exists() && special {
			raw = append(raw, tok)
			continue
		}
		if t.norm != nil {
			tok.content = string(t.norm.apply(nil, []byte(tok.content)))
			t.texts[tok.id] = addedText{alphabetBytes(tok.content), special} // as the reference does
		}
		normalized = append(normalized, tok)
	}
	if len(raw) > 0 {
		t.rawAdded = newMatcher(raw)
	}
	if len(normalized) > 0 {
		t.normAdded = newMatcher(normalized)
	}
	return nil
}

// parsePost reads what the post-processor puts around a single sequence.
func (t *Tokenizer) parsePost(v gjson.Result) error {
	if absent(v) {
		return nil
	}
	switch v.Get("type").String() {
	case "ByteLevel": // changes offsets, not ids
		return nil
	case "Sequence":
		templates := 0
		for _, p := range v.Get("processors").Array() {
			if p.Get("type").String() == "TemplateProcessing" {
				if templates++; templates > 1 {
					return unknown("post_processor", v)
				}
			}
			if err := t.parsePost(p); err != nil {
				return err
			}
		}
		return nil
	case "TemplateProcessing":
		seen := false
		for _, e := range v.Get("single").Array() {
			name := e.Get("SpecialToken.id")
			switch {
			case e.Get("Sequence.id").String() == "A" && !seen:
				seen = true
			case name.Type == gjson.String:
				ids, err := specialIDs(v.Get("special_tokens"), name.String())
				if err != nil {
					return err
				}
				if seen {
					t.suffix = append(t.suffix, ids...)
				} else {
					t.prefix = append(t.prefix, ids...)
				}
			default:
				return unknown("post_processor", e)
			}
		}
		if !seen || len(t.prefix)+len(t.suffix) > 64 {
			return unknown("post_processor", v)
		}
		return nil
	}
	return unknown("post_processor", v)
}

// specialIDs looks name up in a template's special_tokens.
func specialIDs(v gjson.Result, name string) (ids []uint32, err error) {
	err = fmt.Errorf("post_processor: no ids for special token %q: %w", name, ErrMalformed)
	v.ForEach(func(k, e gjson.Result) bool {
		if k.String() != name {
			return true
		}
		for _, id := range e.Get("ids").Array() {
			if id.Type != gjson.Number || id.Num != float64(id.Uint()) || id.Uint() >= maxID {
				return false
			}
			ids = append(ids, uint32(id.Uint()))
		}
		err = nil
		return false
	})
	return ids, err
}
