#!/usr/bin/env bash
# Makes the pictures of the README: `dynctl top --demo` as it looks in a terminal
# after SECONDS_DEMO (30) seconds, and a plot of a published report. Needs tmux,
# Python 3 and Go.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
session=dynctl-pictures-$$
cleanup() {
	tmux kill-session -t "$session" 2>/dev/null || true
	rm -rf "$work"
}
trap cleanup EXIT
go build -o "$work/dynctl" ./cmd/dynctl
mkdir -p docs/pictures
tmux new-session -d -s "$session" -x 120 -y 34 "TERM=xterm-256color COLORTERM=truecolor $work/dynctl top --demo --color always"
sleep "${SECONDS_DEMO:-30}"
tmux capture-pane -p -e -t "$session" >"$work/screen"
grep -q DEMO "$work/screen" || { echo "the screen did not open:" >&2; cat "$work/screen" >&2; exit 1; }
python3 scripts/screen-svg.py "dynctl top --demo" <"$work/screen" >docs/pictures/top.svg
# The time to the first token by length, local against remote, on real engines.
python3 - docs/reports/bench-vllm-0.32-cpu-2p2d.html >docs/pictures/bench.svg <<'PY'
import re, sys
page = open(sys.argv[1], encoding="utf-8").read()
plots = [s for s in re.findall(r"<svg.*?</svg>", page, re.S) if 'aria-label="Time to first token' in s.split(">", 1)[0]]
if not plots:
    sys.exit("the report has no plot of the time to the first token")
print(re.sub(r"(<svg[^>]*>)", r'\1<rect width="100%" height="100%" fill="#fff"/>', plots[-1], count=1))
PY
echo docs/pictures/top.svg docs/pictures/bench.svg
