"""RMSNorm, SwiGLU, and rotary embedding with the KV write, against fp64."""

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.kernels.attention.rope_kv import Rotation, rope_kv
from mini_infer_engine.kernels.attention.rotate_heads import rotate_heads_
from mini_infer_engine.kernels.norm.rms_norm import add_rms_norm, rms_norm
from mini_infer_engine.kernels.norm.silu_mul import silu_mul
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, cases, error, normal
from tests.gpu.exact import exact_norm, exact_rotated

pytestmark = KERNELS
ROUNDING = {FP32: 8.0, BF16: 1.0}


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("rows", "width"), cases([(0, 64), (1, 64), (3, 96)], [(257, 1024), (33, 3584), (5, 8192)]))
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    packed = normal(rows, width + 32, dtype=dtype)
    x, weight = packed[:, :width], normal(width, dtype=dtype)  # rows of x are strided
    assert error(rms_norm(x, weight, 1e-6), exact_norm(x, weight, 1e-6)) <= ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("rows", "width"), cases([(0, 64), (3, 70)], [(257, 1024), (66, 3584)]))
@pytest.mark.parametrize("summands", [1, 2, 4])
def test_add_rms_norm(summands: int, rows: int, width: int, dtype: torch.dtype) -> None:
    x, added = normal(rows, width, dtype=dtype), normal(summands, rows, width, dtype=dtype, seed=1)
    weight = normal(width, dtype=dtype, seed=2)
    exact = x.double() + added.double().sum(0)
    normed = add_rms_norm(x, added, weight, 1e-6)
    assert error(x, exact) <= ROUNDING[dtype]
    assert error(normed, exact_norm(x, weight, 1e-6)) <= ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("rows", "width"), cases([(0, 64), (1, 70), (3, 1030)], [(300, 18944), (17, 3072)]))
def test_silu_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    packed = normal(rows, 2 * width, dtype=dtype)
    gate, up = packed.double().chunk(2, dim=-1)
    assert error(silu_mul(packed), torch.nn.functional.silu(gate) * up) <= ROUNDING[dtype]


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("tokens", "q_heads", "kv_heads", "head_dim", "page_size", "dtype"),
    cases(
        [(1, 4, 2, 64, 16, FP32), (5, 7, 1, 24, 16, BF16), (0, 2, 2, 64, 16, FP32)],
        [
            (1, 28, 4, 128, 128, BF16),
            (63, 16, 8, 128, 64, BF16),
            (64, 12, 2, 128, 256, FP32),
            (1000, 14, 2, 64, 16, BF16),
            (131, 8, 1, 96, 64, FP32),
        ],
    ),
)
def test_rope_kv(
    tokens: int, q_heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, with_norm: bool
) -> None:
    heads = q_heads + 2 * kv_heads
    qkv = normal(tokens, heads * head_dim, dtype=dtype)
    before = qkv.double().view(tokens, heads, head_dim)
    table = normal(512, head_dim, dtype=dtype, seed=1)
    positions = torch.randint(0, 512, (tokens,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    pages = tokens // page_size + 3
    places = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(3))[:tokens].to(DEVICE)
    weights = [normal(head_dim, dtype=dtype, seed=seed) for seed in (4, 5)] if with_norm else [None, None]
    layers = torch.full((pages, 2, 2, page_size, kv_heads, head_dim), float("nan"), dtype=dtype, device=DEVICE)

    rotation = Rotation(table, *weights, eps=1e-5)
    q = rope_kv(qkv, rotation, positions, places, layers[:, 1])

    parts = [
        exact_rotated(before[:, :q_heads], rotation, rotation.q_norm, positions),
        exact_rotated(before[:, q_heads : q_heads + kv_heads], rotation, rotation.k_norm, positions),
        before[:, q_heads + kv_heads :],
    ]
    assert q.shape == (tokens, q_heads, head_dim)
    assert error(q, parts[0]) <= ROUNDING[dtype]
    stored = layers[:, 1].transpose(0, 1).flatten(1, 2)  # [keys or values, places, kv_heads, head_dim]
    assert error(stored[0, places], parts[1]) <= ROUNDING[dtype]
    assert torch.equal(stored[1, places].double(), parts[2])
    untouched = torch.ones(pages * page_size, dtype=torch.bool, device=DEVICE)
    untouched[places] = False
    assert layers[:, 0].isnan().all(), "another layer was written"
    assert stored[:, untouched].isnan().all(), "another token's place was written"


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim"),
    cases([(0, 2, 1, 16), (3, 4, 2, 24)], [(33, 28, 4, 128), (700, 8, 2, 96)]),
)
def test_rotate_heads(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, with_norms: bool
) -> None:
    qkv = normal(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    cos, sin = normal(tokens, head_dim, dtype=dtype, seed=1), normal(tokens, head_dim, dtype=dtype, seed=2)
    norms = (normal(head_dim, dtype=dtype, seed=3), normal(head_dim, dtype=dtype, seed=4)) if with_norms else None
    parts = qkv.double().view(tokens, heads + 2 * kv_heads, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    q, k, v = parts
    if norms is not None:
        q, k = exact_norm(q, norms[0], 1e-6), exact_norm(k, norms[1], 1e-6)
    both = torch.cat((q, k), dim=1)
    first, second = both.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    rotated = both * cos.double().unsqueeze(1) + turned * sin.double().unsqueeze(1)
    rotate_heads_(qkv, cos, sin, heads, kv_heads, norms, 1e-6)
    assert error(qkv, torch.cat((rotated, v), dim=1).flatten(1)) <= 2 * ROUNDING[dtype]
