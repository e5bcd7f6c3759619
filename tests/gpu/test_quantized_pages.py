"""Kernels over pages of one byte an element, against fp64 over what plain torch stores and reads there."""

from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.kernels.attention.attention_config import PrefillConfig, fits_wide_pages
from mini_infer_engine.kernels.attention.decode_attention import decode_attention
from mini_infer_engine.kernels.attention.decode_plan import plan_decode
from mini_infer_engine.kernels.attention.prefill_attention import prefill_attention, prefill_shape
from mini_infer_engine.kernels.attention.prefill_rows import PrefillRows
from mini_infer_engine.kernels.attention.rope_kv import Rotation, rope_kv
from mini_infer_engine.kernels.attention.widen_pages import wide_page_bytes, widen_pages
from mini_infer_engine.kernels.copy_pages import copy_pages
from mini_infer_engine.kernels.sizes import cdiv
from mini_infer_engine.kernels.workspace import Workspace
from mini_infer_engine.models.kv_spec import FP8, INT8, KVQuantization, KVSpec
from mini_infer_engine.runtime.memory.quantized_pool import QuantizedKVPool
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, ON_GPU, POLICY, WORKSPACE, cases, error, normal
from tests.gpu.paged import exact_attention, make_sinks, strided_queries
from tests.gpu.test_attention_kernels import CHUNKS, CONFIGS, LENGTHS, ROUNDING

pytestmark = KERNELS
KINDS = pytest.mark.parametrize("kind", [FP8, INT8], ids=lambda kind: kind.name)
SHAPES = pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "page_size", "window", "softcap", "dtype"),
    cases(
        [
            (4, 2, 64, 16, None, None, FP32),
            (7, 1, 24, 64, 40, 1.5, FP32),
            (4, 2, 64, 16, 20, None, FP32),
        ],
        [
            (28, 4, 128, 128, None, None, BF16),
            (16, 8, 128, 16, 1000, None, BF16),
            (14, 2, 64, 128, None, None, BF16),
            (8, 4, 256, 128, 300, 1.5, BF16),
            (8, 1, 96, 64, None, None, BF16),
            (16, 8, 128, 128, None, None, FP32),
        ],
    ),
)
DECODE_SHAPES = pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "page_size", "window", "softcap", "dtype"),
    cases(
        [
            (4, 2, 64, 16, None, None, FP32),
            (7, 1, 24, 64, 40, 1.5, FP32),
            (10, 1, 64, 64, None, 1.5, FP32),
            (27, 3, 96, 32, 20, None, FP32),
            (5, 5, 128, 128, 30, None, FP32),
            (16, 2, 256, 48, None, None, FP32),
        ],
        [
            (28, 4, 128, 128, None, None, BF16),
            (28, 4, 128, 128, None, 1.5, BF16),
            (16, 8, 128, 16, 1000, None, BF16),
            (14, 2, 64, 128, None, None, BF16),
            (32, 8, 128, 128, None, None, torch.float16),
            (24, 2, 128, 128, None, None, BF16),
            (32, 2, 64, 64, 300, None, BF16),
            (32, 1, 64, 128, None, None, BF16),
            (8, 4, 256, 128, 300, 1.5, BF16),
            (8, 1, 96, 64, None, None, BF16),
            (16, 8, 128, 128, None, None, FP32),
        ],
    ),
)
"""Groups of up to eight query heads are columns of the products, of more rows."""
WIDE_SHAPES = pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "page_size", "window", "softcap", "dtype"),
    cases(
        [
            (4, 2, 64, 16, None, None, FP32),
            (7, 1, 24, 64, 40, 1.5, FP32),
            (6, 3, 96, 32, None, 1.5, FP32),
            (5, 5, 128, 128, 30, None, FP32),
            (2, 1, 256, 48, None, None, FP32),
        ],
        [
            (28, 4, 128, 128, None, None, BF16),
            (16, 8, 128, 256, None, None, BF16),
            (15, 3, 64, 128, None, None, BF16),
            (16, 8, 128, 128, None, None, torch.float16),
            (16, 8, 128, 128, 1000, None, BF16),
            (8, 4, 256, 128, 300, 1.5, BF16),
            (8, 1, 96, 64, None, None, BF16),
        ],
    ),
)
"""Of pages that are widened: whatever can be, though FlashAttention-3 reads some of these only."""
ROTATION_PERIOD = 10.0


def sinks_of(q_heads: int, window: int | None, softcap: float | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns sinks for heads that have a window and no cap of scores."""
    return make_sinks(q_heads, dtype) if window is not None and softcap is None else None


@dataclass
class Quantized:
    """A pool of two layers, of which the second is used, poison wherever nothing should be read."""

    pool: QuantizedKVPool
    tables: torch.Tensor  # [sequences, width] int32
    keys: list[torch.Tensor]  # [length, kv_heads, head_dim] fp64, as they are read
    values: list[torch.Tensor]

    @property
    def layer(self) -> torch.Tensor:
        return self.pool.pages[:, 1]

    def store(self, pages: torch.Tensor, offsets: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Tokens [tokens, 2, kv_heads, head_dim] by plain torch; how they are read."""
        return self.pool.write(self.pool.token_rows_of(pages.long(), offsets.long())[1], kv)

    def read(self, pages: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The same tokens [tokens, 2, kv_heads, head_dim] by plain torch, in `dtype`."""
        spec = self.pool.spec
        shape = (len(pages), 2, spec.num_kv_heads, spec.head_dim)
        out = torch.empty((2 * len(pages), spec.row_width), dtype=dtype, device=DEVICE)
        return self.pool.read(self.pool.token_rows_of(pages.long(), offsets.long())[1], out).view(shape)

    def contents(self) -> torch.Tensor:
        return self.pool.storage.clone()


def make_quantized(
    lengths: list[int], page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, kind: KVQuantization
) -> Quantized:
    width = -(-max(lengths) // page_size)
    count = len(lengths) * width + 3
    pool = QuantizedKVPool(KVSpec(2, page_size, kv_heads, head_dim, dtype, quantization=kind), count, DEVICE)
    pool.storage.fill_(255)  # NaN in e4m3 and in scales
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))[: len(lengths) * width].to(DEVICE)
    made = Quantized(pool, order.view(len(lengths), width).to(torch.int32), [], [])
    for index, length in enumerate(lengths):
        tokens = torch.arange(length, device=DEVICE)
        kv = normal(length, 2, kv_heads, head_dim, dtype=dtype, seed=index) * (1 + tokens % 7)[:, None, None, None]
        read = made.store(made.tables[index][tokens // page_size], tokens % page_size, kv.to(dtype)).double()
        made.keys.append(read[:, 0])
        made.values.append(read[:, 1])
    return made


def rows_of(made: Quantized, chosen: list[int], page_size: int) -> PrefillRows:
    """Of some of CHUNKS, with as many pages as they need."""
    counts, ends = [CHUNKS[index][1] for index in chosen], [sum(CHUNKS[index]) for index in chosen]
    starts = torch.tensor([0, *counts], device=DEVICE).cumsum(0).to(torch.int32)
    lengths = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    pages = sum(cdiv(end, page_size) for end, count in zip(ends, counts, strict=True) if count)
    return PrefillRows(made.tables[chosen], starts, lengths, max(counts), max(ends), pages)


def scratch(made: Quantized, dtype: torch.dtype, pages: int) -> Workspace:
    """With room for so many pages in `dtype`."""
    workspace = Workspace(DEVICE)
    workspace.reserve_wide_pages(pages * wide_page_bytes(made.layer, dtype))
    return workspace


def rotation_of(head_dim: int, dtype: torch.dtype, positions: int) -> Rotation:
    """That leaves everything as it is, so that what is stored can be said without rounding."""
    half = head_dim // 2
    row = torch.cat((torch.ones(half), torch.zeros(half)))
    return Rotation(row.repeat(positions, 1).to(dtype).to(DEVICE))


def check_stored(actual: torch.Tensor, expected: torch.Tensor, kind: KVQuantization) -> None:
    """Byte for byte; the interpreter (Triton 3.6) loses the carry where e4m3 rounds up to the next power of two."""
    if ON_GPU or kind is INT8:
        assert torch.equal(actual, expected)
    else:
        assert (actual == expected).float().mean() > 0.97


@KINDS
@SHAPES
def test_prompts_are_stored_as_by_torch(
    q_heads: int, kv_heads: int, head_dim: int, page_size: int, window: int | None, softcap: float | None,
    dtype: torch.dtype, kind: KVQuantization,
) -> None:  # fmt: skip
    made = make_quantized([3], page_size, kv_heads, head_dim, dtype, kind)
    tokens = 9
    qkv = normal(tokens, (q_heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=9)
    qkv[1, -head_dim:] = 0
    index = torch.tensor([0, 17, -1, 30, 5, 16, 2 * page_size - 1, 1, 3], dtype=torch.int32, device=DEVICE)
    before = made.contents()
    kept = index >= 0
    kv = qkv[:, q_heads * head_dim :].view(tokens, 2, kv_heads, head_dim)[kept].clone()
    made.store(index[kept] // page_size, index[kept] % page_size, kv)
    expected = made.contents()
    made.pool.storage.copy_(before)
    positions = torch.arange(tokens, device=DEVICE)
    rope_kv(qkv, rotation_of(head_dim, dtype, tokens), positions, index, made.layer)
    check_stored(made.contents(), expected, kind)


@KINDS
@DECODE_SHAPES
def test_decode_attention(
    q_heads: int, kv_heads: int, head_dim: int, page_size: int, window: int | None, softcap: float | None,
    dtype: torch.dtype, kind: KVQuantization,
) -> None:  # fmt: skip
    """The new token is stored as by torch, and attends to itself as it is stored, wherever it stands in its text."""
    rows, scale = len(LENGTHS), head_dim**-0.5
    sinks = sinks_of(q_heads, window, softcap, dtype)
    made = make_quantized(LENGTHS, page_size, kv_heads, head_dim, dtype, kind)
    qkv = normal(rows, (q_heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=99)
    heads = qkv.unflatten(1, (-1, head_dim))
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    kv_lengths = torch.tensor(LENGTHS, device=DEVICE) - 1
    pages = made.tables.gather(1, kv_lengths[:, None] // page_size)[:, 0]
    new = heads[:, q_heads:].reshape(rows, 2, kv_heads, head_dim)
    before = made.contents()
    made.store(pages, kv_lengths % page_size, new)
    expected = made.contents()
    for config in CONFIGS:
        made.pool.storage.copy_(before)
        group = q_heads // kv_heads
        plan = plan_decode(
            slots, kv_lengths + 5, kv_lengths, kv_heads, max(LENGTHS), window, config=config, group=group
        )
        mixed = decode_attention(
            qkv, rotation_of(head_dim, dtype, max(LENGTHS) + 5), made.layer, made.tables, plan,
            scale=scale, workspace=WORKSPACE, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        check_stored(made.contents(), expected, kind)
        read = made.read(pages, kv_lengths % page_size, dtype).double()
        exact = []
        for row, length in enumerate(LENGTHS):
            keys, values = made.keys[row], made.values[row]
            keys[-1], values[-1] = read[row]
            queries = heads[row : row + 1, :q_heads]
            exact.append(exact_attention(queries, keys, values, length - 1, scale, window, softcap, sinks))
        # Queries are rounded to fp16 once more, and so are products of probabilities and scales.
        assert error(mixed, torch.cat(exact)) <= 2 * ROUNDING.get(dtype, ROUNDING[BF16]), config


@KINDS
@SHAPES
def test_prefill_attention(
    q_heads: int, kv_heads: int, head_dim: int, page_size: int, window: int | None, softcap: float | None,
    dtype: torch.dtype, kind: KVQuantization,
) -> None:  # fmt: skip
    scale, sinks = head_dim**-0.5, sinks_of(q_heads, window, softcap, dtype)
    made = make_quantized([max(1, sum(chunk)) for chunk in CHUNKS], page_size, kv_heads, head_dim, dtype, kind)

    def check(chosen: list[int], config: PrefillConfig | None = None) -> None:
        counts = [CHUNKS[index][1] for index in chosen]
        ends = [sum(CHUNKS[index]) for index in chosen]
        q = strided_queries(sum(counts), q_heads, kv_heads, head_dim, dtype)
        starts = torch.tensor([0, *counts], device=DEVICE).cumsum(0).to(torch.int32)
        lengths = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        rows = PrefillRows(made.tables[chosen], starts, lengths, max(counts), max(ends))
        shape = prefill_shape(q, made.layer, rows, window, softcap)
        config = config or POLICY.prefill_config(shape)
        mixed = prefill_attention(
            q, made.layer, rows,
            scale=scale, config=config, workspace=WORKSPACE, sliding_window=window, softcap=softcap,
            sinks=sinks,
        )  # fmt: skip
        for index, part, queries in zip(chosen, mixed.split(counts), q.split(counts), strict=True):
            start, end = CHUNKS[index][0], sum(CHUNKS[index])
            keys, values = made.keys[index][:end], made.values[index][:end]
            exact = exact_attention(queries, keys, values, start, scale, window, softcap, sinks)
            assert error(part, exact) <= 2 * ROUNDING[dtype], CHUNKS[index]

    if ON_GPU:
        check(list(range(len(CHUNKS))))
        for alone in (0, 1, 2, 3):
            check([alone])
            check([alone], PrefillConfig(16, 32, 4, 2, programs=4000))
    else:  # a minute each, interpreted
        check([0, 3], PrefillConfig(64, 32, 4, 2, programs=1))
        check([0], PrefillConfig(16, 32, 4, 2, programs=4000))


@KINDS
@WIDE_SHAPES
def test_widened_pages_are_what_torch_reads(
    q_heads: int, kv_heads: int, head_dim: int, page_size: int, window: int | None, softcap: float | None,
    dtype: torch.dtype, kind: KVQuantization,
) -> None:  # fmt: skip
    """Bit for bit, side by side, zeros behind a sequence's end; sequences without new tokens have no pages there."""
    made = make_quantized([max(1, sum(chunk)) for chunk in CHUNKS], page_size, kv_heads, head_dim, dtype, kind)
    rows = rows_of(made, list(range(len(CHUNKS))), page_size)
    workspace = scratch(made, dtype, rows.pages + 1)
    for programs in (3, 100_000):
        workspace.wide_pages.fill_(255)
        wide, wide_rows = widen_pages(made.layer, rows, dtype, workspace=workspace, programs=programs)
        assert wide.data_ptr() == workspace.wide_pages.data_ptr()
        before = 0
        for index, (known, new) in enumerate(CHUNKS):
            count = cdiv(known + new, page_size) if new else 0
            pages = torch.arange(before, before + count, dtype=torch.int32, device=DEVICE)
            assert torch.equal(wide_rows.page_tables[index, :count], pages)
            read = wide[before : before + count].transpose(1, 2).flatten(0, 1).double()  # [tokens, 2, heads, dims]
            expected = torch.stack((made.keys[index], made.values[index]), 1)[: known + new if new else 0]
            assert torch.equal(read[: known + new], expected)
            assert not read[known + new :].any()
            before += count
        assert wide[before:].isnan().all(), "behind the last page nothing is written"


@KINDS
def test_widened_pages_in_fp16_are_finite(kind: KVQuantization) -> None:
    """A scale is rounded up: the largest number of fp16 would become infinite."""
    pool = QuantizedKVPool(KVSpec(2, 16, 1, 64, torch.float16, quantization=kind), 1, DEVICE)
    made = Quantized(pool, torch.zeros((1, 1), dtype=torch.int32, device=DEVICE), [], [])
    kv = torch.full((5, 2, 1, 64), 65504.0, dtype=torch.float16, device=DEVICE)
    made.store(torch.zeros(5, device=DEVICE).long(), torch.arange(5, device=DEVICE), kv)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    rows = PrefillRows(made.tables, starts, starts[1:] * 5, 1, 5, 1)
    workspace = scratch(made, torch.float16, 1)
    wide, _ = widen_pages(made.layer, rows, torch.float16, workspace=workspace, programs=1)
    assert wide.isfinite().all()
    assert (wide[0, :, :5].float() / 65504 - 1).abs().max() <= 0.01


@KINDS
@WIDE_SHAPES
def test_prefill_attention_over_widened_pages(
    q_heads: int, kv_heads: int, head_dim: int, page_size: int, window: int | None, softcap: float | None,
    dtype: torch.dtype, kind: KVQuantization,
) -> None:  # fmt: skip
    """It is the attention over the pages themselves; by FlashAttention-3 where that can compute it."""
    scale, rounding = head_dim**-0.5, ROUNDING.get(dtype, ROUNDING[BF16])
    made = make_quantized([max(1, sum(chunk)) for chunk in CHUNKS], page_size, kv_heads, head_dim, dtype, kind)
    chosen = list(range(len(CHUNKS))) if ON_GPU else [0, 1, 3]
    rows = rows_of(made, chosen, page_size)
    workspace = scratch(made, dtype, rows.pages)
    counts = [CHUNKS[index][1] for index in chosen]
    q = strided_queries(sum(counts), q_heads, kv_heads, head_dim, dtype)
    shape = prefill_shape(q, made.layer, rows, window, softcap, wide_pages=rows.pages)
    hopper = POLICY.hopper_prefill_config(shape)
    assert (hopper is not None) == (POLICY.wide_pages and fits_wide_pages(shape))
    options = {"scale": scale, "workspace": workspace, "sliding_window": window, "softcap": softcap}
    plain = PrefillConfig(64, 32, 4, 2, programs=1)
    if hopper is not None:
        assert hopper.widens
        mixed = prefill_attention(q, made.layer, rows, config=hopper, **options)
    else:
        wide, wide_rows = widen_pages(made.layer, rows, dtype, workspace=workspace, programs=50)
        mixed = prefill_attention(q, wide, wide_rows, config=plain, **options)
    narrow = prefill_attention(q, made.layer, rows, config=plain, **options)
    for index, part, other, queries in zip(
        chosen, mixed.split(counts), narrow.split(counts), q.split(counts), strict=True
    ):
        start, end = CHUNKS[index][0], sum(CHUNKS[index])
        keys, values = made.keys[index][:end], made.values[index][:end]
        exact = exact_attention(queries, keys, values, start, scale, window, softcap)
        assert error(part, exact) <= 2 * rounding, CHUNKS[index]
        assert error(part, other.double()) <= 4 * rounding, CHUNKS[index]


@KINDS
def test_queries_and_keys_of_any_size(kind: KVQuantization) -> None:
    """What would overflow in fp16 does not: queries are divided by their largest element."""
    q_heads, kv_heads, head_dim, page_size = 4, 2, 64, 16
    made = make_quantized([40], page_size, kv_heads, head_dim, BF16 if ON_GPU else FP32, kind)
    q = normal(1, q_heads, head_dim, dtype=BF16 if ON_GPU else FP32) * 1e5
    rows = PrefillRows(
        made.tables, torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
        torch.tensor([40], dtype=torch.int32, device=DEVICE), 1, 40,
    )  # fmt: skip
    config = POLICY.prefill_config(prefill_shape(q, made.layer, rows))
    mixed = prefill_attention(q, made.layer, rows, scale=1e-5, config=config, workspace=WORKSPACE)
    exact = exact_attention(q, made.keys[0], made.values[0], 39, 1e-5, None)
    assert error(mixed, exact) <= 2 * ROUNDING[q.dtype]


@KINDS
def test_pages_are_copied_with_their_scales(kind: KVQuantization) -> None:
    pool = QuantizedKVPool(KVSpec(2, 16, 2, 24, FP32, quantization=kind), 5, DEVICE)
    pool.storage.random_(0, 255)
    before, copies = pool.storage.clone(), [(0, 2, 1), (1, 3, 16), (0, 4, 13)]
    copy_pages(pool.pages, torch.tensor(copies, dtype=torch.int32, device=DEVICE))
    halves, known = (x.view(6, 2, 2, -1) for x in (pool.storage, before))
    value_bytes = 16 * 2 * 24
    for source, target, tokens in copies:
        assert torch.equal(halves[target, ..., : tokens * 48], known[source, ..., : tokens * 48])
        assert torch.equal(
            halves[target, ..., tokens * 48 : value_bytes], known[target, ..., tokens * 48 : value_bytes]
        )
        assert torch.equal(halves[target, ..., value_bytes:], known[source, ..., value_bytes:])
    assert torch.equal(pool.storage[[0, 1, 5]], before[[0, 1, 5]])


def test_the_hopper_kernel_leaves_such_pages_to_the_other() -> None:
    made = make_quantized([64], 128, 2, 128, BF16, FP8)
    q = normal(64, 4, 128, dtype=BF16)
    rows = PrefillRows(made.tables, torch.tensor([0, 64]), torch.tensor([64]), 64, 64, 1)
    shape = prefill_shape(q, made.layer, rows)
    assert POLICY.hopper_prefill_config(shape) is None, "without scratch memory"
    assert POLICY.hopper_prefill_config(replace(shape, pages_dtype=BF16)) is not None or not POLICY.hopper_fa3
