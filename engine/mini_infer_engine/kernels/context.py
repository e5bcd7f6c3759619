"""What every launch of a runner's kernels is handed: which kernels it may choose, and the scratch memory they share."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mini_infer_engine.kernels.launchers import load_launchers_one_at_a_time
from mini_infer_engine.kernels.policy import KernelPolicy, kernel_policy
from mini_infer_engine.kernels.workspace import Workspace


@dataclass(frozen=True, slots=True)
class KernelContext:
    """One for each runner: kernels of two runners may run at the same time."""

    policy: KernelPolicy
    workspace: Workspace

    @classmethod
    def of(cls, device: torch.device, disabled: Iterable[str]) -> "KernelContext":
        """For an engine on a device, with these mechanisms switched off. ValueError: a name is unknown."""
        if device.type == "cuda":
            load_launchers_one_at_a_time()
        return cls(kernel_policy(device, disabled), Workspace(device))
