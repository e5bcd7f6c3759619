"""What measured passes say about the next one."""

import pytest

from mini_infer_engine.core.scheduling.pass_time_model import PassTimeModel


def measured(pass_s: float = 0.01, decode_s: float = 0.001, token_s: float = 0.0001) -> PassTimeModel:
    """A model of an engine whose passes take exactly these times."""
    model = PassTimeModel()
    for num_decodes in (1, 4, 8, 16) * 3:
        model.observe(num_decodes, 0, pass_s + num_decodes * decode_s)
        model.observe(num_decodes, 200, pass_s + num_decodes * decode_s + 200 * token_s)
    return model


def test_pass_time_model_reproduces_measured_times() -> None:
    model = measured()
    assert model.decode_s(10) == pytest.approx(0.02, rel=0.05)
    assert model.token_s == pytest.approx(0.0001, rel=0.05)


@pytest.mark.parametrize(("num_decodes", "seconds", "tokens"), [(10, 0.03, 100), (10, 0.02, 0), (20, 0.02, -100)])
def test_prefill_tokens_within_a_time_depend_on_the_decodes(num_decodes: int, seconds: float, tokens: float) -> None:
    assert measured().prefill_tokens_within(num_decodes, seconds) == pytest.approx(tokens, abs=10)


@pytest.mark.parametrize(("seconds", "most", "rows"), [(0.0205, 64, 10), (0.0205, 4, 4), (0.005, 64, 0)])
def test_rows_are_limited_when_a_pass_has_a_time(seconds: float, most: int, rows: int) -> None:
    assert measured().decodes_within(seconds, most) == rows


def test_nothing_is_limited_when_nothing_is_measured() -> None:
    model = PassTimeModel()
    assert not model.is_measured
    assert model.decode_s(8) == model.token_s == 0
    assert model.decodes_within(0.001, 64) == 64
    assert model.prefill_tokens_within(8, 0.001) == float("inf")


def test_chunks_approach_the_interval_when_every_pass_has_a_prompt() -> None:
    """Passes with decodes alone never come, so what a pass takes anyway is taken for a part of its tokens' time."""
    model = PassTimeModel()
    tokens = 1000.0
    for _ in range(100):
        model.observe(16, int(tokens), 0.026 + 0.0001 * tokens)
        tokens = max(16.0, model.prefill_tokens_within(16, 0.045))
    assert 0.026 + 0.0001 * tokens == pytest.approx(0.045, rel=0.02)
