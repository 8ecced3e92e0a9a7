#!/usr/bin/env python3
"""CPU of a request of 1 KB and of a paced streamed event over TLS: dynctl with API keys
beside nginx, in front of the same stand-in engines, round by round in turns.

    scripts/tls-cpu.py [--dynctl bin/dynctl] [--nginx nginx] [--rounds 5] [--seconds 3]

It needs Python 3.11, OpenSSL's command and nginx; it listens on loopback only. Each
round measures both, in changing order, by what /proc says that their processes used,
divided by what the client got. The medians are printed with their range, and the ratio
of dynctl to nginx with the goal of 3. Other work on the machine makes both dearer: run
it where there is none, and say so where there was.
"""
import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time

CONNECTIONS = 32
STREAMS = 64
EVERY = 0.02  # seconds between two events of a stream
TICK = os.sysconf("SC_CLK_TCK")
PROMPT = "x" * 900
EVENT = b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" word","finish_reason":null}]}\n\n'
ANSWER = json.dumps({"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [
    {"index": 0, "text": "word " * 160, "finish_reason": "stop"}], "usage": {"prompt_tokens": 225, "completion_tokens": 160, "total_tokens": 385}}).encode()
PAGES = {
    b"/health": b"", b"/version": b'{"version":"0.32.0"}',
    b"/v1/models": b'{"object":"list","data":[{"id":"m","object":"model","max_model_len":32768}]}',
}


def ports(n):
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    found = [s.getsockname()[1] for s in taken]
    for s in taken:
        s.close()
    return found


async def message(reader):
    """One HTTP/1.1 head and its body by length."""
    head = await reader.readuntil(b"\r\n\r\n")
    found = re.search(rb"(?i)content-length: *(\d+)", head)
    return head, await reader.readexactly(int(found[1])) if found else b""


async def engine(reader, writer):
    """What an engine answers that has nothing to compute."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head, body = await message(reader)
            path = head.split(b" ", 2)[1]
            if path == b"/v1/completions" and b'"stream":true' in body:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
                chunk = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
                while True:
                    writer.write(chunk)
                    await writer.drain()
                    await asyncio.sleep(EVERY)
            known = path in PAGES or path == b"/v1/completions"
            text = ANSWER if path == b"/v1/completions" else PAGES.get(path, b"{}")
            writer.write(b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (b"200 OK" if known else b"404 Not Found", len(text), text))
            await writer.drain()
    writer.close()


def engines(port):
    async def serve():
        server = await asyncio.start_server(engine, "127.0.0.1", port, limit=1 << 20)
        await server.serve_forever()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        asyncio.run(serve())
        os._exit(0)
    return pid


def cpu(pid):
    """Seconds that a process and its children have used."""
    total = 0
    for p in [pid, *children(pid)]:
        fields = pathlib.Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICK


def children(pid):
    return [int(c) for c in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def request(key, stream):
    body = json.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 160, **({"stream": True} if stream else {})}, separators=(",", ":")).encode()
    return (f"POST /v1/completions HTTP/1.1\r\nHost: router.test\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n").encode() + body


async def load(port, context, key, seconds, pid, stream):
    """µs of the router's CPU for each request, or each event."""
    count, stop = 0, False

    async def one():
        nonlocal count
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="router.test")
        try:
            what = request(key, stream)
            if stream:
                writer.write(what)
                head = await reader.readuntil(b"\r\n\r\n")
                assert b" 200 " in head.split(b"\r\n", 1)[0], head
                while not stop:
                    came = await reader.read(1 << 16)
                    count += came.count(b"data: ")
            while not stop and not stream:
                writer.write(what)
                head, body = await message(reader)
                assert b" 200 " in head.split(b"\r\n", 1)[0], head + body
                count += 1
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()

    tasks = [asyncio.create_task(one()) for _ in range(STREAMS if stream else CONNECTIONS)]
    await asyncio.sleep(0.5)  # handshakes are no part of it
    began, before = count, cpu(pid)
    await asyncio.sleep(seconds)
    n, used = count - began, cpu(pid) - before
    stop = True
    await asyncio.gather(*tasks)
    assert n > 0
    return 1e6 * used / n


def ready(port, context):
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            with socket.create_connection(("127.0.0.1", port), timeout=2) as raw, context.wrap_socket(raw, server_hostname="router.test") as s:
                s.sendall(b"GET /readyz HTTP/1.1\r\nHost: router.test\r\nConnection: close\r\n\r\n")
                head = s.recv(1000)
                if b" 200 " in head or b" 404 " in head:
                    return
        time.sleep(0.1)
    sys.exit(f"nobody is ready at port {port}")


NGINX = """
worker_processes 1; daemon off; pid {dir}/nginx.pid; error_log {dir}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy;
  fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
  upstream engines {{ server 127.0.0.1:{engine}; keepalive 128; }}
  server {{
    listen 127.0.0.1:{port} ssl; ssl_certificate {dir}/cert.pem; ssl_certificate_key {dir}/key.pem;
    ssl_protocols TLSv1.2 TLSv1.3; keepalive_requests 1000000;
    location / {{ proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }}
  }}
}}
"""


async def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--dynctl", default="bin/dynctl")
    options.add_argument("--nginx", default="nginx")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=3)
    o = options.parse_args()
    engine_port, nginx_port, data, admin = ports(4)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as end:
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=router.test",
                        "-addext", "subjectAltName=DNS:router.test", "-keyout", f"{folder}/key.pem", "-out", f"{folder}/cert.pem"], check=True, capture_output=True)
        key = subprocess.run([o.dynctl, "keys", "new", "bench", "--file", f"{folder}/keys.yaml"], check=True, capture_output=True, text=True).stdout.strip()
        pathlib.Path(f"{folder}/nginx.conf").write_text(NGINX.format(dir=folder, engine=engine_port, port=nginx_port))
        pid = engines(engine_port)
        end.callback(os.waitpid, pid, 0)
        end.callback(os.kill, pid, signal.SIGKILL)

        def start(*command):
            p = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            end.callback(p.wait)
            end.callback(p.terminate)
            return p.pid

        context = ssl.create_default_context(cafile=f"{folder}/cert.pem")
        pids = {
            "nginx": (start(o.nginx, "-p", folder, "-c", f"{folder}/nginx.conf"), nginx_port),
            "dynctl": (start(o.dynctl, "serve", "--listen", f"127.0.0.1:{data}", "--admin-listen", f"127.0.0.1:{admin}", "--worker", f"http://127.0.0.1:{engine_port}",
                             "--tls-cert-file", f"{folder}/cert.pem", "--tls-key-file", f"{folder}/key.pem", "--api-keys-file", f"{folder}/keys.yaml"), data),
        }
        for _, port in pids.values():
            ready(port, context)
        seen = {(name, what): [] for name in pids for what in ("1 KB", "event")}
        for i in range(o.rounds):
            for what in ("1 KB", "event"):
                for name in (list(pids), list(reversed(pids)))[i % 2]:
                    pid_, port = pids[name]
                    seen[name, what].append(await load(port, context, key, o.seconds, pid_, what == "event"))
        print(f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors, {o.rounds} rounds of {o.seconds:g} s; µs of CPU, median (range)")
        for what in ("1 KB", "event"):
            medians = {name: statistics.median(seen[name, what]) for name in pids}
            cells = "  ".join(f"{name} {medians[name]:.1f} ({min(seen[name, what]):.1f}–{max(seen[name, what]):.1f})" for name in pids)
            ratio = medians["dynctl"] / medians["nginx"]
            print(f"{what:6} {cells}  ratio {ratio:.2f}, goal 3: {'met' if ratio <= 3 else 'missed'}")


if __name__ == "__main__":
    asyncio.run(main())
