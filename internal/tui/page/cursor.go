package page

import (
	"github.com/dynctl/dynctl/internal/tui/keys"
)

// cursor is a place in a list of rows that change. While it was not moved it
// stays at the top; then it stays with its row.
type cursor struct {
	At  int    // the row, from 0
	Key string // the row's; "" at the top of whatever comes

	off   int // the first row on the page
	first int // its line on the page, for clicks
	rows  int // rows on the page
}

// Sync finds the row again among n rows.
func (l *cursor) Sync(n int, keyAt func(int) string) {
	if l.Key != "" && (l.At >= n || keyAt(l.At) != l.Key) {
		for i := range n {
			if keyAt(i) == l.Key {
				l.At = i
				break
			}
		}
	}
	l.At = max(0, min(l.At, n-1))
}

// Window is the part of n rows that h lines of the page show, from line first on.
func (l *cursor) Window(n, first, h int) (from, to int) {
	h = max(h, 1)
	l.first, l.rows = first, h
	if l.At < l.off {
		l.off = l.At
	}
	if l.At >= l.off+h {
		l.off = l.At - h + 1
	}
	l.off = max(0, min(l.off, n-h))
	return l.off, min(n, l.off+h)
}

// Top goes to the first row and stays there whatever comes.
func (l *cursor) Top() { l.At, l.off, l.Key = 0, 0, "" }

// Shown is the part of n rows that was on the page when it was drawn last.
func (l *cursor) Shown(n int) (from, to int) {
	to = min(n, l.off+max(l.rows, 1))
	return min(l.off, to), to
}

// Move moves the cursor; ok is false when the action is no move.
func (l *cursor) Move(a keys.Action, n int, keyAt func(int) string) (ok bool) {
	switch a {
	case keys.Down:
		l.At++
	case keys.Up:
		l.At--
	case keys.HalfDown:
		l.At += max(1, l.rows/2)
	case keys.HalfUp:
		l.At -= max(1, l.rows/2)
	case keys.Top:
		l.Top()
		return true
	case keys.Bottom:
		l.At = n - 1
	default:
		return false
	}
	l.Set(l.At, n, keyAt)
	return true
}

// Set moves the cursor to a row, or to the nearest one that there is.
func (l *cursor) Set(at, n int, keyAt func(int) string) {
	l.At = max(0, min(at, n-1))
	l.Key = ""
	if n > 0 {
		l.Key = keyAt(l.At)
	}
}

// Click moves to the row on a line of the page.
func (l *cursor) Click(line, n int, keyAt func(int) string) {
	if i := line - l.first + l.off; line >= l.first && line < l.first+l.rows && i < n {
		l.Set(i, n, keyAt)
	}
}

// Scroll is the first line of a text that is on the page.
type Scroll int

// Move moves it on a page of h lines; ok is false when the action is no move.
func (s *Scroll) Move(a keys.Action, h int) (ok bool) {
	switch a {
	case keys.Down:
		*s++
	case keys.Up:
		*s--
	case keys.HalfDown:
		*s += Scroll(h / 2)
	case keys.HalfUp:
		*s -= Scroll(h / 2)
	case keys.Top:
		*s = 0
	case keys.Bottom:
		*s = 1 << 20 // cut by From
	default:
		return false
	}
	*s = max(*s, 0)
	return true
}

// From is the first of n lines where h of them are shown.
func (s *Scroll) From(n, h int) int {
	*s = max(0, min(*s, Scroll(n-h)))
	return int(*s)
}
