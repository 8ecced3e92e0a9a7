"""A small engine for uvicorn, the HTTP and TLS server that real engines run in."""

import json

MODEL = "over-tls"


async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    body = b""
    while True:
        part = await receive()
        body += part.get("body", b"")
        if not part.get("more_body"):
            break
    status, kind, out = 200, b"application/json", [b"{}"]
    if scope["path"] == "/v1/models":
        out = [json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": 2048}]}).encode()]
    elif scope["path"] == "/version":
        out = [b'{"version": "0.32.0"}']
    elif scope["path"] == "/v1/completions":
        asked = json.loads(body)
        choice = {"index": 0, "text": scope["scheme"] + " ", "finish_reason": None}
        if asked.get("stream"):
            kind = b"text/event-stream"
            event = {"id": "1", "object": "text_completion", "model": MODEL, "choices": [choice]}
            out = [b"data: " + json.dumps(event).encode() + b"\n\n"] * 3 + [b"data: [DONE]\n\n"]
        else:
            out = [json.dumps({"id": "1", "object": "text_completion", "model": MODEL, "choices": [choice]}).encode()]
    elif scope["path"] not in ("/health", "/ping"):
        status = 404
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
    for part in out:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
