"""Products of the measured models, and what tuners of other formats share with the engine's own."""

import torch

from mini_infer_engine.kernels.gemm.quantized_weight import (
    GROUP,
    QuantizedWeight,
    interleaved,
    packed_nibbles,
    packed_parameters,
)
from mini_infer_engine.tools.tuning.checkpoints import CHECKPOINTS
from mini_infer_engine.tools.tuning.products import Product as Shape

L2_BYTES = 50_000_000
SQUARE_SUM_PARTS = 64
"""Square sums of a row: as many as a residual stream of 4,096 in tiles of 64 has."""


def _shapes(prefix: str, checkpoint: str) -> dict[str, Shape]:
    shape = CHECKPOINTS[checkpoint]
    width = shape.heads * shape.head_dim
    return {
        f"{prefix} gate_up": Shape(shape.intermediate, shape.hidden, gated=True),
        f"{prefix} down": Shape(shape.hidden, shape.intermediate, writes_residual=True),
        f"{prefix} qkv": Shape(width + 2 * shape.kv_heads * shape.head_dim, shape.hidden),
        f"{prefix} o": Shape(shape.hidden, width, writes_residual=True),
        f"{prefix} head": Shape(shape.vocabulary, shape.hidden),
    }


SHAPES = _shapes("7b", "Qwen2.5-7B") | _shapes("1.5b", "Qwen2.5-1.5B") | _shapes("0.6b", "Qwen3-0.6B")


def random(*shape: int) -> torch.Tensor:
    """Standard normal values, bf16."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def random_weight(form: str, rows: int, k: int) -> QuantizedWeight:
    """Of int8, fp8 or int4, on the GPU."""
    if form == "int4":
        integers = torch.randint(0, 16, (rows, k), dtype=torch.uint8, device="cuda")
        scales = torch.full((rows, k // GROUP), k**-0.5 / 8, device="cuda")
        return QuantizedWeight(packed_nibbles(integers), packed_parameters(scales, torch.full_like(scales, 8)), k)
    values = torch.randint(-127, 128, (rows, k), device="cuda").to(torch.int8)
    scales = torch.full((rows,), k**-0.5 / 64, device="cuda")
    return QuantizedWeight(interleaved(values if form == "int8" else values.to(torch.float8_e4m3fn)), scales, k)
