"""Uses the OpenAI library as its documentation does; exits 1 on a surprise."""

import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
model = client.models.list().data[0].id
long = "Tell me how a router chooses between local and remote prefill. " * 20

chat = client.chat.completions.create(model=model, max_tokens=12, messages=[{"role": "user", "content": long}])
assert chat.choices[0].message.content, chat
assert chat.usage.completion_tokens == 12, chat.usage
print("chat:", chat.choices[0].message.content)

parts, usage = [], None
stream = client.chat.completions.create(
    model=model, max_tokens=12, stream=True, stream_options={"include_usage": True},
    messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": long}])
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        parts.append(chunk.choices[0].delta.content)
    usage = chunk.usage or usage
assert parts and usage and usage.completion_tokens == 12, (parts, usage)
print("streamed chat:", "".join(parts))

raw = client.chat.completions.with_raw_response.create(
    model=model, max_tokens=4, messages=[{"role": "user", "content": "Hi"}])
print("headers:", {k: v for k, v in raw.headers.items() if k.startswith("x-")})
assert raw.headers["x-dynctl-path"] == "local", raw.headers
assert raw.headers["x-request-id"]

tool = {"type": "function", "function": {
    "name": "weather", "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
called = client.chat.completions.create(
    model=model, max_tokens=64, tools=[tool], tool_choice={"type": "function", "function": {"name": "weather"}},
    messages=[{"role": "user", "content": "What is the weather in Paris?"}])
call = called.choices[0].message.tool_calls[0]
assert call.function.name == "weather", called
print("tool call:", call.function.name, call.function.arguments)

text = client.completions.create(model=model, prompt=long, max_tokens=8, temperature=0)
again = client.completions.create(model=model, prompt=long, max_tokens=8, temperature=0, stream=True)
assert "".join(c.choices[0].text for c in again if c.choices) == text.choices[0].text
print("completion:", text.choices[0].text)

ids = client.completions.create(model=model, prompt=list(range(100, 300)), max_tokens=4)
assert ids.usage.prompt_tokens == 200, ids.usage

vectors = client.embeddings.create(model=model, input=["one", "two"])
assert len(vectors.data) == 2 and len(vectors.data[0].embedding) > 0
print("embeddings:", len(vectors.data), "of", len(vectors.data[0].embedding))

response = client.responses.create(model=model, input="Say something.", max_output_tokens=8)
assert response.output_text, response
print("response:", response.output_text)

with client.chat.completions.create(
        model=model, max_tokens=4000, stream=True, messages=[{"role": "user", "content": long}]) as left:
    next(iter(left))
print("left a stream")

try:
    client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "Hi"}])
    raise SystemExit("an unknown model was served")
except openai.NotFoundError as e:
    assert e.code == "model_not_found", e
    print("unknown model:", e.message)
