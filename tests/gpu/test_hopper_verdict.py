"""Tests of our kernels for Hopper run or fail on such a GPU; only elsewhere they skip."""

import pytest

from mini_infer_engine.kernels.device import DeviceProfile
from tests.engine.kernels.profiles import H200, H200_OTHER_TRITON, L4
from tests.gpu.hopper import Verdict, enforce, here, judge


@pytest.mark.parametrize(
    ("capability", "profile", "outcome", "reason"),
    [
        (None, None, "skip", "compute capability 9.0"),
        ((8, 9), L4, "skip", "compute capability 9.0"),
        ((10, 0), None, "skip", "compute capability 9.0"),
        ((9, 0), H200, "run", ""),
        ((9, 0), H200_OTHER_TRITON, "fail", "Triton 3.7.1, they need 3.6.x; install the pair of constraints-gpu.txt"),
        ((9, 0), None, "fail", "Triton is not installed"),
    ],
)
def test_verdict_of_a_hopper_test_by_capability(
    capability: tuple[int, int] | None, profile: DeviceProfile | None, outcome: str, reason: str
) -> None:
    verdict = judge(capability, profile)
    assert verdict.outcome == outcome
    assert reason in verdict.reason


def test_hopper_kernels_run_when_this_machine_has_a_hopper_gpu() -> None:
    """Modules without Triton are skipped as a whole: that they could not run is said here."""
    verdict = here()
    assert verdict.outcome != "fail", verdict.reason


def test_a_verdict_runs_skips_or_fails_a_test() -> None:
    enforce(Verdict("run"))
    with pytest.raises(pytest.skip.Exception, match="no GPU"):
        enforce(Verdict("skip", "no GPU"))
    with pytest.raises(pytest.fail.Exception, match="no Triton"):
        enforce(Verdict("fail", "no Triton"))
