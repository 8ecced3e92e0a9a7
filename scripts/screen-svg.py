#!/usr/bin/env python3
"""Draws a terminal's screen as SVG: reads what `tmux capture-pane -p -e` prints,
writes the picture to standard output. The first argument is its title."""
import re
import sys
from xml.sax.saxutils import escape

CELL, LINE, PAD = 8.4, 18, 14
BACK, FRONT = "#0d1117", "#d0d7de"
BASE = ["#484f58", "#ff7b72", "#3fb950", "#d29922", "#58a6ff", "#bc8cff", "#39c5cf", "#b1bac4",
        "#6e7681", "#ffa198", "#56d364", "#e3b341", "#79c0ff", "#d2a8ff", "#56d4dd", "#ffffff"]


def colour(n):
    """The colour of a number of the 256."""
    if n < 16:
        return BASE[n]
    if n < 232:
        steps = [0, 95, 135, 175, 215, 255]
        n -= 16
        return "#%02x%02x%02x" % (steps[n // 36], steps[n // 6 % 6], steps[n % 6])
    return "#%02x%02x%02x" % ((8 + 10 * (n - 232),) * 3)


def style(state, codes):
    """The style after a sequence of SGR codes."""
    codes = [int(c or 0) for c in codes.split(";")]
    while codes:
        c = codes.pop(0)
        if c == 0:
            state = {}
        elif c in (1, 2, 3, 4, 7):
            state = {**state, c: True}
        elif c in (22, 23, 24, 27):
            state = {k: v for k, v in state.items() if k != c - 20 and not (c == 22 and k == 1)}
        elif c in (38, 48):
            kind = codes.pop(0)
            value = colour(codes.pop(0)) if kind == 5 else "#%02x%02x%02x" % tuple(codes.pop(0) for _ in range(3))
            state = {**state, "fg" if c == 38 else "bg": value}
        elif c in (39, 49):
            state = {k: v for k, v in state.items() if k != ("fg" if c == 39 else "bg")}
        elif 30 <= c <= 37 or 90 <= c <= 97:
            state = {**state, "fg": BASE[c - 30 if c < 90 else c - 82]}
        elif 40 <= c <= 47 or 100 <= c <= 107:
            state = {**state, "bg": BASE[c - 40 if c < 100 else c - 92]}
    return state


def main():
    lines = sys.stdin.read().rstrip("\n").split("\n")
    rows, columns, state = [], 1, {}
    for line in lines:
        x, row = 0, []
        for i, part in enumerate(re.split(r"\x1b\[([0-9;]*)m", line)):
            if i % 2:
                state = style(state, part)
            elif part:
                row.append((x, part, state))
                x += len(part)
        rows.append(row)
        columns = max(columns, x)
    width, height = columns * CELL + 2 * PAD, len(rows) * LINE + 2 * PAD
    title = escape(sys.argv[1], {'"': "&quot;"})
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{title}" '
          f'font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,monospace" font-size="14">')
    print(f'<title>{title}</title><rect width="100%" height="100%" rx="8" fill="{BACK}"/>')
    for y, row in enumerate(rows):
        top = PAD + y * LINE
        for x, text, s in row:
            fg, bg = s.get("fg", FRONT), s.get("bg")
            if s.get(7):
                fg, bg = bg or BACK, fg
            left, wide = PAD + x * CELL, len(text) * CELL
            if bg:
                print(f'<rect x="{left:.1f}" y="{top}" width="{wide:.1f}" height="{LINE}" fill="{bg}"/>')
            if not text.strip():
                continue
            more = (' font-weight="bold"' if s.get(1) else "") + (' opacity="0.65"' if s.get(2) else "")
            print(f'<text x="{left:.1f}" y="{top + 13}" textLength="{wide:.1f}" xml:space="preserve" fill="{fg}"{more}>{escape(text)}</text>')
    print("</svg>")


main()
