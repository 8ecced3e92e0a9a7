package bpe

import "fmt"

// family is a recognised pre-tokenizer. Each stands for exactly one pattern
// (or sequence of patterns) of tokenizer.json; anything else is refused.
type family string

const (
	famGPT2     family = "gpt2"      // ByteLevel with its built-in pattern
	famLlama3   family = "llama3"    // Llama 3.x, and other cl100k-like files with 1-3 digits
	famQwen2    family = "qwen2"     // Qwen 2, 2.5, 3: single digits
	famQwen35   family = "qwen3.5"   // as qwen2, marks belong to words
	famO200k    family = "o200k"     // GPT-4o, GPT-OSS, Llama 4
	famDeepSeek family = "deepseek3" // DeepSeek V3 and R1: three splits in sequence
)

// The patterns, as they are in tokenizer.json after JSON decoding.
const (
	patLlama3 = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	patQwen2  = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	patQwen35 = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	patO200k  = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?` +
		`|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?` +
		`|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`

	patDeepSeekDigits = `\p{N}{1,3}`
	patDeepSeekCJK    = "[一-龥\u3040-ゟ゠-ヿ]+"
	patDeepSeekMain   = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)

// familyOf recognises the split patterns of a file, in order. No pattern at
// all means the one built into the ByteLevel pre-tokenizer.
func familyOf(patterns []string) (family, error) {
	switch len(patterns) {
	case 0:
		return famGPT2, nil
	case 1:
		switch patterns[0] {
		case patLlama3:
			return famLlama3, nil
		case patQwen2:
			return famQwen2, nil
		case patQwen35:
			return famQwen35, nil
		case patO200k:
			return famO200k, nil
		}
	case 3:
		if patterns[0] == patDeepSeekDigits && patterns[1] == patDeepSeekCJK && patterns[2] == patDeepSeekMain {
			return famDeepSeek, nil
		}
	}
	return "", fmt.Errorf("pre_tokenizer: unknown split pattern %q: %w (known: gpt2, llama3, qwen2, qwen3.5, o200k, deepseek3)", patterns, ErrUnknown)
}

// The functions below return the end of the first word of b[i:]. They are the
// patterns' alternatives in order, written out, and rely on every character
// having exactly one class. The whole of b is one stretch of text between added
// tokens, so that the patterns' look-ahead may see its end.

// nextGPT2: 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
func (t *classTable) nextGPT2(b []byte, i int) int {
	if b[i] == '\'' {
		if n := contraction(b[i:], false); n > 0 {
			return i + n
		}
	}
	j := i
	if b[i] == ' ' && i+1 < len(b) {
		j++
	}
	c, n := t.at(b, j)
	switch {
	case c&clL != 0:
		return t.run(b, j+n, clL)
	case c == clN:
		return t.run(b, j+n, clN)
	case c&clWS == 0:
		return t.run(b, j+n, ^(clWS | clL | clN))
	}
	return t.spaces(b, i, false)
}

// nextCL100K covers patLlama3, patQwen2 and patQwen35, which differ in how
// many digits make a word and in whether marks count as letters.
func (t *classTable) nextCL100K(b []byte, i, digits int, letters class) int {
	first := b[i]
	if first == '\'' {
		if n := contraction(b[i:], true); n > 0 {
			return i + n
		}
	}
	c, n := t.at(b, i)
	if c&letters != 0 {
		return t.run(b, i+n, letters)
	}
	if c&(clNL|clN) == 0 && i+n < len(b) {
		if c2, n2 := t.at(b, i+n); c2&letters != 0 {
			return t.run(b, i+n+n2, letters)
		}
	}
	if c == clN {
		return t.digits(b, i+n, digits-1)
	}
	if e := t.punct(b, i, first, ^(clWS | letters | clN)); e > i {
		for e < len(b) && (b[e] == '\r' || b[e] == '\n') {
			e++
		}
		return e
	}
	return t.spaces(b, i, true)
}

// nextO200k: patO200k. Its two word alternatives backtrack; see camel.
func (t *classTable) nextO200k(b []byte, i int) int {
	c, n := t.at(b, i)
	pre := c&(clNL|clL|clN) == 0 // may be the optional leading character
	if pre && i+n < len(b) {
		if e := t.camel(b, i+n); e > 0 {
			return e + contraction(b[e:], true)
		}
	}
	if c&(clL|clM) != 0 {
		if e := t.camel(b, i); e > 0 {
			return e + contraction(b[e:], true)
		}
	}
	// Second alternative: upper-case run without a lower-case tail. The
	// first one failed, so nothing after the run can be lower case.
	if pre && i+n < len(b) {
		if e := t.run(b, i+n, clUpper); e > i+n {
			return e + contraction(b[e:], true)
		}
	}
	if e := t.run(b, i, clUpper); e > i {
		return e + contraction(b[e:], true)
	}
	if c == clN {
		return t.digits(b, i+n, 2)
	}
	if e := t.punct(b, i, b[i], ^(clWS | clL | clN)); e > i {
		for e < len(b) && (b[e] == '\r' || b[e] == '\n' || b[e] == '/') {
			e++
		}
		return e
	}
	return t.spaces(b, i, true)
}

const (
	clUpper = clLu | clLt | clLm | clLo | clM
	clLower = clLl | clLm | clLo | clM
)

// camel matches [upper]*[lower]+ at b[i:], 0 for no match. The upper run is
// greedy; when no lower character follows it, it gives back down to the last
// character that is in both sets.
func (t *classTable) camel(b []byte, i int) int {
	last := 0 // end of the last character in both sets
	for i < len(b) {
		c, n := t.at(b, i)
		if c&clUpper == 0 {
			if c&clLower != 0 {
				return t.run(b, i+n, clLower)
			}
			break
		}
		i += n
		if c&clLower != 0 {
			last = i
		}
	}
	return last
}

// digits returns the end of at most max more number characters.
func (t *classTable) digits(b []byte, i, max int) int {
	for ; max > 0 && i < len(b); max-- {
		c, n := t.at(b, i)
		if c != clN {
			break
		}
		i += n
	}
	return i
}

// punct matches ' ?[set]+' at b[i:]; i for no match.
func (t *classTable) punct(b []byte, i int, first byte, set class) int {
	j := i
	if first == ' ' {
		j++
	}
	if e := t.run(b, j, set); e > j {
		return e
	}
	return i
}

// spaces matches '\s*[\r\n]+|\s+(?!\S)|\s+' (the first alternative only with
// newlines) at b[i:], which starts with white space; i for no match.
func (t *classTable) spaces(b []byte, i int, newlines bool) int {
	end, lastNL, lastStart := i, 0, i
	for end < len(b) {
		c, n := t.at(b, end)
		if c&clWS == 0 {
			break
		}
		lastStart = end
		end += n
		if c == clNL {
			lastNL = end
		}
	}
	switch {
	case newlines && lastNL > 0:
		return lastNL
	case end == len(b) || lastStart == i:
		return end
	}
	return lastStart // leave one white space to the word that follows
}

// contraction returns the length of (?:'s|'t|'re|'ve|'m|'ll|'d) at b, or 0.
// Folded matching is Unicode's: the long s (U+017F) folds to s.
func contraction(b []byte, fold bool) int {
	if len(b) < 2 || b[0] != '\'' {
		return 0
	}
	c := b[1]
	var d byte
	if len(b) > 2 {
		d = b[2]
	}
	if fold {
		if c == 0xc5 && d == 0xbf {
			return 3
		}
		c, d = lower(c), lower(d)
	}
	switch c {
	case 's', 't', 'm', 'd':
		return 2
	case 'r', 'v':
		if d == 'e' {
			return 3
		}
	case 'l':
		if d == 'l' {
			return 3
		}
	}
	return 0
}

func lower(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		return c + 'a' - 'A'
	}
	return c
}

// nextDeepSeek returns the next stretch that the first two DeepSeek splits
// (digits, then CJK) leave: main is false for up to three digits, which the
// third split cannot divide.
func (t *classTable) nextDeepSeek(b []byte, i int) (end int, main bool) {
	c, n := t.at(b, i)
	if c == clN {
		return t.digits(b, i+n, 2), false
	}
	cjk := isKana(b[i:])
	for j := i + n; ; {
		if j >= len(b) {
			return j, true
		}
		c, n := t.at(b, j)
		if c == clN || isKana(b[j:]) != cjk {
			return j, true
		}
		j += n
	}
}

// isKana reports whether b starts with a character of patDeepSeekCJK.
func isKana(b []byte) bool {
	if len(b) < 3 || b[0] < 0xe3 || b[0] > 0xe9 {
		return false
	}
	r := rune(b[0]&0x0f)<<12 | rune(b[1]&0x3f)<<6 | rune(b[2]&0x3f)
	return r >= 0x4e00 && r <= 0x9fa5 || r >= 0x3040 && r <= 0x30ff
}

// nextDeepSeekMain matches patDeepSeekMain at b[i:], or returns i where no
// alternative matches (the caller then extends the stretch between matches).
func (t *classTable) nextDeepSeekMain(b []byte, i int) int {
	first := b[i]
	c, n := t.at(b, i)
	if first < 0x80 && c&(clP|clS) != 0 {
		j := i + 1
		for j < len(b) && 'a' <= b[j]|0x20 && b[j]|0x20 <= 'z' {
			j++
		}
		if j > i+1 {
			return j
		}
	}
	if c&(clL|clM) != 0 {
		return t.run(b, i+n, clL|clM)
	}
	if c&(clNL|clP|clS) == 0 && i+n < len(b) {
		if c2, n2 := t.at(b, i+n); c2&(clL|clM) != 0 {
			return t.run(b, i+n+n2, clL|clM)
		}
	}
	if e := t.punct(b, i, first, clP|clS); e > i {
		for e < len(b) && (b[e] == '\r' || b[e] == '\n') {
			e++
		}
		return e
	}
	return t.spaces(b, i, true)
}
