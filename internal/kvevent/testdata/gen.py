#!/usr/bin/env python3
"""Writes vectors.jsonl: payloads as vLLM and SGLang encode them, with what they mean.

Needs msgspec, the encoder of both engines. Run: python3 gen.py > vectors.jsonl
Each line: name, payload (hex), want {ts, rank, unknown, skipped, events}.
In want, hashes are decimal strings and absent fields have their zero value.
"""

import json
from typing import Optional, Union

import msgspec

enc = msgspec.msgpack.Encoder()
T = list(range(100, 108))
BIG = 15760518052499183552
NEG = -4241135371313137165


def u64(v):
    return str(v & (2**64 - 1))


# The classes as the engines declare them: msgspec then decides what is left out.
class VArr(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class VMap(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


def stored(base, name, extra):
    return msgspec.defstruct(
        "BlockStored",
        [
            ("block_hashes", list),
            ("parent_block_hash", Optional[object]),
            ("token_ids", list),
            ("block_size", int),
            ("lora_id", Optional[int]),
        ]
        + extra,
        bases=(base,),
        tag="BlockStored",
        omit_defaults=True,
        array_like=base is VArr,
    )


VSTORED_TAIL = [
    ("medium", Optional[str]),
    ("lora_name", Optional[str]),
    ("extra_keys", Optional[list], None),
    ("group_idx", Optional[int], None),
    ("kv_cache_spec_kind", Optional[str], None),
    ("kv_cache_spec_sliding_window", Optional[int], None),
]
StoredArr = stored(VArr, "a", VSTORED_TAIL)
StoredMap = stored(
    VMap,
    "m",
    VSTORED_TAIL
    + [("locality", Optional[str], None), ("ownership", Optional[str], None), ("session_id", Optional[str], None)],
)
SStoredMap = stored(
    VMap, "s", [("medium", Optional[str], None), ("cache_salt", Optional[str], None), ("session_id", Optional[str], None)]
)

vectors = []


def add(name, payload, events, ts=1.5, rank=-1, unknown=0, skipped=0):
    raw = payload if isinstance(payload, bytes) else enc.encode(payload)
    vectors.append(
        {
            "name": name,
            "payload": raw.hex(),
            "want": {"ts": ts, "rank": rank, "unknown": unknown, "skipped": skipped, "events": events},
        }
    )


def st(hashes, tokens=T, **kw):
    e = {"kind": "stored", "hashes": [u64(h) for h in hashes], "tokens": tokens, "block_size": 4, "group": -1}
    e.update(kw)
    return e


gpu = {"medium_name": "GPU"}

# vLLM arrays
add("E1 two elements", [1.5, [["BlockStored", [1, 2], None, T, 4, None]]], [st([1, 2])])
add("E2 rank 0", [1.5, [StoredArr([BIG, 2], 7, T, 4, None, "GPU", None)], 0], [st([BIG, 2], parent="7", **gpu)], rank=0)
add("E2 negative hashes", [1.5, [StoredArr([NEG, -1], -2, T, 4, 3, "GPU", None)], 1],
    [st([NEG, -1], parent=u64(-2), lora_id=3, **gpu)], rank=1)
digest = bytes(range(32))
add("E2 bin hashes", [1.5, [StoredArr([digest, digest[:16]], digest, T, 4, None, "GPU", None)], 0],
    [st([int.from_bytes(digest[24:], "big"), int.from_bytes(digest[8:16], "big")],
        parent=str(int.from_bytes(digest[24:], "big")), **gpu)], rank=0)
add("E2 hexadecimal hashes", [1.5, [StoredArr(["%064x" % BIG, "%016x" % 2], None, T, 4, None, "GPU", None)], 0],
    [st([BIG, 2], **gpu)], rank=0)
add("E2 all fields", [1.5, [StoredArr([1, 2], None, T, 4, 9, "CPU", "ad", [["ad"], ["ad"]], 2, "sliding_window", 128)], 0],
    [st([1, 2], lora_id=9, lora_name="ad", medium=1, medium_name="CPU", group=2, cache_kind=2, window=128)], rank=0)
add("E2 null group before kind", [1.5, [["BlockStored", [1], None, T, 8, None, "GPU", None, None, None, "mamba", None]], 0],
    [st([1], block_size=8, cache_kind=3, **gpu)], rank=0)
add("list before the tail", [1.5, [["BlockStored", [1], None, T, 8, None, "GPU", None, None, [None], 3, "full_attention", 64]], 0],
    [st([1], block_size=8, group=3, cache_kind=1, window=64, **gpu)], rank=0)
add("trailing elements", [1.5, [["BlockStored", [1], None, T, 8, None, "GPU", None, None, 0, "full_attention", None, "NEW", {"a": [1]}, 2]], 0, "x", {}],
    [st([1], block_size=8, group=0, cache_kind=1, **gpu)], rank=0)
add("removed and cleared", [2, [["BlockRemoved", [5, -6]], ["BlockRemoved", [7], "CPU", 1], ["AllBlocksCleared"]], 3],
    [{"kind": "removed", "hashes": ["5", u64(-6)], "group": -1},
     {"kind": "removed", "hashes": ["7"], "group": 1, "medium": 1, "medium_name": "CPU"},
     {"kind": "cleared", "group": -1}], ts=2, rank=3)
# vLLM maps
add("E3", [1.5, [StoredMap([BIG, 2], None, T, 4, None, "GPU", None, [None, None], 0, "full_attention")], 0],
    [st([BIG, 2], group=0, cache_kind=1, **gpu)], rank=0)
add("E3 salt and LoRA", [1.5, [StoredMap([1, 2], None, T, 4, 1, "GPU", "ad", [["ad", "salt-a"], ["ad"]])], 0],
    [st([1, 2], lora_id=1, lora_name="ad", salt="salt-a", **gpu)], rank=0)
add("E3 salt only on the first block of a prompt", [1.5, [StoredMap([1, 2], 9, T, 4, None, "GPU", None, [None, ["img"]])], 0],
    [st([1, 2], parent="9", extra=[False, True], **gpu)], rank=0)
add("E3 images, salt, embeddings", [1.5, [StoredMap([1, 2], None, T, 4, None, "GPU", None, [[["img", -3], "s", b"\x01\x02"], [["img", -7]]])], 0],
    [st([1, 2], salt="s", extra=[True, True], **gpu)], rank=0)
add("E3 offloaded", [1.5, [StoredMap([1], None, [], 0, None, "STORAGE", None, locality="REMOTE", ownership="tier2", session_id="sess")], 0],
    [st([1], [], block_size=0, medium=2, medium_name="STORAGE", locality=2, ownership="tier2", session="sess")], rank=0)
add("E3 partial block", [1.5, [StoredMap([1], 4, T[:3], 3, None, "GPU", None)], 0], [st([1], T[:3], block_size=3, parent="4", **gpu)], rank=0)
add("E3 keys in another order", [1.5, [{"extra_keys": [["ad", "s"]], "future": {"x": [1, 2]}, "token_ids": T, "lora_name": "ad", "block_size": 8,
    "block_hashes": [1], "type": "BlockStored"}], 0], [st([1], block_size=8, lora_name="ad", salt="s")], rank=0)
add("E4", {"events": [{"type": "AllBlocksCleared", "medium": "DISK"}], "ts": 3, "data_parallel_rank": 2, "more": []},
    [{"kind": "cleared", "group": -1, "medium": 2, "medium_name": "DISK"}], ts=3, rank=2)
add("mixed arrays and maps", [1.5, [["BlockRemoved", [5], "GPU"], {"type": "BlockRemoved", "block_hashes": [6], "medium": "GPU", "group_idx": 0}], 0],
    [{"kind": "removed", "hashes": ["5"], "group": -1, **gpu}, {"kind": "removed", "hashes": ["6"], "group": 0, **gpu}], rank=0)
# SGLang
add("S1", [1.5, [["BlockStored", [NEG, 5], None, T, 4, None]], None], [st([NEG, 5])])
add("S2", [1.5, [["BlockStored", [NEG], None, T, 8, None, "CPU_PINNED"], ["BlockRemoved", [NEG], "EXTERNAL"]], 1],
    [st([NEG], block_size=8, medium=1, medium_name="CPU_PINNED"), {"kind": "removed", "hashes": [u64(NEG)], "group": -1, "medium": 3, "medium_name": "EXTERNAL"}], rank=1)
add("S3 salt", [1.5, [["BlockStored", [NEG], None, T, 8, None, "GPU", {"cache_salt": "tenant"}]], 0], [st([NEG], block_size=8, salt="tenant", **gpu)], rank=0)
add("S4", [1.5, [SStoredMap([NEG, 5], 6, T, 4, None, "GPU", "tenant", "sess")], 0], [st([NEG, 5], parent="6", salt="tenant", session="sess", **gpu)], rank=0)
add("EAGLE pairs", [1.5, [["BlockStored", [1], None, [[a, a + 1] for a in T], 8, None, "GPU"]], 0], [st([1], block_size=8, bigram=True, **gpu)], rank=0)
# siblings survive
add("unknown tag between", [1.5, [["BlockRemoved", [5]], ["BlockPinned", {"a": 1}, [2]], {"type": "Later", "block_hashes": "?"}, ["BlockRemoved", [6]]], 0],
    [{"kind": "removed", "hashes": ["5"], "group": -1}, {"kind": "removed", "hashes": ["6"], "group": -1}], rank=0, unknown=2)
add("bad events between", [1.5, [["BlockRemoved", "x"], ["BlockStored", [1], None, [1, -1], 2, None], ["BlockStored", [1], None, [1.5], 1, None],
    ["BlockStored", [1]], [], 7, None, {"block_hashes": [1]}, {"type": 4}, ["BlockRemoved", [1.5]], ["BlockRemoved", [6]]], 0],
    [{"kind": "removed", "hashes": ["6"], "group": -1}], rank=0, skipped=10)
add("largest token and odd ranks", [1.5, [["BlockStored", [1], None, [0, 2**32 - 1], 2, None]], -4], [st([1], [0, 2**32 - 1], block_size=2)])
add("parent zero", [1.5, [["BlockStored", [1], 0, T, 8, None, "GPU"]], 0], [st([1], block_size=8, **gpu)], rank=0)
add("empty", [1.5, [], 0], [], rank=0)

for v in vectors:
    print(json.dumps(v, separators=(",", ":")))
