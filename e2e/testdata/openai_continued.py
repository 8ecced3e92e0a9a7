"""Reads streams with the OpenAI library while the engine behind them is killed.

For each kind of stream: one undisturbed, and one of the same request. After its
first text the name of its worker goes to standard output; the rest is read once
there is a line on standard input. Exits 1 on a surprise.
"""

import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
model = client.models.list().data[0].id
TOKENS = 120


def seen(stream, begun=None):
    """What an application makes of a stream, all of which must be of one answer."""
    text, usage, ids, created, roles, finish = "", [], set(), set(), [], []
    for chunk in stream:
        ids.add(chunk.id)
        created.add(chunk.created)
        usage += [chunk.usage] if chunk.usage else []
        for c in chunk.choices:
            piece = c.text if chunk.object == "text_completion" else c.delta.content
            roles += [c.delta.role] if chunk.object != "text_completion" and c.delta.role else []
            finish += [c.finish_reason] if c.finish_reason else []
            text += piece or ""
            assert not (c.model_extra or {}).get("token_ids"), chunk
        if text and begun:
            begun()
            begun = None
    assert len(ids) == 1 and len(created) == 1, (ids, created)
    assert finish == ["length"], finish
    assert len(usage) == 1 and usage[0].completion_tokens == TOKENS, usage
    return text, roles, usage[0].prompt_tokens, usage[0].total_tokens


def chat(raw):
    return raw.chat.completions.with_raw_response.create(
        model=model, max_completion_tokens=TOKENS, temperature=0, stream=True, stream_options={"include_usage": True},
        extra_body={"ignore_eos": True}, messages=[{"role": "user", "content": "Tell me about the wide river."}])


def completion(raw):
    return raw.completions.with_raw_response.create(
        model=model, max_tokens=TOKENS, temperature=0, stream=True, stream_options={"include_usage": True},
        extra_body={"ignore_eos": True}, prompt="The river was wide, and on its other side they saw")


for ask in (chat, completion):
    want = seen(ask(client).parse())
    assert want[0] and want[1] == (["assistant"] if ask is chat else []), want
    answer = ask(client)

    def begun():
        print(answer.headers["x-dynctl-worker"], flush=True)
        sys.stdin.readline()

    got = seen(answer.parse(), begun)
    assert got == want, (got, want)
    print("ok", answer.headers["x-dynctl-decision"], flush=True)
