"""How much of a GPU the page pool gets, and whether memory grows while requests come, go and are aborted.

    python benchmarks/memory.py --models qwen2.5-7b --soak-s 600 --out FILE

The share: bytes of the pool, of what the weights, the largest pass and the CUDA context leave of the part of the GPU
that the engine may use. On a CPU the pool is what was asked for; the soak then watches the process's resident memory.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from common.engines import CONTEXT_TOKENS
from common.isolation import isolated
from common.models import model_folder
from common.report import print_table, save, say
from engine_offline import smoke_settings


def measure(settings: dict[str, Any], soak_s: float, vocabulary: int, longest: int) -> dict[str, Any]:
    """Load, look, soak, look again."""
    import torch

    from mini_infer_engine.build import build_engine
    from mini_infer_engine.engine import Engine
    from mini_infer_engine.request import Request, SamplingParams
    from mini_infer_engine.runner import TorchRunner
    from mini_infer_engine.settings import EngineSettings

    asked = EngineSettings(**settings)
    engine: Engine = build_engine(asked).engine
    runner = engine._runner
    assert isinstance(runner, TorchRunner)
    on_gpu = runner.device.type == "cuda"
    pool = runner.pool.pages.nbytes
    weights = sum(parameter.nbytes for parameter in runner.model.parameters())
    found: dict[str, Any] = {
        "pool GB": pool / 1e9,
        "weights GB": weights / 1e9,
        "pool tokens": runner.num_pages * runner.page_size,
    }
    dice = random.Random(0)
    started = 0

    def add(prompt_tokens: int, output: int) -> None:
        nonlocal started
        ids = [dice.randrange(vocabulary) for _ in range(prompt_tokens)]
        sampling = SamplingParams(temperature=dice.choice((0.0, 0.8)), top_p=0.9, max_tokens=output, ignore_eos=True)
        engine.add(Request(request_id=str(started), prompt_token_ids=ids, sampling=sampling))
        started += 1

    def used() -> tuple[int, int]:
        """Bytes in use and bytes taken: by torch on a GPU, else resident ones."""
        if on_gpu:
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        return resident, resident

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    for _ in range(4):
        add(longest, 4)
    while engine.has_work:
        engine.step()
        engine.take_events()
    if on_gpu:
        free, total = torch.cuda.mem_get_info()
        activations = torch.cuda.max_memory_allocated() - before
        outside = total - free - torch.cuda.memory_reserved()
        left = total * asked.gpu_memory_utilization - outside - weights - activations
        found |= {
            "largest pass GB": activations / 1e9,
            "context and others GB": outside / 1e9,
            "graphs and scratch GB": (before - pool - weights) / 1e9,
            "pool / what is left": pool / left,
        }
    series: list[tuple[float, int, int]] = []
    begin = said = time.monotonic()
    live = 0
    while time.monotonic() - begin < soak_s:
        while live < 2 * asked.max_num_seqs:
            add(dice.randint(1, longest // 8), dice.randint(1, 128))
            live += 1
        live -= sum(output.finish_reason is not None for output in engine.step())
        engine.take_events()
        if dice.random() < 0.05 and engine._sequences:
            engine.abort(dice.choice(list(engine._sequences)))
            live -= 1
        now = time.monotonic()
        if not series or now - said >= soak_s / 40:
            said = now
            series.append((now - begin, *used()))
            in_use, taken = (f"{count / 1e9:.4f} GB" for count in series[-1][1:])
            say(f"  {now - begin:5.0f} s, {started} requests, {in_use} in use, {taken} taken")
    while engine.has_work:
        engine.step()
    half = series[len(series) // 2 :]
    found |= {
        "soak requests": started,
        "soak s": soak_s,
        "in use, growth of second half MB": (half[-1][1] - half[0][1]) / 1e6,
        "taken, growth of second half MB": (half[-1][2] - half[0][2]) / 1e6,
        "pages in use afterwards": runner.num_pages - engine.scheduler.pool.num_free,
        "series": series,
    }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen2.5-7b,qwen3-0.6b", metavar="NAME,...")
    parser.add_argument("--soak-s", type=float, default=600, help="seconds a model (default: 600)")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--smoke", action="store_true", help="the demo model on a CPU for a second: does it run?")
    options = parser.parse_args()
    models = ["demo"] if options.smoke else options.models.split(",")
    found: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {"models": found}
    with tempfile.TemporaryDirectory() as root:
        for model in models:
            say(model)
            settings: dict[str, Any] = {
                "model": model_folder(model, Path(root)),
                "load_format": "dummy",
                "max_model_len": CONTEXT_TOKENS,
                "max_num_seqs": options.max_num_seqs,
            }
            load: tuple[float, int, int] = (options.soak_s, 150_000, 8000)
            if options.smoke:
                settings, load = settings | smoke_settings(), (1.0, 4000, 100)
            found[model] = isolated(measure, settings, *load, timeout_s=600 + options.soak_s)
            save(options.out, result)
    good = {model: figures for model, figures in found.items() if "error" not in figures}
    names = [name for name in next(iter(good.values()), {}) if name != "series"]
    print_table(["memory", *good], [[name, *(figures[name] for figures in good.values())] for name in names])
    return int(len(good) < len(found))


if __name__ == "__main__":
    raise SystemExit(main())
