"""The engine end to end on the fake runner: tokens, ends, aborts, load."""

import pytest
from mini_infer_engine.blocks import PoolTooSmallError
from mini_infer_engine.engine import Engine
from mini_infer_engine.request import Output, Request, SamplingParams
from mini_infer_engine.settings import EngineSettings

from tests.support.fake_runner import EOS, FakeRunner, expected_tokens

MAX_MODEL_LEN = 128


def make_engine(
    num_pages: int = 64, page_size: int = 16, max_model_len: int = MAX_MODEL_LEN, **settings: object
) -> Engine:
    runner = FakeRunner(num_pages, page_size)
    engine = Engine(
        EngineSettings(model="fake", **settings),  # type: ignore[arg-type]
        runner,
        (EOS,),
        max_model_len,
        "revision",
    )
    runner.references = engine.scheduler.pool.references
    return engine


def make_request(name: str, prompt: list[int], **sampling: object) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(temperature=0, **sampling))


def drain(engine: Engine, max_steps: int = 2_000) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError(f"still at work after {max_steps} steps")


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_are_those_of_each_request_alone(depth: int) -> None:
    engine = make_engine(step_depth=depth, max_num_batched_tokens=24)
    requests = [make_request(f"r{n}", [n + 1] * (n * 7 + 1), max_tokens=20) for n in range(8)]
    for request in requests:
        engine.add(request)
    outputs = drain(engine)
    for request in requests:
        assert tokens(outputs[request.request_id]) == expected_tokens(request, MAX_MODEL_LEN)


def test_a_pool_smaller_than_one_sequence_is_refused_with_the_remedy() -> None:
    with pytest.raises(PoolTooSmallError, match=r"holds 112 tokens \(7 pages of 16\).*128.*--kv-cache-memory"):
        make_engine(num_pages=7)
