#!/usr/bin/env python3
"""Record the KV events of vLLM's cache manager for prompts with images.

usage: record.py FOLDER

Plays random prompts, one at a time, against vLLM's own KVCacheManager, with no model and no
accelerator: several images in a prompt, again, moved, in other places of equal text, with
and without a salt. It writes one file of JSON lines for each kind of cache, as those of
testdata/hybrid. A request has "media" beside its tokens: identifier, offset and length of each
image; and "salt". Every image has the same placeholders, so that only the extra keys of the
blocks tell images apart.

With a vLLM whose block names cover tokens after the block (0.33) it writes files for one
and for three such tokens, too.
"""
import base64
import gzip
import inspect
import json
import os
import random
import sys

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import msgspec
import torch
import vllm
from vllm.distributed.kv_events import KVEventBatch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

BLOCK, PAD, START, END, BREAK = 16, 151655, 151652, 151653, 108
ATTENTION = dict(num_kv_heads=1, head_size=1, dtype=torch.float16)
CACHES = {
    "full": lambda: [FullAttentionSpec(block_size=BLOCK, **ATTENTION)],
    "full+window": lambda: [FullAttentionSpec(block_size=BLOCK, **ATTENTION), SlidingWindowSpec(block_size=BLOCK, sliding_window=40, **ATTENTION)],
    "full-x2+window": lambda: [FullAttentionSpec(block_size=2 * BLOCK, **ATTENTION), SlidingWindowSpec(block_size=BLOCK, sliding_window=64, **ATTENTION)],
    "full+window-x2": lambda: [FullAttentionSpec(block_size=BLOCK, **ATTENTION), SlidingWindowSpec(block_size=2 * BLOCK, sliding_window=64, **ATTENTION)],
}
# The tokens before an image of n placeholders, its own, and those behind it.
FORMS = {
    "": lambda n: ([START], [PAD] * n, [END]),
    # Rows with a token behind each, as Pixtral has them; two images may touch.
    "rows": lambda n: ([], [t for row in range(0, n, 9) for t in [PAD] * min(9, n - row) + [BREAK]][:-1] + [END], []),
    # All that is put around an image belongs to it, as with Gemma 3.
    "framed": lambda n: ([], [BREAK, START] + [PAD] * n + [END, BREAK], []),
}


class Prompts:
    """Prompts of text and images, many of them like one before."""

    def __init__(self, rng, form):
        self.rng, self.seen, self.form = rng, [], form
        self.images = [(f"{rng.getrandbits(256):064x}", rng.choice((5, 16, 40, 67, 100))) for _ in range(9)]
        self.texts = [[rng.randrange(1000) for _ in range(rng.choice((1, 7, 16, 33, 48)))] for _ in range(6)]

    def part(self):
        return ("image", self.rng.choice(self.images)) if self.rng.random() < 0.45 else ("text", self.rng.choice(self.texts))

    def next(self):
        rng, kind = self.rng, self.rng.random()
        if self.seen and kind < 0.7:
            salt, parts = rng.choice(self.seen[-14:])
            parts = list(parts)
            if kind < 0.15:
                pass  # again
            elif kind < 0.4:
                parts += [self.part() for _ in range(rng.randint(1, 3))]  # the next turn
            elif kind < 0.5:  # another image in the place of one
                at = [i for i, p in enumerate(parts) if p[0] == "image"]
                if at:
                    i = rng.choice(at)
                    parts[i] = ("image", (rng.choice(self.images)[0], parts[i][1][1]))
            elif kind < 0.6:
                rng.shuffle(parts)
            else:
                parts.insert(rng.randint(0, len(parts)), ("text", [rng.randrange(1000)]))  # moved
        else:
            salt, parts = rng.choice(("", "", "", "tenant")), [self.part() for _ in range(rng.randint(1, 6))]
        self.seen.append((salt, parts))
        tokens, media = [], []
        for what, p in parts:
            if what == "text":
                tokens += p
            else:
                before, item, after = FORMS[self.form](p[1])
                tokens += before
                media.append((p[0], len(tokens), len(item)))
                tokens += item + after
        tokens = tokens[:900]
        return salt, tokens, [m for m in media if m[1] + m[2] <= len(tokens)]


def record(path, cache, ahead, seed, blocks, requests, form=""):
    rng = random.Random(seed)
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    specs = CACHES[cache]()
    more = {"num_hash_lookahead_tokens": ahead} if ahead else {}
    hasher = get_request_block_hasher(BLOCK, hash_fn, **more)
    scheduler = max(s.block_size for s in specs)
    manager = KVCacheManager(
        KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], s) for i, s in enumerate(specs)]),
        max_model_len=4096, scheduler_block_size=scheduler, hash_block_size=BLOCK, max_in_flight_tokens=4096, enable_caching=True,
        enable_kv_cache_events=True, **more,
    )
    prompts, encoder, seq = Prompts(rng, form), msgspec.msgpack.Encoder(), 0
    with gzip.GzipFile(path, "wb", mtime=0) as out:
        def write(**line):
            out.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

        write(type="header", vllm=vllm.__version__, cache=cache, groups=[dict(group_idx=i, spec=type(s).__name__, block_size=s.block_size) for i, s in enumerate(specs)],
              hash_block_size=BLOCK, blocks=blocks, seed=seed, ahead=ahead)
        for n in range(requests):
            salt, tokens, media = prompts.next()
            features = [MultiModalFeatureSpec(data=None, modality="image", identifier=i, mm_position=PlaceholderRange(offset=o, length=k)) for i, o, k in media]
            r = Request(f"r{n}", tokens, SamplingParams(max_tokens=8), None, mm_features=features, cache_salt=salt or None, block_hasher=hasher)
            got = manager.get_computed_blocks(r)
            found, cached = got[0], got[1]
            write(type="request", id=r.request_id, tokens=tokens, media=[dict(id=i, offset=o, length=k) for i, o, k in media], salt=salt, cached=cached)
            step, first = 128, True
            while r.num_computed_tokens < len(tokens):
                if first:
                    new = min(step, len(tokens) - cached)
                    took = manager.allocate_slots(r, new, num_new_computed_tokens=cached, new_computed_blocks=found)
                    r.num_computed_tokens = cached
                else:
                    new = min(step, len(tokens) - r.num_computed_tokens)
                    took = manager.allocate_slots(r, new)
                assert took is not None, (n, len(tokens))
                r.num_computed_tokens += new
                first = False
            answer = []
            for _ in range(rng.choice((0, 0, 3, 20))):
                answer.append(rng.randrange(1000))
                r.append_output_token_ids(answer[-1])
                if manager.allocate_slots(r, 1) is None:
                    break
                r.num_computed_tokens += 1
            if form and answer:  # the next turn has it
                prompts.seen[-1][1].append(("text", answer))
            manager.free(r)
            manager.take_new_block_ids()
            events = manager.take_events()
            if events:
                batch = KVEventBatch(ts=1.7e9 + n, events=events, data_parallel_rank=0)
                write(type="batch", seq=seq, payload=base64.b64encode(encoder.encode(batch)).decode())
                seq += 1


os.environ["PYTHONHASHSEED"] = "5"
folder, version = sys.argv[1], vllm.__version__.split("+")[0]
for number, cache in enumerate(CACHES):
    record(os.path.join(folder, f"vllm-{version}-{cache}.jsonl.gz"), cache, 0, 77 + number, 150, 120)
for form, seed, caches in (("rows", 177, ("full", "full+window-x2")), ("framed", 178, ("full", "full-x2+window"))):
    for cache in caches:
        record(os.path.join(folder, f"vllm-{version}-{cache}-{form}.jsonl.gz"), cache, 0, seed, 150, 120, form)
if "num_hash_lookahead_tokens" in inspect.signature(get_request_block_hasher).parameters:
    for ahead in (1, 3):
        record(os.path.join(folder, f"vllm-{version}-full-ahead{ahead}.jsonl.gz"), "full", ahead, 90 + ahead, 150, 120)
