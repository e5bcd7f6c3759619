"""The loads, and what results are shown against: bounds worked out by hand, floors, the best of a peer's variants."""

import hashlib
import sys
from itertools import chain

import pytest

from mini_infer_engine.config.options.mechanisms import Mechanism
from mini_infer_engine.config.options.settings import EngineSettings
from tests.engine.server.dry_server import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from ablations import VARIANTS
from common.loads import FULL, SMOKE, bounds, run_loads
from common.models import CONFIGS, Bound
from common.targets import ratio_target
from engine_offline import worth_repeating
from kv_dtype import ANSWER, CONTEXT, SETTINGS

REFERENCE_LOADS = "1830f040892d69c52b0d5ac4d635fff661f78dbb2f312dc4bede81dbec593023"
"""SHA-256 of the prompts, limits and temperatures that the reference's script of these loads asks for."""


@pytest.mark.parametrize(
    ("model", "decode_ms", "prefill_ms"),
    [
        ("qwen2.5-7b", 3.30, {512: 8.5, 4096: 71.9, 8192: 152}),
        ("qwen2.5-1.5b", 0.72, {512: 1.7, 4096: 15.4, 8192: 34.5}),
        ("qwen3-0.6b", 0.29, {512: 0.6, 4096: 7.0, 8192: 18.9}),
    ],
)
def test_bounds_of_a_models_decode_and_prefill(model: str, decode_ms: float, prefill_ms: dict[int, float]) -> None:
    bound = Bound.of(model)
    assert bound is not None
    assert bound.decode_s(1, 256) * 1e3 == pytest.approx(decode_ms, rel=0.03)
    for tokens, expected in prefill_ms.items():
        assert bound.prefill_s(tokens) * 1e3 == pytest.approx(expected, rel=0.1)


class Listening:
    """An engine that remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], list[int], float]] = []

    def run(self, prompts: list[list[int]], limits: list[int], temperature: float, **sampling: float) -> int:
        self.calls.append((prompts, limits, temperature))
        return sum(limits)


def test_the_loads_equal_the_references() -> None:
    engine = Listening()
    names = [name for name, _ in run_loads(engine, FULL)]
    digest = hashlib.sha256()
    for call in engine.calls[2:31]:  # after the warm-up, until the aligned warm prefix
        digest.update(repr(call).encode())
    assert digest.hexdigest() == REFERENCE_LOADS
    assert names[8:10] == ["warm ms 4096+128", "warm ms 4000+128"]
    assert len(names) == len(set(names)) == 15


def test_a_later_round_has_equal_sizes_and_other_ids() -> None:
    first, second = Listening(), Listening()
    list(run_loads(first, SMOKE, 0))
    list(run_loads(second, SMOKE, 1))
    for (prompts, limits, _), (others, other_limits, _) in zip(first.calls, second.calls, strict=True):
        assert limits == other_limits
        assert [len(prompt) for prompt in prompts] == [len(prompt) for prompt in others]
        assert all(ours != theirs for ours, theirs in zip(chain(*prompts), chain(*others), strict=True))


def test_a_load_is_not_run_when_it_is_not_selected() -> None:
    every, some = Listening(), Listening()
    list(run_loads(every, SMOKE))
    assert [name for name, _ in run_loads(some, SMOKE, 0, lambda name: name.startswith("w2"))] == ["w2 tok_s"]
    assert some.calls == [*every.calls[:2], every.calls[3]]


def test_every_figure_of_the_reference_has_its_bound() -> None:
    bound = Bound.of("qwen3-0.6b")
    assert bound is not None
    for sizes in (SMOKE, FULL):
        found = list(bounds(bound, sizes))
        assert found == [name for name, _ in run_loads(Listening(), sizes)][: len(found)]
        assert found[-1].startswith("warm ms")


def test_an_engine_that_makes_too_few_tokens_is_found_out() -> None:
    class Lazy(Listening):
        def run(self, prompts: list[list[int]], limits: list[int], temperature: float, **sampling: float) -> int:
            return super().run(prompts, limits, temperature) - 1

    with pytest.raises(AssertionError, match="asked for"):
        list(run_loads(Lazy(), SMOKE))


def test_verdicts_by_target_and_value() -> None:
    slower_is_worse = ratio_target("qwen2.5-7b", "itl ms bs 1")
    more_is_better = ratio_target("qwen3-0.6b", "w1 tok_s")
    assert slower_is_worse is not None
    assert more_is_better is not None
    assert [slower_is_worse.verdict(ratio) for ratio in (0.91, 0.9, 0.8)] == ["FAIL", "pass", "aim"]
    assert [more_is_better.verdict(ratio) for ratio in (1.07, 1.08, 1.2)] == ["FAIL", "pass", "aim"]
    assert ratio_target("tiny", "w1 tok_s") is None


def test_a_variant_that_is_best_nowhere_is_not_repeated() -> None:
    found = {
        "ours": {"w1 tok_s": 200.0, "itl ms bs 1": 1.0},
        "fast": {"w1 tok_s": 100.0, "itl ms bs 1": 3.0, "start s": 9.0},
        "quick": {"w1 tok_s": 90.0, "itl ms bs 1": 2.0, "start s": 9.0},
        "near": {"w1 tok_s": 99.0, "itl ms bs 1": 2.5, "start s": 1.0},
    }
    assert worth_repeating(found) == {"fast", "quick"}
    assert worth_repeating({"ours": found["ours"]}) == set()


def test_ablations_have_a_variant_for_each_mechanism_and_ask_for_settings_that_there_are() -> None:
    disabled: set[str] = set()
    for variant in VARIANTS.values():
        settings = EngineSettings(model="any", **variant.settings)
        disabled |= {name for name in settings.disable if len(settings.disable) == 1}
    assert disabled == set(map(str, Mechanism))


def test_sequences_of_the_kv_benchmark_are_as_long_as_its_shape_allows() -> None:
    """An engine refuses a context that is longer than the model's."""
    longest = CONFIGS["qwen2.5-7b"]["max_position_embeddings"]
    assert SETTINGS["max_model_len"] <= longest
    assert 0 < ANSWER < CONTEXT <= SETTINGS["max_model_len"]
