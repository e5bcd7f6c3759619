"""Whole runs of an engine that guesses, on machines whose times are set: never much slower than without guesses.

Times are those of one H200 (benchmarks/results/2026-11-23-h200-new-parts.md): a demo model whose passes take a tenth of
a millisecond, where a draft's reading takes the host as long as thirty of them, and a model of 7B.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core import engine as engine_module
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request, SamplingParams
from tests.support.timed_runner import Machine, TimedRunner


def demo_plain(rows: int) -> float:
    return 92 + 0.7 * rows


def demo_host(rows: int) -> float:
    return 55 + 1.6 * rows


def demo_check(rows: int, drafts: int) -> float:
    return 1.3 * demo_plain(rows) + 30 + 0.25 * rows * drafts


def large_plain(rows: int) -> float:
    return 3_550 + 14 * rows


def large_check(rows: int, drafts: int) -> float:
    return 3_700 + 16 * rows * (1 + drafts)


DEMO_DRAFT = Machine(demo_plain, demo_check, 45, demo_host, 90, reading_host=2_500, reading=0.1, cold=250)
DEMO_HEAD = Machine(demo_plain, demo_check, 25, demo_host, 90, cold=250)
DEMO_LOOK_UP = Machine(demo_plain, demo_check, 2, demo_host, 90, cold=250)
LARGE_DRAFT = Machine(large_plain, large_check, 480, demo_host, 90, reading_host=5_000, reading=2.5, cold=250)
LARGE_DRAFT_BY_GRAPHS = replace(LARGE_DRAFT, reading_host=100)
"""Kernel by kernel it took the host 10 to 14 ms on another H200 machine, whatever the number of tokens."""
LARGE_LOOK_UP = Machine(large_plain, large_check, 5, demo_host, 90, cold=250)
METHODS = {
    "plain": {},
    "draft": {"speculative_model": "demo-draft"},
    "head": {"speculative_method": "head", "speculative_model": "demo-head"},
    "look-up": {"speculative_method": "ngram"},
}


class Bench:
    """Engines on one machine, which go on from run to run."""

    def __init__(self, patch: pytest.MonkeyPatch, runner: TimedRunner, method: str) -> None:
        self.patch, self.runner = patch, runner
        options: dict[str, Any] = METHODS[method] | ({"num_speculative_tokens": 5} if method != "plain" else {})
        settings = EngineSettings(model="null", max_num_seqs=128, max_num_batched_tokens=8192, **options)
        self.engine = Engine(settings, self.runner, (0,), 8192, "null", record_events=False)
        self.runs = 0

    def tokens_per_s(self, batch: int, tokens: int = 128, prompt: int = 40) -> float:
        """Of decoding a batch: from its last first token to its first end."""
        clock = self.runner.clock
        self.patch.setattr(engine_module, "time", SimpleNamespace(monotonic=clock.seconds, time=clock.seconds))
        self.runs += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for place in range(batch):
            request_id = f"{self.runs}-{place}"
            prompt_ids = [self.runs + 10, place + 10] * (prompt // 2)
            self.engine.add(Request(request_id=request_id, prompt_token_ids=prompt_ids, sampling=sampling))
        first, made, since = set[str](), 0, (0.0, 0)
        while True:
            outputs = self.engine.step()
            ended = False
            for output in outputs:
                first.add(output.request_id)
                made += len(output.token_ids)
                ended |= output.finish_reason is not None
            if len(first) == batch and not since[1]:
                since = clock.seconds(), made
            if ended:
                rate = (made - since[1]) / (clock.seconds() - since[0])
                while self.engine.has_work:
                    self.engine.step()
                return rate


def ratios(runner: TimedRunner, method: str, batch: int, runs: int) -> list[float]:
    """Of each run to the plain engine's, which has made as many before."""
    with pytest.MonkeyPatch.context() as patch:
        plain, guessing = Bench(patch, TimedRunner(runner.machine), "plain"), Bench(patch, runner, method)
        rates = [(guessing.tokens_per_s(batch), plain.tokens_per_s(batch)) for _ in range(runs)]
    return [one / other for one, other in rates]


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize(
    ("machine", "method", "acceptance"),
    [
        (DEMO_DRAFT, "draft", 0.55),
        (DEMO_HEAD, "head", 0.25),
        (DEMO_HEAD, "head", 0.6),
        (DEMO_LOOK_UP, "look-up", 0.1),
        (LARGE_DRAFT, "draft", 0.2),
    ],
)
def test_speculation_loses_hardly_any_time_when_drafts_do_not_pay(
    machine: Machine, method: str, acceptance: float, batch: int
) -> None:
    """All runs together, the first alone, and each of the others: a trial takes a few passes of one of them."""
    found = ratios(TimedRunner(machine, acceptance), method, batch, 7)
    assert sum(found) / len(found) > 0.975
    assert found[0] > 0.925
    assert min(found[1:]) > 0.94


@pytest.mark.parametrize("batch", [8, 32])
@pytest.mark.parametrize(
    ("machine", "method"), [(DEMO_DRAFT, "draft"), (DEMO_LOOK_UP, "look-up")], ids=["draft", "look-up"]
)
def test_later_runs_use_measured_times_when_none_were_known_at_first(machine: Machine, method: str, batch: int) -> None:
    """Then the first run pays for a draft's reading, and for what passes with guesses are found to take."""
    found = ratios(TimedRunner(machine, 0.2, measures=False), method, batch, 7)
    assert sum(found[1:]) / 6 > 0.975
    assert min(found[1:]) > 0.9


@pytest.mark.parametrize(
    ("machine", "method", "acceptance", "batch", "least"),
    [
        (LARGE_DRAFT, "draft", 0.8, 1, 1.75),
        (LARGE_DRAFT, "draft", 0.8, 8, 1.6),
        (LARGE_DRAFT, "draft", 0.8, 32, 1.4),
        (LARGE_DRAFT, "draft", 0.6, 1, 1.2),
        (LARGE_DRAFT, "draft", 0.6, 32, 1.1),
        (DEMO_LOOK_UP, "look-up", 0.85, 1, 1.7),
        (DEMO_LOOK_UP, "look-up", 0.85, 8, 1.7),
        (DEMO_HEAD, "head", 0.95, 1, 1.3),
    ],
)
def test_speculation_is_used_when_it_wins(
    machine: Machine, method: str, acceptance: float, batch: int, least: float
) -> None:
    found = ratios(TimedRunner(machine, acceptance), method, batch, 6)
    assert sum(found[2:]) / 4 > least


@pytest.mark.parametrize(("batch", "least"), [(1, 1.75), (8, 1.6), (32, 1.4)])
def test_a_draft_with_graphs_wins_from_the_first_run(batch: int, least: float) -> None:
    """Its first reading need not be paid for by 1 % of many seconds."""
    assert min(ratios(TimedRunner(LARGE_DRAFT_BY_GRAPHS, 0.8), "draft", batch, 3)) > least
    slow = replace(LARGE_DRAFT, reading_host=14_000)
    assert ratios(TimedRunner(slow, 0.8), "draft", batch, 1)[0] < 1.05
