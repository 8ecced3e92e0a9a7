"""Start vLLM engines quickly: import vLLM once, and fork.

A start of vLLM on a CPU is three Python processes that import the same modules
one after the other. What is forked here has them. Standard input has a line of
JSON for each engine: its arguments after "vllm", what its environment has
besides, and the file of its log; the answer is a line with its process id, which
is that of its process group. At the end of the input all are killed.
"""

import json
import multiprocessing
import os
import signal
import sys

context = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)

import vllm.entrypoints.cli.main  # noqa: E402
import vllm.entrypoints.openai.api_server  # noqa: E402, F401
import vllm.v1.engine.core  # noqa: E402, F401
import vllm.v1.executor.multiproc_executor  # noqa: E402, F401
import vllm.v1.worker.cpu_worker  # noqa: E402, F401


def start(engine):
    """Runs in the child, and does not return."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(engine["env"])
    log = os.open(engine["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for fd, to in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(to, fd)
    sys.argv = ["vllm", *engine["args"]]
    sys.exit(vllm.entrypoints.cli.main.main())


def send(group, number):
    """Reports whether there was such a group."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
print("ready", flush=True)
groups = []
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        start(json.loads(line))
    groups = [g for g in groups if send(g, 0)] + [pid]
    print(pid, flush=True)
for group in groups:
    send(group, signal.SIGKILL)
