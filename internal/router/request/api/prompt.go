package api

import (
	"fmt"
	"math"
	"slices"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// PromptKind is the form in which a prompt came.
type PromptKind uint8

// The forms of a prompt.
const (
	// PromptNone: the prompt is missing or null.
	PromptNone PromptKind = iota
	// PromptText is one string.
	PromptText
	// PromptTexts is a list of strings: one request, several prompts.
	PromptTexts
	// PromptIDs is a list of token ids.
	PromptIDs
	// PromptIDLists is a list of lists of token ids.
	PromptIDLists
	// PromptMessages is a chat: a list of messages.
	PromptMessages
	// PromptItems is the item list of the Responses API.
	PromptItems
)

var promptNames = [...]string{"none", "text", "texts", "ids", "id_lists", "messages", "items", "invalid"}

// String is the name of the form, as in receipts.
func (p PromptKind) String() string { return promptNames[min(int(p), len(promptNames)-1)] }

// isPrompt reports whether a member holds the prompt, or a part of it, at the
// view's endpoint.
func (v *View) isPrompt(id keyID) bool {
	switch id {
	case keyPrompt:
		return v.Kind == Completion || v.Kind == Tokenize
	case keyMessages:
		switch v.Kind {
		case Chat, Messages, CountTokens, Tokenize, Embeddings, Pooling, Classify:
			return true
		}
	case keyInput:
		switch v.Kind {
		case Responses, Embeddings, Pooling, Classify:
			return true
		}
	case keyInputIDs, keyText:
		return v.Kind == SGLangGenerate
	case keyTokenIDs:
		return v.Kind == Generate
	case keySystem:
		return v.Kind == Messages || v.Kind == CountTokens
	case keyInstructions:
		return v.Kind == Responses
	}
	return false
}

// read passes over the value of a top-level member and validates it; prompts
// are taken apart on the way, so that their bytes are looked at once.
func (v *View) read(id keyID, i int) int {
	s := &v.scan
	if !v.isPrompt(id) || i >= len(v.Body) || v.Body[i] == 'n' {
		return s.Value(i)
	}
	param := keyNames[id]
	if id == keySystem || id == keyInstructions {
		first := len(v.Texts)
		end := v.content(i, param, -1)
		v.system = Span{first, len(v.Texts)}
		return end
	}
	if v.Prompt != PromptNone {
		return v.reject(BadRequest(param, "%q and %q are both given; give one (byte %d)", v.PromptKey, param, i))
	}
	start := i
	switch {
	case v.Body[i] == '"' && id != keyMessages && id != keyInputIDs && id != keyTokenIDs:
		v.Prompt = PromptText
		i = v.oneText(i)
	case v.Body[i] == '[':
		i = v.list(id, param, i)
	default:
		want := "a string or a list"
		if id == keyMessages || id == keyInputIDs || id == keyTokenIDs {
			want = "a list"
		}
		return v.wrongValue(param, want, i)
	}
	if i < 0 {
		return -1
	}
	v.PromptKey, v.PromptValue = param, Span{start, i}
	return i
}

// oneText reads a string and keeps it as a text of the prompt.
func (v *View) oneText(i int) int {
	s := &v.scan
	end, _ := s.Str(i + 1)
	if end < 0 {
		return -1
	}
	if len(v.Texts) >= v.limits.Texts {
		return v.reject(BadRequest("", "the prompt has more than %d texts", v.limits.Texts))
	}
	v.Texts = append(v.Texts, Span{i + 1, end - 1})
	if s.Points() >= 0 {
		v.points += s.Points()
	} else {
		v.points += rawjson.CodePoints(v.Body[i+1 : end-1])
	}
	return end
}

// list reads a prompt that is a list. Its first element says of what.
func (v *View) list(id keyID, param string, i int) int {
	s := &v.scan
	if id == keyMessages {
		v.Prompt = PromptMessages
		return v.messages(i, param)
	}
	if id == keyTokenIDs {
		v.Prompt = PromptIDs
		return v.ids(i, param, -1)
	}
	k := s.Space(i + 1)
	if k >= len(v.Body) {
		return s.Value(i)
	}
	switch c := v.Body[k]; {
	case c == '"' && id != keyInputIDs && v.Kind != Responses:
		v.Prompt = PromptTexts
		n := 0
		return s.Array(i, func(i int) int {
			if i < len(v.Body) && v.Body[i] == '"' {
				n++
				return v.oneText(i)
			}
			return v.wrongElement(param, n, "a string like the first", i)
		})
	case c == '[' && v.Kind != Responses:
		v.Prompt = PromptIDLists
		n := 0
		return s.Array(i, func(i int) int {
			if i < len(v.Body) && v.Body[i] == '[' {
				n++
				return v.ids(i, param, n-1)
			}
			return v.wrongElement(param, n, "a list of token ids like the first", i)
		})
	case c == '{' && id == keyInput && v.Kind == Responses:
		v.Prompt = PromptItems
		return v.messages(i, param)
	case c == '{' && id != keyInputIDs:
		// Multimodal inputs of embedding models, or prompts as objects.
		v.Multimodal, v.Opaque = true, true
		return s.Value(i)
	case c == ']':
		switch {
		case v.Kind == Responses:
			v.Prompt = PromptItems
		case id == keyInputIDs:
			v.Prompt = PromptIDs
		default:
			v.Prompt = PromptTexts
		}
		return s.Value(i)
	case v.Kind == Responses:
		return v.wrongElement(param, 0, "an object", k)
	default:
		v.Prompt = PromptIDs
		return v.ids(i, param, -1)
	}
}

func (v *View) wrongElement(param string, n int, want string, i int) int {
	return v.wrongValue(fmt.Sprintf("%s[%d]", param, n), want, i)
}

// wrongValue refuses the value at i, or bad JSON in its place.
func (v *View) wrongValue(param, want string, i int) int {
	s := &v.scan
	end := s.Value(i)
	if end < 0 {
		return -1
	}
	return v.reject(v.wrong(param, want, v.Body[i:end], Span{i, end}))
}

// ids reads a list of token ids and checks each.
func (v *View) ids(i int, param string, outer int) int {
	s := &v.scan
	start, n := i, 0
	b := v.Body
	i = rawjson.Space(b, i+1)
	for i < len(b) && b[i] != ']' {
		id, end := uint64(0), i
		for end < len(b) && b[end]-'0' <= 9 && id <= math.MaxUint32 {
			id = id*10 + uint64(b[end]-'0')
			end++
		}
		if end == i || id > math.MaxUint32 || (b[i] == '0' && end > i+1) || (end < len(b) && !endsID(b[end])) {
			if outer >= 0 {
				param = fmt.Sprintf("%s[%d]", param, outer)
			}
			return v.wrongElement(param, n, "a token id from 0 to 4294967295", i)
		}
		n++
		i = rawjson.Space(b, end)
		if i < len(b) && b[i] == ',' {
			i = rawjson.Space(b, i+1)
			if i < len(b) && b[i] == ']' {
				return s.Fail(i, "expected a JSON value")
			}
		} else if i < len(b) && b[i] != ']' {
			return s.Fail(i, "expected ',' or ']' after an element of an array")
		}
	}
	if i >= len(b) {
		return s.Fail(i, "expected ',' or ']' after an element of an array")
	}
	if len(v.Lists) >= v.limits.Texts {
		return v.reject(BadRequest(param, "the prompt has more than %d token lists", v.limits.Texts))
	}
	v.Lists = append(v.Lists, Span{start, i + 1})
	v.IDs += n
	return i + 1
}

func endsID(c byte) bool {
	switch c {
	case ',', ']', ' ', '\n', '\r', '\t':
		return true
	}
	return false
}

// AppendIDs appends the token ids of list n of the prompt (0 for PromptIDs) to
// dst, which it grows at most once.
func (v *View) AppendIDs(dst []uint32, n int) []uint32 {
	if n >= len(v.Lists) {
		return dst
	}
	b := v.Lists[n].Of(v.Body)
	if len(v.Lists) == 1 {
		dst = slices.Grow(dst, v.IDs)
	} else {
		dst = slices.Grow(dst, min(v.IDs, len(b)/2))
	}
	for i := 1; i < len(b); i++ {
		if b[i]-'0' > 9 {
			continue
		}
		id := uint32(b[i] - '0')
		for i++; b[i]-'0' <= 9; i++ { // ends at the bracket
			id = id*10 + uint32(b[i]-'0')
		}
		dst = append(dst, id)
	}
	return dst
}

// messages reads a list of messages, or of items of the Responses API.
func (v *View) messages(i int, param string) int {
	s := &v.scan
	n := 0
	return s.Array(i, func(i int) int {
		if i >= len(v.Body) || v.Body[i] != '{' {
			return v.wrongElement(param, n, "an object", i)
		}
		end := s.Object(i, func(key, keyEnd int, escaped bool, i int) int {
			switch v.nestedKey(Span{key, keyEnd}, escaped) {
			case "content", "output":
				return v.content(i, param, n)
			case "type":
				if kind, end := v.partType(i); kind != MediaNone {
					v.Multimodal, v.Opaque = true, true
					return end
				}
			case "call":
				return v.call(i)
			}
			return s.Value(i)
		})
		n++
		return end
	})
}

// nestedKey is the name of a member inside of the prompt. Only names that are
// looked at are turned into strings.
func (v *View) nestedKey(key Span, escaped bool) string {
	b := key.Of(v.Body)
	if escaped {
		b = []byte(unquote(v.Body[key.Start-1 : key.End+1]))
	}
	switch string(b) {
	case "content":
		return "content"
	case "output":
		return "output"
	case "type":
		return "type"
	case "text":
		return "text"
	case "tool_calls", "arguments", "input": // of chats; of the Responses API; of both others
		return "call"
	}
	if mediaOf(b) != MediaNone {
		return "media"
	}
	switch string(b) {
	case "source": // of Anthropic's images
		return "source"
	case "uuid":
		return "uuid"
	}
	return ""
}

// content reads the content of a message: a string, null, or a list of parts.
func (v *View) content(i int, param string, n int) int {
	s := &v.scan
	if i >= len(v.Body) {
		return s.Value(i)
	}
	switch v.Body[i] {
	case '"':
		return v.oneText(i)
	case 'n':
		return s.Value(i)
	case '[':
		k := 0
		return s.Array(i, func(i int) int {
			if i >= len(v.Body) {
				return s.Value(i)
			}
			k++
			switch v.Body[i] {
			case '"':
				return v.oneText(i)
			case '{':
				return v.part(i, param, n)
			}
			if n < 0 {
				return v.wrongElement(param, k-1, "an object with a type", i)
			}
			return v.wrongElement(fmt.Sprintf("%s[%d].content", param, n), k-1, "an object with a type", i)
		})
	}
	if n >= 0 {
		param = fmt.Sprintf("%s[%d].content", param, n)
	}
	return v.wrongValue(param, "a string, null or a list of parts", i)
}

// part reads one part of a message's content.
func (v *View) part(i int, param string, n int) int {
	s := &v.scan
	var m Media
	end := s.Object(i, func(key, keyEnd int, escaped bool, i int) int {
		switch v.nestedKey(Span{key, keyEnd}, escaped) {
		case "text":
			if i < len(v.Body) && v.Body[i] == '"' {
				return v.oneText(i)
			}
		case "type":
			kind, end := v.partType(i)
			m.Kind = max(m.Kind, kind)
			return end
		case "content": // the result of a tool, Anthropic
			if i < len(v.Body) && (v.Body[i] == '"' || v.Body[i] == '[') {
				return v.content(i, param, n)
			}
		case "call":
			return v.call(i)
		case "media":
			m.Kind = max(m.Kind, mediaOf(v.Body[key:keyEnd]))
			if escaped {
				m.Kind = MediaOther
			}
			return v.mediaValue(&m, i)
		case "source":
			return v.mediaValue(&m, i)
		case "uuid":
			end := s.Value(i)
			if end > 0 && v.Body[i] == '"' && end-i <= maxNameBytes {
				m.UUID = unquote(v.Body[i:end])
			}
			return end
		}
		return s.Value(i)
	})
	if end < 0 || m.Kind == MediaNone {
		return end
	}
	v.Multimodal = true
	switch {
	case m.Kind == MediaOther, m.Value.Len() == 0 && m.UUID == "":
		v.Opaque = true
	case len(v.Media) >= v.limits.Texts:
		return v.reject(BadRequest("", "the prompt has more than %d images, sounds and videos", v.limits.Texts))
	default:
		v.Media = append(v.Media, m)
	}
	return end
}

// call reads what a model has passed to a tool. Templates print it as JSON, so its length is
// that of the text that the client wrote.
func (v *View) call(i int) int {
	end := v.scan.Value(i)
	if end > 0 && v.Body[i] != 'n' {
		v.points += rawjson.CodePoints(v.Body[i:end])
	}
	return end
}

// hasTools reports whether prompts of the view's endpoint have the schemas of tools.
func (v *View) hasTools() bool { return v.Kind.IsChat() || v.Kind == CountTokens || v.Kind == Tokenize }

// Tools is the raw value of a chat's tools, which templates print before the messages; empty
// without tools.
func (v *View) Tools() []byte {
	if k := v.seen[keyTools]; k != 0 && v.hasTools() && v.Body[v.Fields[k-1].Value.Start] == '[' {
		return v.Fields[k-1].Value.Of(v.Body)
	}
	return nil
}

// partType reads the type of a part, and returns what of media it speaks of.
func (v *View) partType(i int) (kind MediaKind, end int) {
	if end = v.scan.Value(i); end > 0 && v.Body[i] == '"' {
		kind = mediaOf(v.Body[i+1 : end-1])
	}
	return kind, end
}

// systemFirst moves the texts of the system prompt to the front, where every
// template puts them, wherever the client wrote them.
func (v *View) systemFirst() {
	if v.system.Start == 0 || v.system.Len() == 0 {
		return
	}
	head := slices.Clone(v.Texts[v.system.Start:v.system.End])
	copy(v.Texts[len(head):], v.Texts[:v.system.Start])
	copy(v.Texts, head)
}

// Prompts is the number of separate prompts in the request.
func (v *View) Prompts() int {
	switch v.Prompt {
	case PromptNone:
		return 0
	case PromptTexts:
		return len(v.Texts)
	case PromptIDLists:
		return len(v.Lists)
	default:
		return 1
	}
}

// EstimateTokens is the length of the prompt in tokens where no tokenizer is
// used: the number of token ids, else the number of code points of all texts, tools
// and calls of tools divided by four, rounded down once. Media are not in it; see package media.
func (v *View) EstimateTokens() int {
	if v.Prompt == PromptIDs || v.Prompt == PromptIDLists {
		return v.IDs
	}
	return v.points / 4
}
