#!/bin/sh
# Judges policy kv against the others: 7 workloads, 3 fleets, 3 loads, 4 seeds. Prints a row
# for each cell, the verdicts and the worst cells. docs/lab/judge.md has the rule.
#
#   scripts/judge-policies.sh -conversation conversation_trace.jsonl.gz
#   scripts/judge-policies.sh -download                  # fetches the trace
#   scripts/judge-policies.sh -half tuning               # what weights are chosen on
#   scripts/judge-policies.sh -sensitivity               # what half and 1.5 times each constant change
#   scripts/judge-policies.sh -drift                     # engines that become slow or go
#
# The exit code is 0 when the judgement is passed, 5 when it is missed, and 3 when there is
# none, as with a part of the workloads. A run that was interrupted resumes.
set -eu
cd "$(dirname "$0")/.."
CGO_ENABLED=0 go build -trimpath -o bin/judge-policies ./benchmarks/judge
# Weights and constants of kv may be chosen on the first three workloads only. The others judge
# them.
exec bin/judge-policies -tuning agents,chats,documents -judging conversation,bursts,coders,mixture "$@"
