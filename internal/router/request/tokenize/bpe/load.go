package bpe

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/text/unicode/norm"

	"github.com/dynctl/dynctl/internal/rawjson"
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
	maxDepth  = 128
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
	root := rawjson.Value(data)
	if !rawjson.ReadObject(data, maxDepth, func(_, _ []byte) {}) || !rawjson.IsObject(root.Get("model")) {
		return nil, fmt.Errorf("not a JSON object in UTF-8 that holds a model: %w", ErrMalformed)
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
func unknown(part string, v rawjson.Value) error {
	raw := string(v)
	if len(raw) > 200 {
		raw = strings.ToValidUTF8(raw[:200], "") + "…"
	}
	return fmt.Errorf("%s: %s: %w", part, raw, ErrUnknown)
}

func absent(v rawjson.Value) bool { return !v.Exists() || rawjson.IsNull(v) }

// elements returns those of an array, none where there is no value. Anything else is
// malformed: a list that is passed over gives other ids.
func elements(part string, v rawjson.Value) ([]rawjson.Value, error) {
	if !absent(v) && !rawjson.IsArray(v) {
		return nil, fmt.Errorf("%s: no list: %w", part, ErrMalformed)
	}
	return slices.Collect(v.Elements()), nil
}

func parseNormalizer(v rawjson.Value) (form norm.Form, ok bool, err error) {
	if absent(v) {
		return 0, false, nil
	}
	switch v.Get("type").String() {
	case "NFC":
		return norm.NFC, true, nil
	case "NFKC":
		return norm.NFKC, true, nil
	case "Sequence":
		list, err := elements("normalizer: normalizers", v.Get("normalizers"))
		if err != nil || !v.Get("normalizers").Exists() {
			return 0, false, cmp.Or(err, unknown("normalizer", v))
		}
		switch len(list) {
		case 0:
			return 0, false, nil
		case 1:
			return parseNormalizer(list[0])
		}
	}
	return 0, false, unknown("normalizer", v)
}

func parsePreTokenizer(v rawjson.Value) (family, error) {
	if absent(v) {
		return "", unknown("pre_tokenizer", v)
	}
	list := []rawjson.Value{v}
	if v.Get("type").String() == "Sequence" {
		var err error
		if list, err = elements("pre_tokenizer: pretokenizers", v.Get("pretokenizers")); err != nil {
			return "", err
		}
	}
	var patterns []string
	for i, p := range list {
		switch p.Get("type").String() {
		case "Split":
			behavior, invert := p.Get("behavior").String(), p.Get("invert").Bool()
			// "Removed" and inverted keeps the matches alone. The known single
			// patterns match every character, so that this is the same.
			same := behavior == "Removed" && invert && len(list) == 2
			if behavior != "Isolated" && !same || behavior == "Isolated" && invert || !rawjson.IsString(p.Get("pattern.Regex")) {
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

func (t *Tokenizer) parseModel(m rawjson.Value) (map[string]uint32, error) {
	if typ := m.Get("type").String(); typ != "BPE" && (typ != "" || !m.Get("merges").Exists()) {
		return nil, fmt.Errorf("model: type %q: %w (known: BPE)", typ, ErrUnknown)
	}
	for _, k := range []string{"continuing_subword_prefix", "end_of_word_suffix"} {
		if v := m.Get(k); !absent(v) && v.String() != "" {
			return nil, unknown("model: "+k, v)
		}
	}
	if v := m.Get("dropout"); !absent(v) {
		if p, err := strconv.ParseFloat(string(v), 64); err != nil || p != 0 {
			return nil, unknown("model: dropout", v)
		}
	}
	t.ignoreMerges = m.Get("ignore_merges").Bool()

	entries := m.Get("vocab")
	vocab := make(map[string]uint32, len(entries)/16)
	for k, v := range entries.Members() {
		id, ok := rawjson.Uint32(v)
		switch {
		case !ok || id >= maxID:
			return nil, fmt.Errorf("model: vocab: id %s of %q: %w", string(v), k, ErrMalformed)
		case len(vocab) >= maxVocab || len(k) > maxTokLen:
			return nil, fmt.Errorf("model: vocab: %w", ErrTooLarge)
		}
		vocab[string(k)] = id
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

func (t *Tokenizer) parseMerges(v rawjson.Value, vocab map[string]uint32) error {
	n := 0
	var ab []byte
	byteOf := make(map[uint32]byte, 256)
	for b, id := range t.byteID {
		byteOf[id] = byte(b)
	}
	if !rawjson.IsArray(v) {
		return fmt.Errorf("model: merges: no list: %w", ErrMalformed)
	}
	t.merges = newMergeTable(bytes.Count(v, []byte(",")) + 1)
	for e := range v.Elements() {
		var pair [2]string
		ok := true
		if rawjson.IsArray(e) {
			i := 0
			for s := range e.Elements() {
				if ok = ok && rawjson.IsString(s) && i < 2; ok {
					pair[i] = s.String()
				}
				i++
			}
			ok = ok && i == 2
		} else {
			pair[0], pair[1], ok = strings.Cut(e.String(), " ")
			ok = ok && rawjson.IsString(e) && !strings.Contains(pair[1], " ")
		}
		a, b := pair[0], pair[1]
		ab = append(append(ab[:0], a...), b...)
		ia, ok1 := vocab[a]
		ib, ok2 := vocab[b]
		iab, ok3 := vocab[string(ab)]
		switch {
		case !ok:
			return fmt.Errorf("model: merge %d: %w", n, ErrMalformed)
		case !ok1 || !ok2 || !ok3:
			return fmt.Errorf("model: merge %d of %q and %q is not in the vocabulary: %w", n, a, b, ErrMalformed)
		case n >= maxVocab:
			return fmt.Errorf("model: merges: %w", ErrTooLarge)
		default:
			t.merges.put(ia, ib, uint32(n), iab)
			ba, okA := byteOf[ia]
			bb, okB := byteOf[ib]
			if okA && okB {
				t.merges.bytes[int(ba)<<8|int(bb)] = uint64(n)<<32 | uint64(iab)
			}
		}
		n++
	}
	return nil
}

func (t *Tokenizer) parseAdded(v rawjson.Value, vocab map[string]uint32) error {
	var raw, normalized []addedToken
	known := make(map[string]bool)
	t.texts = make(map[uint32]addedText)
	byID := make(map[uint32]string)
	list, err := elements("added_tokens", v)
	if err != nil {
		return err
	}
	for _, a := range list {
		content := a.Get("content").String()
		id, ok := rawjson.Uint32(a.Get("id"))
		if len(known) >= maxAdded || len(content) > maxTokLen || id >= maxID {
			return fmt.Errorf("added_tokens: %w", ErrTooLarge)
		}
		if !ok {
			return fmt.Errorf("added_tokens: id %s: %w", string(a.Get("id")), ErrMalformed)
		}
		if content == "" {
			continue // the reference ignores them
		}
		if in, ok := vocab[content]; ok && in != id {
			return fmt.Errorf("added_tokens: %q has id %d here and %d in the vocabulary: %w", content, id, in, ErrMalformed)
		}
		if other, ok := byID[id]; ok && other != content {
			return fmt.Errorf("added_tokens: id %d stands for %q and %q: %w", id, other, content, ErrMalformed)
		}
		if _, ok := vocab[content]; !ok && uint64(id) < uint64(len(t.tokens)) && t.tokens[id] != nil {
			return fmt.Errorf("added_tokens: id %d of %q is taken by the vocabulary: %w", id, content, ErrMalformed)
		}
		if known[content] {
			continue
		}
		known[content] = true
		byID[id] = content
		tok := addedToken{
			id: id, content: content, lstrip: a.Get("lstrip").Bool(),
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
func (t *Tokenizer) parsePost(v rawjson.Value) error {
	if absent(v) {
		return nil
	}
	switch v.Get("type").String() {
	case "ByteLevel": // changes offsets, not ids
		return nil
	case "Sequence":
		templates := 0
		list, err := elements("post_processor: processors", v.Get("processors"))
		if err != nil || !v.Get("processors").Exists() {
			return cmp.Or(err, unknown("post_processor", v))
		}
		for _, p := range list {
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
		for e := range v.Get("single").Elements() {
			name := e.Get("SpecialToken.id")
			switch {
			case e.Get("Sequence.id").String() == "A" && !seen:
				seen = true
			case rawjson.IsString(name):
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
func specialIDs(v rawjson.Value, name string) (ids []uint32, err error) {
	err = fmt.Errorf("post_processor: no ids for special token %q: %w", name, ErrMalformed)
	for k, e := range v.Members() {
		if string(k) != name {
			continue
		}
		list, broken := elements("post_processor: ids of "+name, e.Get("ids"))
		if broken != nil || len(list) == 0 {
			return nil, cmp.Or(broken, err)
		}
		for _, n := range list {
			id, ok := rawjson.Uint32(n)
			if !ok || id >= maxID {
				return nil, err
			}
			ids = append(ids, id)
		}
		return ids, nil
	}
	return nil, err
}
