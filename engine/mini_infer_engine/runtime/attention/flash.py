"""Computes prompt chunks by flash-attn 2.8 (Dao 2023, arXiv 2307.08691), not by our kernel; bf16, pages of n x 256."""

from flash_attn import flash_attn_varlen_func
from torch import Tensor

from mini_infer_engine.kernels.attention.prefill_rows import PrefillRows


def flash_prefill_attention(
    q: Tensor,
    pages: Tensor,
    rows: PrefillRows,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None = None,
    sinks: None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes the same as `kernels.attention.prefill_attention.prefill_attention` without sinks, by flash-attn."""
    assert sinks is None, "`triton_backend` refuses them"
    mixed: Tensor = flash_attn_varlen_func(
        q,
        pages[:, 0],
        pages[:, 1],
        cu_seqlens_q=rows.query_starts,
        cu_seqlens_k=rows.key_starts,
        max_seqlen_q=rows.longest_query,
        max_seqlen_k=rows.longest_key,
        softmax_scale=scale,
        causal=True,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        softcap=softcap or 0.0,
        block_table=rows.page_tables,
    )
    return mixed.flatten(1) if out is None else out.copy_(mixed.flatten(1))
