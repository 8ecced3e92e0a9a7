"""Uses LangChain's OpenAI and Anthropic models as its documentation does; exits 1 on a surprise."""

import sys

import openai
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

base = sys.argv[1]
long = "Tell me how a router chooses between local and remote prefill. " * 20


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return "Sunny in " + city


def check(name, chat, calls=True):
    answer = chat.invoke([SystemMessage("Be brief."), HumanMessage(long)])
    assert isinstance(answer, AIMessage) and answer.text and answer.usage_metadata["output_tokens"] == 12, answer
    total = None
    for chunk in chat.stream(long):
        total = chunk if total is None else total + chunk
    assert total.text and total.usage_metadata["output_tokens"] == 12, total
    batch = chat.batch(["one", "two", "three"])
    assert len(batch) == 3 and all(b.text for b in batch), batch
    if calls:
        tools = chat.bind_tools([weather], tool_choice="weather").bind(max_tokens=64)
        asked = HumanMessage("What is the weather in Paris?")
        called = tools.invoke([asked])
        assert [c["name"] for c in called.tool_calls] == ["weather"] and "city" in called.tool_calls[0]["args"], called
        result = ToolMessage(weather.invoke(called.tool_calls[0]["args"]), tool_call_id=called.tool_calls[0]["id"])
        assert chat.invoke([asked, called, result]).text
    stream = chat.bind(max_tokens=4000).stream(long)
    next(stream)
    stream.close()
    print(name + ":", answer.text)


check("ChatOpenAI", ChatOpenAI(base_url=base + "/v1", api_key="none", model="sim", max_tokens=12, max_retries=0, stream_usage=True))
check("ChatOpenAI over responses", ChatOpenAI(base_url=base + "/v1", api_key="none", model="sim", max_tokens=12, max_retries=0, use_responses_api=True), calls=False)
check("ChatAnthropic", ChatAnthropic(base_url=base, api_key="none", model="sim", max_tokens=12, max_retries=0))
vectors = OpenAIEmbeddings(base_url=base + "/v1", api_key="none", model="sim", check_embedding_ctx_length=False).embed_documents(["one", "two"])
assert len(vectors) == 2 and vectors[0], vectors
try:
    ChatOpenAI(base_url=base + "/v1", api_key="none", model="no-such-model", max_retries=0).invoke("Hi")
    raise SystemExit("an unknown model was served")
except openai.NotFoundError as e:
    print("unknown model:", e.body["message"])
