"""Attention over pages: our kernels, flash-attn where it is installed, and torch over gathered pages.

    python benchmarks/attention.py --out FILE

Decode by batch and context, prefill by new and cached tokens, for the heads of Qwen2.5-7B and Qwen3-0.6B. On a GPU
every time is that of one call inside a CUDA graph, over as many layers as do not fit the L2 cache. Decode shows
the read bandwidth, prefill the rate; both beside flash-attn's time where there is one, and the largest difference
from torch, which is timed on a CPU only.
"""

import itertools
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from common.budget import Budget
from common.report import log_line, make_parser, print_table, save
from common.targets import Target, print_verdicts
from common.timing import microseconds
from torch import Tensor
from torch.nn import functional

from mini_infer_engine.kernels.attention.prefill_rows import PrefillRows

PAGE_SIZE = 256
HEAD_DIM = 128
HEADS = {"7b": (28, 4), "0.6b": (16, 8)}
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
SCALE = HEAD_DIM**-0.5
READ_TB_S = 4.31
"""What an H200 was measured to read."""
_FASTER = Target(1.0, at_least=True)
_SHARE = Target(0.85, at_least=True)
Call = Callable[[Tensor], Tensor]
"""One layer's pages to the attention over them."""


def make_pages(rows: int, tokens: int, kv_heads: int) -> tuple[list[Tensor], Tensor]:
    """Layers [pages, 2, page_size, kv_heads, head_dim] of one pool, and page tables [rows, pages of a row]."""
    width = math.ceil(tokens / PAGE_SIZE)
    pages = rows * width + 1
    page_bytes = PAGE_SIZE * kv_heads * HEAD_DIM * 2 * DTYPE.itemsize
    layers = max(2, min(64, math.ceil(300e6 / (pages * page_bytes)))) if ON_GPU else 2
    pool = torch.randn(pages, layers, 2, PAGE_SIZE, kv_heads, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    tables = torch.randperm(pages - 1, device=DEVICE).int()[: rows * width].view(rows, width)
    return list(pool.unbind(1)), tables


def by_torch(q: Tensor, pages: Tensor, tables: Tensor, tokens: int) -> Tensor:
    """Q [rows, heads, queries, head_dim], its last query at the last token: [rows, queries, heads * head_dim]."""
    found = pages[tables.long()]  # [rows, width, 2, page_size, kv_heads, head_dim]
    keys, values = (found[:, :, half].flatten(1, 2)[:, :tokens].transpose(1, 2) for half in (0, 1))
    places = torch.arange(tokens, device=q.device)
    seen = places <= torch.arange(tokens - q.shape[2], tokens, device=q.device)[:, None]
    out = functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=SCALE, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


def decode_calls(
    rows: int, tokens: int, q_heads: int, kv_heads: int, tables: Tensor, layers: list[Tensor]
) -> dict[str, Call]:
    """Each way to attend from one new token a row; ours also rotates (by nothing) and writes its key and value."""
    qkv = torch.randn(rows, (q_heads + 2 * kv_heads) * HEAD_DIM, device=DEVICE, dtype=DTYPE)
    q = qkv[:, : q_heads * HEAD_DIM].unflatten(1, (q_heads, HEAD_DIM))
    calls: dict[str, Call] = {"torch": lambda pages: by_torch(q[:, :, None], pages, tables, tokens).flatten(1)}
    if not ON_GPU:
        return calls
    from mini_infer_engine.kernels.attention.attention_config import PrefillShape
    from mini_infer_engine.kernels.attention.decode_attention import decode_attention
    from mini_infer_engine.kernels.attention.decode_plan import plan_decode
    from mini_infer_engine.kernels.attention.rope_kv import Rotation
    from mini_infer_engine.kernels.policy import kernel_policy
    from mini_infer_engine.kernels.workspace import Workspace

    slots = torch.arange(rows, device=DEVICE, dtype=torch.int32)
    positions = torch.full((rows,), tokens - 1, device=DEVICE)
    still = torch.cat((torch.ones(tokens, HEAD_DIM // 2), torch.zeros(tokens, HEAD_DIM // 2)), dim=1)
    rotation = Rotation(still.to(DEVICE, DTYPE))
    page_size = layers[0].shape[2]
    shape = PrefillShape(DTYPE, DTYPE, 0, 0, q_heads, kv_heads, HEAD_DIM, page_size, None, 0)
    config = kernel_policy(torch.device(DEVICE)).decode_config(rows, kv_heads, shape=shape)
    plan = plan_decode(  # once a pass, for all layers
        slots,
        positions,
        positions,
        kv_heads,
        tokens,
        config=config,
        group=q_heads // kv_heads,
        page_tables=tables,
        page_size=page_size,
    )
    workspace = Workspace(torch.device(DEVICE))
    calls["ours"] = lambda pages: decode_attention(qkv, rotation, pages, tables, plan, scale=SCALE, workspace=workspace)
    for pages in layers:
        calls["ours"](pages)  # the others find the new keys and values
    if find_spec("flash_attn"):
        from flash_attn import flash_attn_with_kvcache

        lengths = torch.full((rows,), tokens, device=DEVICE, dtype=torch.int32)
        calls["flash-attn"] = lambda pages: flash_attn_with_kvcache(
            q[:, None], pages[:, 0], pages[:, 1], cache_seqlens=lengths, block_table=tables, causal=True
        ).flatten(1)
    return calls


def prefill_calls(new: int, cached: int, q_heads: int, tables: Tensor, pages: Tensor) -> dict[str, Call]:
    """Each way to attend from a chunk of one prompt over a layer's pages, which are like `pages`."""
    tokens = new + cached
    q = torch.randn(new, q_heads, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    calls: dict[str, Call] = {"torch": lambda pages: by_torch(q.transpose(0, 1)[None], pages, tables, tokens)[0]}
    if not ON_GPU:
        return calls
    from mini_infer_engine.kernels.attention.prefill_attention import prefill_attention, prefill_shape
    from mini_infer_engine.kernels.policy import kernel_policy
    from mini_infer_engine.kernels.workspace import Workspace

    query_starts, ends = (torch.tensor(counts, device=DEVICE, dtype=torch.int32) for counts in ([0, new], [tokens]))
    rows = PrefillRows(tables, query_starts, ends, new, tokens)
    workspace = Workspace(torch.device(DEVICE))
    config = kernel_policy(torch.device(DEVICE)).prefill_config(prefill_shape(q, pages, rows))
    calls["ours"] = lambda pages: prefill_attention(q, pages, rows, scale=SCALE, config=config, workspace=workspace)
    if find_spec("flash_attn"):
        from mini_infer_engine.runtime.attention.flash import flash_prefill_attention

        calls["flash-attn"] = lambda pages: flash_prefill_attention(q, pages, rows, scale=SCALE, sliding_window=None)
    return calls


def timed(calls: dict[str, Call], layers: list[Tensor], is_checked: bool) -> dict[str, float]:
    """Microseconds by name, and how far each is from torch's result at most."""
    found: dict[str, float] = {}
    by_reference = calls.pop("torch") if ON_GPU else calls["torch"]
    expected = by_reference(layers[0]).float() if is_checked else None
    for name, call in calls.items():
        if expected is not None:
            found[f"{name} error"] = (call(layers[0]).float() - expected).abs().max().item()
        found[f"{name} us"] = microseconds([lambda pages=pages, run=call: run(pages) for pages in layers])
    if "flash-attn us" in found:
        found["flash-attn / ours"] = found["flash-attn us"] / found["ours us"]
    return found


def decode_case(heads: str, rows: int, tokens: int) -> dict[str, float]:
    """Decode attention of `rows` sequences of `tokens` each."""
    q_heads, kv_heads = HEADS[heads]
    layers, tables = make_pages(rows, tokens, kv_heads)
    found = timed(decode_calls(rows, tokens, q_heads, kv_heads, tables, layers), layers, rows * tokens <= 70_000)
    if "ours us" in found:
        found["TB/s"] = rows * tokens * kv_heads * HEAD_DIM * 2 * DTYPE.itemsize / found["ours us"] / 1e6
    return found


def prefill_case(heads: str, new: int, cached: int) -> dict[str, float]:
    """Attention of `new` tokens of one prompt behind `cached` ones."""
    q_heads, kv_heads = HEADS[heads]
    layers, tables = make_pages(1, new + cached, kv_heads)
    found = timed(
        prefill_calls(new, cached, q_heads, tables, layers[0]), layers[:8], new * (new + cached) <= 20_000_000
    )
    if "ours us" in found:
        found["TFLOP/s"] = 4 * q_heads * HEAD_DIM * (new * cached + new * new / 2) / found["ours us"] / 1e6
    return found


def main() -> int:
    options = make_parser(__doc__).parse_args()
    budget = Budget(options.time_limit_s)
    decodes = [pair for pair in itertools.product((1, 8, 32), (1024, 4096, 16384, 65536)) if math.prod(pair) <= 600_000]
    prefills = [(512, 0), (4096, 0), (8192, 0), (128, 4096), (512, 15_000)]
    if options.smoke:
        decodes, prefills = [(1, 300), (2, 40)], [(16, 0), (8, 280)]
    found: dict[str, dict[str, Any]] = {}
    speed: dict[str, float] = {}
    for heads in HEADS:
        cases: list[tuple[str, Callable[[str, int, int], dict[str, float]], int, int]]
        cases = [(f"{heads} decode {rows} x {tokens}", decode_case, rows, tokens) for rows, tokens in decodes]
        cases += [(f"{heads} prefill {new} after {cached}", prefill_case, new, cached) for new, cached in prefills]
        for name, case, first, second in cases:
            if not budget.allows("a case"):
                continue
            with budget.spending("a case"):
                row = found[name] = case(heads, first, second)
            if case is decode_case and first <= 8:
                speed |= {f"{name}, {key}": row[key] for key in ("flash-attn / ours",) if key in row}
                if second >= 65_536 and "TB/s" in row:
                    speed[f"{name}, share of bandwidth"] = row["TB/s"] / READ_TB_S
        log_line(f"{heads} done")
        save(options.out, {"cases": found})
    names = list(dict.fromkeys(name for row in found.values() for name in row))
    print_table(["", *names], [[case, *(row.get(name) for name in names)] for case, row in found.items()])
    print_verdicts("decode", speed, {name: _SHARE if name.endswith("bandwidth") else _FASTER for name in speed})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
