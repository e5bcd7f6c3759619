"""Lists the GPUs whose passes were measured, with the rates at which our kernels read and multiply on them."""

from dataclasses import dataclass

MOST_ROWS = 256
"""Most sequences that decode together: no pass with more rows was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU. Rates are what kernels reach, not what the data sheet says."""

    name: str
    product: str
    """Value of the node label nvidia.com/gpu.product."""
    memory_bytes: int
    """Memory as CUDA reports it."""
    weight_bytes_per_s: float
    """Rate at which the products of decode passes read weights."""
    kv_bytes_per_s: float
    """Rate at which decode attention reads keys and values."""


GPUS = {
    gpu.name.lower(): gpu
    for gpu in (
        Gpu(
            name="H200",
            product="NVIDIA-H200",
            memory_bytes=150_110_000_000,
            weight_bytes_per_s=4.35e12,
            kv_bytes_per_s=4.45e12,
        ),
        Gpu(
            name="H100",
            product="NVIDIA-H100-80GB-HBM3",
            memory_bytes=85_020_000_000,
            weight_bytes_per_s=3.1e12,
            kv_bytes_per_s=3.2e12,
        ),
    )
}
