"""Checks of langchain-openai."""

import json
from typing import Literal

import pydantic
from checking import DEMO, QUESTION, SCRIPTED, URL, check, main
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings


class Person(pydantic.BaseModel):
    """Somebody."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


@tool
def get_weather(city: str) -> str:
    """The weather."""
    return "SUNNY-21"


@tool
def get_sky(city: Literal["Oslo", "Rome"]) -> str:
    """The sky; of choices alone, for the demo model knows no end of a string."""
    return "sun"


def chat(model=DEMO, **fields):
    options = {"model": model, "base_url": f"{URL}/v1", "api_key": "any", "max_retries": 0, "timeout": 60} | fields
    return ChatOpenAI(**options)


@check
def invoke():
    answer = chat(max_tokens=24).invoke(QUESTION)
    assert answer.content
    assert answer.usage_metadata["total_tokens"] > 0


@check
def stream():
    chunks = list(chat(max_tokens=24, stream_usage=True).stream(QUESTION))
    assert "".join(chunk.text for chunk in chunks)
    assert any(chunk.usage_metadata for chunk in chunks)


@check
def batch():
    assert all(answer.content for answer in chat(max_tokens=8).batch([QUESTION, "What does len do?"]))


@check
async def ainvoke():
    assert (await chat(max_tokens=8).ainvoke(QUESTION)).content


@check
def structured_json_schema():
    found = chat(max_tokens=200).with_structured_output(Person, method="json_schema").invoke(QUESTION)
    assert isinstance(found, Person)


@check
def structured_function_calling():
    found = chat(max_tokens=200).with_structured_output(Person, method="function_calling").invoke(QUESTION)
    assert isinstance(found, Person)


@check
def structured_json_mode():
    found = chat(SCRIPTED).with_structured_output(Person, method="json_mode").invoke("Ada is how old? JSON.")
    assert found == Person(name="Ada", age=36)


@check
def tools_loop():
    model = chat(SCRIPTED, max_tokens=200).bind_tools([get_weather])
    messages = [HumanMessage("What is the weather in Paris?")]
    call = model.invoke(messages)
    assert [c["args"] for c in call.tool_calls] == [{"city": "Paris"}]
    answers = [ToolMessage(get_weather.invoke(c), tool_call_id=c["id"]) for c in call.tool_calls]
    assert "sunny" in model.invoke([*messages, call, *answers]).content


@check
def tools_stream():
    whole = None
    for chunk in chat(SCRIPTED, max_tokens=200).bind_tools([get_weather]).stream("What is the weather in Paris?"):
        whole = chunk if whole is None else whole + chunk
    assert [c["args"] for c in whole.tool_calls] == [{"city": "Paris"}]


@check
def tool_any():
    model = chat(max_tokens=120).bind_tools([get_sky], tool_choice="any", strict=True)
    call = model.invoke("Weather?").tool_calls[0]
    assert call["name"] == "get_sky"
    assert call["args"]["city"] in ("Oslo", "Rome")


@check
def logprobs():
    assert chat(max_tokens=4, logprobs=True).invoke(QUESTION).response_metadata["logprobs"]["content"]


@check
def responses_api():
    answer = chat(use_responses_api=True, max_tokens=24).invoke(QUESTION)
    assert answer.text


@check
def responses_api_tools():
    model = chat(SCRIPTED, use_responses_api=True).bind_tools([get_weather])
    messages = [HumanMessage("What is the weather in Paris?")]
    call = model.invoke(messages)
    assert [c["args"] for c in call.tool_calls] == [{"city": "Paris"}]
    answers = [ToolMessage("SUNNY-21", tool_call_id=c["id"]) for c in call.tool_calls]
    assert "sunny" in model.invoke([*messages, call, *answers]).text


@check
def responses_api_stream():
    chunks = list(chat(use_responses_api=True, max_tokens=24).stream(QUESTION))
    assert "".join(chunk.text for chunk in chunks)


@check
def text_completion():
    model = OpenAI(model=DEMO, base_url=f"{URL}/v1", api_key="any", max_tokens=8, max_retries=0)
    assert model.invoke("import os\n")


@check
def embeddings():
    model = OpenAIEmbeddings(model=DEMO, base_url=f"{URL}/v1", api_key="any", check_embedding_ctx_length=False)
    found = model.embed_documents(["one", "two"])
    assert len(found) == 2
    assert json.dumps(found[0])


if __name__ == "__main__":
    main()
