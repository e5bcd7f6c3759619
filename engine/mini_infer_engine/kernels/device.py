"""What kernel choices depend on: an NVIDIA GPU's sizes and features, and the Triton that compiles for it."""

import functools
from dataclasses import dataclass

import torch

_GLUON_TRITON = "3.6."
"""Gluon is experimental: its semantics change between minor versions, and a wrong barrier would hang the GPU."""
_HOPPER = (9, 0)


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A GPU as kernel choices see it; plain data, so that choices can be tested for a GPU that is not there."""

    name: str
    """As the driver says it, "NVIDIA H200": tuned configs are stored under it."""
    compute_capability: tuple[int, int]
    sm_count: int
    """Streaming multiprocessors."""
    shared_memory_bytes: int
    """The most that one program (CUDA: thread block) may have: 227 KB on an H100 or H200, 99 KB on an L4."""
    sm_shared_memory_bytes: int
    """What the programs that are resident on one SM share."""
    triton_version: str

    @property
    def is_hopper(self) -> bool:
        """Whether it is an H100, H200 or alike."""
        return self.compute_capability == _HOPPER

    @property
    def reads_tensors(self) -> bool:
        """Whether Triton's tensor descriptors are fast here: by TMA, or in the interpreter."""
        return self.compute_capability >= _HOPPER or self.compute_capability == (0, 0)

    @property
    def supports_gluon(self) -> bool:
        """Whether our kernels for Hopper, which are written in Gluon, can run."""
        return self.gluon_obstacle is None

    @property
    def gluon_obstacle(self) -> str | None:
        """Why our kernels for Hopper cannot run here; None: they can."""
        if not self.is_hopper:
            major, minor = self.compute_capability
            return f"{self.name} has compute capability {major}.{minor}, they need 9.0 (H100, H200)"
        if not self.triton_version.startswith(_GLUON_TRITON):
            return f"Triton {self.triton_version}, they need {_GLUON_TRITON}x"
        return None


INTERPRETER = DeviceProfile("cpu", (0, 0), 132, 1 << 30, 1 << 30, "")
"""Of a CPU, where Triton's interpreter runs: grids as on an H200, no limit of shared memory, no Hopper kernels."""


@functools.cache
def device_profile(device: torch.device) -> DeviceProfile:
    """Of an NVIDIA GPU; `INTERPRETER` of a CPU."""
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
