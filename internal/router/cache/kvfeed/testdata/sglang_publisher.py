"""SGLang's own event publisher (sglang.srt.disaggregation.kv_events), driven over stdin by
interop_test.go with the commands of publisher.py: the events of a payload are made again as
SGLang's own, so that their bytes, their numbers and the replay are those of SGLang.
"""
import sys

import msgspec
import zmq
from sglang.srt.disaggregation import kv_events as sgl

STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")


def event(e):
    if not isinstance(e, dict):
        names = {"BlockStored": STORED, "BlockRemoved": ("block_hashes",)}.get(e[0], ())
        e = dict(zip(("type", *names), e))
    if e["type"] == "BlockStored":
        return sgl.BlockStored(*(e.get(k) for k in STORED), medium=sgl.StorageMedium.GPU)
    if e["type"] == "BlockRemoved":
        return sgl.BlockRemoved(e["block_hashes"], medium=sgl.StorageMedium.GPU)
    return sgl.AllBlocksCleared()


def publisher(at, replay):
    p = sgl.ZmqEventPublisher(0, endpoint=at, replay_endpoint=replay, bind=True)
    return p, p._local_pub_endpoint, p._local_replay_endpoint


p, at, replay = publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
print("ready", at, replay, flush=True)
for line in sys.stdin:
    words = line.split()
    if words[0] == "add":
        batch = msgspec.msgpack.decode(bytes.fromhex(words[1]))
        p.publish(sgl.KVEventBatch(ts=batch[0], events=[event(e) for e in batch[1]]))
    elif words[0] == "restart":
        p.shutdown()
        zmq.Context.instance().term()  # returns when the ports are free
        p, at, replay = publisher(at, replay)
        print("restarted", flush=True)
p.shutdown()
