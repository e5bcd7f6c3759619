"""Latent attention over pages, absorbed and decompressed, against fp64 that decompresses everything."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, and an NVIDIA GPU or TRITON_INTERPRET=1")

from mini_infer_engine.kernels.attention.attention_config import DecodeConfig
from mini_infer_engine.kernels.attention.decode_plan import plan_decode
from mini_infer_engine.kernels.attention.latent_decode import latent_decode
from mini_infer_engine.kernels.attention.latent_prefill import KeyPart, latent_prefill
from mini_infer_engine.kernels.attention.latent_rope import LatentShape, latent_rope
from mini_infer_engine.kernels.moe.route import route
from mini_infer_engine.layers.moe import MoESpec
from mini_infer_engine.ops import torch_ops
from mini_infer_engine.runtime.attention.triton_latent import part_ranges
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, ON_GPU, POLICY, WORKSPACE, cases, error, normal

pytestmark = KERNELS
ROUNDING = {FP32: 256.0, BF16: 8.0}
"""bf16: queries in latent space, weights, latents mixed and the result are rounded."""
SHAPES = cases(  # heads, rank, nope, rope, value, interleaved, page size, dtype
    [
        (4, 32, 24, 16, 20, True, 16, FP32),
        (3, 48, 16, 8, 32, False, 32, FP32),
        (20, 32, 16, 16, 16, True, 16, FP32),
        (1, 32, 16, 16, 16, True, 16, FP32),  # a rank may have but one
    ],
    [
        ((16, 512, 128, 64, 128, True, 128, BF16),),
        ((128, 512, 128, 64, 128, True, 64, BF16),),
        ((16, 512, 128, 64, 128, False, 16, BF16),),
        ((16, 128, 64, 32, 64, True, 128, FP32),),
        ((5, 96, 40, 32, 48, True, 128, BF16),),
        ((1, 512, 128, 64, 128, True, 128, BF16),),
        ((8, 512, 128, 64, 128, True, 128, BF16),),
    ],
)
LENGTHS = [1, 2, 31, 32, 33, 64, 100, 128, 129, 1000, 4097, 9001] if ON_GPU else [1, 17, 33, 70]
CONFIGS = [
    DecodeConfig(target_programs=1, block_tokens=32, programs_per_row=1.0),
    DecodeConfig(target_programs=264, block_tokens=32),
    DecodeConfig(target_programs=264, block_tokens=32, pdl=POLICY.pdl),
    DecodeConfig(target_programs=1000, block_tokens=16),
][:: 1 if ON_GPU else 3]
Case = tuple[int, int, int, int, int, bool, int, torch.dtype]


@dataclass
class Layer:
    """Weights of one layer, and one sequence's latents before norm and rotation for each length."""

    shape: LatentShape
    cos_sin: torch.Tensor
    norm: torch.Tensor
    kv_up: torch.Tensor  # [heads, nope + value, rank]

    @classmethod
    def of(cls, case: Case, longest: int) -> "Layer":
        heads, rank, nope, rope, value, interleaved, _, dtype = case
        shape = LatentShape(heads, rank, nope, rope, value, interleaved, 1e-6)
        angles = torch.arange(longest, device=DEVICE)[:, None] / 10.0 ** torch.arange(rope // 2, device=DEVICE)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)
        kv_up = normal(heads, nope + value, rank, dtype=dtype, seed=3) / rank**0.5
        return cls(shape, table, 1 + normal(rank, dtype=dtype, seed=4) / 4, kv_up)

    @property
    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv_up[:, : self.shape.nope_dim], self.kv_up[:, self.shape.nope_dim :]

    def rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, rope_dim] fp64, pairs half a head apart afterwards."""
        x = x.double()
        if self.shape.interleaved:
            x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
        cos, sin = self.cos_sin.double()[positions][:, None].chunk(2, dim=-1)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def cached(self, latents: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What the pool has of packed latents [tokens, latent_width], fp64."""
        rank = self.shape.kv_rank
        x = latents[:, :rank].double()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.shape.eps) * self.norm.double()
        return torch.cat((x, self.rotated(latents[:, None, rank:], positions)[:, 0]), dim=-1)

    def exact(
        self, packed: torch.Tensor, cached: torch.Tensor, positions: torch.Tensor, indexes: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of tokens over all cached tokens up to each one's own of these `indexes`, rotated by `positions`:
        [tokens, heads * value_dim] fp64.
        """
        shape = self.shape
        q = packed[:, : shape.q_width].view(-1, shape.heads, shape.qk_dim)
        q = torch.cat((q[..., : shape.nope_dim].double(), self.rotated(q[..., shape.nope_dim :], positions)), dim=-1)
        kv = torch.einsum("tr,hdr->thd", cached[:, : shape.kv_rank], self.kv_up.double())
        shared = cached[:, None, shape.kv_rank :].expand(-1, shape.heads, -1)
        k, v = torch.cat((kv[..., : shape.nope_dim], shared), dim=-1), kv[..., shape.nope_dim :]
        hidden = torch.arange(len(cached), device=DEVICE) > indexes[:, None]
        scores = (torch.einsum("qhd,thd->hqt", q, k) * scale).masked_fill(hidden, float("-inf"))
        return torch.einsum("hqt,thd->qhd", scores.softmax(-1), v).flatten(1)


def pool_of(lengths: list[int], case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's pages, all poison, and the tables [sequences, width] of sequences of these lengths."""
    width, page_size = case[1] + case[3], case[6]
    pages = -(-max(lengths) // page_size)
    total = pages * len(lengths) + 2
    pool = torch.full((total, 2, 1, page_size, 1, width), float("nan"), dtype=case[7], device=DEVICE)[:, 1]
    order = torch.randperm(total, generator=torch.Generator().manual_seed(1))[: pages * len(lengths)].to(DEVICE)
    return pool, order.view(len(lengths), pages).to(torch.int32)


def write(pool: torch.Tensor, table: torch.Tensor, tokens: torch.Tensor) -> None:
    """Tokens [count, width] to the first places of a sequence's pages."""
    places = torch.arange(len(tokens), device=DEVICE)
    pool[table[places // pool.shape[2]].long(), 0, places % pool.shape[2], 0] = tokens.to(pool.dtype)


@pytest.mark.parametrize("count", [1, 3, 100] if ON_GPU else [3, 7])
@pytest.mark.parametrize("case", SHAPES)
def test_absorbed_decodes(case: Case, count: int) -> None:
    """From queries and latents before rotation: each row's latent is in its page afterwards, nothing else changed.

    Tokens stand further on in their texts than in their caches, each row's by another number of positions.
    """
    lengths = (LENGTHS * 20)[: min(count, 7 * len(LENGTHS))]
    layer, dtype = Layer.of(case, max(lengths) + 1 + 23), case[7]
    shape, scale = layer.shape, 0.1
    pool, tables = pool_of(lengths, case)
    slots = torch.tensor([*reversed(range(len(lengths))), 0], dtype=torch.int32, device=DEVICE)
    kv_lengths = torch.tensor([*lengths[::-1], 0], device=DEVICE) - 1  # the last row is padding
    positions = kv_lengths + 1 + torch.arange(len(slots), device=DEVICE) * 29 % 23
    packed = normal(len(slots), shape.q_width + shape.latent_width + 32, dtype=dtype, seed=5)
    packed = packed[:, : shape.q_width + shape.latent_width]
    expected, before = [], packed.clone()
    for row, length in enumerate(lengths[::-1]):
        own = normal(length, shape.latent_width, dtype=dtype, seed=row)
        own[-1] = packed[row, shape.q_width :]
        places = torch.arange(length, device=DEVICE)
        places[-1] = positions[row]
        cached = layer.cached(own, places).to(dtype)
        write(pool, tables[slots[row]], cached[:-1])
        of_row = slice(row, row + 1)
        expected.append(layer.exact(packed[of_row], cached.double(), positions[of_row], kv_lengths[of_row], scale))
    for config in CONFIGS:
        plan = plan_decode(slots, positions, kv_lengths, 1, max(lengths) + 1, config=config)
        made = latent_decode(
            packed,
            shape,
            layer.cos_sin,
            layer.norm,
            *layer.halves,
            pool,
            tables,
            slots,
            positions,
            kv_lengths,
            plan,
            scale=scale,
            workspace=WORKSPACE,
            out=torch.full((len(slots), shape.heads * shape.value_dim), 7.0, dtype=dtype, device=DEVICE),
        )
        assert (made[-1] == 7).all(), "a padded row is left as it is"
        assert error(made[:-1], torch.cat(expected)) < ROUNDING[dtype], config
        assert torch.equal(packed, before)
    last = pool[tables[0, (lengths[0] - 1) // case[6]].long(), 0, (lengths[0] - 1) % case[6], 0]
    reference = layer.cached(packed[-2:-1, shape.q_width :], positions[-2:-1])
    assert error(last, reference[0]) < 16


@pytest.mark.parametrize("capacity", [1 << 20, 40])
@pytest.mark.parametrize("case", SHAPES)
def test_decompressed_prompts(case: Case, capacity: int) -> None:
    """Chunks behind cached prefixes, keys in one part or several; padded sequences have neither."""
    chunks = [(0, 1), (0, 37), (70, 64), (33, 1), (0, 0)] + ([(4000, 300), (131, 1025)] if ON_GPU else [])
    ends = [start + count for start, count in chunks]
    layer, dtype = Layer.of(case, max(ends)), case[7]
    shape, scale = layer.shape, 0.1
    pool, tables = pool_of(ends, case)
    counts = [count for _, count in chunks]
    packed = normal(sum(counts), shape.q_width + shape.latent_width, dtype=dtype, seed=5)
    positions = torch.cat([torch.arange(start, start + count) for start, count in chunks]).to(DEVICE)
    rows = torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor(counts)).to(DEVICE)
    kv_index = tables[rows, positions // case[6]] * case[6] + positions % case[6]
    sequences, expected, begin = [], [], 0
    for index, (start, count) in enumerate(chunks):
        new = packed[begin : begin + count]
        latents = torch.cat((normal(start, shape.latent_width, dtype=dtype, seed=index), new[:, shape.q_width :]))
        cached = layer.cached(latents, torch.arange(start + count, device=DEVICE)).to(dtype)
        write(pool, tables[index], cached[:start])
        own_positions = positions[begin : begin + count]
        expected.append(layer.exact(new, cached.double(), own_positions, own_positions, scale))
        sequences.append(cached)
        begin += count
    latent_rope(packed, shape, layer.cos_sin, layer.norm, positions.int(), kv_index.int(), pool)
    for index, end in enumerate(ends):
        places = torch.arange(end, device=DEVICE)
        found = pool[tables[index][places // case[6]].long(), 0, places % case[6], 0]
        assert error(found, sequences[index].double()) < 16
    q = packed[:, : shape.q_width].view(-1, shape.heads, shape.qk_dim)
    begins = torch.tensor([0, *counts]).cumsum(0).to(DEVICE, torch.int32)
    out = torch.full((len(q), shape.heads * shape.value_dim), float("nan"), dtype=dtype, device=DEVICE)
    state = torch.full((len(q) * shape.heads * (shape.value_dim + 2),), float("nan"), device=DEVICE)
    for part in part_ranges(ends, capacity):
        own = [each[part.first : part.first + count] for each, count in zip(sequences, part.counts, strict=True)]
        latents = torch.cat(own)
        kv = torch.einsum("tr,hdr->thd", latents[:, : shape.kv_rank], layer.kv_up).contiguous()
        starts = torch.tensor([0, *part.counts]).cumsum(0).to(DEVICE, torch.int32)
        keys = KeyPart(starts, part.first, part.is_first, part.is_last)
        latent_prefill(
            q,
            kv,
            latents[:, shape.kv_rank :],
            shape,
            begins,
            torch.tensor(ends, dtype=torch.int32, device=DEVICE),
            keys,
            scale=scale,
            state=state,
            out=out,
        )
    assert error(out, torch.cat(expected)) < ROUNDING[dtype]


def test_parts_cover_every_token_once() -> None:
    for ends, capacity in (([5], 100), ([5], 2), ([7, 1, 30], 9), ([3, 3], 1)):
        parts = part_ranges(ends, capacity)
        assert [sum(column) for column in zip(*(part.counts for part in parts), strict=True)] == ends
        assert [part.is_first for part in parts] == [True] + [False] * (len(parts) - 1)
        assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]


ROUTERS: list[dict[str, Any]] = [
    {"num_shared": 2},
    {"num_shared": 1, "scale": 2.5, "num_groups": 4, "top_groups": 2},
    {"scoring": "sigmoid", "has_correction": True, "num_groups": 4, "top_groups": 2, "num_shared": 1},
    {"scoring": "sigmoid", "has_correction": True, "scale": 3.0},
]


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("fields", ROUTERS)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), cases([(5, 12, 3)], [(300, 160, 6), (64, 256, 8)]))
def test_mla_expert_routing_equals_torchs(
    tokens: int, experts: int, top_k: int, fields: dict[str, Any], normalizes: bool
) -> None:
    spec = MoESpec(8, 8, experts, top_k, normalizes, **fields)
    logits = normal(tokens, experts)
    correction = normal(experts, seed=1) / 4 if spec.has_correction else None
    weights, chosen = torch_ops.route(logits, spec, correction)
    routing = route(
        logits,
        top_k,
        normalizes_top_k=normalizes,
        groups=True,
        num_shared=spec.num_shared,
        sigmoid=spec.scoring == "sigmoid",
        scale=spec.scale,
        num_groups=spec.num_groups,
        top_groups=spec.top_groups,
        correction=correction,
    )
    assert torch.equal(routing.experts.long(), chosen)
    assert torch.allclose(routing.weights, weights, atol=1e-5)
    assert torch.equal(routing.counts.long().cpu(), torch.bincount(chosen.flatten().cpu(), minlength=spec.num_stacked))
