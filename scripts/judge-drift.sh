#!/bin/sh
# Sets --routing-threshold auto against fixed thresholds while engines change, and prints
# a table: the five minutes from each fault on, and the time after
# them. Needs jq and a built dynctl.
#
# DYNCTL (bin/dynctl), FLEETS, SHAPES and REQUESTS may be set.
set -eu
dynctl=${DYNCTL:-bin/dynctl}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
# compare COUNT-FROM TO: all thresholds, as JSON
compare() {
	"$dynctl" replay "$dir/$shape.jsonl" --fleet "$fleet" --fault "5m:$fault" --count-from "$1" --to "$2" \
		--routing-threshold auto,0,512,2048,8192,32768,1000000 -o json 2>"$dir/log" || { cat "$dir/log" >&2; exit 1; }
}
echo '| trace | fleet | fault | minutes | requests | best threshold | good | p95 TTFT | auto: good | p95 TTFT | within 10 % |'
echo '|---|---|---|---|---|---|---|---|---|---|---|'
for shape in ${SHAPES:-agents}; do
	more=
	[ "$shape" != agents ] || more="--sessions 160"
	# shellcheck disable=SC2086 # words, or none
	"$dynctl" replay generate "$shape" $more --requests "${REQUESTS:-20000}" -w "$dir/$shape.jsonl"
	for fleet in ${FLEETS:-4p12d}; do
		for fault in prefill_slow=3 network_slow=10 prefill_gone=0.5; do
			for span in "5m 10m" "10m 15m"; do
				# shellcheck disable=SC2086 # two words
				compare $span | jq -r --arg cell "$shape | $fleet | \`$fault\` | $span" '
					(map(select(.threshold_auto)) | first) as $a
					| (map(select(.threshold_auto | not)) | max_by([.good_ratio, -.ttft.p95_ms])) as $b
					| def pct: . * 1000 | round / 10 | tostring + " %";
					"| \($cell) | \($a.requests) | \(if $b.threshold_tokens >= 1000000 then "never" else $b.threshold_tokens end) | \($b.good_ratio | pct) | \($b.ttft.p95_ms | round) | \($a.good_ratio | pct) | \($a.ttft.p95_ms | round) | \(if $a.good_ratio >= 0.9 * $b.good_ratio then "yes" else "no" end) |"'
			done
		done
	done
done
