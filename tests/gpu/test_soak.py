"""Ten thousand requests, many of them aborted at random: no page, slot or byte is lost, and no text is wrong."""

import random
from pathlib import Path

import pytest
import torch

from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.model_path import resolve_model

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from tests.gpu.device import GPU_ONLY
from tests.gpu.runs import SAMPLINGS, make_engine, make_runner, make_settings, texts

pytestmark = GPU_ONLY
REQUESTS = 10_000
DISTINCT = 60
AT_ONCE = 96
MEASURED_AFTER = REQUESTS // 5


def kinds() -> list[tuple[list[int], SamplingParams, int]]:
    """Distinct requests: prompts of 1 to 70 tokens, some with shared beginnings; sampling; seeds."""
    dice = random.Random(11)
    shared = [dice.randrange(4096) for _ in range(70)]
    made = []
    for index in range(DISTINCT):
        prompt = [dice.randrange(4096) for _ in range(dice.randint(1, 70))]
        if index % 2:
            kept = dice.randrange(len(prompt))
            prompt[:kept] = shared[:kept]
        sampling = SAMPLINGS[index % len(SAMPLINGS)]
        params = {field: getattr(sampling, field) for field in sampling.__struct_fields__}
        params |= {"max_tokens": dice.randint(1, 24), "ignore_eos": True}
        made.append((prompt, SamplingParams(**params), dice.getrandbits(60)))
    return made


def request(name: int, kind: tuple[list[int], SamplingParams, int]) -> Request:
    prompt, sampling, seed = kind
    return Request(request_id=str(name), prompt_token_ids=prompt, sampling=sampling, noise_seed=seed)


def assert_nothing_is_allocated(engine: Engine) -> None:
    scheduler = engine.scheduler
    assert not engine.has_work
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.kv_cache.pool.num_free == scheduler.kv_cache.pool.num_pages
    assert sorted(scheduler.slots._free) == list(range(64))


@pytest.mark.timeout(170)
def test_ten_thousand_requests_with_random_aborts() -> None:
    # The pool is too small for what 64 slots grow to: requests wait for pages.
    settings = make_settings(
        Path(resolve_model("demo", None)), max_num_seqs=64, page_size=16, kv_cache_memory=190 * 8 * 2 * 16 * 2 * 64 * 4
    )
    runner = make_runner(settings)
    distinct = kinds()
    alone = [texts(make_engine(settings, runner), [request(0, kind)])[0] for kind in distinct]
    engine = make_engine(settings, runner)
    dice = random.Random(12)
    live: dict[str, tuple[int, list[int]]] = {}
    started = finished = aborted = 0
    memory = 0
    wrong: list[tuple[str, int]] = []
    while started < REQUESTS or engine.has_work:
        while started < REQUESTS and len(live) < AT_ONCE:
            which = dice.randrange(DISTINCT)
            engine.add(request(started, distinct[which]))
            live[str(started)] = (which, [])
            started += 1
        for output in engine.step():
            which, tokens = live[output.request_id]
            tokens += output.token_ids
            if output.finish_reason is not None:
                del live[output.request_id]
                finished += 1
                if tokens != alone[which]:
                    wrong.append((output.request_id, which))
        for _ in range(min(len(live), dice.choice((0, 1, 2)))):
            name = dice.choice(list(live))
            which, tokens = live.pop(name)
            engine.abort(name)
            aborted += 1
            if tokens != alone[which][: len(tokens)]:
                wrong.append((name, which))
        if not memory and started >= MEASURED_AFTER:
            torch.cuda.synchronize()
            memory = torch.cuda.memory_allocated()
    assert not wrong, f"{len(wrong)} texts are not what their request gives alone: {wrong[:10]}"
    assert finished + aborted == REQUESTS
    assert aborted > REQUESTS // 10
    assert_nothing_is_allocated(engine)
    torch.cuda.synchronize()
    # A batch's inputs and results live for two steps: what may differ between two moments, and nothing that grows.
    assert torch.cuda.memory_allocated() - memory <= 4 << 20
