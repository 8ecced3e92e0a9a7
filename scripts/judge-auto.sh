#!/bin/sh
# Sets --routing-threshold auto against fixed thresholds, over traces, fleets and
# arrivals, and prints a table. Needs jq and a built dynctl.
#
#   scripts/judge-auto.sh conversation.jsonl.gz     # 5 traces; without a file, 4
#
# DYNCTL (bin/dynctl), FLEETS, SPEEDS, SHAPES and REQUESTS may be set, and ENGINES, what
# all engines have besides: ENGINES=profile=steps.yaml is another timing. A trace that is
# given is cut to its first REQUESTS.
set -eu
dynctl=${DYNCTL:-bin/dynctl} requests=${REQUESTS:-2000}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
traces=
for file in "$@"; do
	case $file in *.gz) gzip -dc "$file" ;; *) cat "$file" ;; esac | sed -n "1,${requests}p" >"$dir/conversation.jsonl"
	traces=conversation
done
for shape in ${SHAPES-agents chats documents bursts}; do
	more=
	[ "$shape" != agents ] || more="--sessions 160" # as much to do as the other shapes have
	# shellcheck disable=SC2086 # words, or none
	"$dynctl" replay generate $shape $more --requests "$requests" -w "$dir/$shape.jsonl"
	traces="$traces $shape"
done
echo '| trace | fleet | arrivals | best threshold | good | p95 TTFT | auto: good | p95 TTFT | holds |'
echo '|---|---|---|---|---|---|---|---|---|'
for trace in $traces; do
	for fleet in ${FLEETS:-4p12d 8p8d 2p14d 12p4d}; do
		for speed in ${SPEEDS:-1 4 8 16}; do
			"$dynctl" replay "$dir/$trace.jsonl" --fleet "$fleet${ENGINES:+:$ENGINES}" --arrival-speedup "$speed" \
				--routing-threshold auto,0,512,2048,8192,32768,1000000 -o json 2>"$dir/log" |
				jq -r --arg cell "$trace | $fleet | ×$speed" '
					(map(select(.threshold_auto)) | first) as $a
					| (map(select(.threshold_auto | not)) | max_by([.good_ratio, -.ttft.p95_ms])) as $b
					| ($a.good_ratio >= 0.95 * $b.good_ratio and $a.ttft.p95_ms <= 1.1 * $b.ttft.p95_ms) as $holds
					| def pct: . * 1000 | round / 10 | tostring + " %";
					"| \($cell) | \(if $b.threshold_tokens >= 1000000 then "never" else $b.threshold_tokens end) | \($b.good_ratio | pct) | \($b.ttft.p95_ms | round) | \($a.good_ratio | pct) | \($a.ttft.p95_ms | round) | \(if $holds then "yes" else "no" end) |"' || { cat "$dir/log" >&2; exit 1; }
		done
	done
done
