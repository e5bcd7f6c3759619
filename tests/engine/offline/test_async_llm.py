"""`AsyncLLM` and `LLMEngine`: outputs while texts are generated, aborts, and the engine's end."""

import argparse
import asyncio
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from mini_infer_engine import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    EngineArgs,
    EngineDeadError,
    LLMEngine,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

ARGS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8}
TEXT = "what is said is said again, to the last word"


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    made = AsyncLLM.from_engine_args(AsyncEngineArgs("dry", **ARGS))
    yield made
    made.shutdown()


async def outputs_of(llm: AsyncLLM, prompt: Any, params: SamplingParams, name: str) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, request_id=name)]


def params_of(kind: RequestOutputKind | None, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=100, output_kind=kind, **others)


async def test_outputs_have_what_their_kind_says() -> None:
    llm = AsyncLLM(EngineArgs("dry", **ARGS))
    kinds = RequestOutputKind
    whole = {kind: await outputs_of(llm, TEXT, params_of(kind), f"{kind}") for kind in (*RequestOutputKind, None)}
    llm.shutdown()
    for outputs in whole.values():
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].finish_reason == "stop"
    assert [output.outputs[0].text for output in whole[kinds.FINAL_ONLY]] == [TEXT]
    assert "".join(output.outputs[0].text for output in whole[kinds.DELTA]) == TEXT
    tokens = [token for output in whole[kinds.DELTA] for token in output.outputs[0].token_ids]
    (final,) = whole[kinds.FINAL_ONLY]
    assert tokens == final.outputs[0].token_ids
    for kind in (kinds.CUMULATIVE, None):
        texts = [output.outputs[0].text for output in whole[kind]]
        assert len(texts) > 1
        assert all(later.startswith(text) for text, later in pairwise(texts))
        assert texts[-1] == TEXT


async def test_prompts_of_many_tasks_run_together_and_equal_llms(llm: AsyncLLM) -> None:
    prompts = [f"prompt {number}, " * (number % 5 + 1) for number in range(24)]
    found = await asyncio.gather(
        *(outputs_of(llm, prompt, params_of(None, n=2), f"many-{number}") for number, prompt in enumerate(prompts))
    )
    texts = [[one.text for one in outputs[-1].outputs] for outputs in found]
    same = LLM.from_engine_args(EngineArgs("dry", **ARGS)).generate(prompts, params_of(None, n=2), use_tqdm=False)
    assert texts == [[one.text for one in output.outputs] for output in same]


async def test_a_prompt_is_aborted_when_its_generator_is_closed_or_by_its_id() -> None:
    llm = AsyncLLM(EngineArgs("dry", max_model_len=65_536))
    endless = SamplingParams(temperature=0, max_tokens=60_000, ignore_eos=True)
    outputs = llm.generate(TEXT, endless, "left")
    await anext(outputs)
    await outputs.aclose()

    aborted = llm.generate(TEXT, endless, "aborted")
    await anext(aborted)
    await llm.abort("aborted")
    *_, last = [output async for output in aborted]
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    await llm.abort(["aborted", "unknown"])

    async with asyncio.timeout(60):
        while not await llm.reset_prefix_cache():  # until the last step of what was aborted is over
            pass
    gauges = {metric.name: metric.value for metric in await llm.get_metrics()}
    assert (gauges["vllm:num_requests_running"], gauges["vllm:num_requests_waiting"]) == (0, 0)
    llm.shutdown()


async def test_a_slow_caller_gets_everything_in_fewer_outputs(llm: AsyncLLM) -> None:
    outputs = []
    async for output in llm.generate(TEXT, params_of(RequestOutputKind.DELTA), "slow"):
        outputs.append(output)
        await outputs_of(llm, TEXT * 2, params_of(None), f"meanwhile-{len(outputs)}")
    assert "".join(output.outputs[0].text for output in outputs) == TEXT
    assert len(outputs) <= 3


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", params_of(None), "prompt 0"),
        ("x" * 600, params_of(None), "600 tokens"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, params_of(None), "multi_modal_data"),
        ("x", SamplingParams(temperature=3), "temperature"),
        ("x", SamplingParams(output_kind="delta"), "output_kind"),
        ("x", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")), "structured_outputs"),
    ],
)
async def test_generate_raises_when_a_request_is_invalid(
    llm: AsyncLLM, prompt: Any, params: SamplingParams, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        await outputs_of(llm, prompt, params, "invalid")
    assert (await outputs_of(llm, "good", params_of(None), "invalid"))[-1].outputs[0].text == "good"


async def test_an_id_can_be_used_again_when_its_prompt_is_over(llm: AsyncLLM) -> None:
    first = llm.generate(TEXT, params_of(None), "twice")
    outputs = [await anext(first)]
    with pytest.raises(ValueError, match="twice"):
        await outputs_of(llm, TEXT, params_of(None), "twice")
    outputs += [output async for output in first]
    assert outputs[-1].outputs[0].text == TEXT
    assert (await outputs_of(llm, TEXT, params_of(None), "twice"))[-1].finished


async def test_embeddings_come_once(llm: AsyncLLM) -> None:
    (one,) = [output async for output in llm.encode(TEXT, request_id="vector")]
    (same,) = LLM("dry", **ARGS).encode(TEXT, use_tqdm=False)
    assert one.outputs.data == pytest.approx(same.outputs.data)
    assert one.request_id == "vector"


async def test_callers_get_an_error_when_the_engine_has_ended() -> None:
    llm = AsyncLLM(EngineArgs("dry", **ARGS))
    assert llm.is_running
    outputs = llm.generate(TEXT, params_of(None, ignore_eos=True), "waiting")
    await anext(outputs)
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        async for _ in outputs:
            pass
    with pytest.raises(EngineDeadError):
        await outputs_of(llm, TEXT, params_of(None), "later")
    with pytest.raises(EngineDeadError):
        await llm.check_health()
    assert (llm.is_running, llm.errored) == (False, True)


def test_an_async_llm_serves_one_event_loop_after_another() -> None:
    llm = AsyncLLM(EngineArgs("dry", **ARGS))
    for number in range(2):
        outputs = asyncio.run(outputs_of(llm, TEXT, params_of(RequestOutputKind.FINAL_ONLY), str(number)))
        assert outputs[0].outputs[0].text == TEXT
    llm.shutdown()


def test_an_engine_is_stepped_by_its_caller() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs("dry", **ARGS))
    engine.add_request("delta", TEXT, params_of(RequestOutputKind.DELTA))
    engine.add_request("final", TEXT[:20], params_of(RequestOutputKind.FINAL_ONLY, n=2))
    engine.add_request("aborted", TEXT, params_of(None))
    with pytest.raises(ValueError, match="final"):
        engine.add_request("final", TEXT)
    outputs = engine.step()
    engine.abort_request(["aborted", "unknown"])
    assert engine.get_num_unfinished_requests() == 2
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert "".join(one.outputs[0].text for one in outputs if one.request_id == "delta") == TEXT
    (final,) = [one for one in outputs if one.request_id == "final"]
    assert [one.text for one in final.outputs] == [TEXT[:20]] * 2
    assert engine.reset_prefix_cache() is True
    assert engine.get_metrics()


@pytest.mark.parametrize("made", [AsyncLLM, LLMEngine])
def test_vllms_other_names_have_a_remedy_when_they_are_used(made: Any) -> None:
    with pytest.raises(AttributeError, match="sleep"):
        made(EngineArgs("dry", max_model_len=64)).sleep()
    with pytest.raises(ValueError, match="stat_loggers"):
        made.from_engine_args(EngineArgs("dry", max_model_len=64), stat_loggers=[print])
    with pytest.raises(TypeError, match="nonsense"):
        EngineArgs("dry", nonsense=1)


def test_a_programs_own_parser_gets_the_engines_flags() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    args = parser.parse_args(
        ["--model", "dry", "--max-model-len", "1k", "--kv-cache-memory", "64MiB", "--enforce-eager"]
    )
    made = AsyncEngineArgs.from_cli_args(args)
    assert (made.model, made.max_model_len, made.kv_cache_memory, made.enforce_eager) == ("dry", 1000, 2**26, True)
    assert made.settings == EngineArgs("dry", max_model_len=1000, kv_cache_memory=2**26, enforce_eager=True).settings
    assert LLM.from_engine_args(made).settings == made.settings
    with pytest.raises(TypeError, match="model"):
        EngineArgs.from_cli_args(parser.parse_args([]))
