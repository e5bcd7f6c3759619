"""What benchmarks of single kernels share on one GPU: the policy that serving has there, and a workspace."""

import functools

import torch

from mini_infer_engine.kernels.policy import KernelPolicy, kernel_policy
from mini_infer_engine.kernels.workspace import Workspace

DEVICE = torch.device("cuda")


@functools.cache
def policy() -> KernelPolicy:
    """All kernel choices for this GPU."""
    return kernel_policy(DEVICE)


@functools.cache
def workspace() -> Workspace:
    """Of all kernels that are timed, which run one after another."""
    return Workspace(DEVICE)
