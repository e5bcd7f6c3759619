"""The modelled engine against the engine's own scheduler and prefix cache, request by request."""

import random

import pytest

from benchmarks.routing.engine_model import EngineModel, EngineShape
from benchmarks.routing.rates import QWEN_7B_H200
from benchmarks.routing.scheduler_engine import SchedulerEngine
from benchmarks.routing.workload import SimulatedRequest

BLOCK = 16


def chats(seed: int, count: int, gap_s: float) -> list[SimulatedRequest]:
    """Growing chats of small prompts, some of them with a shared beginning."""
    dice = random.Random(seed)
    shared, identifiers = tuple(range(1, 9)), 10
    open_chats: list[tuple[int, ...]] = []
    requests, now_s = [], 0.0
    for number in range(count):
        now_s += dice.expovariate(1 / gap_s)
        chain = open_chats.pop(dice.randrange(len(open_chats))) if open_chats and dice.random() < 0.7 else shared
        prompt = len(chain) * BLOCK + dice.randint(20, 700)
        output = dice.randint(1, 120)
        new = (prompt + output) // BLOCK - len(chain)
        chain = (*chain, *range(identifiers, identifiers + new))
        identifiers += new
        if len(chain) < 200:
            open_chats.append(chain)
        requests.append(SimulatedRequest(number, now_s, prompt, output, chain))
    return requests


class Run:
    """Drives one engine through its requests."""

    def __init__(self) -> None:
        self.first: dict[int, float] = {}
        self.ended: dict[int, tuple[float, int]] = {}

    def on_first(self, request: SimulatedRequest, now_s: float) -> None:
        self.first[request.number] = now_s

    def on_finish(self, request: SimulatedRequest, now_s: float, cached: int) -> None:
        self.ended[request.number] = (now_s, cached)

    def through(self, engine: EngineModel | SchedulerEngine, requests: list[SimulatedRequest]) -> "Run":
        arrivals = list(reversed(requests))
        while arrivals or engine.next_s is not None:
            if arrivals and (engine.next_s is None or arrivals[-1].arrival_s < engine.next_s):
                request = arrivals.pop()
                engine.add(request, request.arrival_s)
            else:
                engine.wake(engine.next_s)
        return self


@pytest.mark.parametrize(
    ("seed", "kv_blocks", "gap_s", "exact"),
    [
        (1, 20_000, 0.05, True),  # room for all: every hit, every pass
        (2, 1200, 0.02, False),  # evictions
        (3, 420, 0.02, False),  # evictions, refused admissions and preemptions
    ],
)
def test_modelled_and_real_engine_agree(seed: int, kv_blocks: int, gap_s: float, exact: bool) -> None:
    requests = chats(seed, 300, gap_s)
    shape = EngineShape(kv_blocks, BLOCK, QWEN_7B_H200, max_num_seqs=32, token_budget=1024)
    real, model = Run(), Run()
    real_engine = SchedulerEngine(shape, real.on_first, real.on_finish)
    model_engine = EngineModel("model", shape, model.on_first, model.on_finish)
    real.through(real_engine, requests)
    model.through(model_engine, requests)

    assert model.ended.keys() == real.ended.keys() == {request.number for request in requests}
    assert model_engine.free_pages == kv_blocks == real_engine.scheduler.kv_cache.pool.num_free
    if exact:
        assert model.first == pytest.approx(real.first)
        assert model.ended == {number: (pytest.approx(end), hit) for number, (end, hit) in real.ended.items()}
    hits = sum(hit for _, hit in real.ended.values())
    assert sum(hit for _, hit in model.ended.values()) == pytest.approx(hits, rel=0.02)
    waits = sum(real.first[item.number] - item.arrival_s for item in requests)
    assert sum(model.first[item.number] - item.arrival_s for item in requests) == pytest.approx(waits, rel=0.05)
    assert model_engine.computed_tokens == pytest.approx(real_engine.computed_tokens, rel=0.02)
    if kv_blocks == 420:
        assert real_engine.preemptions > 0
        assert model_engine.preemptions == pytest.approx(real_engine.preemptions, rel=0.25, abs=3)
