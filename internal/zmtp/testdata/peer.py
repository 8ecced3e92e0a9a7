#!/usr/bin/env python3
"""A libzmq peer for the tests: one role per run, driven by lines on stdin.

It prints "ready <endpoint>" first. Roles:
  pub-bind ENDPOINT [HEARTBEAT_MS]     "send N SIZE [TOPIC]" publishes N messages, "quit"
  pub-connect ENDPOINT                 the same
  sub-connect ENDPOINT TOPIC [HB_MS]   prints "got TOPIC SEQ LEN" for each message
  sub-bind ENDPOINT TOPIC              the same
  router ENDPOINT                      answers replay requests as vLLM does
  dealer ENDPOINT                      "replay START": prints each answer in hex
Messages are TOPIC, sequence (8 bytes big endian), SIZE bytes.
"""

import struct
import sys
import threading

import zmq


def say(*words):
    print(*words, flush=True)


def main():
    role, endpoint, *rest = sys.argv[1:]
    ctx = zmq.Context()
    kind = {"pub": zmq.PUB, "sub": zmq.SUB, "router": zmq.ROUTER, "dealer": zmq.DEALER}[role.split("-")[0]]
    sock = ctx.socket(kind)
    sock.linger = 0
    sock.set_hwm(200000)
    if kind == zmq.SUB:
        sock.subscribe(rest.pop(0))
    if rest:
        sock.setsockopt(zmq.HEARTBEAT_IVL, int(rest[0]))
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10 * int(rest[0]))
        monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        def watch():
            monitor.recv_multipart()
            say("disconnected")
        threading.Thread(target=watch, daemon=True).start()
    if role in ("pub-bind", "sub-bind", "router"):
        sock.bind(endpoint)
        endpoint = sock.getsockopt_string(zmq.LAST_ENDPOINT)
    else:
        sock.connect(endpoint)
    say("ready", endpoint)

    if kind == zmq.SUB:
        def receive():
            while True:
                topic, seq, payload = sock.recv_multipart()
                say("got", topic.decode() or "-", struct.unpack(">Q", seq)[0], len(payload))
        threading.Thread(target=receive, daemon=True).start()
        sys.stdin.read()
    elif kind == zmq.PUB:
        seq = 0
        for line in sys.stdin:
            words = line.split()
            if words[0] == "quit":
                break
            topic = words[3].encode() if len(words) > 3 else b""
            for _ in range(int(words[1])):
                sock.send_multipart([topic, struct.pack(">Q", seq), bytes(int(words[2]))])
                seq += 1
    elif kind == zmq.ROUTER:
        def serve():
            while True:
                frames = sock.recv_multipart()
                if len(frames) != 3:
                    continue
                start = struct.unpack(">Q", frames[2])[0]
                for seq in range(start, 10):
                    sock.send_multipart([frames[0], b"", b"kv", struct.pack(">Q", seq), b"payload"])
                sock.send_multipart([frames[0], b"", b"", b"\xff" * 8, b""])
        threading.Thread(target=serve, daemon=True).start()
        sys.stdin.read()
    else:
        for line in sys.stdin:
            sock.send_multipart([b"", struct.pack(">Q", int(line.split()[1]))])
            while True:
                frames = sock.recv_multipart()
                say("answer", *[f.hex() or "-" for f in frames])
                if frames[-1] == b"":
                    break
    sys.stdout.flush()
    import os
    os._exit(0)


main()
