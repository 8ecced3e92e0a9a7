"""Writes vectors.json: reference values from the C implementation of XXH3 (pip install xxhash)."""
import json
import struct

import xxhash


def h(data, seed):
    return xxhash.xxh3_64_intdigest(data, seed)


def local(tokens, seed, extra=0):
    data = struct.pack(f"<{len(tokens)}I", *tokens)
    if extra:
        data += struct.pack("<Q", extra)
    return h(data, seed)


M = 1 << 64
cases = []
for name, size, n, lora, salt, extra in [
    ("one block", 16, 16, "", "", []),
    ("partial tail", 16, 40, "", "", []),
    ("shorter than a block", 16, 15, "", "", []),
    ("block of one", 1, 5, "", "", []),
    ("block of 64", 64, 256, "", "", []),
    ("block of 128", 128, 256, "", "", []),
    ("lora", 16, 48, "adapter-a", "", []),
    ("salt", 16, 48, "", "tenant-7", []),
    ("lora and salt", 16, 48, "adapter-ä", "tenant-7", []),
    ("extra digests", 16, 64, "", "", [0, 0xDEADBEEF, 0xFFFFFFFFFFFFFFFF]),
    ("extra digests in block of 128", 128, 256, "x", "y", [7]),
]:
    tokens = [(i * 2654435761 + 12345) % (1 << 32) if i % 5 else i for i in range(n)]
    base = 1337 + (h(lora.encode(), 0) if lora else 0)
    locals_, chain = [], []
    for i in range(n // size):
        seed = base + (h(salt.encode(), 1) if salt and i == 0 else 0)
        e = extra[i] if i < len(extra) else 0
        locals_.append(local(tokens[i * size : (i + 1) * size], seed % M, e))
        chain.append(h(struct.pack("<QQ", chain[-1], locals_[-1]), 1337) if chain else locals_[-1])
    cases.append(
        dict(name=name, block_size=size, lora=lora, salt=salt, extra=extra, tokens=tokens, locals=locals_, chain=chain)
    )
text = "The quick brown fox jumps over the lazy dog; größer, 漢字, 🙂. " * 3
raw = text.encode()
tseed = 0x7465787400000539
doc = dict(
    cases=cases,
    text=dict(
        text=text,
        chunk_bytes=32,
        hashes=[h(raw[i : i + 32], tseed) for i in range(0, len(raw) - 31, 32)],
    ),
)
with open("vectors.json", "w", encoding="utf-8") as f:
    json.dump(doc, f, ensure_ascii=False)
    f.write("\n")
