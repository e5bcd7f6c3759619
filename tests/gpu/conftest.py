"""Fresh memory is poison: what a kernel forgets to write is NaN, not last call's right answer.

And what a Hopper GPU must be able to run fails where it cannot.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.gpu import hopper
from tests.gpu.bounds import check_all_launches
from tests.gpu.device import INTERPRETED


@pytest.fixture
def hopper_kernels() -> None:
    """For tests of our kernels for Hopper: skips on other devices, fails on Hopper where they cannot run."""
    hopper.enforce(hopper.here())


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(False)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """With FAILURES_AT_ONCE failures are told as they happen: a run that ends at its limit has no summary."""
    if report.failed and "FAILURES_AT_ONCE" in os.environ:
        print(f"\n{report.nodeid}: {report.longreprtext.strip().splitlines()[-1][:300]}", flush=True)


if INTERPRETED and "TRITON_BOUNDS" in os.environ:
    check_all_launches()
