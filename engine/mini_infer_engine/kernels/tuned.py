"""How skinny products are cut, by shape: measured on an H200 by benchmarks/kernels.py, stored so that start-up is quick."""

from mini_infer_engine.kernels.skinny_linear import SkinnyConfig

SKINNY: dict[tuple[int, int, bool], SkinnyConfig] = {}
"""(columns, width, gated) to the fastest cut."""


def skinny_config(columns: int, width: int, *, gated: bool, fused_norm: bool) -> SkinnyConfig:
    """The stored cut, or a guess that keeps every multiprocessor reading."""
    found = SKINNY.get((columns, width, gated))
    if found is not None and (found.split_k == 1 or not (gated or fused_norm)):
        return found
    block_n = 16 if columns <= 32768 else 32
    blocks = -(-columns // block_n)
    split_k = 1 if gated or fused_norm else max(1, min(8, 264 // blocks, width // 512))
    return SkinnyConfig(block_n=block_n, block_k=256, split_k=split_k, warps=4, stages=3)
