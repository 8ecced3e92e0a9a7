package jinja

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"
)

type tokKind uint8

const (
	tkEOF   tokKind = iota
	tkData          // template text
	tkBegin         // {%
	tkEnd           // %}
	tkPrint         // {{
	tkPrintEnd
	tkName
	tkString
	tkInt
	tkFloat
	tkOp
)

type token struct {
	kind tokKind
	text string
	line int
}

// lex cuts a template into tokens, with trim_blocks and lstrip_blocks on and
// the last newline dropped, as transformers renders chat templates.
func lex(src string) ([]token, error) {
	src = strings.ReplaceAll(strings.ReplaceAll(src, "\r\n", "\n"), "\r", "\n")
	src = strings.TrimSuffix(src, "\n")
	l := &lexer{src: src, line: 1, lineStart: true}
	for l.pos < len(l.src) {
		if err := l.data(); err != nil {
			return nil, err
		}
	}
	return append(l.toks, token{tkEOF, "", l.line}), nil
}

type lexer struct {
	src       string
	pos, line int
	toks      []token
	lineStart bool // the text at pos starts a line
	trimNext  bool // the text at pos loses its leading white space
}

const pySpace = " \t\n\r\x0b\x0c"

var (
	tagStart = regexp.MustCompile(`\{[{%#]`)
	numeral  = regexp.MustCompile(`^[0-9][0-9_]*(\.[0-9]+)?([eE][+-]?[0-9]+)?`)
	word     = regexp.MustCompile(`^[A-Za-z_][A-Za-z_0-9]*`)
)

func (l *lexer) errorf(format string, a ...any) error {
	return fmt.Errorf("line %d: %s", l.line, fmt.Sprintf(format, a...))
}

// data lexes template text up to a tag, and the tag.
func (l *lexer) data() error {
	rest := l.src[l.pos:]
	tag := tagStart.FindStringIndex(rest)
	if tag == nil {
		l.text(rest, "", 0)
		l.pos = len(l.src)
		return nil
	}
	at := tag[0]
	kind := rest[at+1]
	sign, after := cutSign(rest[at+2:])
	l.text(rest[:at], string(kind), sign)
	l.line += strings.Count(rest[:at], "\n")
	l.pos = len(l.src) - len(after)
	switch kind {
	case '#':
		end := strings.Index(after, "#}")
		if end < 0 {
			return l.errorf("comment does not end")
		}
		l.line += strings.Count(after[:end], "\n")
		l.pos += end + 2
		if end > 0 {
			l.tagEnd(after[end-1], true)
		} else {
			l.tagEnd(0, true)
		}
		return nil
	case '%':
		if raw, err := l.raw(after); raw || err != nil {
			return err
		}
		l.toks = append(l.toks, token{tkBegin, "", l.line})
		return l.code("%}", tkEnd)
	}
	l.toks = append(l.toks, token{tkPrint, "", l.line})
	return l.code("}}", tkPrintEnd)
}

// cutSign takes the sign off that a tag may have at either end, 0 for none.
func cutSign(t string) (byte, string) {
	if t != "" && (t[0] == '-' || t[0] == '+') {
		return t[0], t[1:]
	}
	return 0, t
}

// text adds template text that is followed by a tag of the given kind.
func (l *lexer) text(s, next string, sign byte) {
	if l.trimNext {
		s = strings.TrimLeft(s, pySpace)
	}
	switch {
	case sign == '-':
		s = strings.TrimRight(s, pySpace)
	case sign != '+' && (next == "%" || next == "#"):
		nl := strings.LastIndexByte(s, '\n') + 1
		if (nl > 0 || l.lineStart && !l.trimNext) && strings.Trim(s[nl:], pySpace) == "" {
			s = s[:nl]
		}
	}
	l.trimNext, l.lineStart = false, false
	if s != "" {
		l.toks = append(l.toks, token{tkData, s, l.line})
	}
}

// tagEnd handles what a tag's end does to the text after it.
func (l *lexer) tagEnd(sign byte, block bool) {
	l.trimNext = sign == '-'
	if block && sign != '-' && sign != '+' && strings.HasPrefix(l.src[l.pos:], "\n") {
		l.pos++
		l.line++
		l.lineStart = true
	}
}

// raw handles {% raw %}, whose text is taken as it stands.
func (l *lexer) raw(after string) (bool, error) {
	body := strings.TrimLeft(after, pySpace)
	if !strings.HasPrefix(body, "raw") {
		return false, nil
	}
	sign, head := cutSign(strings.TrimLeft(body[3:], pySpace))
	if !strings.HasPrefix(head, "%}") {
		return false, nil
	}
	l.pos = len(l.src) - len(head) + 2
	l.tagEnd(sign, true)
	rest := l.src[l.pos:]
	for i := 0; ; {
		k := strings.Index(rest[i:], "{%")
		if k < 0 {
			return true, l.errorf("raw block does not end")
		}
		i += k
		open, t := cutSign(rest[i+2:])
		if t = strings.TrimLeft(t, pySpace); strings.HasPrefix(t, "endraw") {
			end, t := cutSign(strings.TrimLeft(t[6:], pySpace))
			if strings.HasPrefix(t, "%}") {
				l.text(rest[:i], "%", open)
				l.line += strings.Count(rest[:i], "\n")
				l.pos = len(l.src) - len(t) + 2
				l.tagEnd(end, true)
				return true, nil
			}
		}
		i += 2
	}
}

// code lexes the inside of a tag up to its end.
func (l *lexer) code(end string, kind tokKind) error {
	depth := 0
	for {
		s := strings.TrimLeft(l.src[l.pos:], pySpace)
		l.line += strings.Count(l.src[l.pos:len(l.src)-len(s)], "\n")
		l.pos = len(l.src) - len(s)
		if s == "" {
			return l.errorf("tag does not end")
		}
		if sign, after := cutSign(s); depth == 0 && strings.HasPrefix(after, end) {
			l.pos = len(l.src) - len(after) + 2
			l.toks = append(l.toks, token{kind, "", l.line})
			l.tagEnd(sign, kind == tkEnd)
			return nil
		}
		n, err := l.one(s)
		if err != nil {
			return err
		}
		switch t := l.toks[len(l.toks)-1]; {
		case t.kind == tkOp && strings.Contains("([{", t.text):
			depth++
		case t.kind == tkOp && strings.Contains(")]}", t.text):
			depth--
		}
		l.pos += n
	}
}

var operators = []string{"**", "//", "==", "!=", "<=", ">=", "+", "-", "*", "/", "%", "~", "<", ">", "=", "(", ")", "[", "]", "{", "}", ",", ":", ".", "|"}

// one lexes one token at the start of s and returns its length.
func (l *lexer) one(s string) (int, error) {
	add := func(k tokKind, text string) { l.toks = append(l.toks, token{k, text, l.line}) }
	if s[0] == '\'' || s[0] == '"' {
		text, n, err := unquote(s)
		if err != nil {
			return 0, l.errorf("%s", err)
		}
		add(tkString, text)
		l.line += strings.Count(s[:n], "\n")
		return n, nil
	}
	if text := numeral.FindString(s); text != "" {
		kind := tkInt
		if strings.ContainsAny(text, ".eE") {
			kind = tkFloat
		}
		add(kind, strings.ReplaceAll(text, "_", ""))
		return len(text), nil
	}
	if text := word.FindString(s); text != "" {
		add(tkName, text)
		return len(text), nil
	}
	for _, op := range operators {
		if strings.HasPrefix(s, op) {
			add(tkOp, op)
			return len(op), nil
		}
	}
	r, _ := utf8.DecodeRuneInString(s)
	return 0, l.errorf("unexpected character %q", r)
}

// unquote reads a Python string literal and returns its text and length.
func unquote(s string) (string, int, error) {
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		c := s[i]
		if c == s[0] {
			return b.String(), i + 1, nil
		}
		if c != '\\' || i+1 >= len(s) {
			b.WriteByte(c)
			continue
		}
		i++
		switch e := s[i]; e {
		case 'n', 't', 'r', 'b', 'f', 'v', 'a':
			b.WriteByte("\n\t\r\b\f\v\a"[strings.IndexByte("ntrbfva", e)])
		case '\n':
		case '\\', '\'', '"':
			b.WriteByte(e)
		case 'x', 'u', 'U':
			n := map[byte]int{'x': 2, 'u': 4, 'U': 8}[e]
			r, err := strconv.ParseUint(s[i+1:min(i+1+n, len(s))], 16, 32)
			if err != nil || i+n >= len(s) {
				return "", 0, fmt.Errorf("bad escape")
			}
			b.WriteRune(rune(r))
			i += n
		case '0', '1', '2', '3', '4', '5', '6', '7', 'N':
			return "", 0, fmt.Errorf("escape \\%c is not implemented", e)
		default:
			b.WriteByte('\\')
			b.WriteByte(e)
		}
	}
	return "", 0, fmt.Errorf("string does not end")
}
