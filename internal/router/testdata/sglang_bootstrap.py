"""SGLang's own bootstrap server (sglang.srt.disaggregation.common.conn), and what its prefill
and decode engines ask of it, driven over stdin by sglangboot_test.go. One server for each
argument, which is the number of its data-parallel ranks.

A line on stdin is a completion's body that a decode engine got. SGLang's own model reads it,
its decode queue and receiver look the prefill up: the answer has how many ranks there are,
which one it is and its address, by the rank that the body names and by the room alone.
"""
import importlib.machinery
import json
import logging
import sys
import time
import types

import transformers

transformers.AutoProcessor  # chooses its own parts before there is a torchvision that is none


class Nothing(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name, (), {})


def stand_in(name):
    """A module of which nothing is called: SGLang's models and weights import it."""
    m = types.ModuleType(name)
    m.__path__, m.__spec__ = [], importlib.machinery.ModuleSpec(name, None, is_package=True)
    m.__getattr__ = lambda n: getattr(Nothing("module", (), {}), n)
    sys.modules[name] = m


for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "gguf"):
    stand_in(name)

from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.common import conn
from sglang.srt.entrypoints.openai import protocol

logging.basicConfig(stream=sys.stderr)
PAGE = 16
# What an engine's start leaves behind for its parts to read.
parallel = types.SimpleNamespace(
    enable_cp_tp_group_sharing=False, load_balance_method="follow_bootstrap_room", enable_dsa_cache_layer_split=False, enable_kv_cache_sharding=False,
)
conn.get_parallel = lambda: parallel
conn.get_serving = lambda: types.SimpleNamespace(port=None)
conn.get_disagg = lambda: types.SimpleNamespace(disaggregation_decode_allocation_policy="early")


class Manager(conn.CommonKVManager):
    """An engine's side of bootstrap, without the KV and the sockets that move it."""

    def __init__(self, **members):
        self.kv_args = types.SimpleNamespace(page_size=PAGE, engine_rank=0, state_types=(), rust_http_port=None)
        self.attn_tp_size, self.attn_tp_rank, self.attn_cp_size, self.attn_cp_rank = 1, 0, 1, 0
        self.attn_dp_size, self.attn_dp_rank, self.pp_size, self.pp_rank, self.dcp_size = 1, 0, 1, 0, 1
        self.kv_cache_dtype_str = self.kv_layout = self.dsv41_spec_layout = self.dist_init_addr = None
        self.is_mla_backend = self.is_hybrid_mla_backend = self.enable_all_cp_ranks_for_transfer = False
        self.prefill_info_table = {}
        self.__dict__.update(members)


Manager.__abstractmethods__ = frozenset()

addresses = []
for n, dp in enumerate(map(int, sys.argv[1:])):
    server = conn.CommonKVBootstrapServer("127.0.0.1", 0)
    while not (hasattr(server, "_runner") and server._runner.addresses):
        time.sleep(0.01)  # it does not report that it listens
    port = server._runner.addresses[0][1]
    for rank in range(dp):
        Manager(
            system_dp_size=dp, system_dp_rank=rank, bootstrap_host="127.0.0.1", bootstrap_port=port, local_ip=f"10.0.{n}.{rank}", rank_port=5000 + rank,
        ).register_to_bootstrap()
    addresses.append(f"127.0.0.1:{port}")
print(json.dumps(addresses), flush=True)


def look_up(req, rank):
    """The prefill rank that SGLang's decode engine asks for the KV of a request."""
    asks = types.SimpleNamespace(**{**vars(req), "disagg_prefill_dp_rank": rank})
    at = decode._bootstrap_addr(asks)
    manager = Manager()
    if not manager.try_ensure_parallel_info(at):
        return None
    info = manager.prefill_info_table[at]
    rank = decode.DecodePreallocQueue._resolve_prefill_dp_rank(types.SimpleNamespace(kv_manager=manager), asks)
    receiver = types.SimpleNamespace(bootstrap_addr=at)
    found = conn.CommonKVReceiver._get_bootstrap_info_from_server(receiver, rank, info.target_cp_ranks[0], info.target_tp_rank, info.target_pp_ranks[0])
    return {"rank": rank, "at": found and f"{found['rank_ip']}:{found['rank_port']}", "dp": info.dp_size}


for line in sys.stdin:
    req = protocol.CompletionRequest.model_validate(json.loads(line))
    print(json.dumps({"by_rank": look_up(req, req.disagg_prefill_dp_rank), "by_room": look_up(req, None)}), flush=True)
