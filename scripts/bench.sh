#!/usr/bin/env bash
# Runs the benchmarks that goals are set for and prints a table of medians, the
# goal beside each. Arguments: number of repetitions (default 3).
#
# With KVOPS (a file of operations, as benchmarks/kvindex describes it) the index rows are
# run, with DYNCTL_TOKENIZER and DYNCTL_BENCH_TEXT (a real tokenizer.json and a
# text) the tokenizer rows. Client and engine of the request rows run in the
# same process: the row "direct" is what they need, and is taken off. They send
# one request after the other, so that nothing is shared between requests that
# run at the same time; the goals are for 32 connections, in docs/benchmarks.md.
set -euo pipefail
cd "$(dirname "$0")/.."
count=${1:-3}
out=$(mktemp)
trap 'rm -f "$out"' EXIT
run() { # package pattern flags...
	local pkg=$1 pattern=$2; shift 2
	go test -run '^$' -bench "$pattern" -count "$count" "$@" "./$pkg" | tee -a "$out" | grep '^Benchmark' >&2 || true
}
[ -z "${KVOPS:-}" ] || run benchmarks/kvindex Workload -benchtime 1x
run internal/router/cache/kvstream Stream
run internal/router/cache/kvfeed Feed
run internal/router 'Decision|Observed'
run internal/router 'Request|Chunk' -benchtime 3000x
run internal/router/forward/disagg 'ParseAnswer'
[ -z "${DYNCTL_TOKENIZER:-}" ] || run internal/router/request/tokenize/bpe 'Cold1MB|Prompt220KB'
run internal/bench/loadgen 'ClosedLoop|OpenLoop'

awk '
/^Benchmark/ {
	name = $1
	sub(/-[0-9]+$/, "", name); sub(/^Benchmark/, "", name)
	for (i = 3; i < NF; i += 2) v[name, $(i + 1), ++n[name, $(i + 1)]] = $i
	if (!(name in seen)) { seen[name]; order[++names] = name }
}
function median(name, unit,   k, i, j, t, a) {
	k = n[name, unit]
	if (!k) return ""
	for (i = 1; i <= k; i++) a[i] = v[name, unit, i] + 0
	for (i = 2; i <= k; i++) { t = a[i]; for (j = i - 1; j > 0 && a[j] > t; j--) a[j + 1] = a[j]; a[j + 1] = t }
	return k % 2 ? a[(k + 1) / 2] : (a[k / 2] + a[k / 2 + 1]) / 2
}
function row(what, goal, value, unit, better,   ok) {
	if (value == "") { printf "| %s | %s | not run | |\n", what, goal; return }
	ok = goal == "" ? "" : (better == "more" ? value >= goal : value <= goal) ? "met" : "missed"
	printf "| %s | %s | %.4g %s | %s |\n", what, goal, value, unit, ok
}
function over(name, base,   a, b) {
	a = median(name, "cpu-µs/op"); b = median(base, "cpu-µs/op")
	return a == "" || b == "" ? "" : a - b
}
function share(name, of, base,   a, b) {
	a = over(name, base); b = over(of, base)
	return a == "" || b == "" || b <= 0 ? "" : a / b
}
END {
	print "| what | goal | seen | |"
	print "|---|---|---|---|"
	row("index, one event per removed hash, 2 threads, at least", 45, median("Workload/vllm", "Mops/s"), "M block operations/s", "more")
	row("index, grouped, 2 threads, at least", 45, median("Workload/grouped", "Mops/s"), "M block operations/s", "more")
	for (i = 1; i <= names; i++)
		if (order[i] ~ /^(Stream|Feed)/) {
			row("event path, " order[i] ", at least", 5, median(order[i], "Mblocks/s"), "M blocks/s", "more")
			row("its allocations an operation", "", median(order[i], "allocs/op"), "")
		}
	row("decision, 8,192 tokens, 64 ranks", 50, median("Decision/aggregated/64", "cpu-µs/op"), "µs")
	row("the same, 32 prefill and 32 decode", 50, median("Decision/disaggregated/64", "cpu-µs/op"), "µs")
	row("64 ranks with work in flight", 50, median("Decision/busy/64", "cpu-µs/op"), "µs")
	row("the same, 512 ranks", "", median("Decision/aggregated/512", "cpu-µs/op"), "µs")
	row("the same, 256 prefill and 256 decode", "", median("Decision/disaggregated/512", "cpu-µs/op"), "µs")
	row("the same, 2,048 ranks", 200, median("Decision/aggregated/2048", "cpu-µs/op"), "µs")
	row("the same, 1,024 prefill and 1,024 decode", 200, median("Decision/disaggregated/2048", "cpu-µs/op"), "µs")
	row("2,048 ranks with work in flight", "", median("Decision/busy/2048", "cpu-µs/op"), "µs")
	row("receipt and metrics of a request, 2 ranks", "", median("Observed/2-ranks", "cpu-µs/op"), "µs")
	row("pass-through 1 KB, over direct", "", over("Request/pass-through/1KB", "Request/direct/1KB"), "µs")
	row("KV-aware 1 KB, over direct", "", over("Request/kv/1KB", "Request/direct/1KB"), "µs")
	row("the same, recorded, as a multiple", 1.1, share("Request/kv-recorded/1KB", "Request/kv/1KB", "Request/direct/1KB"), "")
	row("pass-through 220 KB, over direct", "", over("Request/pass-through/220KB", "Request/direct/220KB"), "µs")
	row("KV-aware 220 KB, over direct", "", over("Request/kv/220KB", "Request/direct/220KB"), "µs")
	row("two legs 1 KB, over one direct", "", over("Request/two-legs/1KB", "Request/direct/1KB"), "µs")
	row("two legs 220 KB, over one direct", "", over("Request/two-legs/220KB", "Request/direct/220KB"), "µs")
	row("8,192 token ids, KV-aware", "", median("Request/kv-ids/8k-tokens", "cpu-µs/op"), "µs, all three processes")
	row("streamed event, over direct", "", over("Chunk/router", "Chunk/direct"), "µs")
	row("the same, with continue.mode exact, as a multiple", 1.15, share("Chunk/continued", "Chunk/router", "Chunk/direct"), "")
	row("check of a prefill answer with 3,438 block ids", "", median("ParseAnswer", "ns/op") / 1000, "µs")
	row("tokenizing 1 MB of mixed text, cold", "", median("Cold1MB/real", "MB/cpu-s"), "MB/s", "more")
	row("220 KB prompt, cold", 20, median("Prompt220KB/real/cold", "cpu-ms/op"), "ms")
	row("220 KB prompt, 90 % shared", 2, median("Prompt220KB/real/share90", "cpu-ms/op"), "ms")
	row("load client, closed loop, at least", 5000, median("ClosedLoop", "rps"), "requests/s", "more")
	row("load client, 2,500/s constant, dispatch p99", 1000, median("OpenLoop/constant", "dispatch_p99_us"), "µs")
	row("load client, 2,500/s Poisson, dispatch p99", 1000, median("OpenLoop/poisson", "dispatch_p99_us"), "µs")
}' "$out"
