package disagg

import (
	"bytes"
	"strconv"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// Usage puts a prefill's count of cached tokens into the usage of its decode leg's answer: a
// decode engine counts the tokens that it was given, or only its own cache. It changes no other
// byte, and holds back no more than a usage whose end has not come.
type Usage struct {
	held []byte // the beginning of a usage, or of its name

	// Replaced says that the prefill's count stands in a usage, and Own is the decode engine's
	// newest one.
	Replaced bool
	Own      int

	// Cached is the prefill's count in tokens, asked for where a usage has come; nothing is
	// replaced where it is negative.
	Cached func() int

	in, out []byte // what Pass returns where that is no piece of its caller
}

// usageName is what a usage begins with. Inside of a JSON string its quotes have backslashes.
// JSON is full of quotes, so the search is for the end of the name.
const (
	usageName  = `"usage"`
	usageFirst = `"usa`
	usageLast  = `ge"`
)

// maxUsage is the largest usage in bytes that is looked into.
const maxUsage = 4 << 10

// Pass takes the next piece of an answer, split anywhere, and returns what may be sent of it,
// valid until the next call.
func (u *Usage) Pass(p []byte) []byte {
	if len(u.held) > 0 {
		u.in = append(append(u.in[:0], u.held...), p...)
		p, u.held = u.in, u.held[:0]
	}
	changed, sent := false, 0 // sent bytes of p are in out
	for at := 0; ; {
		k := named(p[at:])
		if k < 0 {
			if n := beginning(p[at:]); n > 0 {
				k = len(p) - n
				u.held, p = append(u.held, p[k:]...), p[:k]
			}
			break
		}
		name := at + k
		at = name + len(usageName)
		from, to := object(p[at:])
		if to < 0 {
			if len(p)-name <= maxUsage {
				u.held, p = append(u.held, p[name:]...), p[:name]
				break
			}
			continue
		}
		from, to = at+from, at+to
		cached := u.Cached()
		if count, own, ok := recount(p[from:to], cached); ok {
			if u.Replaced, u.Own = true, own; own != cached {
				if !changed {
					changed, u.out = true, u.out[:0]
				}
				u.out, sent = append(append(u.out, p[sent:from]...), count...), to
			}
		}
		at = to
	}
	if !changed {
		return p
	}
	u.out = append(u.out, p[sent:]...)
	return u.out
}

// Rest is what is still held back when the answer has ended.
func (u *Usage) Rest() []byte { return u.held }

// named is where a usage begins in p; -1 for nowhere.
func named(p []byte) int {
	for at := 0; ; {
		k := bytes.Index(p[at:], []byte(usageLast))
		if k < 0 {
			return -1
		}
		if at += k; bytes.HasSuffix(p[:at], []byte(usageFirst)) {
			return at - len(usageFirst)
		}
		at += len(usageLast)
	}
}

// beginning is the size of the part of a usage's name that p ends with.
func beginning(p []byte) int {
	p = p[max(0, len(p)-len(usageName)+1):]
	for i, c := range p {
		if c == usageName[0] && string(p[i:]) == usageName[:len(p)-i] {
			return len(p) - i
		}
	}
	return 0
}

// object finds the object that follows a member's name. from == to is something else, and a
// negative to says that its end has not come.
func object(b []byte) (from, to int) {
	i := rawjson.Space(b, 0)
	if i < len(b) && b[i] != ':' {
		return 0, 0
	}
	if i = rawjson.Space(b, min(i+1, len(b))); i < len(b) && b[i] != '{' {
		return 0, 0
	}
	from = i
	for depth, quoted := 0, false; i < len(b); i++ {
		switch c := b[i]; {
		case c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{':
			depth++
		case c == '}':
			if depth--; depth == 0 {
				return from, i + 1
			}
		}
	}
	return from, -1
}

// recount replaces the cached tokens in a usage, and in the Messages API the tokens beside
// them. own is the count that it had; ok is false where it has none, or where the prefill's
// cannot be that of this prompt.
func recount(usage rawjson.Value, cached int) (_ []byte, own int, ok bool) {
	prompt, read, path, counts := -1, -1, "", false
	number := func(v rawjson.Value) int {
		if n, ok := v.Int(); ok && n >= 0 {
			return n
		}
		return -1
	}
	for key, v := range usage.Members() {
		switch name := string(key); name {
		case "prompt_tokens", "input_tokens":
			prompt = number(v)
		case "completion_tokens", "output_tokens":
			counts = true
		case "cache_read_input_tokens":
			read = number(v)
		case "prompt_tokens_details", "input_tokens_details":
			if own = number(v.Get("cached_tokens")); own >= 0 {
				path = name + ".cached_tokens"
			}
		}
	}
	if cached < 0 || prompt < 0 || !counts {
		return nil, 0, false
	}
	if read >= 0 {
		rest := prompt + read - cached // neither read from the cache nor written to it
		if rest < 0 {
			return nil, 0, false
		}
		if read == cached {
			return usage, read, true
		}
		out := rawjson.Put(usage, "cache_read_input_tokens", []byte(strconv.Itoa(cached)))
		return rawjson.Put(out, "input_tokens", []byte(strconv.Itoa(rest))), read, true
	}
	if path == "" || cached > prompt {
		return nil, 0, false
	}
	if own == cached {
		return usage, own, true
	}
	return rawjson.Put(usage, path, []byte(strconv.Itoa(cached))), own, true
}
