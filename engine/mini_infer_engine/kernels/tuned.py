"""How skinny products are cut, by shape: measured on an H200 by benchmarks/gpu_kernels.py, stored for a quick start."""

from mini_infer_engine.kernels.skinny_linear import SkinnyConfig

SKINNY: dict[tuple[int, int, bool], SkinnyConfig] = {
    (4608, 3584, False): SkinnyConfig(64, 256, 1, 4, 5),
    (3584, 3584, False): SkinnyConfig(64, 128, 2, 4, 5),
    (18944, 3584, True): SkinnyConfig(32, 128, 1, 4, 3),
    (3584, 18944, False): SkinnyConfig(64, 256, 2, 4, 4),
    (152064, 3584, False): SkinnyConfig(64, 128, 1, 4, 5),
    (2048, 1536, False): SkinnyConfig(32, 128, 4, 4, 4),
    (1536, 1536, False): SkinnyConfig(32, 128, 4, 4, 3),
    (8960, 1536, True): SkinnyConfig(32, 128, 1, 4, 3),
    (1536, 8960, False): SkinnyConfig(32, 128, 8, 4, 4),
    (151936, 1536, False): SkinnyConfig(64, 128, 1, 4, 4),
    (4096, 1024, False): SkinnyConfig(32, 128, 1, 4, 5),
    (1024, 2048, False): SkinnyConfig(32, 128, 8, 4, 5),
    (3072, 1024, True): SkinnyConfig(32, 256, 1, 4, 5),
    (1024, 3072, False): SkinnyConfig(32, 128, 8, 4, 5),
    (151936, 1024, False): SkinnyConfig(64, 256, 1, 4, 3),
}
"""(columns, width, gated) to the fastest cut at one row; sixteen rows cost the same to within 3 %."""


def skinny_config(columns: int, width: int, *, gated: bool) -> SkinnyConfig:
    """The stored cut, or a guess that keeps every multiprocessor reading."""
    found = SKINNY.get((columns, width, gated))
    if found is not None:
        return found
    block_n = 32 if columns <= 16384 else 64
    split_k = 1 if gated else max(1, min(8, 528 // -(-columns // block_n), width // 256))
    return SkinnyConfig(block_n=block_n, block_k=128, split_k=split_k, warps=4, stages=4)
