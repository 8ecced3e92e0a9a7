#!/usr/bin/env python3
"""Record the KV events of vLLM's cache manager with its offloading to the host's memory.

usage: record.py [--seed N] [--device BLOCKS] [--host BLOCKS] [--requests N] [--eagle own|merged] > FILE

Plays random prompts, one at a time, against vLLM's own KVCacheManager and
CPUOffloadingManager, with no model and no accelerator, and writes JSON lines as those of
testdata/hybrid. A request has, beside "cached" (tokens found on the device), "beyond":
the blocks behind them that vLLM's offloading connector would load.

With --eagle the engine drafts with EAGLE, MTP or the like, and computes the last block of
each hit anew; the drafter's layers have a cache group that says so (own), or are in one
that does not (merged), of which the connector drops nothing.
"""
import argparse
import base64
import json
import os
import random
import sys

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import msgspec
import torch
import vllm
from vllm.distributed.kv_events import KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker, get_offloading_event_group_spec
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.request import Request

BLOCK = 16


def connector(group, host, tracker):
    """vLLM's offloading connector, as much of it as looks prompts up."""
    c = object.__new__(offloading.OffloadingConnectorScheduler)
    spec = group.kv_cache_spec
    c.config = offloading.SchedulerOffloadConfig(
        kv_group_configs=(offloading.GroupOffloadConfig(
            group_idx=0, tokens_per_block=BLOCK, tokens_per_chunk=BLOCK, hashes_per_chunk=1, kv_event_group_spec=get_offloading_event_group_spec(group),
            sliding_window_size_in_chunks=None, kv_cache_spec=spec, manager_cls=KVCacheSpecRegistry.get_manager_class(spec), is_eagle_group=group.is_eagle_group,
        ),),
        blocks_per_chunk=1, tokens_per_hash=BLOCK, num_workers=1, offload_prompt_only=True, supports_partial_tail=False,
    )
    c.manager, c._events_tracker = host, tracker
    c._full_attention_groups, c._sliding_window_groups, c._lookup_groups = (0,), (), (0,)
    c._mamba_align_size, c._chunks_being_loaded = None, None
    return c


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", type=int, default=24)
    p.add_argument("--host", type=int, default=48)
    p.add_argument("--requests", type=int, default=120)
    p.add_argument("--eagle", choices=("own", "merged"))
    a = p.parse_args()
    rng = random.Random(a.seed)
    hash_fn = get_hash_fn_by_name("sha256_cbor")
    os.environ["PYTHONHASHSEED"] = str(a.seed)
    init_none_hash(hash_fn)
    hasher = get_request_block_hasher(BLOCK, hash_fn)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float16)
    group = KVCacheGroupSpec(["layer"], spec, is_eagle_group=a.eagle == "own")
    device = KVCacheManager(
        KVCacheConfig(num_blocks=a.device, kv_cache_tensors=[], kv_cache_groups=[group]), use_eagle=a.eagle is not None,
        max_model_len=4096, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=True, enable_kv_cache_events=True, max_in_flight_tokens=4096,
    )
    host = CPUOffloadingManager(num_chunks=a.host, enable_events=True)
    tracker = OffloadingEventsTracker(OffloadingKVEventsConfig(enable_kv_cache_events=True, self_describing_kv_events=False))
    lookup = connector(group, host, tracker)
    encoder, seq = msgspec.msgpack.Encoder(), 0

    def write(**line):
        json.dump(line, sys.stdout, separators=(",", ":"))
        sys.stdout.write("\n")

    write(type="header", vllm=vllm.__version__, block_size=BLOCK, device_blocks=a.device, host_blocks=a.host, seed=a.seed, eagle=a.eagle or "")
    seen = []
    for n in range(a.requests):
        if seen and rng.random() < 0.75:
            old = rng.choice(seen[-12:])
            tokens = old[: rng.randint(1, len(old))] if rng.random() < 0.4 else list(old)
        else:
            tokens = []
        tokens += [rng.randrange(1000) for _ in range(rng.choice((1, 5, BLOCK, 3 * BLOCK, 5 * BLOCK)))]
        tokens = tokens[: (a.device - 4) * BLOCK]
        seen.append(tokens)
        r = Request(f"r{n}", list(tokens), SamplingParams(max_tokens=8), None, block_hasher=hasher)
        ctx = ReqContext(req_id=r.request_id)
        host.on_new_request(ctx)
        blocks, cached, *_ = device.get_computed_blocks(r)
        keys = [make_offload_key(h, 0) for h in r.block_hashes]
        state = offloading.RequestOffloadState(config=lookup.config, req=r, req_context=ctx, offloading_context=None)
        state.update_offload_keys()
        state.num_locally_computed_tokens = cached
        # The last token is computed in any case.
        beyond = min(lookup._lookup_complete_chunks(state) // BLOCK, (len(tokens) - 1) // BLOCK - cached // BLOCK)
        write(type="request", id=r.request_id, tokens=tokens, cached=cached, beyond=beyond)
        loaded = keys[cached // BLOCK : cached // BLOCK + beyond]
        if loaded:
            host.prepare_load(loaded, ctx)
        got = device.allocate_slots(
            r, len(tokens) - cached - beyond * BLOCK, num_new_computed_tokens=cached, new_computed_blocks=blocks,
            num_external_computed_tokens=beyond * BLOCK,
        )
        assert got is not None
        if loaded:
            host.complete_load(loaded, ctx)
        r.num_computed_tokens = len(tokens)
        out = host.prepare_store(keys, ctx)
        if out is not None and out.keys_to_store:
            host.complete_store(out.keys_to_store, ctx)
        device.free(r)
        host.on_request_finished(ctx)
        events = device.take_events() + list(tracker.take_events(host.take_events()))
        if events:
            batch = KVEventBatch(ts=1.7e9 + n, events=events, data_parallel_rank=0)
            write(type="batch", seq=seq, payload=base64.b64encode(encoder.encode(batch)).decode())
            seq += 1


main()
