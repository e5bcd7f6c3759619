"""The bounds that results are shown against, at the figures that were worked out for them by hand."""

import sys

import pytest

from tests.engine.server.dry_server import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from common.loads import FULL, SMOKE, bounds, run_loads
from common.models import Bound


@pytest.mark.parametrize(
    ("model", "decode_ms", "prefill_ms"),
    [
        ("qwen2.5-7b", 3.30, {512: 8.5, 4096: 71.9, 8192: 152}),
        ("qwen2.5-1.5b", 0.72, {512: 1.7, 4096: 15.4, 8192: 34.5}),
        ("qwen3-0.6b", 0.29, {512: 0.6, 4096: 7.0, 8192: 18.9}),
    ],
)
def test_bounds(model: str, decode_ms: float, prefill_ms: dict[int, float]) -> None:
    bound = Bound.of(model)
    assert bound is not None
    assert bound.decode_s(1, 256) * 1e3 == pytest.approx(decode_ms, rel=0.03)
    for tokens, wanted in prefill_ms.items():
        assert bound.prefill_s(tokens) * 1e3 == pytest.approx(wanted, rel=0.1)


class Counting:
    """An engine that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def run(self, prompts: list[list[int]], limits: list[int], temperature: float) -> int:
        self.asked += [(len(prompt), limit) for prompt, limit in zip(prompts, limits, strict=True)]
        return sum(limits)


def test_every_figure_has_its_bound() -> None:
    bound = Bound.of("qwen3-0.6b")
    assert bound is not None
    for sizes in (SMOKE, FULL):
        assert list(bounds(bound, sizes)) == list(run_loads(Counting(), sizes, lambda line: None))


def test_an_engine_that_makes_too_few_tokens_is_found_out() -> None:
    class Lazy(Counting):
        def run(self, prompts: list[list[int]], limits: list[int], temperature: float) -> int:
            return super().run(prompts, limits, temperature) - 1

    with pytest.raises(AssertionError, match="asked for"):
        run_loads(Lazy(), SMOKE, lambda line: None)
