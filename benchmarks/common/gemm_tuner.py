"""Products of the measured models, and what tuners of other formats share with the engine's own."""

import torch

from mini_infer_engine.tuning.checkpoints import CHECKPOINTS
from mini_infer_engine.tuning.products import Product as Shape

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
