"""Uses the Anthropic library as its documentation does; exits 1 on a surprise."""

import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
model = client.models.list().data[0].id
long = [{"role": "user", "content": "Tell me how a router chooses between local and remote prefill. " * 20}]

whole = client.messages.create(model=model, max_tokens=12, messages=long, temperature=0)
assert whole.content[0].text and whole.stop_reason == "max_tokens", whole
assert whole.usage.output_tokens == 12 and whole.usage.input_tokens > 100, whole.usage
print("message:", whole.content[0].text)

with client.messages.stream(model=model, max_tokens=12, messages=long, temperature=0, system="") as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == final.content[0].text and final.stop_reason == "max_tokens", final
assert final.usage.output_tokens == 12, final.usage
print("streamed:", text)

tool = {"name": "weather", "description": "The weather of a city.", "input_schema": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
asked = [{"role": "user", "content": "What is the weather in Paris?"}]
called = client.messages.create(
    model=model, max_tokens=64, tools=[tool], tool_choice={"type": "tool", "name": "weather"}, messages=asked)
use = next(b for b in called.content if b.type == "tool_use")
assert use.name == "weather" and "city" in use.input, called
print("tool use:", use.name, use.input)
answered = client.messages.create(model=model, max_tokens=8, tools=[tool], messages=asked + [
    {"role": "assistant", "content": [{"type": "tool_use", "id": use.id, "name": use.name, "input": use.input}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "Sunny."}]}])
assert answered.usage.output_tokens > 0, answered

with client.messages.stream(model=model, max_tokens=4000, messages=long) as stream:
    next(iter(stream.text_stream))
print("left a stream")

try:
    client.messages.create(model="no-such-model", max_tokens=4, messages=long)
    raise SystemExit("an unknown model was served")
except anthropic.NotFoundError as e:
    assert e.body["type"] == "error" and e.body["error"]["type"] == "not_found_error", e.body
    print("unknown model:", e.body["error"]["message"])
try:
    client.messages.create(model=model, max_tokens=-1, messages=long)
    raise SystemExit("a negative length was served")
except anthropic.BadRequestError as e:
    assert e.body["error"]["message"], e.body
    print("bad length:", e.body["error"]["message"])
