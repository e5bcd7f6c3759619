"""/v1/responses by the schemas of Open Responses (openresponses.org), where no field that is required may lack."""

import json
import typing

import httpx
import openresponses_types.types as schemas
from checking import DEMO, QUESTION, SCRIPTED, URL, WEATHER, check, main

PATH = f"{URL}/v1/responses"
TOOL = {"type": "function", "name": "get_weather", "parameters": WEATHER}
PARIS = "What is the weather in Paris?"
RENAMED = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
}
"""Events that OpenAI's own clients know by another name."""


def events_by_type():
    """From an event's type to its schema."""
    models = [model for name, model in vars(schemas).items() if name.endswith("StreamingEvent")]
    found = {}
    for model in models:
        kind = model.model_fields["type"].annotation
        values = typing.get_args(kind) or [member.value for member in kind]
        found |= dict.fromkeys(values, model)
    return found


EVENTS = events_by_type()


def send(**fields):
    answer = httpx.post(PATH, json={"model": DEMO, "input": QUESTION} | fields, timeout=60)
    assert answer.status_code == 200, answer.text
    schemas.ResponseResource.model_validate(answer.json())
    return answer.json()


def stream(**fields):
    answer = httpx.post(PATH, json={"model": DEMO, "input": QUESTION, "stream": True} | fields, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
    for number, event in enumerate(events):
        kind = RENAMED.get(event["type"], event["type"])
        EVENTS[kind].model_validate(event | {"type": kind})
        assert event["sequence_number"] == number
    return events


@check
def whole():
    assert send(max_output_tokens=200)["output"][0]["content"][0]["text"]


@check
def cut_off():
    response = send(max_output_tokens=3)
    assert (response["status"], response["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")


@check
def streamed():
    events = stream(max_output_tokens=16)
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] in ("response.completed", "response.incomplete")


@check
def system_prompt_and_turns():
    turns = [("system", "Be brief."), ("user", "My name is Alice."), ("assistant", "Hello Alice."), ("user", QUESTION)]
    items = [{"type": "message", "role": role, "content": text} for role, text in turns]
    assert send(input=items, max_output_tokens=16)["output"]


@check
def thinking():
    calls = {"reasoning": {"effort": "low"}, "max_output_tokens": 400}
    assert send(**calls)["output"][0]["type"] == "reasoning"
    kinds = {event["item"]["type"] for event in stream(**calls) if event["type"] == "response.output_item.added"}
    assert "reasoning" in kinds


@check
def tool_called():
    response = send(model=SCRIPTED, input=PARIS, tools=[TOOL])
    assert [item["type"] for item in response["output"]] == ["message", "function_call"]


@check
def tool_called_in_a_stream():
    kinds = [event["type"] for event in stream(model=SCRIPTED, input=PARIS, tools=[TOOL])]
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= set(kinds)


@check
def in_the_background():
    response = send(background=True, max_output_tokens=4)
    assert response["status"] == "queued"
    kept = httpx.get(f"{PATH}/{response['id']}", timeout=60).json()
    schemas.ResponseResource.model_validate(kept)


if __name__ == "__main__":
    main()
