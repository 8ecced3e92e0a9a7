"""The event sockets of an engine on libzmq, driven over stdin by interop_test.go.

publisher.py bind            PUB binds, replay ROUTER beside it
publisher.py dial ENDPOINT   PUB connects to ENDPOINT

Commands, one a line: "add HEX SEND" keeps a payload and publishes it if SEND is 1,
"restart" closes the sockets, forgets everything and opens them again.
"""
import sys
import threading

import zmq

mode = sys.argv[1]
log = []
lock = threading.Lock()
END = b"\xff" * 8


def serve(router, stop):
    while not stop.is_set():
        if not router.poll(20):
            continue
        frames = router.recv_multipart()
        if len(frames) != 3 or frames[1]:
            continue
        start = int.from_bytes(frames[2], "big")
        with lock:
            batches = list(enumerate(log))[start:]
        for seq, payload in batches:
            router.send_multipart([frames[0], b"", b"kv", seq.to_bytes(8, "big"), payload])
        router.send_multipart([frames[0], b"", b"", END, b""])
    router.close(0)


class Sockets:
    def __init__(self, pub_at, rep_at):
        self.ctx = ctx = zmq.Context()
        self.pub = ctx.socket(zmq.PUB)
        self.pub.set_hwm(100000)
        if mode == "bind":
            self.pub.bind(pub_at)
        else:
            self.pub.connect(sys.argv[2])
        router = ctx.socket(zmq.ROUTER)
        router.bind(rep_at)
        self.rep_at = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.pub_at = self.pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=serve, args=(router, self.stop))
        self.thread.start()

    def close(self):
        self.stop.set()
        self.thread.join()
        self.pub.close(0)
        self.ctx.term()  # returns when the ports are free


s = Sockets("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
print("ready", s.pub_at, s.rep_at, flush=True)
for line in sys.stdin:
    words = line.split()
    if words[0] == "add":
        payload = bytes.fromhex(words[1])
        with lock:
            seq = len(log)
            log.append(payload)
        if words[2] == "1":
            s.pub.send_multipart([b"kv", seq.to_bytes(8, "big"), payload])
    elif words[0] == "restart":
        s.close()
        with lock:
            log.clear()
        s = Sockets(s.pub_at, s.rep_at)
        print("restarted", flush=True)
s.close()
