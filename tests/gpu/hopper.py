"""Where tests of our kernels for Hopper run, and where that they cannot run is itself a failure.

On a GPU of compute capability 9.0 such a test never skips: an engine there would silently be slower.
"""

import importlib.util
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from mini_infer_engine.kernels.device import DeviceProfile, device_profile


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a test, and why."""

    outcome: Literal["run", "skip", "fail"]
    reason: str = ""


def judge(capability: tuple[int, int] | None, profile: DeviceProfile | None) -> Verdict:
    """For a GPU of this compute capability (None: there is none), and its profile (None: there is no Triton)."""
    if capability != (9, 0):
        return Verdict("skip", "needs an NVIDIA GPU of compute capability 9.0")
    if profile is None:
        return Verdict("fail", "Triton is not installed: install the pair of constraints-gpu.txt")
    if profile.gluon_obstacle is not None:
        return Verdict("fail", f"Gluon kernels off: {profile.gluon_obstacle}; install the pair of constraints-gpu.txt")
    return Verdict("run")


def here() -> Verdict:
    """For this machine."""
    if not torch.cuda.is_available():
        return judge(None, None)
    has_triton = importlib.util.find_spec("triton") is not None
    profile = device_profile(torch.device("cuda", torch.cuda.current_device())) if has_triton else None
    return judge(torch.cuda.get_device_capability(), profile)


def enforce(verdict: Verdict) -> None:
    """Go on, skip or fail."""
    if verdict.outcome == "skip":
        pytest.skip(verdict.reason)
    if verdict.outcome == "fail":
        pytest.fail(verdict.reason, pytrace=False)
