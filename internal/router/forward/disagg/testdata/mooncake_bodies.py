"""vLLM's own MooncakeConnector as the other end (vllm ... v1.mooncake): its scheduler reads
the transfer parameters of both legs, and its bootstrap server answers the router.

The first line of the answer is the port of the bootstrap server, at which the ranks of the
arguments are registered. Then, for each line [leg, parameters] on stdin, what the scheduler
hands to its worker.
"""
import json
import sys
import types

import httpx
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as m
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils import MooncakeBootstrapServer
from vllm.v1.request import RequestStatus

server = MooncakeBootstrapServer("127.0.0.1", 0)
server.start()
port = getattr(server, "port", 0) or server.server.servers[0].sockets[0].getsockname()[1]
for rank, engine in enumerate(sys.argv[1:]):
    httpx.post(
        f"http://127.0.0.1:{port}/register",
        json={"engine_id": engine, "dp_rank": rank, "tp_rank": 0, "pp_rank": 0, "addr": f"tcp://127.0.0.1:{4000 + rank}"},
    ).raise_for_status()
print(json.dumps(port), flush=True)


def scheduler(producer):
    """A scheduler without an engine: what its constructor takes from the engine is set here."""
    s = object.__new__(m.MooncakeConnectorScheduler)
    s.is_kv_producer, s.is_kv_consumer = producer, not producer
    s._reqs_need_recv, s._reqs_need_send, s._reqs_not_processed = {}, {}, set()
    s._has_mamba = s._bounded_replay = s._is_hma_required = False
    s.get_sw_clipped_blocks = lambda blocks: [list(g) for g in blocks]
    return s


blocks = types.SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: ([1, 2, 3],))
for line in sys.stdin:
    leg, params = json.loads(line)
    s, got = scheduler(leg == "prefill"), {}
    request = types.SimpleNamespace(request_id="r", kv_transfer_params=params, prompt_token_ids=list(range(48)), num_prompt_tokens=48)
    got["fetches"], got["async"] = s.get_num_new_matched_tokens(request, 16)
    s.update_state_after_alloc(request, blocks, got["fetches"])
    meta = s.build_connector_meta(None)
    for engine, pulls in meta.reqs_to_recv.items():
        for pull in pulls.values():
            got |= {"engine": engine, "server": pull.remote_bootstrap_addr, "transfer": pull.transfer_id}
    for transfer, _ in meta.reqs_to_send.values():
        got["transfer"] = transfer
    if leg == "prefill":
        # An answer that ended by length keeps its blocks, one that ended by itself does not.
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        got["keeps"], got["gives"] = s.request_finished(request, ([1, 2, 3],))
        request.status = RequestStatus.FINISHED_STOPPED
        got["keeps_stopped"], _ = s.request_finished(request, ([1, 2, 3],))
    print(json.dumps(got), flush=True)
server.shutdown()
