#!/usr/bin/env python3
"""Writes libzmq-<version>-{pub,sub}.hex here: both directions of one link
between a PUB (heartbeats every 150 ms) and a SUB of libzmq, in hex.

Needs pyzmq. The SUB takes topics kv and load and later cancels load; the PUB
sends six messages to them and one to nobody.
"""

import pathlib
import socket
import struct
import threading
import time

import zmq

ctx = zmq.Context()
pub = ctx.socket(zmq.PUB)
pub.setsockopt(zmq.HEARTBEAT_IVL, 150)
port = pub.bind_to_random_port("tcp://127.0.0.1")
proxy = socket.create_server(("127.0.0.1", 0))
said = {"pub": b"", "sub": b""}


def pump(src, dst, who):
    while data := src.recv(65536):
        said[who] += data
        dst.sendall(data)


def accept():
    sub_side, _ = proxy.accept()
    pub_side = socket.create_connection(("127.0.0.1", port))
    threading.Thread(target=pump, args=(sub_side, pub_side, "sub"), daemon=True).start()
    threading.Thread(target=pump, args=(pub_side, sub_side, "pub"), daemon=True).start()


threading.Thread(target=accept, daemon=True).start()
sub = ctx.socket(zmq.SUB)
sub.subscribe("kv")
sub.subscribe("load")
sub.connect("tcp://127.0.0.1:%d" % proxy.getsockname()[1])
time.sleep(1)
for i, n in enumerate([0, 1, 200, 255, 256, 1500]):
    pub.send_multipart([b"kv@a" if i % 2 == 0 else b"load", struct.pack(">Q", i), bytes([i]) * n])
pub.send_multipart([b"other", b"x"])
time.sleep(0.5)
sub.unsubscribe("load")
time.sleep(0.3)
here = pathlib.Path(__file__).parent
for who, data in said.items():
    lines = [data[i : i + 32].hex() for i in range(0, len(data), 32)]
    (here / f"libzmq-{zmq.zmq_version()}-{who}.hex").write_text("\n".join(lines) + "\n")
