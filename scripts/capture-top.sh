#!/usr/bin/env bash
# Runs the router with simulated engines under load, drives `dynctl top` in tmux
# with real keys at 120x40 and 80x24, and writes every view to docs/screens/.
# Needs tmux, curl and Go. SECONDS_LOAD is how long the load runs before the
# first capture (default 15).
set -euo pipefail
cd "$(dirname "$0")/.."
out=docs/screens
work=$(mktemp -d)
bin=$work/dynctl
session=dynctl-top-$$
pids=()
cleanup() {
	tmux kill-session -t "$session" 2>/dev/null || true
	for p in "${pids[@]}"; do kill "$p" 2>/dev/null || true; done
	wait 2>/dev/null || true
	rm -rf "$work"
}
trap cleanup EXIT

go build -o "$bin" ./cmd/dynctl
port=$((20000 + RANDOM % 20000))
data=127.0.0.1:$port admin=127.0.0.1:$((port + 1))
"$bin" serve --sim 4p8d:dp=2,kv_blocks=1500,auto_restart=10s --routing-threshold 1024 \
	--listen "$data" --admin-listen "$admin" --log-level error 2>"$work/serve.log" &
pids+=($!)
for _ in $(seq 100); do
	curl -fs "http://$admin/readyz" >/dev/null && break
	sleep 0.1
done

# Clients: conversations over a few shared system prompts. A prompt is a list of
# token ids that depends on its seed and its length alone, so that a longer one
# continues a shorter one.
client() {
	local n=$1 turn=0
	while :; do
		turn=$((turn + 1))
		awk -v who="$n" -v turn="$turn" 'BEGIN {
			sys = (who * 7 + int(turn / 4)) % 5; talk = who * 1000 + int(turn / 4); step = turn % 4
			printf "{\"model\":\"sim\",\"max_tokens\":%d,\"ignore_eos\":true,\"stream\":true,\"stream_options\":{\"include_usage\":true},\"prompt\":[", 40 + (who * turn) % 100
			len = 512 + 256 * sys
			for (i = 0; i < len; i++) printf "%d,", 100 + (sys * 7919 + i * 31) % 20000
			more = 200 + 300 * step + (turn % 9 == 0 ? 3000 : 0)
			for (i = 0; i < more; i++) printf "%d%s", 100 + (talk * 104729 + i * 37) % 20000, i + 1 < more ? "," : "]}"
		}' | curl -s -o /dev/null --max-time 30 -H 'Content-Type: application/json' --data-binary @- "http://$data/v1/completions" || true
	done
}
for n in $(seq "${CLIENTS:-16}"); do
	client "$n" &
	pids+=($!)
done
sleep "${SECONDS_LOAD:-15}"

mkdir -p "$out"
shot() { # name, then the pause after the last key
	sleep "${2:-1.2}"
	tmux capture-pane -p -t "$session" | sed 's/[[:space:]]*$//' >"$out/$1.txt"
	echo "$out/$1.txt"
}
keys() {
	local k
	for k in "$@"; do
		tmux send-keys -t "$session" "$k"
		sleep 0.4
	done
}
run() { # columns lines suffix flags
	local w=$1 h=$2 s=$3
	shift 3
	tmux new-session -d -s "$session" -x "$w" -y "$h" "$bin top --router http://$admin $*"
	sleep 12 # two rate windows
	shot "overview$s"
	keys 2 j j m
	shot "workers$s" 2
	keys 3
	sleep 1.5
	keys l j E
	shot "radix$s" 2.5
	keys 4
	sleep 1.5
	keys j j
	shot "decisions$s"
	keys Enter
	shot "decision$s"
	keys Escape 5
	shot "events$s"
	keys '?'
	shot "help$s" 0.5
	keys Escape q
	for _ in $(seq 20); do
		tmux has-session -t "$session" 2>/dev/null || return 0
		sleep 0.1
	done
	echo "the screen did not quit" >&2
	return 1
}
run 120 40 -120x40
run 80 24 -80x24
run 120 40 -120x40-ascii --ascii

# Trouble: one engine dies, another loses half of its events.
engine() { "$bin" workers list --router "http://$admin" -o json | tr ',{}' '\n' | sed -n "/\"name\": *\"$1\"/,\$s/.*\"url\": *\"\\([^\"]*\\)\".*/\\1/p" | head -1; }
tmux new-session -d -s "$session" -x 120 -y 40 "$bin top --router http://$admin"
sleep 4
curl -fsS -X POST -d '{"drop_events":0.5}' "$(engine decode-3)/sim/v1/faults" >/dev/null
curl -fsS -X POST "$(engine decode-6)/sim/v1/exit" >/dev/null || true
shot trouble-120x40 3
keys '!'
shot attention-120x40 0.5
"$bin" top --router "http://$admin" --once --ascii >"$out/once.txt"
echo "$out/once.txt"
