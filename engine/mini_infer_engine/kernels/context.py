"""Groups the prerequisites of a launch of a runner's kernels: the policy that chooses them, and scratch memory."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mini_infer_engine.kernels.launchers import load_launchers_one_at_a_time
from mini_infer_engine.kernels.policy import KernelPolicy, kernel_policy
from mini_infer_engine.kernels.workspace import Workspace


@dataclass(frozen=True, slots=True)
class KernelContext:
    """The kernel policy and workspace of one runner. Runners share none: their kernels may run at the same time."""

    policy: KernelPolicy
    workspace: Workspace

    @classmethod
    def of(cls, device: torch.device, disabled: Iterable[str]) -> "KernelContext":
        """Returns the context for an engine on a device, without the `disabled` mechanisms. Raises ValueError for
        unknown names.
        """
        if device.type == "cuda":
            load_launchers_one_at_a_time()
        return cls(kernel_policy(device, disabled), Workspace(device))
