"""Checks of openai-python."""

import asyncio
import json

import openai
import pydantic
from checking import DEMO, QUESTION, SCRIPTED, URL, WEATHER, WEATHER_TOOL, check, main, raises

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0, timeout=60)
USER = [{"role": "user", "content": QUESTION}]
PARIS_MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
FORCED = {"type": "function", "function": {"name": "get_weather"}}
RESPONSES_TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "weather",
    "parameters": WEATHER,
    "strict": True,
}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


def chat(**fields):
    return client.chat.completions.create(**({"model": DEMO, "messages": USER, "max_tokens": 24} | fields))


@check
def chat_whole():
    answer = chat()
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@check
def chat_stream():
    chunks = list(chat(stream=True, temperature=0))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == chat(temperature=0).choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")


@check
def stream_usage():
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert all(c.usage is None for c in chunks[:-1])


@check
def several_choices():
    assert len(chat(n=3, temperature=1).choices) == 3


@check
def seed_repeats():
    assert (
        chat(seed=7, temperature=1).choices[0].message.content == chat(seed=7, temperature=1).choices[0].message.content
    )


@check
def stop_string():
    whole = chat(temperature=0).choices[0].message.content
    cut = chat(temperature=0, stop=[whole[5:8]]).choices[0]
    assert whole[5:8] not in cut.message.content
    assert cut.finish_reason == "stop"


@check
def logprobs():
    tokens = chat(logprobs=True, top_logprobs=3, temperature=0).choices[0].logprobs.content
    assert all(len(t.top_logprobs) == 3 and t.logprob <= 0 and bytes(t.bytes).decode(errors="replace") for t in tokens)


@check
def logit_bias():
    answer = chat(logit_bias={"50": 100}, max_tokens=3, temperature=0, logprobs=True)
    assert len({t.token for t in answer.choices[0].logprobs.content}) == 1


@check
def json_object():
    message = chat(response_format={"type": "json_object"}, max_tokens=300, temperature=0).choices[0]
    assert message.finish_reason == "length" or isinstance(json.loads(message.message.content), dict)


@check
def json_schema_strict():
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": WEATHER}}
    content = chat(response_format=schema, max_tokens=120).choices[0].message.content
    assert list(json.loads(content)) == ["city"]


@check
def chat_parse_pydantic():
    parsed = client.chat.completions.parse(model=DEMO, messages=USER, response_format=Person, max_tokens=200)
    assert isinstance(parsed.choices[0].message.parsed, Person)


@check
def tool_forced():
    choice = chat(tools=[WEATHER_TOOL], tool_choice=FORCED, messages=PARIS_MESSAGES, max_tokens=120).choices[0]
    call = choice.message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert "city" in json.loads(call.function.arguments)
    assert call.id.startswith("call_")
    assert call.type == "function"
    assert choice.finish_reason == "stop", "OpenAI's: a named tool ends with stop"


@check
def tool_required():
    choice = chat(tools=[WEATHER_TOOL], tool_choice="required", messages=PARIS_MESSAGES, max_tokens=120).choices[0]
    assert choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"


@check
def tool_auto():
    choice = chat(model=SCRIPTED, tools=[WEATHER_TOOL], messages=PARIS_MESSAGES, max_tokens=200).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content.strip() == "I look it up."
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris"}


@check
def tool_auto_stream():
    calls, text = {}, ""
    for chunk in chat(model=SCRIPTED, tools=[WEATHER_TOOL], messages=PARIS_MESSAGES, max_tokens=200, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, {"name": "", "arguments": ""})
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
    assert text.strip() == "I look it up."
    assert {i: (c["name"], json.loads(c["arguments"])) for i, c in calls.items()} == {
        0: ("get_weather", {"city": "Paris"})
    }


@check
def tool_calls_parallel():
    send = [{"role": "user", "content": "What is the weather in Oslo and Rome?"}]
    message = chat(model=SCRIPTED, tools=[WEATHER_TOOL], messages=send, max_tokens=300).choices[0].message
    assert [json.loads(c.function.arguments)["city"] for c in message.tool_calls] == ["Oslo", "Rome"]
    assert message.content is None
    assert len({c.id for c in message.tool_calls}) == 2


@check
def tool_result_is_answered():
    first = chat(model=SCRIPTED, tools=[WEATHER_TOOL], messages=PARIS_MESSAGES, max_tokens=200).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "SUNNY-21"}
    reply = chat(
        model=SCRIPTED, tools=[WEATHER_TOOL], messages=[*PARIS_MESSAGES, first, result], max_tokens=200
    ).choices[0]
    assert reply.finish_reason == "stop"
    assert "sunny" in reply.message.content
    assert not reply.message.tool_calls


@check
def tool_choice_none():
    choice = chat(tools=[WEATHER_TOOL], tool_choice="none", messages=PARIS_MESSAGES).choices[0]
    assert not choice.message.tool_calls
    assert "<tool_call>" not in (choice.message.content or "")


@check
def reasoning_is_apart():
    answer = chat(reasoning_effort="low", max_tokens=200, temperature=0)
    message = answer.choices[0].message
    assert message.reasoning_content
    assert "</think>" not in (message.content or "")
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0


@check
def wrong_reasoning_effort():
    assert "reasoning_effort" in str(raises(openai.BadRequestError, lambda: chat(reasoning_effort="banana")))


@check
def unknown_model():
    assert raises(openai.NotFoundError, lambda: chat(model="gpt-nothing")).code == "model_not_found"


@check
def too_long_prompt():
    long = [{"role": "user", "content": "word " * 9000}]
    assert raises(openai.BadRequestError, lambda: chat(messages=long)).code == "context_length_exceeded"


@check
def completion():
    answer = client.completions.create(model=DEMO, prompt="import os\n", max_tokens=8, temperature=0)
    assert answer.choices[0].text
    assert answer.id.startswith("cmpl-")


@check
def completion_echo_logprobs():
    answer = client.completions.create(model=DEMO, prompt="import os\n", max_tokens=0, echo=True, logprobs=1)
    found = answer.choices[0].logprobs
    assert answer.choices[0].text == "import os\n"
    assert found.token_logprobs[0] is None
    assert len(found.tokens) == answer.usage.prompt_tokens


@check
def embeddings():
    answer = client.embeddings.create(model=DEMO, input=["one", "two"])
    assert len(answer.data) == 2
    assert len(answer.data[0].embedding) == len(answer.data[1].embedding) > 0
    plain = client.embeddings.create(model=DEMO, input="one", encoding_format="float").data[0].embedding
    assert max(abs(a - b) for a, b in zip(plain, answer.data[0].embedding, strict=True)) < 1e-6


@check
def models():
    names = [model.id for model in client.models.list()]
    assert DEMO in names
    assert client.models.retrieve(DEMO).id == DEMO


@check
def responses_whole():
    answer = client.responses.create(model=DEMO, input=QUESTION, max_output_tokens=24)
    assert answer.output_text
    assert answer.id.startswith("resp_")
    assert answer.usage.output_tokens > 0
    assert answer.status in ("completed", "incomplete")


@check
def responses_stream():
    text, kinds = "", []
    for event in client.responses.create(model=DEMO, input=QUESTION, max_output_tokens=24, stream=True):
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert text


@check
def responses_stream_helper():
    with client.responses.stream(model=SCRIPTED, input=QUESTION) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text


@check
def responses_previous():
    first = client.responses.create(model=DEMO, input=QUESTION, max_output_tokens=16)
    second = client.responses.create(
        model=DEMO, input="And os.path.split?", previous_response_id=first.id, max_output_tokens=16
    )
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens


@check
def responses_retrieve_items_delete():
    made = client.responses.create(model=DEMO, input=QUESTION, max_output_tokens=16)
    assert client.responses.retrieve(made.id).output_text == made.output_text
    assert QUESTION in client.responses.input_items.list(made.id).data[0].content[0].text
    client.responses.delete(made.id)
    raises(openai.NotFoundError, lambda: client.responses.retrieve(made.id))


@check
def responses_background():
    made = client.responses.create(model=DEMO, input=QUESTION, max_output_tokens=16, background=True)
    assert made.status in ("queued", "in_progress", "completed", "incomplete")
    for _ in range(300):
        seen = client.responses.retrieve(made.id)
        if seen.status not in ("queued", "in_progress"):
            break
        import time

        time.sleep(0.1)
    assert seen.status in ("completed", "incomplete")
    assert seen.output_text


@check
def responses_parse():
    parsed = client.responses.parse(model=DEMO, input=QUESTION, text_format=Person, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Person)


@check
def responses_tool_loop():
    send = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.responses.create(model=SCRIPTED, input=send, tools=[RESPONSES_TOOL])
    call = next(item for item in first.output if item.type == "function_call")
    assert call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Paris"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "SUNNY-21"}
    second = client.responses.create(
        model=SCRIPTED, input=[result], previous_response_id=first.id, tools=[RESPONSES_TOOL]
    )
    assert "sunny" in second.output_text


@check
def responses_lost():
    error = raises(
        openai.BadRequestError,
        lambda: client.responses.create(model=DEMO, input="x", previous_response_id="resp_" + "0" * 32),
    )
    assert error.code == "previous_response_not_found"


@check
async def async_together():
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0) as several:
        answers = await asyncio.gather(
            *(several.chat.completions.create(model=DEMO, messages=USER, max_tokens=8, temperature=0) for _ in range(6))
        )
    assert len({a.choices[0].message.content for a in answers}) == 1


@check
def run_tools_stream_helper():
    with client.chat.completions.stream(
        model=SCRIPTED,
        messages=PARIS_MESSAGES,
        tools=[{**WEATHER_TOOL, "function": {**WEATHER_TOOL["function"], "strict": True}}],
    ) as stream:
        for _ in stream:
            pass
        call = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert call.function.parsed_arguments == {"city": "Paris"}


@check
def with_raw_response():
    raw = client.chat.completions.with_raw_response.create(model=DEMO, messages=USER, max_tokens=4)
    assert raw.headers["x-request-id"]
    assert raw.parse().choices


if __name__ == "__main__":
    main()
