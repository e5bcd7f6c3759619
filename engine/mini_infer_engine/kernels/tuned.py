"""How skinny products are cut, by shape: measured on an H200 by benchmarks/gpu_kernels.py, stored for a quick start."""

from mini_infer_engine.kernels.skinny_linear import SkinnyConfig, row_block_of

SKINNY: dict[tuple[int, int, bool, int], SkinnyConfig | None] = {
    (4608, 3584, False, 16): SkinnyConfig(64, 256, 1, 4, 5),
    (4608, 3584, False, 32): None,
    (4608, 3584, False, 64): None,
    (3584, 3584, False, 16): SkinnyConfig(32, 128, 4, 4, 3),
    (3584, 3584, False, 32): SkinnyConfig(32, 128, 2, 4, 4),
    (3584, 3584, False, 64): SkinnyConfig(32, 256, 1, 4, 4),
    (18944, 3584, True, 16): SkinnyConfig(32, 128, 1, 4, 3),
    (18944, 3584, True, 32): SkinnyConfig(64, 64, 1, 4, 3),
    (18944, 3584, True, 64): SkinnyConfig(64, 64, 1, 4, 3),
    (3584, 18944, False, 16): SkinnyConfig(64, 256, 2, 8, 4),
    (3584, 18944, False, 32): SkinnyConfig(64, 256, 2, 4, 4),
    (3584, 18944, False, 64): SkinnyConfig(64, 128, 2, 4, 4),
    (152064, 3584, False, 16): SkinnyConfig(128, 128, 1, 4, 3),
    (152064, 3584, False, 32): SkinnyConfig(128, 128, 1, 4, 5),
    (152064, 3584, False, 64): SkinnyConfig(128, 128, 1, 4, 4),
    (2048, 1536, False, 16): SkinnyConfig(16, 256, 1, 4, 5),
    (2048, 1536, False, 32): SkinnyConfig(16, 256, 1, 4, 4),
    (2048, 1536, False, 64): SkinnyConfig(16, 256, 1, 4, 4),
    (1536, 1536, False, 16): SkinnyConfig(32, 128, 4, 4, 3),
    (1536, 1536, False, 32): SkinnyConfig(32, 128, 2, 4, 4),
    (1536, 1536, False, 64): SkinnyConfig(16, 256, 1, 4, 4),
    (8960, 1536, True, 16): SkinnyConfig(32, 128, 1, 4, 3),
    (8960, 1536, True, 32): SkinnyConfig(128, 128, 1, 8, 4),
    (8960, 1536, True, 64): SkinnyConfig(128, 64, 1, 4, 5),
    (1536, 8960, False, 16): SkinnyConfig(32, 128, 8, 4, 4),
    (1536, 8960, False, 32): SkinnyConfig(32, 128, 8, 4, 4),
    (1536, 8960, False, 64): SkinnyConfig(64, 128, 4, 4, 4),
    (151936, 1536, False, 16): SkinnyConfig(128, 128, 1, 4, 3),
    (151936, 1536, False, 32): SkinnyConfig(128, 128, 1, 4, 3),
    (151936, 1536, False, 64): SkinnyConfig(128, 64, 1, 4, 3),
    (4096, 1024, False, 16): SkinnyConfig(32, 128, 1, 4, 5),
    (4096, 1024, False, 32): SkinnyConfig(32, 128, 1, 4, 4),
    (4096, 1024, False, 64): SkinnyConfig(32, 128, 1, 4, 5),
    (1024, 2048, False, 16): SkinnyConfig(32, 128, 4, 4, 4),
    (1024, 2048, False, 32): SkinnyConfig(32, 128, 4, 8, 4),
    (1024, 2048, False, 64): SkinnyConfig(16, 256, 2, 4, 4),
    (3072, 1024, True, 16): SkinnyConfig(32, 128, 1, 4, 5),
    (3072, 1024, True, 32): SkinnyConfig(32, 128, 1, 4, 4),
    (3072, 1024, True, 64): SkinnyConfig(32, 128, 1, 4, 5),
    (1024, 3072, False, 16): SkinnyConfig(32, 128, 8, 4, 5),
    (1024, 3072, False, 32): SkinnyConfig(16, 256, 4, 4, 3),
    (1024, 3072, False, 64): SkinnyConfig(32, 128, 4, 4, 5),
    (151936, 1024, False, 16): SkinnyConfig(128, 128, 1, 4, 3),
    (151936, 1024, False, 32): SkinnyConfig(64, 128, 1, 4, 4),
    (151936, 1024, False, 64): SkinnyConfig(128, 64, 1, 4, 3),
}
"""(columns, width, gated, rows of a tile) to the fastest cut; None: cuBLAS is faster, a norm's own kernel included."""


def skinny_config(rows: int, columns: int, width: int, *, gated: bool) -> SkinnyConfig | None:
    """The stored cut, or for few rows a guess that keeps every multiprocessor reading; None: leave it to cuBLAS."""
    key = (columns, width, gated, row_block_of(rows))
    if key in SKINNY or rows > 16:
        return SKINNY.get(key)
    block_n = 32 if columns <= 16384 else 64
    split_k = 1 if gated else max(1, min(8, 528 // -(-columns // block_n), width // 256))
    return SkinnyConfig(block_n=block_n, block_k=128, split_k=split_k, warps=4, stages=4)
