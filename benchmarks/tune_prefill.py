"""Tune attention of prompt chunks on this GPU: every config worth trying, by model, new tokens and cached ones.

    python benchmarks/tune_prefill.py --out FILE [--models 0.6b,7b]

Chunks are those of captured passes: padded sequences, page tables as wide as the context. Checks every config against
torch in fp32 first. Times are those of one call inside a CUDA graph over layers that do not fit the L2 cache; beside
them the config that serving takes, FlashAttention-3, and the bound: keys and values read once, or the arithmetic.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from common.gpu import policy
from common.models import BYTES_PER_S, FLOPS_PER_S
from common.timing import graph_microseconds
from torch import Tensor
from torch.nn import functional

from mini_infer_engine.kernels.attention.attention_config import HopperPrefillConfig, PrefillConfig
from mini_infer_engine.kernels.attention.prefill_attention import prefill_attention, prefill_shape
from mini_infer_engine.kernels.attention.prefill_rows import PrefillRows
from mini_infer_engine.kernels.workspace import Workspace

HEADS = {"7b": (28, 4), "1.5b": (12, 2), "0.6b": (16, 8)}  # q heads, kv heads
HEAD_DIM, PAGE_SIZE = 128, 128
SCALE = HEAD_DIM**-0.5
SEQUENCES, CONTEXT_PAGES = 8, 128
CASES = [(128, 0), (256, 0), (16, 4096), (64, 4096), (128, 4096), (128, 16_000), (256, 2048), (352, 4096), (352, 8192)]
"""(new tokens, cached ones) of one chunk."""
TILES = [(128, 128, 8, 3), (128, 64, 8, 3), (64, 128, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (32, 64, 4, 3)]
PROGRAMS_PER_SM = (1, 2, 3, 4)
COMPILERS = 14
Call = Callable[[Tensor], Tensor]


class Setting:
    """Layers of pages, and one chunk in a captured pass."""

    def __init__(self, model: str, new: int, cached: int, layers: int | None = None) -> None:
        self.q_heads, self.kv_heads = HEADS[model]
        self.new, self.tokens = new, new + cached
        pages = -(-self.tokens // PAGE_SIZE)
        layer_bytes = pages * PAGE_SIZE * self.kv_heads * HEAD_DIM * 4
        count = layers or max(4, min(64, int(200e6 / layer_bytes)))
        shape = (pages, count, 2, PAGE_SIZE, self.kv_heads, HEAD_DIM)
        self.layers = list(torch.randn(shape, device="cuda", dtype=torch.bfloat16).unbind(1))
        self.workspace = Workspace(torch.device("cuda"))
        self.q = torch.randn(new, self.q_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        tables = torch.zeros(SEQUENCES, CONTEXT_PAGES, dtype=torch.int32)
        tables[0, :pages] = torch.arange(pages)
        starts = torch.full((SEQUENCES + 1,), new, dtype=torch.int32)
        starts[0] = 0
        ends = torch.ones(SEQUENCES, dtype=torch.int32)
        ends[0] = self.tokens
        self.rows = PrefillRows(tables.cuda(), starts.cuda(), ends.cuda(), new, CONTEXT_PAGES * PAGE_SIZE)

    @property
    def bound_us(self) -> float:
        """The least that a call can take."""
        read = self.tokens * self.kv_heads * HEAD_DIM * 4 / BYTES_PER_S
        pairs = self.new * (self.tokens - self.new / 2)
        return max(read, 4 * self.q_heads * HEAD_DIM * pairs / FLOPS_PER_S) * 1e6

    def call(self, config: PrefillConfig | HopperPrefillConfig) -> Call:
        """One layer's attention."""
        return lambda pages: prefill_attention(
            self.q, pages, self.rows, scale=SCALE, config=config, workspace=self.workspace
        )

    def exact(self, pages: Tensor) -> Tensor:
        """[new, q_heads * head_dim] fp32."""
        keys, values = (pages[:, half].flatten(0, 1)[: self.tokens].transpose(0, 1).float() for half in (0, 1))
        places = torch.arange(self.tokens, device="cuda")
        seen = places <= places[-self.new :, None]
        q = self.q.transpose(0, 1).float()
        out = functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=SCALE, enable_gqa=True)
        return out.transpose(0, 1).flatten(1)


def all_configs() -> list[PrefillConfig]:
    """Every tile with every number of programs."""
    sm_count = policy().profile.sm_count
    return [PrefillConfig(*tile, sm_count * per_sm) for tile, per_sm in itertools.product(TILES, PROGRAMS_PER_SM)]


def compile_and_check(models: list[str]) -> None:
    """Every config against fp32; kernels are compiled several at a time."""
    jobs = list(itertools.product(models, all_configs()))

    def error(job: tuple[str, PrefillConfig]) -> float:
        setting = Setting(job[0], 100, 1000, layers=1)
        exact = setting.exact(setting.layers[0])
        out = setting.call(job[1])(setting.layers[0]).float()
        return ((out - exact).norm() / exact.norm()).item()

    with ThreadPoolExecutor(COMPILERS) as threads:  # each has a workspace of its own
        list(threads.map(error, jobs))
    errors = list(map(error, jobs))
    wrong = [job for job, found in zip(jobs, errors, strict=True) if not found < 1e-2]
    assert not wrong, wrong
    print(f"{len(jobs)} are right, relative error at most {max(errors):.1e}", flush=True)


def tune(model: str, new: int, cached: int) -> dict[str, float]:
    """Microseconds by config, the best first."""
    setting = Setting(model, new, cached)

    def microseconds(call: Call) -> float:
        return graph_microseconds([lambda pages=pages: call(pages) for pages in setting.layers], 9)

    found = {brief(config): microseconds(setting.call(config)) for config in all_configs()}
    shape = prefill_shape(setting.q, setting.layers[0], setting.rows)
    measured = {"bound": setting.bound_us, "serving": microseconds(setting.call(policy().prefill_config(shape)))}
    if hopper := policy().hopper_prefill_config(shape):
        measured["hopper"] = microseconds(setting.call(hopper))
    ranked = dict(sorted(found.items(), key=lambda item: item[1]))
    numbers = "  ".join(f"{name} {value:6.1f}" for name, value in measured.items())
    best = ", ".join(f"{name} {value:.1f}" for name, value in list(ranked.items())[:4])
    print(f"{model:4} {new:4} after {cached:6}  {numbers} | {best}", flush=True)
    return measured | ranked


def brief(config: PrefillConfig) -> str:
    """rows/keys/warps/stages, programs."""
    return f"{config.rows}/{config.keys}/{config.warps}/{config.stages} p{config.programs}"


def main() -> None:
    """Compile, check, time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--models", default="7b,0.6b,1.5b")
    options = parser.parse_args()
    models = options.models.split(",")
    started = time.perf_counter()
    compile_and_check(models)
    found = {
        f"{model} {new} {cached}": tune(model, new, cached) for (new, cached), model in itertools.product(CASES, models)
    }
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
