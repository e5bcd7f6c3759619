"""How a budget of GPUs is shared out, as a table."""

import pytest

from mini_infer_operator.scaling.budget import Claim, shared_out


@pytest.mark.parametrize(
    ("claims", "gpus", "expected"),
    [
        pytest.param({"a": Claim(1, 3, 1), "b": Claim(0, 2, 1)}, 99, {"a": 3, "b": 2}, id="enough for all"),
        pytest.param({"a": Claim(1, 9, 1), "b": Claim(2, 9, 1)}, 3, {"a": 1, "b": 2}, id="least numbers come first"),
        pytest.param({"a": Claim(0, 8, 1), "b": Claim(0, 4, 1)}, 6, {"a": 4, "b": 2}, id="in the shares of desires"),
        pytest.param({"a": Claim(0, 2, 4), "b": Claim(0, 4, 1)}, 6, {"a": 1, "b": 2}, id="an engine of four GPUs"),
        pytest.param({"a": Claim(0, 4, 1, 4), "b": Claim(0, 4, 1)}, 4, {"a": 4, "b": 0}, id="running engines stay"),
        pytest.param({"a": Claim(3, 3, 1), "b": Claim(0, 1, 0)}, 1, {"a": 3, "b": 1}, id="least numbers exceed it"),
        pytest.param({}, 1, {}, id="nobody"),
    ],
)
def test_engines_are_granted_within_the_budget(claims: dict[str, Claim], gpus: float, expected: dict[str, int]) -> None:
    assert shared_out(claims, gpus) == expected
