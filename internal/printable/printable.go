// Package printable is the rule for text that others wrote and a terminal or a log shows:
// names that engines report, annotations of pods, paths of requests, fields of traces. What
// a terminal would obey is shown as an escape instead, such as \u001b. Letters of all
// languages and emoji stay as they are.
//
// The code that prints applies the rule, and no other code does: values stay whole until
// then. Applying it twice changes nothing, because a backslash is not escaped.
package printable

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Line returns s as part of one line. It escapes control characters (C0 with line feed and
// tab, DEL, C1), the marks that change the direction of text, the line and paragraph
// separators, and bytes that are no UTF-8. It returns s itself if it has none of these.
func Line(s string) string { return escape(s, "", `\x%02x`) }

// Lines returns s as a text of several lines: as Line does, but line feeds stay. It indents
// all lines but the first by two blanks, unless they begin with as many. So nothing in s
// begins a line at the left edge.
func Lines(s string) string {
	lines := strings.Split(strings.TrimRight(s, "\n"), "\n")
	for i, l := range lines {
		if lines[i] = Line(l); i > 0 && !strings.HasPrefix(l, "  ") {
			lines[i] = "  " + lines[i]
		}
	}
	return strings.Join(lines, "\n")
}

// Fprintf is fmt.Fprintf for one or more lines in which each argument is part of a line: it
// escapes what is formatted, and not the format.
func Fprintf(w io.Writer, format string, a ...any) (int, error) {
	return io.WriteString(w, Sprintf(format, a...))
}

// Sprintf is fmt.Sprintf with the arguments escaped as in Fprintf.
func Sprintf(format string, a ...any) string {
	if false {
		_ = fmt.Sprintf(format, a...) // so that go vet checks formats of callers
	}
	safe := make([]any, len(a))
	for i, v := range a {
		switch v.(type) {
		case int, int64, uint64, float64, bool: // also widths, which must stay numbers
			safe[i] = v
		default:
			safe[i] = arg{v}
		}
	}
	return fmt.Sprintf(format, safe...)
}

// arg formats a value and escapes the result.
type arg struct{ v any }

// Format implements fmt.Formatter.
func (x arg) Format(s fmt.State, verb rune) {
	_, _ = io.WriteString(s, Line(fmt.Sprintf(fmt.FormatString(s, verb), x.v))) // fmt's own buffer takes everything
}

// JSON returns a writer of JSON that a terminal may also show: it passes documents on with
// the rule applied, which changes no value, because the escapes are those of JSON. Each
// Write must hold whole characters, as those of an encoder do.
func JSON(w io.Writer) io.Writer { return jsonWriter{w} }

type jsonWriter struct{ w io.Writer }

// Write implements io.Writer.
func (j jsonWriter) Write(p []byte) (int, error) {
	// Blanks between values stay. U+FFFD is what decoders make of invalid UTF-8.
	if _, err := io.WriteString(j.w, escape(string(p), "\n\r\t", `\ufffd`)); err != nil {
		return 0, err
	}
	return len(p), nil
}

// escape writes what a terminal obeys as escapes, but for the characters in keep. invalid
// is the format of a byte that is no UTF-8.
func escape(s, keep, invalid string) string {
	i := 0
	for i < len(s) && s[i] >= ' ' && s[i] < 0x7f {
		i++
	}
	if i == len(s) {
		return s
	}
	var b strings.Builder
	from := 0 // what is before is written
	for i < len(s) {
		r, n := utf8.DecodeRuneInString(s[i:])
		bad := r == utf8.RuneError && n == 1
		if bad || obeyed(r) && !strings.ContainsRune(keep, r) {
			b.WriteString(s[from:i])
			switch {
			case bad && strings.Contains(invalid, "%"):
				fmt.Fprintf(&b, invalid, s[i])
			case bad:
				b.WriteString(invalid)
			case r == '\n', r == '\r', r == '\t':
				b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
			default:
				fmt.Fprintf(&b, `\u%04x`, r)
			}
			from = i + n
		}
		i += n
	}
	if from == 0 {
		return s
	}
	return b.String() + s[from:]
}

// obeyed reports whether a terminal may obey r instead of showing it.
func obeyed(r rune) bool {
	return unicode.IsControl(r) || r >= 0x61c && unicode.In(r, unicode.Bidi_Control, unicode.Zl, unicode.Zp)
}
