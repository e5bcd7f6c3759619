"""Checks of anthropic's client."""

from typing import Literal

import anthropic
import pydantic
from checking import DEMO, QUESTION, SCRIPTED, URL, WEATHER, check, main, raises

client = anthropic.Anthropic(base_url=URL, api_key="any", max_retries=0, timeout=60)
USER = [{"role": "user", "content": QUESTION}]
PARIS_MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {"name": "get_weather", "description": "weather", "input_schema": WEATHER}


class Weather(pydantic.BaseModel):
    """Of choices alone: the client takes limits of length out of a schema, and the demo model knows no end."""

    city: Literal["Oslo", "Rome"]
    sky: Literal["rain", "sun"]


def send(**fields):
    return client.messages.create(**({"model": DEMO, "messages": USER, "max_tokens": 24} | fields))


@check
def message():
    answer = send()
    assert answer.type == "message"
    assert answer.role == "assistant"
    assert answer.id.startswith("msg_")
    assert answer.content[0].type == "text"
    assert answer.stop_reason in ("end_turn", "max_tokens")
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens > 0
    assert answer.usage.output_tokens > 0


@check
def system_blocks():
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert send(system=blocks).content[0].text
    assert send(system="Be brief.").content[0].text


@check
def stream():
    with client.messages.stream(model=DEMO, messages=USER, max_tokens=24) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == final.content[0].text
    assert final.stop_reason in ("end_turn", "max_tokens")


@check
def stream_events_in_order():
    kinds = [event.type for event in send(stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") > 0


@check
def stop_sequence():
    whole = send(extra_body={"temperature": 0}).content[0].text
    cut = send(extra_body={"temperature": 0}, stop_sequences=[whole[5:8]])
    assert cut.stop_reason == "stop_sequence"
    assert cut.stop_sequence == whole[5:8]


@check
def tool_use():
    answer = send(model=SCRIPTED, messages=PARIS_MESSAGES, tools=[TOOL], max_tokens=300)
    use = next(block for block in answer.content if block.type == "tool_use")
    assert answer.stop_reason == "tool_use"
    assert use.input == {"city": "Paris"}
    assert use.id.startswith("toolu_")


@check
def tool_use_stream():
    with client.messages.stream(model=SCRIPTED, messages=PARIS_MESSAGES, tools=[TOOL], max_tokens=300) as events:
        final = events.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use"]
    assert final.content[1].input == {"city": "Paris"}


@check
def tool_result():
    first = send(model=SCRIPTED, messages=PARIS_MESSAGES, tools=[TOOL], max_tokens=300)
    use = next(block for block in first.content if block.type == "tool_use")
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "SUNNY-21"}]}
    messages = [*PARIS_MESSAGES, {"role": "assistant", "content": first.content}, result]
    answer = send(model=SCRIPTED, messages=messages, tools=[TOOL], max_tokens=300)
    assert answer.stop_reason == "end_turn"
    assert "sunny" in answer.content[0].text


@check
def tool_choice_any():
    answer = send(messages=PARIS_MESSAGES, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=120)
    assert answer.stop_reason == "tool_use"
    assert "city" in answer.content[-1].input


@check
def thinking():
    answer = send(thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=1500)
    assert answer.content[0].type == "thinking"
    assert answer.content[0].thinking
    assert all("</think>" not in block.text for block in answer.content if block.type == "text")


@check
def count_tokens():
    counted = client.messages.count_tokens(model=DEMO, messages=USER).input_tokens
    usage = send().usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


@check
def parse_pydantic():
    parsed = client.messages.parse(model=DEMO, messages=USER, max_tokens=200, output_format=Weather)
    assert isinstance(parsed.parsed_output, Weather)


@check
def models():
    assert DEMO in [model.id for model in client.models.list()]


@check
def error_shape():
    error = raises(anthropic.BadRequestError, lambda: send(max_tokens=-1))
    assert error.body["type"] == "error"
    assert error.body["error"]["type"] == "invalid_request_error"
    missing = raises(anthropic.NotFoundError, lambda: send(model="claude-nothing"))
    assert missing.body["error"]["type"] == "not_found_error"


@check
async def tool_runner():
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="any", max_retries=0, timeout=60) as several:
        calls = []

        @anthropic.beta_async_tool
        async def get_weather(city: str) -> str:
            """The weather."""
            calls.append(city)
            return "SUNNY-21"

        runner = several.beta.messages.tool_runner(
            model=SCRIPTED, max_tokens=300, tools=[get_weather], messages=PARIS_MESSAGES
        )
        final = await runner.until_done()
    assert calls == ["Paris"]
    assert "sunny" in final.content[0].text


if __name__ == "__main__":
    main()
