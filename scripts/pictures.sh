#!/usr/bin/env bash
# Makes the pictures of the README: `dynctl top --demo` as it looks in a terminal
# after SECONDS_DEMO (30) seconds, and a plot of an experiment under the virtual clock.
# Needs tmux, Python 3 and Go.
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
go test ./benchmarks/profiles -run TestPicture -update
echo docs/pictures/top.svg docs/pictures/bench.svg
