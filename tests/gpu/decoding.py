"""Decode attention against fp64: from q, k and v before rotation, over pages with poison wherever nothing is read."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mini_infer_engine.kernels.attention.attention_config import DecodeConfig
from mini_infer_engine.kernels.attention.decode_attention import decode_attention
from mini_infer_engine.kernels.attention.decode_plan import plan_decode
from mini_infer_engine.kernels.attention.rope_kv import Rotation
from tests.gpu.device import BF16, DEVICE, FP32, ON_GPU, WORKSPACE, error, normal
from tests.gpu.exact import exact_rotated
from tests.gpu.paged import exact_attention, make_paged, make_sinks

ROUNDING = {FP32: 256.0, BF16: 3.0}
"""bf16 weights and a bf16 result: two roundings; fp32 sums of thousands of terms that are larger than their mean."""
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 128, 255, 257, 1000, 4097, 9001] if ON_GPU else [1, 17, 64, 70]


@dataclass(frozen=True)
class DecodeShape:
    """Sizes of heads and pages."""

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    window: int | None
    dtype: torch.dtype


def assert_decodes(
    shape: DecodeShape,
    configs: Sequence[DecodeConfig],
    *,
    with_norm: bool,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> None:
    """The new token's k and v are in their page afterwards, nothing else changed, and twice the same is made.

    Tokens stand further on in their texts than in their caches, each row's by another number of positions.
    """
    q_heads, kv_heads, head_dim, page_size = shape.q_heads, shape.kv_heads, shape.head_dim, shape.page_size
    window, dtype = shape.window, shape.dtype
    sinks = make_sinks(q_heads, dtype) if has_sinks else None
    rows, spare = len(LENGTHS), 2  # padded rows of a graph: all of one sequence, whose only token is the new one
    paged = make_paged([*LENGTHS, 1], page_size, kv_heads, head_dim, dtype)
    slots = [*range(rows)[::-1], *[rows] * spare]  # rows are in another order than page tables
    kv_lengths = torch.tensor([*LENGTHS, 1], device=DEVICE)[slots] - 1
    positions = kv_lengths + torch.arange(len(slots), device=DEVICE) * 29 % 23
    width = (q_heads + 2 * kv_heads) * head_dim
    qkv = normal(len(slots), width + 32, dtype=dtype, seed=99)[:, :width]  # its rows are strided
    weights = [1 + normal(head_dim, dtype=dtype, seed=seed) / 4 for seed in (4, 5)] if with_norm else [None, None]
    angles = torch.arange(max(LENGTHS) + 23, device=DEVICE)[:, None] / 10.0 ** torch.arange(
        head_dim // 2, device=DEVICE
    )
    rotation = Rotation(torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype), *weights, eps=1e-5)

    heads = qkv.unflatten(1, (-1, head_dim))
    q = exact_rotated(heads[:, :q_heads], rotation, rotation.q_norm, positions)
    new_keys = exact_rotated(heads[:, q_heads : q_heads + kv_heads], rotation, rotation.k_norm, positions)
    new_values = heads[:, q_heads + kv_heads :]
    pages = paged.tables[slots].gather(1, kv_lengths[:, None] // page_size)[:, 0].long()
    before = paged.pool.clone()
    before[pages, :, kv_lengths % page_size] = 0
    paged.pool[pages, :, kv_lengths % page_size] = float("nan")  # what stood there is not read
    exact = []
    for row, slot in enumerate(slots[:rows]):
        keys, values = paged.keys[slot], paged.values[slot]
        keys[-1], values[-1] = new_keys[row], new_values[row].double()
        first = LENGTHS[slot] - 1
        exact.append(exact_attention(q[row : row + 1], keys, values, first, head_dim**-0.5, window, softcap, sinks))

    for config in configs:
        slot_tensor, group = torch.tensor(slots, dtype=torch.int32, device=DEVICE), q_heads // kv_heads
        plan = plan_decode(
            slot_tensor,
            positions,
            kv_lengths,
            kv_heads,
            max(LENGTHS),
            window,
            config=config,
            group=group,
            page_tables=paged.tables,
            page_size=page_size,
        )
        run = [
            decode_attention(
                qkv,
                rotation,
                paged.pool,
                paged.tables,
                plan,
                scale=head_dim**-0.5,
                workspace=WORKSPACE,
                softcap=softcap,
                sinks=sinks,
            )
            for _ in range(2)
        ]
        assert error(run[0][:rows], torch.cat(exact)) <= ROUNDING[dtype], config
        assert torch.equal(run[0][:rows], run[1][:rows]), "counters were not left at zero, or results depend on timing"
        written = paged.pool[pages, :, kv_lengths % page_size]
        assert error(written[:rows, 0], new_keys[:rows]) <= ROUNDING[dtype]
        assert torch.equal(written[:rows, 1], new_values[:rows])
        after = paged.pool.clone()
        after[pages, :, kv_lengths % page_size] = 0
        assert torch.equal(after.nan_to_num(7.0), before.nan_to_num(7.0)), "another token's place was written"
    no_slots = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    empty = plan_decode(
        no_slots,
        positions[:0],
        kv_lengths[:0],
        kv_heads,
        9,
        window,
        config=configs[0],
        page_tables=paged.tables,
        page_size=page_size,
    )
    mixed = decode_attention(qkv[:0], rotation, paged.pool, paged.tables, empty, scale=1.0, workspace=WORKSPACE)
    assert mixed.shape == (0, q_heads * head_dim)
