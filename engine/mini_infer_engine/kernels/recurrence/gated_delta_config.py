"""Chooses how the kernels of gated delta nets are launched, from the sizes of a pass.

The choices were measured on an H200 at Qwen3-Next's shape, beside flash-linear-attention
(benchmarks/recurrent_kernels.py). Does not know any kernel.
"""

from dataclasses import dataclass

import torch

from mini_infer_engine.kernels.workspace import COUNTERS


@dataclass(frozen=True, slots=True)
class StepConfig:
    """The launch config of updates by one token."""

    block_values: int
    """Columns of a head's state in one program. If they are not all, the program that ends last normalises the head."""
    warps: int
    programs: int = 64
    """The most programs for each block of columns: they loop over more steps, most of which may be padding."""
    pdl: bool = False
    """True for programmatic dependent launch: the state is read while the kernel before, the convolution, ends."""


@dataclass(frozen=True, slots=True)
class ScanConfig:
    """The launch config of the scan over chunks."""

    block_values: int
    """Columns of a head's state in one program: fewer make more programs, which read the same keys and queries."""
    warps: int
    stages: int
    """Chunks whose operands are in shared memory or on their way to it. With 1, bf16 states lost what chunks add, on an
    H200 under Triton 3.6; fp32 states did not.
    """


_WHOLE_HEAD = StepConfig(block_values=1 << 10, warps=8)
"""The config without counters."""
_STEP_CONFIGS = {8: StepConfig(16, 1), 32: StepConfig(16, 1, programs=1024), 128: StepConfig(32, 1)}
"""Configs by the most steps for which they are used; the last one is for more, too."""

_MOST_PDL_STEPS = 32
"""Steps up to which programmatic dependent launch pays: 128 took 158 us with it and 155 without."""


def step_config(steps: int, heads: int, *, pdl: bool) -> StepConfig:
    """Returns the config for so many steps of so many heads. `pdl` is False where the device or settings forbid it."""
    if steps * heads > COUNTERS:
        return _WHOLE_HEAD
    config = next((config for most, config in _STEP_CONFIGS.items() if steps <= most), [*_STEP_CONFIGS.values()][-1])
    return StepConfig(config.block_values, config.warps, config.programs, pdl=pdl and steps <= _MOST_PDL_STEPS)


def scan_config(dtype: torch.dtype) -> ScanConfig:
    """Returns the config for operands of this dtype; those of fp32 fill shared memory with one chunk."""
    return ScanConfig(32, 4, stages=1 if dtype == torch.float32 else 3)
