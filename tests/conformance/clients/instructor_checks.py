"""Checks of instructor: its modes."""

import instructor
import openai
import pydantic
from checking import DEMO, QUESTION, SCRIPTED, URL, check, main


class Person(pydantic.BaseModel, extra="forbid"):
    """Closed: otherwise the demo model, which samples, adds properties of its own until the tokens are used up."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


USER = [{"role": "user", "content": QUESTION}]


def send(mode, model=DEMO, messages=USER, response_model=Person):
    plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0, timeout=60)
    client = instructor.from_openai(plain, mode=mode)
    return client.chat.completions.create(
        model=model, messages=messages, response_model=response_model, max_retries=0, max_tokens=200
    )


@check
def tools():
    assert isinstance(send(instructor.Mode.TOOLS), Person)


@check
def tools_strict():
    assert isinstance(send(instructor.Mode.TOOLS_STRICT), Person)


@check
def json_schema():
    assert isinstance(send(instructor.Mode.JSON_SCHEMA), Person)


@check
def json():
    messages = [{"role": "user", "content": "Ada is how old?"}]
    assert send(instructor.Mode.JSON, SCRIPTED, messages).model_dump() == {"name": "Ada", "age": 36}


@check
def markdown_json():
    messages = [{"role": "user", "content": "Ada is how old?"}]
    assert send(instructor.Mode.MD_JSON, SCRIPTED, messages).model_dump() == {"name": "Ada", "age": 36}


@check
def responses_tools():
    plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0, timeout=60)
    client = instructor.from_openai(plain, mode=instructor.Mode.RESPONSES_TOOLS)
    found = client.responses.create(
        model=DEMO, input=QUESTION, response_model=Person, max_retries=0, max_output_tokens=200
    )
    assert isinstance(found, Person)


if __name__ == "__main__":
    main()
