"""Checks of litellm."""

import asyncio
import json

import litellm
from checking import DEMO, QUESTION, SCRIPTED, URL, WEATHER, WEATHER_TOOL, check, main, raises

litellm.suppress_debug_info = True
USER = [{"role": "user", "content": QUESTION}]
PARIS_MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
HERE = {"api_base": f"{URL}/v1", "api_key": "any", "num_retries": 0, "timeout": 60}


def chat(model=f"hosted_vllm/{DEMO}", **fields):
    return litellm.completion(**(HERE | {"model": model, "messages": USER, "max_tokens": 24} | fields))


@check
def chat_whole():
    answer = chat()
    assert answer.choices[0].message.content
    assert answer.usage.total_tokens > 0


@check
def chat_as_openai():
    assert chat(model=f"openai/{DEMO}").choices[0].message.content


@check
def chat_stream():
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chat(stream=True))
    assert text


@check
def stream_usage():
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    assert any(getattr(chunk, "usage", None) for chunk in chunks)


@check
async def chat_async():
    answers = await asyncio.gather(
        *(litellm.acompletion(**HERE, model=f"hosted_vllm/{DEMO}", messages=USER, max_tokens=8) for _ in range(4))
    )
    assert all(answer.choices[0].message.content for answer in answers)


@check
def json_schema():
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": WEATHER}}
    assert list(json.loads(chat(response_format=schema, max_tokens=120).choices[0].message.content)) == ["city"]


@check
def json_object():
    choice = chat(response_format={"type": "json_object"}, max_tokens=300, temperature=0).choices[0]
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


@check
def tool_auto():
    choice = chat(f"hosted_vllm/{SCRIPTED}", tools=[WEATHER_TOOL], messages=PARIS_MESSAGES, max_tokens=200).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris"}


@check
def tool_loop_stream():
    chunks = list(
        chat(f"hosted_vllm/{SCRIPTED}", tools=[WEATHER_TOOL], messages=PARIS_MESSAGES, max_tokens=200, stream=True)
    )
    first = litellm.stream_chunk_builder(chunks, messages=PARIS_MESSAGES).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "SUNNY-21"}
    messages = [*PARIS_MESSAGES, first.model_dump(exclude_none=True), result]
    reply = chat(f"hosted_vllm/{SCRIPTED}", tools=[WEATHER_TOOL], messages=messages, max_tokens=200).choices[0]
    assert "sunny" in reply.message.content


@check
def tool_required():
    choice = chat(tools=[WEATHER_TOOL], tool_choice="required", messages=PARIS_MESSAGES, max_tokens=120).choices[0]
    assert "city" in json.loads(choice.message.tool_calls[0].function.arguments)


@check
def logprobs():
    assert chat(logprobs=True, top_logprobs=2, max_tokens=4).choices[0].logprobs.content[0].top_logprobs


@check
def reasoning():
    message = chat(reasoning_effort="low", max_tokens=200, temperature=0).choices[0].message
    assert message.reasoning_content
    assert "</think>" not in (message.content or "")


@check
def text_completion():
    answer = litellm.text_completion(**HERE, model=f"hosted_vllm/{DEMO}", prompt="import os\n", max_tokens=8)
    assert answer.choices[0].text


@check
def embedding():
    answer = litellm.embedding(**HERE, model=f"hosted_vllm/{DEMO}", input=["one", "two"])
    assert len(answer.data) == 2


@check
def responses():
    answer = litellm.responses(**HERE, model=f"openai/{DEMO}", input=QUESTION, max_output_tokens=24)
    assert answer.output


@check
def messages_of_anthropic():
    fields = HERE | {"model": f"anthropic/{DEMO}", "messages": USER, "max_tokens": 24, "api_base": URL}
    assert litellm.completion(**fields).choices[0].message.content


@check
def too_long_prompt():
    long = [{"role": "user", "content": "word " * 9000}]
    raises(litellm.ContextWindowExceededError, lambda: chat(messages=long))


@check
def unknown_model():
    raises(litellm.NotFoundError, lambda: chat("hosted_vllm/gpt-nothing"))


if __name__ == "__main__":
    main()
