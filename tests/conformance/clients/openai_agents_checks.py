"""Checks of openai-agents."""

import agents
import openai
from checking import DEMO, QUESTION, SCRIPTED, URL, check, main

agents.set_tracing_disabled(True)
SHORT = agents.ModelSettings(max_tokens=200)


def client():
    return openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0, timeout=60)


def chat_model(name):
    return agents.OpenAIChatCompletionsModel(model=name, openai_client=client())


def responses_model(name):
    return agents.OpenAIResponsesModel(model=name, openai_client=client())


@agents.function_tool
def get_weather(city: str) -> str:
    """The weather."""
    return "SUNNY-21"


@check
async def chat_plain():
    agent = agents.Agent(name="a", model=chat_model(DEMO), model_settings=SHORT)
    assert (await agents.Runner.run(agent, QUESTION)).final_output


@check
async def chat_tool_loop():
    agent = agents.Agent(name="a", model=chat_model(SCRIPTED), tools=[get_weather], model_settings=SHORT)
    assert "sunny" in (await agents.Runner.run(agent, "What is the weather in Paris?")).final_output


@check
async def responses_tool_loop():
    agent = agents.Agent(name="a", model=responses_model(SCRIPTED), tools=[get_weather], model_settings=SHORT)
    assert "sunny" in (await agents.Runner.run(agent, "What is the weather in Paris?")).final_output


@check
async def responses_tool_loop_stream():
    agent = agents.Agent(name="a", model=responses_model(SCRIPTED), tools=[get_weather], model_settings=SHORT)
    run = agents.Runner.run_streamed(agent, "What is the weather in Paris?")
    async for _ in run.stream_events():
        pass
    assert "sunny" in run.final_output


@check
async def handoff():
    concierge = agents.Agent(name="concierge", instructions="You are the concierge.", model=chat_model(SCRIPTED))
    desk = agents.Agent(
        name="desk", instructions="Hand the guest over.", model=chat_model(SCRIPTED), handoffs=[concierge]
    )
    run = await agents.Runner.run(desk, "My room?")
    assert run.last_agent.name == "concierge"
    assert run.final_output == "Your room is ready."


if __name__ == "__main__":
    main()
