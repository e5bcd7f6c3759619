"""Tune decode attention on this GPU: every config worth trying, by model, batch and length.

    python benchmarks/tune_decode.py --out FILE [--models 0.6b,7b] [--rows 1,8]

Checks every config against fp32 first. Times are those of one call inside a CUDA graph over as many layers as do not
fit the L2 cache; the bound is reading each key and value once.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from common.gpu import policy
from common.timing import graph_microseconds
from torch import Tensor

from mini_infer_engine.kernels.attention.attention_config import DecodeConfig, PrefillShape
from mini_infer_engine.kernels.attention.decode_attention import decode_attention
from mini_infer_engine.kernels.attention.decode_plan import DecodePlan, plan_decode
from mini_infer_engine.kernels.attention.rope_kv import Rotation, rope_kv
from mini_infer_engine.kernels.workspace import Workspace

HEADS = {"7b": (28, 4, False), "1.5b": (12, 2, False), "0.6b": (16, 8, True)}  # q heads, kv heads, norm
HEAD_DIM, PAGE_SIZE = 128, 128
SCALE = HEAD_DIM**-0.5
MOST_TOKENS = 1 << 16
READS = [  # block, warps, stages
    (64, 4, 2),
    (64, 4, 3),
    (64, 4, 4),
    (64, 8, 3),
    (32, 4, 3),
    (32, 4, 4),
    (32, 2, 3),
    (32, 2, 4),
    (128, 4, 2),
    (128, 8, 2),
    (128, 8, 3),
]
TARGETS_PER_SM = (1, 2, 3, 4, 5, 8)
PROGRAMS_PER_ROW = (1.0, 1.25, 1.5, 2.0, 3.0)
COMPILERS = 14


def make_cases() -> dict[str, list[int]]:
    """Lengths of each batch by name."""
    cases = {}
    generator = torch.Generator().manual_seed(0)

    def uniform(low: int, high: int, rows: int) -> Tensor:
        return torch.randint(low, high + 1, (rows,), generator=generator)

    for rows, lengths in (
        (1, (512, 1100, 4096, 16_384, 65_536)),
        (8, (640, 4096, 16_384, 65_536)),
        (32, (640, 4096)),
        (64, (800,)),
        (256, (800,)),
    ):
        for tokens in lengths:
            cases[f"{rows} x {tokens}"] = [tokens] * rows
    cases["256 x 512..1100"] = uniform(512, 1100, 256).tolist()
    progress = torch.rand(256, generator=generator)
    cases["256 x W1"] = (uniform(100, 1024, 256) + progress * uniform(100, 1024, 256)).int().tolist()
    cases["8 x 300, one 16k"] = [300] * 7 + [16_384]
    return cases


class Setting:
    """Pages, tables and packed q, k and v of one batch."""

    def __init__(self, model: str, lengths: list[int], most_layers: int = 128) -> None:
        self.q_heads, self.kv_heads, norm = HEADS[model]
        self.lengths, rows = lengths, len(lengths)
        needed = [-(-length // PAGE_SIZE) for length in lengths]
        total = sum(needed)
        page_bytes = 2 * PAGE_SIZE * self.kv_heads * HEAD_DIM * 2
        layers = max(2, min(most_layers, math.ceil(300e6 / (total * page_bytes))))
        size = (total, layers, 2, PAGE_SIZE, self.kv_heads, HEAD_DIM)
        self.pool = torch.randn(size, device="cuda", dtype=torch.bfloat16)
        self.layers = list(self.pool.unbind(1))
        order = torch.randperm(total).int()
        self.tables = torch.zeros(rows, max(needed), dtype=torch.int32)
        begins = [0, *itertools.accumulate(needed)]
        for row, count in enumerate(needed):
            self.tables[row, :count] = order[begins[row] : begins[row] + count]
        self.tables = self.tables.cuda()
        self.workspace = Workspace(torch.device("cuda"))
        self.slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.positions = torch.tensor(lengths, device="cuda") - 1
        self.qkv = torch.randn(rows, (self.q_heads + 2 * self.kv_heads) * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        angles = torch.arange(max(lengths), device="cuda")[:, None] / 1e6 ** torch.linspace(0, 1, 64, device="cuda")
        table = torch.cat((angles.cos(), angles.sin()), dim=-1).bfloat16()
        weights = [1 + torch.randn(HEAD_DIM, device="cuda").bfloat16() / 8 for _ in range(2)] if norm else [None, None]
        self.rotation = Rotation(table, *weights)
        pages = self.tables.gather(1, self.positions[:, None] // PAGE_SIZE)[:, 0].long()
        self.kv_index = pages * PAGE_SIZE + self.positions % PAGE_SIZE

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all tokens of one layer."""
        return sum(self.lengths) * self.kv_heads * HEAD_DIM * 4

    def plan(self, config: DecodeConfig | None) -> DecodePlan:
        """As a pass makes it; without a config, by the one that serving takes."""
        group = self.q_heads // self.kv_heads
        shape = PrefillShape(
            torch.bfloat16, torch.bfloat16, 0, 0, self.q_heads, self.kv_heads, HEAD_DIM, PAGE_SIZE, None, 0
        )
        portable = policy().decode_config(len(self.lengths), self.kv_heads)
        serving = policy().decode_config(len(self.lengths), self.kv_heads, shape=shape)
        config = serving if config is None else replace(config, pdl=portable.pdl)
        return plan_decode(
            self.slots,
            self.positions,
            self.positions,
            self.kv_heads,
            MOST_TOKENS,
            config=config,
            group=group,
            page_tables=self.tables,
            page_size=PAGE_SIZE,
        )

    def fused(self, pages: Tensor, plan: DecodePlan) -> Tensor:
        """One layer's attention."""
        return decode_attention(
            self.qkv, self.rotation, pages, self.tables, plan, scale=SCALE, workspace=self.workspace
        )

    def exact(self, pages: Tensor) -> Tensor:
        """Attention in fp32 after the separate kernel's rotation, and write to `pages`: [rows, q_heads * head_dim]."""
        q = rope_kv(self.qkv.clone(), self.rotation, self.positions, self.kv_index, pages).float()
        out = []
        for row, length in enumerate(self.lengths):
            own = pages[self.tables[row, : -(-length // PAGE_SIZE)].long()].float()
            keys, values = (own[:, half].flatten(0, 1)[:length] for half in (0, 1))
            group = self.q_heads // self.kv_heads
            scores = torch.einsum("hd,thd->ht", q[row], keys.repeat_interleave(group, 1)) * SCALE
            out.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values.repeat_interleave(group, 1)).flatten())
        return torch.stack(out)


def compile_part(part: int, models: list[str]) -> None:
    """Compile one process's share of all configs into the shared cache."""
    jobs = list(itertools.product(models, READS, (False, True)))
    for model, read, merge in jobs[part::COMPILERS]:
        setting = Setting(model, [70, 9], 2)
        setting.fused(setting.layers[0], setting.plan(config_of(read, 64 if merge else 1, 1.0)))
    torch.cuda.synchronize()


def config_of(read: tuple[int, int, int], target: int | None = None, programs_per_row: float = 1.5) -> DecodeConfig:
    """A config by its numbers; target: programs, two an SM by default."""
    block_tokens, warps, stages = read
    target = 2 * policy().profile.sm_count if target is None else target
    return DecodeConfig(target, block_tokens, warps, stages, programs_per_row)


def check(model: str) -> None:
    """Every config against fp32, and the written keys and values against the separate kernel's."""
    setting = Setting(model, [1, 2, 64, 65, 127, 128, 129, 640, 1100, 5000], 2)
    pages = setting.layers[1]
    fresh = pages.clone()
    exact = setting.exact(pages)
    rotated = pages.clone()
    for read, share in itertools.product(READS, ((1, 1.0), (396, 1.5), (40, 4.0))):
        config = config_of(read, *share)
        pages.copy_(fresh)
        plan = setting.plan(config)
        outs = [setting.fused(pages, plan) for _ in range(3)]
        worst = ((outs[0].float() - exact).norm() / exact.norm()).item()
        assert worst < 1e-2, (model, config, worst)
        assert all(torch.equal(outs[0], out) for out in outs), (model, config)
        changed = (pages != rotated).float().mean().item()
        assert (pages.float() - rotated.float()).abs().max() < 0.1, (model, config)
        assert changed < 1e-4, (model, config, changed)
    print(f"{model}: right, relative error {worst:.1e}; {changed:.1e} of the pool rounded unlike the separate kernel's")


def timed(setting: Setting, call: Callable[[Tensor], object]) -> float:
    """Microseconds a layer."""
    return graph_microseconds([lambda pages=pages: call(pages) for pages in setting.layers], 9)


def tune(model: str, name: str, lengths: list[int]) -> dict[str, float]:
    """All reads at the default division, then the best three at every division: microseconds by config."""
    setting = Setting(model, lengths)
    results: dict[DecodeConfig, float] = {}

    def measure(config: DecodeConfig) -> None:
        if config not in results:
            plan = setting.plan(config)
            results[config] = timed(setting, lambda pages: setting.fused(pages, plan))

    for read in READS:
        measure(config_of(read))
    for best in sorted(results, key=results.__getitem__)[:3]:
        read = (best.block_tokens, best.warps, best.stages)
        for per_sm in TARGETS_PER_SM:
            measure(config_of(read, per_sm * policy().profile.sm_count, 1.0))
        for a_row in PROGRAMS_PER_ROW:
            if len(setting.lengths) >= 32:
                measure(config_of(read, None, a_row))
    row = {"bound us": setting.kv_bytes / 4.3e6}
    default = setting.plan(None).config
    measure(default)
    row["default"] = results[default]
    row["plan"] = graph_microseconds([lambda: setting.plan(default)] * 20, 9)
    ranked = sorted(results, key=results.__getitem__)
    row["best"] = results[ranked[0]]
    row["TB/s"] = setting.kv_bytes / row["best"] / 1e6
    numbers = "  ".join(f"{key} {value:7.2f}" for key, value in row.items())
    print(
        f"{model:4} {name:17} {numbers} | " + ", ".join(f"{brief(c)} {results[c]:.1f}" for c in ranked[:4]), flush=True
    )
    return row | {brief(config): results[config] for config in ranked}


def brief(config: DecodeConfig) -> str:
    """block/warps/stages, target programs, programs a row."""
    return (
        f"{config.block_tokens}/{config.warps}/{config.stages} t{config.target_programs} r{config.programs_per_row:g}"
    )


def main() -> None:
    """Compile, check, time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--models", default="0.6b,7b,1.5b")
    parser.add_argument("--rows", default="1,8,32,64,256", help="only batches of so many rows")
    options = parser.parse_args()
    models = options.models.split(",")
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(COMPILERS) as pool:
        pool.starmap(compile_part, [(part, models) for part in range(COMPILERS)])
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)
    for model in models:
        check(model)
    rows = {int(count) for count in options.rows.split(",")}
    cases = {name: lengths for name, lengths in make_cases().items() if len(lengths) in rows}
    found = {f"{model} {name}": tune(model, name, cases[name]) for name, model in itertools.product(cases, models)}
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
