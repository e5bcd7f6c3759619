"""Describes what kernel choices depend on: an NVIDIA GPU's sizes and features, and the Triton that compiles for it."""

import functools
from dataclasses import dataclass

import torch

_GLUON_TRITON = "3.6."
"""The Triton version for Gluon, which is experimental: its semantics change, and a wrong barrier would hang the GPU."""
_HOPPER = (9, 0)


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A GPU's properties for kernel choices; plain data, so that choices can be tested without the GPU."""

    name: str
    """The driver's name of the GPU, "NVIDIA H200", under which tuned configs are stored."""
    compute_capability: tuple[int, int]
    sm_count: int
    """The number of streaming multiprocessors."""
    shared_memory_bytes: int
    """The shared memory limit of one program (CUDA: thread block): 227 KB on an H100 or H200, 99 KB on an L4."""
    sm_shared_memory_bytes: int
    """The shared memory of one SM, for all its resident programs."""
    triton_version: str

    @property
    def is_hopper(self) -> bool:
        """True for an H100, H200 and the like."""
        return self.compute_capability == _HOPPER

    @property
    def reads_tensors(self) -> bool:
        """True if Triton's tensor descriptors are fast here: by TMA, or in the interpreter."""
        return self.compute_capability >= _HOPPER or self.compute_capability == (0, 0)

    @property
    def supports_gluon(self) -> bool:
        """True if our kernels for Hopper, which are written in Gluon, can run."""
        return self.gluon_obstacle is None

    @property
    def gluon_obstacle(self) -> str | None:
        """The reason why our kernels for Hopper cannot run here, or None if they can."""
        if not self.is_hopper:
            major, minor = self.compute_capability
            return f"{self.name} has compute capability {major}.{minor}, they need 9.0 (H100, H200)"
        if not self.triton_version.startswith(_GLUON_TRITON):
            return f"Triton {self.triton_version}, they need {_GLUON_TRITON}x"
        return None


INTERPRETER = DeviceProfile("cpu", (0, 0), 132, 1 << 30, 1 << 30, "")
"""The profile of a CPU with Triton's interpreter: grids as on an H200, no limit of shared memory, no Hopper kernels."""


@functools.cache
def device_profile(device: torch.device) -> DeviceProfile:
    """Returns the profile of an NVIDIA GPU, and `INTERPRETER` for a CPU."""
    if device.type != "cuda":
        return INTERPRETER
    import triton
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    properties = torch.cuda.get_device_properties(index)
    limit: int = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return DeviceProfile(
        properties.name,
        (properties.major, properties.minor),
        properties.multi_processor_count,
        limit,
        properties.shared_memory_per_multiprocessor,
        str(triton.__version__),
    )
