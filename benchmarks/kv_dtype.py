"""Keys and values in one byte an element beside bf16: decode attention by itself, and steps of an engine.

    python benchmarks/kv_dtype.py --out FILE --model qwen2.5-7b --engines ours,vllm

Random weights. Attention: one layer's decode attention of 8 sequences of 32,768 tokens and other sizes, inside a CUDA
graph over as many layers as do not fit the L2 cache, with the rate of bytes read, and of prompt chunks. Engine: time
between tokens of 8 sequences of 32,768 tokens, and to the first token of 4,096, by dtype of keys and values (--kinds);
with fp8 weights too, for beside bf16 weights the weights are half of what a step reads. As many engines as fit the
GPU's memory start at the same time, each in a process of its own, and are measured one at a time; those of bf16 weights
come first. With `--engines ours,vllm --kinds auto,fp8` these are two waves of four on an H200, and four of two on a GPU
of 80 GB.
"""

import argparse
import contextlib
import itertools
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from common import engines
from common.budget import Budget
from common.models import kv_bytes_per_token, model_folder, vocabulary
from common.report import log_line, make_parser, print_table, save, words
from common.targets import Target, print_verdicts
from common.timing import microseconds
from common.together import Start, measure_alternately

if TYPE_CHECKING:
    from mini_infer_engine.kernels.attention.attention_config import DecodeConfig

HEAD_DIM, PAGE_SIZE, Q_HEADS, KV_HEADS = 128, 128, 28, 4
ROWS, CONTEXT, ANSWER = 8, 32_768, 65
SETTINGS = {"max_num_seqs": ROWS, "max_model_len": CONTEXT}
"""Prompt and answer fill the context: the 7B shape has no more positions."""
_KV_TOKENS = ROWS * (CONTEXT + 2 * PAGE_SIZE) + 3 * 4_096
"""All sequences, whose pages are found again where a run repeats them, and the prompts before them."""
_ONE_BYTE = 0.54
"""Of bf16's bytes, that keys and values of one byte take: int8 has scales."""
_WEIGHT_BYTES = {None: 15.3e9, "fp8": 8.8e9}
"""Of the 7B shape; the embedding and the output layer stay bf16."""
_OTHER_BYTES = 4.5e9
"""Of an engine: activations of 16,384 tokens, CUDA graphs, CUDA itself."""
_GPU_SHARE = 0.92
"""Of the GPU's memory, that engines of one wave take together, at most."""
_DECODES = ((8, 32_768), (1, 32_768), (8, 4_096), (32, 8_192), (128, 2_048))
_TUNED = ((8, 32_768), (32, 8_192))
_PREFILLS = ((4_096, 0), (2_048, 30_720), (512, 16_384))
_KINDS = ("auto", "fp8", "int8")
_TARGETS = {"attention of 8 x 32768, fp8 times bf16": Target(1.5, at_least=True)}


def attention(options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Microseconds of each case and dtype, and terabytes a second of decodes."""
    import triton

    from mini_infer_engine.config.options.mechanisms import Mechanism
    from mini_infer_engine.kernels.attention.decode_attention import decode_attention
    from mini_infer_engine.kernels.attention.decode_plan import plan_decode
    from mini_infer_engine.kernels.attention.prefill_attention import prefill_attention, prefill_shape
    from mini_infer_engine.kernels.attention.prefill_rows import PrefillRows
    from mini_infer_engine.kernels.attention.rope_kv import Rotation
    from mini_infer_engine.kernels.attention.widen_pages import WIDENING_PROGRAMS_PER_SM, wide_page_bytes, widen_pages
    from mini_infer_engine.kernels.policy import kernel_policy
    from mini_infer_engine.kernels.workspace import Workspace
    from mini_infer_engine.models.kv_spec import KV_QUANTIZATIONS, KVSpec
    from mini_infer_engine.runtime.memory.quantized_pool import make_pool

    device, dtype, scale = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16, HEAD_DIM**-0.5
    policy, workspace = kernel_policy(device), Workspace(device)
    half = HEAD_DIM // 2
    still = torch.cat((torch.ones(CONTEXT, half), torch.zeros(CONTEXT, half)), dim=1)
    rotation = Rotation(still.to(device, dtype))
    for rows, tokens in [*_DECODES, *((1, sum(pair)) for pair in _PREFILLS)][: 1 if options.smoke else None]:
        width = math.ceil(tokens / PAGE_SIZE)
        for kind in _KINDS:
            spec = KVSpec(1, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype, quantization=KV_QUANTIZATIONS.get(kind))
            layers = max(2, min(64, math.ceil(300e6 / (rows * width * spec.page_bytes))))
            spec = KVSpec(layers, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype, quantization=spec.quantization)
            pool = make_pool(spec, rows * width, device)
            pool.storage.view(torch.int16).fill_(0x3C01)  # finite in every dtype
            pages = pool.pages.unbind(1)
            tables = torch.randperm(rows * width, device=device).int().view(rows, width)
            name = "bf16" if kind == "auto" else kind
            if (rows, tokens) in _DECODES:
                qkv = torch.randn(rows, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, device=device, dtype=dtype)
                slots = torch.arange(rows, device=device, dtype=torch.int32)
                positions = torch.full((rows,), tokens - 1, device=device)
                config = policy.decode_config(rows, KV_HEADS, quantized=spec.quantization is not None)
                group = Q_HEADS // KV_HEADS
                plan = plan_decode(slots, positions, positions, KV_HEADS, tokens, config=config, group=group)

                def decode(layer: torch.Tensor) -> torch.Tensor:
                    return decode_attention(qkv, rotation, layer, tables, plan, scale=scale, workspace=workspace)

                took = microseconds([lambda layer=layer, run=decode: run(layer) for layer in pages])
                yield {f"decode {rows} x {tokens}, {name}, us": took}
                yield {f"decode {rows} x {tokens}, {name}, TB/s": rows * width * spec.page_bytes / layers / took / 1e6}
                tunes = options.tune and kind == "fp8" and (rows, tokens) in _TUNED
                for other, label in other_configs(config, policy.profile.sm_count) if tunes else ():
                    plan = plan_decode(slots, positions, positions, KV_HEADS, tokens, config=other, group=group)
                    with contextlib.suppress(triton.OutOfResources):  # it is no candidate
                        took = microseconds([lambda layer=layer, run=decode: run(layer) for layer in pages])
                        yield {f"decode {rows} x {tokens}, {name}, {label}, us": took}
            new = {sum(pair): pair[0] for pair in _PREFILLS}.get(tokens) if rows == 1 else None
            if new is not None:
                q = torch.randn(new, Q_HEADS, HEAD_DIM, device=device, dtype=dtype)
                starts, ends = (torch.tensor(x, device=device, dtype=torch.int32) for x in ([0, new], [tokens]))
                chunk = PrefillRows(tables, starts, ends, new, tokens, width)
                workspace.reserve_wide_pages(width * wide_page_bytes(pages[0], dtype))
                shape = prefill_shape(q, pages[0], chunk, wide_pages=width)
                tiles = policy.prefill_config(shape)

                def prefill(layer: torch.Tensor) -> torch.Tensor:
                    return prefill_attention(q, layer, chunk, scale=scale, config=tiles, workspace=workspace)

                took = microseconds([lambda layer=layer, run=prefill: run(layer) for layer in pages[:4]])
                yield {f"prefill {new} of {tokens}, {name}, us": took}
                if kind != "auto":
                    programs = WIDENING_PROGRAMS_PER_SM * policy.profile.sm_count

                    def widen(layer: torch.Tensor) -> None:
                        widen_pages(layer, chunk, dtype, workspace=workspace, programs=programs)

                    took = microseconds([lambda layer=layer, run=widen: run(layer) for layer in pages[:4]])
                    yield {f"widening {tokens}, {name}, us": took}
                    tiles = policy.without(Mechanism.WIDE_PAGES).prefill_config(shape)
                    took = microseconds([lambda layer=layer, run=prefill: run(layer) for layer in pages[:4]])
                    yield {f"prefill {new} of {tokens}, {name} without wide pages, us": took}
            del pool, pages


def other_configs(chosen: "DecodeConfig", sm_count: int) -> "Iterator[tuple[DecodeConfig, str]]":
    """Decode configs beside the chosen one, each with what is told of it."""
    for (block, warps), stages, per_sm in itertools.product(((32, 2), (64, 4), (128, 4)), (2, 3, 4), (2, 4, 6)):
        config = replace(chosen, block_tokens=block, warps=warps, stages=stages, target_programs=per_sm * sm_count)
        if config != chosen:
            yield config, f"blocks of {block}, {warps} warps, {stages} stages, {per_sm} an SM"


def measure(engine: str, folder: str, settings: dict[str, Any], smoke: bool) -> Iterator[dict[str, float]]:
    """An engine's time between tokens of long sequences, and to the first token, in milliseconds; first nothing."""
    rows, context, answer = (2, 40, 4) if smoke else (ROWS, CONTEXT, ANSWER)
    loaded = engines.load(engine, folder, settings)
    yield {}
    ids = vocabulary(folder, 4000 if smoke else 150_000)

    def timed(length: int, count: int, seed: int, limit: int) -> float:
        prompts = [[(7 * place + 131 * row + 977 * seed) % ids for place in range(length)] for row in range(count)]
        begin = time.perf_counter()
        loaded.run(prompts, [limit] * count, 0.0)
        return (time.perf_counter() - begin) * 1e3

    timed(16, rows, 1, 4)
    length = min(context, 4096)
    firsts = sorted(timed(length, 1, 10 + attempt, 1) for attempt in range(3))
    yield {f"ttft ms {length}": firsts[1]}
    timed(context - answer, rows, 2, 1)  # what is cached is found below
    first = min(timed(context - answer, rows, 2, 1) for _ in range(2))
    whole = min(timed(context - answer, rows, 2, answer) for _ in range(2))
    yield {f"itl ms of {rows} x {context}": (whole - first) / (answer - 1)}


def speed(options: argparse.Namespace, budget: Budget, result: dict[str, Any], root: Path) -> None:
    """Engines with each dtype of keys and values, and with each of weights."""
    folder, found = model_folder(options.model, root), result.setdefault("engine", {})

    def note(label: str, part: dict[str, float]) -> None:
        found.setdefault(label, {}).update(part)
        log_line(f"  {label}: {part}")
        save(options.out, result)

    gpu_bytes = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else math.inf
    for wave in waves(folder, options, gpu_bytes):
        if not budget.allows("wave", 60.0):
            continue
        log_line("; ".join(wave))
        with budget.spending("wave"):
            result["errors"] += measure_alternately(wave, budget.left_s, note)
    names = list(dict.fromkeys(name for each in found.values() for name in each))
    print_table(["", *names], [[label, *(each.get(name) for name in names)] for label, each in found.items()])


def waves(folder: str, options: argparse.Namespace, gpu_bytes: float) -> list[dict[str, Start]]:
    """Engines by label, as many a time as fit a GPU's memory."""
    made: list[dict[str, Start]] = []
    used: list[float] = []
    common = dict(engines.SMOKE_SETTINGS) if options.smoke else SETTINGS
    kinds = ("fp8",) if options.smoke else options.kinds
    for weights, kind, engine in itertools.product((None,) if options.smoke else (None, "fp8"), kinds, options.engines):
        if not engines.is_present(engine) or (engine != "ours" and kind == "int8"):
            continue
        kv_bytes = int(_KV_TOKENS * kv_bytes_per_token(folder) * (1.0 if kind == "auto" else _ONE_BYTE))
        own = common | {"kv_cache_dtype": kind} | ({"quantization": weights} if weights else {})
        if not options.smoke:
            own |= engines.share_of_gpu(kv_bytes)
        needed = _WEIGHT_BYTES[weights] + kv_bytes + _OTHER_BYTES
        place = next((place for place, total in enumerate(used) if total + needed <= _GPU_SHARE * gpu_bytes), len(made))
        if place == len(made):
            made.append({})
            used.append(0.0)
        used[place] += needed
        label = f"{engine}, weights {weights or 'bf16'}, KV {kind}"
        made[place][label] = (measure, (engine, folder, own, options.smoke))
    return made


def main() -> int:
    """Attention first: it is what the target is of."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="qwen2.5-7b", metavar="NAME")
    parser.add_argument("--engines", type=words, default=["ours"], metavar="NAME,...")
    parser.add_argument(
        "--kinds", type=words, default=list(_KINDS), metavar="NAME,...", help="of engines (default: auto,fp8,int8)"
    )
    parser.add_argument("--only-engines", action="store_true", help="no attention by itself")
    parser.add_argument(
        "--tune", action="store_true", help="decode attention over fp8 by other configs, too: two minutes"
    )
    options = parser.parse_args()
    if options.smoke:
        options.model = engines.SMOKE_MODEL
    budget, result = Budget(options.time_limit_s), dict[str, Any]()
    found, result["errors"] = result.setdefault("attention", {}), []
    # Not asked for when engines' processes import this: vLLM forks its own, in which CUDA would not start any more.
    if torch.cuda.is_available() and not options.only_engines:
        for part in attention(options):
            found |= part
            log_line(f"  {part}")
            save(options.out, result)
    with tempfile.TemporaryDirectory() as root:
        speed(options, budget, result, Path(root))
    name = f"decode {ROWS} x {CONTEXT}"
    if f"{name}, fp8, us" in found:
        ratio = found[f"{name}, bf16, us"] / found[f"{name}, fp8, us"]
        print_verdicts("7B shape", {"attention of 8 x 32768, fp8 times bf16": ratio}, _TARGETS)
    save(options.out, result)
    return int(bool(result["errors"]))


if __name__ == "__main__":
    raise SystemExit(main())
