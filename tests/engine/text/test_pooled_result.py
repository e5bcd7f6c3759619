"""Answers that are made of pooled numbers: normalised, cut, activated, compared."""

import math
from array import array

import pytest

from mini_infer_engine.config.pooling.pooler_config import Activation, PoolerConfig
from mini_infer_engine.text.pooled_result import check_dimensions, cosine, embedding_of, scores_of
from mini_infer_engine.text.validation import ParameterError


def packed(*values: float) -> bytes:
    return array("f", values).tobytes()


@pytest.mark.parametrize(
    ("activation", "use_activation", "dimensions", "expected"),
    [
        ("normalize", None, None, [0.6, 0.8, 0.0]),
        ("normalize", False, None, [3.0, 4.0, 0.0]),
        ("normalize", None, 1, [1.0]),
        ("identity", None, 2, [3.0, 4.0]),
        ("identity", True, 2, [0.6, 0.8]),
    ],
)
def test_an_embedding_is_normalised_when_model_or_request_says_so(
    activation: Activation, use_activation: bool | None, dimensions: int | None, expected: list[float]
) -> None:
    pooler = PoolerConfig(size=3, activation=activation)
    found = embedding_of(packed(3, 4, 0), pooler, dimensions, use_activation=use_activation)
    assert found.tolist() == pytest.approx(expected)


def test_an_embedding_of_zeros_stays_when_it_is_normalised() -> None:
    assert embedding_of(packed(0, 0), PoolerConfig(size=2)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("activation", "use_activation", "expected"),
    [
        ("softmax", None, [1 / (1 + math.e**2), 1 / (1 + math.e**-2)]),
        ("sigmoid", True, [1 / (1 + math.e), 1 / (1 + math.e**-1)]),
        ("identity", True, [-1.0, 1.0]),
        ("softmax", False, [-1.0, 1.0]),
    ],
)
def test_scores_are_activated_as_the_model_says_when_the_request_does_not_refuse(
    activation: Activation, use_activation: bool | None, expected: list[float]
) -> None:
    pooler = PoolerConfig(task="classify", size=2, activation=activation)
    assert scores_of(packed(-1, 1), pooler, use_activation=use_activation) == pytest.approx(expected)


def test_scores_stay_finite_when_logits_are_large() -> None:
    for activation in ("softmax", "sigmoid"):
        found = scores_of(packed(-1e4, 1e4), PoolerConfig(task="classify", size=2, activation=activation))  # type: ignore[arg-type]  # one of the literal's
        assert found == [0.0, 1.0]


@pytest.mark.parametrize(
    ("allowed", "dimensions", "is_allowed"),
    [
        (None, 3, True),
        (None, 9, False),
        ([4], 4, True),
        ([4], 8, True),
        ([4], 5, False),
        ([], 4, False),
        ([], None, True),
    ],
)
def test_dimensions_are_checked_against_what_the_model_was_trained_for(
    allowed: list[int] | None, dimensions: int | None, is_allowed: bool
) -> None:
    pooler = PoolerConfig(size=8, matryoshka_dimensions=allowed)
    if is_allowed:
        check_dimensions(pooler, dimensions)
        return
    with pytest.raises(ParameterError, match="dimensions"):
        check_dimensions(pooler, dimensions)


def test_cosine_is_zero_when_a_vector_has_no_direction() -> None:
    assert cosine([3, 4], [6, 8]) == pytest.approx(1)
    assert cosine([0, 0], [1, 0]) == 0
