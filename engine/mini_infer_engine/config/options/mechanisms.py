"""Every mechanism of the GPU path that can be switched off by name, to measure what it brings or to find a fault.

Does not depend on torch: settings and command lines read the names too.
"""

import difflib
from collections.abc import Iterable
from enum import StrEnum


class Mechanism(StrEnum):
    """A name for `disable`, with what runs when it is on and what runs in its place when it is off."""

    description: str

    def __new__(cls, name: str, description: str) -> "Mechanism":
        """Makes a string that has a description."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.description = description
        return member

    SMALL_M_GEMM = (
        "small_m_gemm",
        "our GEMM kernels for at most 64 rows, with bias, gate, residual and RMSNorm fused; off: cuBLAS and kernels of "
        "their own",
    )
    WIDE_PANELS = (
        "wide_panels",
        "quantised weights of at most 64 rows on Hopper: TMA copies 128 bytes of a row at a time, of x only rows that "
        "there are, and scales; off: 64 bytes, eight rows, and scales are copied by threads",
    )
    LARGE_M_GEMM = (
        "large_m_gemm",
        "more than 64 rows by int8 or int4 weights are multiplied by a kernel that widens weights in registers, on "
        "Hopper; off: weights are read once for 64 rows, or a bf16 copy of the layer is made for cuBLAS",
    )
    INT8_GEMM = (
        "int8_gemm",
        "W8A8: int8 products of more than 64 rows with their scales in one kernel; off: torch._int_mm and a kernel for "
        "the scales",
    )
    FP8_BLOCK_GEMM = (
        "fp8_block_gemm",
        "W8A8 for more than 64 rows by FP8 weights with scales by blocks, where there is TMA; off: W8A16, activations "
        "keep their dtype",
    )
    STREAM_K = "stream_k", "the stream-K GEMM of 17 to 64 rows, where pdl_gemm cannot run; off: cuBLAS"
    PDL = (
        "pdl",
        "programmatic dependent launch on Hopper: GEMM kernels and decode attention begin while the kernel before them "
        "still runs; off: the portable kernels, one after another",
    )
    TUNED_CONFIGS = "tuned_configs", "tile configs that were measured for a GEMM's shape; off: the rule for all shapes"
    SPLIT_K = "split_k", "split-K for cuBLAS GEMMs with too few output tiles for all SMs; off: one product"
    SPLIT_KV = "split_kv", "FlashDecoding: decode attention splits a sequence's keys; off: one program per KV head"
    CHECK_ATTENTION = (
        "check_attention",
        "speculation: where guesses are checked, rotation, the write of keys and values, attention and the merge of "
        "splits are one kernel; off: three, those of short prompt chunks",
    )
    HOPPER_DECODE = (
        "hopper_decode",
        "decode attention on Hopper by a kernel that copies keys before it waits for q; off: the portable kernel",
    )
    HOPPER_FA3 = "hopper_fa3", "FlashAttention-3 for prompts on Hopper; off: FlashAttention-2 in Triton"
    WIDE_PAGES = (
        "wide_pages",
        "prompts over KV pages of one byte an element: they are widened to 16 bits in scratch memory, layer by layer, "
        "for FlashAttention-3; off: FlashAttention-2 widens them tile by tile",
    )
    ONE_SHOT_ALL_REDUCE = (
        "one_shot_all_reduce",
        "tensor parallelism: sums go through the memory of the host's GPUs, in one kernel with residual and RMSNorm; "
        "off: NCCL",
    )
    PUSHED_SUMS = (
        "pushed_sums",
        "tensor parallelism: summands of at most 256 rows are written into the other GPUs' memory, which wait for the "
        "data itself; off: they are read from there after a signal, as those of more rows",
    )
    OVERLAPPED_SUMS = (
        "overlapped_sums",
        "tensor parallelism over two GPUs: in passes of at least 6,144 rows that no CUDA graph holds, copy engines "
        "move one half of a summand while products of the other run; off: sums and products one after another",
    )
    PREFILL_GRAPHS = "prefill_graphs", "CUDA graphs of passes with prompts; off: kernel by kernel"
    SEPARATE_DECODE_GRAPHS = (
        "separate_decode_graphs",
        "small models run decode rows beside a prompt in a CUDA graph of their own; off: in the prompt's graph",
    )


def parse_mechanisms(names: Iterable[str]) -> frozenset[Mechanism]:
    """Returns the mechanisms of these names. Raises a ValueError that lists the known names if one is unknown."""
    by_name = {str(mechanism): mechanism for mechanism in Mechanism}
    found = set()
    for name in names:
        if name not in by_name:
            close = difflib.get_close_matches(name, by_name, n=1)
            hint = f": did you mean {close[0]!r}?" if close else "."
            raise ValueError(f"disable: there is no mechanism {name!r}{hint} There are {', '.join(by_name)}.")
        found.add(by_name[name])
    return frozenset(found)
