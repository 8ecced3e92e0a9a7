"""Reads bodies as SGLang's own package does (sglang.srt.entrypoints.openai.protocol).

One a line on stdin, as [name of the model, body]; its answer is what SGLang has of the
members of disaggregation, and of the body's other members those that it does not know.
"""
import json
import sys

from sglang.srt.entrypoints.openai import protocol

OURS = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank", "routed_dp_rank")

for line in sys.stdin:
    name, body = json.loads(line)
    model = getattr(protocol, name)
    r = model.model_validate(body)
    print(json.dumps({"read": {k: getattr(r, k) for k in OURS}, "unknown": [k for k in body if k not in model.model_fields]}), flush=True)
