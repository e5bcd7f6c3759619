"""Checks of pydantic-ai."""

import pydantic
from checking import DEMO, QUESTION, SCRIPTED, URL, check, main
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

PROVIDER = OpenAIProvider(base_url=f"{URL}/v1", api_key="any")
SHORT = ModelSettings(max_tokens=200, timeout=60)


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


def weather_agent(model):
    agent = Agent(model, model_settings=SHORT)
    calls = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        calls.append(city)
        return "SUNNY-21" if city == "Paris" else "RAIN-9"

    return agent, calls


@check
async def plain():
    result = await Agent(OpenAIChatModel(DEMO, provider=PROVIDER), model_settings=SHORT).run(QUESTION)
    assert result.output


@check
async def tool_loop():
    agent, calls = weather_agent(OpenAIChatModel(SCRIPTED, provider=PROVIDER))
    result = await agent.run("What is the weather in Paris?")
    assert calls == ["Paris"]
    assert "sunny" in result.output


@check
async def tool_loop_stream():
    agent, calls = weather_agent(OpenAIChatModel(SCRIPTED, provider=PROVIDER))
    async with agent.run_stream("What is the weather in Oslo and Rome?") as stream:
        text = await stream.get_output()
    assert calls == ["Oslo", "Rome"]
    assert "Rome has sun" in text


@check
async def output_by_tool():
    agent = Agent(OpenAIChatModel(SCRIPTED, provider=PROVIDER), output_type=Person, model_settings=SHORT)
    assert (await agent.run("Who wrote it?")).output == Person(name="Ada", age=36)


@check
async def output_native():
    agent = Agent(OpenAIChatModel(DEMO, provider=PROVIDER), output_type=NativeOutput(Person), model_settings=SHORT)
    assert isinstance((await agent.run(QUESTION)).output, Person)


@check
async def responses_tool_loop():
    agent, calls = weather_agent(OpenAIResponsesModel(SCRIPTED, provider=PROVIDER))
    result = await agent.run("What is the weather in Paris?")
    assert calls == ["Paris"]
    assert "sunny" in result.output


@check
async def messages_tool_loop():
    provider = AnthropicProvider(base_url=URL, api_key="any")
    agent, calls = weather_agent(AnthropicModel(SCRIPTED, provider=provider))
    result = await agent.run("What is the weather in Paris?")
    assert calls == ["Paris"]
    assert "sunny" in result.output


if __name__ == "__main__":
    main()
