"""Uses LiteLLM as its documentation does; exits 1 on a surprise."""

import asyncio
import sys

import litellm

base = sys.argv[1]
long = [{"role": "user", "content": "Tell me how a router chooses between local and remote prefill. " * 20}]
tool = {"type": "function", "function": {
    "name": "weather", "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}


async def concurrent(provider, where):
    answers = await asyncio.gather(*(litellm.acompletion(
        model=provider + "/sim", api_base=where, api_key="none", max_tokens=6, messages=long) for _ in range(8)))
    assert all(a.usage.completion_tokens == 6 for a in answers), answers


for provider, where in [("openai", base + "/v1"), ("hosted_vllm", base + "/v1"), ("anthropic", base)]:
    common = {"model": provider + "/sim", "api_base": where, "api_key": "none", "num_retries": 0}
    answer = litellm.completion(max_tokens=12, messages=long, **common)
    assert answer.choices[0].message.content and answer.usage.completion_tokens == 12, answer
    chunks = list(litellm.completion(max_tokens=12, messages=long, stream=True, stream_options={"include_usage": True}, **common))
    whole = litellm.stream_chunk_builder(chunks, messages=long)
    assert whole.choices[0].message.content and whole.usage.completion_tokens == 12, whole
    called = litellm.completion(
        max_tokens=64, tools=[tool], tool_choice={"type": "function", "function": {"name": "weather"}},
        messages=[{"role": "user", "content": "What is the weather in Paris?"}], **common)
    assert called.choices[0].message.tool_calls[0].function.name == "weather", called
    asyncio.run(concurrent(provider, where))
    try:
        litellm.completion(messages=long, max_tokens=4, **{**common, "model": provider + "/no-such-model"})
        raise SystemExit("an unknown model was served")
    except litellm.NotFoundError as e:
        print(provider + ":", answer.choices[0].message.content, "|", str(e)[:160])
