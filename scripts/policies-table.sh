#!/bin/sh
# Sets the policies, with their default settings, against each other over generated
# requests and two fleets, and prints the table of docs/lab/policies.md. Needs jq and a built
# dynctl; takes one to three minutes on two cores.
#
#   make build && scripts/policies-table.sh
#
# DYNCTL (bin/dynctl), POLICIES, FLEETS, LOADS (shape:arrivals:blocks of a rank's cache),
# SEEDS, REQUESTS and THRESHOLD may be set. Each figure is the mean of all seeds.
set -eu
dynctl=${DYNCTL:-bin/dynctl}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
policies=${POLICIES:-kv,kv_blocks,kv_dynamo,session,least_loaded,round_robin,power_of_two,random}
seeds=${SEEDS:-1 2 3}
echo '| requests | fleet | arrivals | policy | good | E2E p50 | hit | imbalance |'
echo '|---|---|---|---|---|---|---|---|'
for load in ${LOADS:-agents:1:2600 agents:2:2600 agents:3:2600 chats:1:4096 documents:2:4096 bursts:2:4096}; do
	shape=${load%%:*} blocks=${load##*:} speed=${load#*:}
	speed=${speed%:*}
	for seed in $seeds; do
		trace=$dir/$shape-$seed.jsonl
		[ -e "$trace" ] || "$dynctl" replay generate "$shape" --requests "${REQUESTS:-1000}" --seed "$seed" -w "$trace"
	done
	for fleet in ${FLEETS:-4a 2p4d}; do
		for seed in $seeds; do
			"$dynctl" replay "$dir/$shape-$seed.jsonl" --policy "$policies" --fleet "$fleet" --kv-blocks "$blocks" --routing-threshold "${THRESHOLD:-1024}" \
				--arrival-speedup "$speed" --seed "$seed" -o jsonl 2>"$dir/log" || { cat "$dir/log" >&2; exit 1; }
		done >"$dir/rows"
		jq -rs --arg cell "$shape | $fleet | ×$speed" '
			def mean(f): (map(f) | add) / length;
			def fixed(n): . * n | round / n | tostring;
			group_by(.policy) | map({
				policy: .[0].policy, good: mean(.good_ratio), e2e: mean(.e2e.p50_ms), hit: mean(.hit_ratio), imbalance: mean(.prefill_imbalance)
			}) | sort_by(-.good)[] |
			"| \($cell) | \(.policy) | \(.good * 100 | fixed(10)) % | \(.e2e | round) | \(.hit * 100 | fixed(10)) % | \(.imbalance | fixed(100)) |"' "$dir/rows"
	done
done
