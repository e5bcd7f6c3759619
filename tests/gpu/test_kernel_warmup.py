"""Kernels of rare requests are left for later only if Triton's cache has all others. It needs triton, but no GPU."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from triton import knobs

from mini_infer_engine.runtime.cuda.kernel_warmup import run_in_threads

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("defers", "is_cold", "expected"),
    [(False, False, True), (False, True, True), (True, False, False), (True, True, True)],
)
def test_rare_kernels_are_deferred_when_the_cache_is_warm(
    monkeypatch: pytest.MonkeyPatch, defers: bool, is_cold: bool, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    ran = list[object]()

    def run(number: int) -> None:
        assert torch.is_inference_mode_enabled()
        knobs.compilation.listener(cache_hit=not is_cold)
        ran.append(number)

    common = [partial(run, number) for number in range(5)]
    few = [partial(ran.append, name) for name in ("rare", "rarer")]
    run_in_threads(common, few, torch.device("cpu"), defers=defers)
    assert [one for one in ran if isinstance(one, str)] == ["rare", "rarer"] * expected
    assert sorted(one for one in ran if isinstance(one, int)) == [0, 1, 2, 3, 4]


def test_error_of_a_pass_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_in_threads([fail], [], torch.device("cpu"), defers=False)
