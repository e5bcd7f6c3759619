"""How much of a GPU the page pool gets, and whether memory grows while requests come, go and are aborted.

    python benchmarks/memory.py --models qwen2.5-7b --soak-s 600 --out FILE
    python benchmarks/memory.py --models qwen3-0.6b --soak-s 600 --gpu-memory-utilization 0.08 --pause-ms 20

The share: bytes of the pool, of what the weights and the largest pass leave of the part of the GPU that the engine may
use. Growth: the most in use in the second half of the soak, less that in the first. The second line soaks gently,
beside other work on the same GPU; while that measures (common/quiet.py) it waits, which does not count. On a CPU the
pool is what was asked for, and only resident memory is watched.
"""

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.budget import Budget
from common.engines import MEMORY_SHARE, SETTINGS, SMOKE_MODEL, SMOKE_SETTINGS
from common.isolation import isolated
from common.models import model_folder, vocabulary
from common.quiet import wait_while_measuring
from common.report import log_line, make_parser, print_table, save, words
from common.targets import Target, print_verdicts

_TARGETS = {
    "pool / what is left": Target(0.97, at_least=True),
    "growth of allocated MB": Target(1.0),
    "growth of reserved MB": Target(1.0),
    "growth of resident MB": Target(8.0),
    "pages in use afterwards": Target(0),
}
_POINTS = 40
"""Of the soak's series."""


def measure(settings: dict[str, Any], soak_s: float, pause_s: float, known_ids: int) -> Iterator[dict[str, Any]]:
    """Load, look, soak, look again."""
    import torch

    from mini_infer_engine.config.options.settings import EngineSettings
    from mini_infer_engine.core.engine import Engine
    from mini_infer_engine.core.request import Request, SamplingParams
    from mini_infer_engine.runtime.model_runner import load_runner

    engine_settings = EngineSettings(**settings)
    runner = load_runner(engine_settings)
    engine = Engine(engine_settings, runner, (), runner.max_model_len, "", record_events=False)
    on_gpu = runner.device.type == "cuda"
    longest = runner.max_model_len // 2
    pool = runner.pool.pages.nbytes
    weights = sum(parameter.nbytes for parameter in runner.worker.model.parameters())
    yield {"pool GB": pool / 1e9, "weights GB": weights / 1e9, "pool tokens": runner.num_pages * runner.page_size}
    dice = random.Random(0)
    live: list[str] = []
    started = 0

    def add(prompt_tokens: int, output: int) -> None:
        nonlocal started
        ids = [dice.randrange(known_ids) for _ in range(prompt_tokens)]
        sampling = SamplingParams(temperature=dice.choice((0.0, 0.8)), top_p=0.9, max_tokens=output, ignore_eos=True)
        started += 1
        live.append(str(started))
        engine.add(Request(request_id=live[-1], prompt_token_ids=ids, sampling=sampling))

    def step() -> None:
        for output in engine.step():
            if output.finish_reason is not None:
                live.remove(output.request_id)

    def used() -> dict[str, float]:
        """MB in use: of the GPU by tensors and by torch, and of main memory."""
        found = {"resident": int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6}
        if on_gpu:
            found |= {"allocated": torch.cuda.memory_allocated() / 1e6, "reserved": torch.cuda.memory_reserved() / 1e6}
        return found

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    for _ in range(4):
        add(longest, 4)
    while engine.has_work:
        step()
    if on_gpu:
        largest_pass = torch.cuda.max_memory_allocated() - before
        free, total = torch.cuda.mem_get_info()
        allowed = total * engine_settings.gpu_memory_utilization
        yield {
            "largest pass GB": largest_pass / 1e9,
            "graphs and scratch GB": (before - pool - weights) / 1e9,
            "context and others GB": (total - free - torch.cuda.memory_reserved()) / 1e9,
            "pool / what is left": pool / (allowed - weights - largest_pass),
            "in use at most / allowed": (total - free) / allowed,
        }
    series: list[dict[str, float]] = []
    passed, before_s = 0.0, time.monotonic()
    while passed < soak_s:
        while len(live) < 2 * engine_settings.max_num_seqs:
            add(dice.randint(1, longest // 8), dice.randint(1, 128))
        step()
        if live and dice.random() < 0.05:
            engine.abort(live.pop(dice.randrange(len(live))))
        if passed >= len(series) * soak_s / _POINTS:
            series.append({"s": passed} | used())
            log_line(f"  {started} requests, " + ", ".join(f"{name} {value:,.0f} MB" for name, value in used().items()))
            yield {"soak requests": started, "soak s": passed, "series": series} | growth(series)
        time.sleep(pause_s)
        passed += time.monotonic() - before_s
        wait_while_measuring()
        before_s = time.monotonic()
    while engine.has_work:
        step()
    afterwards = {"pages in use afterwards": runner.num_pages - engine.scheduler.kv_cache.pool.num_free}
    yield {"soak requests": started, "soak s": passed} | afterwards


def growth(series: list[dict[str, float]]) -> dict[str, float]:
    """MB by which the most in use of the second half is above that of the first."""
    half = len(series) // 2
    names = [name for name in series[0] if name != "s"] if half else []
    return {
        f"growth of {name} MB": max(point[name] for point in series[half:])
        - max(point[name] for point in series[:half])
        for name in names
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--models", type=words, default=words("qwen2.5-7b,qwen3-0.6b"), metavar="NAME,...")
    parser.add_argument("--soak-s", type=float, default=600, help="seconds a model (default: 600)")
    parser.add_argument("--pause-ms", type=float, default=0, help="between two steps of the soak")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--gpu-memory-utilization", type=float, default=MEMORY_SHARE)
    options = parser.parse_args()
    budget = Budget(options.time_limit_s)
    models = [SMOKE_MODEL] if options.smoke else options.models
    found: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {"models": found}
    with tempfile.TemporaryDirectory() as root:
        for model in models:
            if not budget.allows("a model"):
                continue
            log_line(model)
            folder = model_folder(model, Path(root))
            settings: dict[str, Any] = SETTINGS | {
                "model": folder,
                "max_num_batched_tokens": 8192,
                "max_num_seqs": options.max_num_seqs,
                "gpu_memory_utilization": options.gpu_memory_utilization,
            }
            settings |= SMOKE_SETTINGS if options.smoke else {}
            soak_s, pause_s = (1.0, 0.0) if options.smoke else (options.soak_s, options.pause_ms / 1e3)
            load = (soak_s, pause_s, vocabulary(folder))

            def note(part: dict[str, Any]) -> None:
                found.setdefault(model, {}).update(part)
                save(options.out, result)

            with budget.spending("a model"):
                figures = isolated(measure, settings, *load, timeout_s=budget.left_s, note=note)
            found[model] = figures
            save(options.out, result)
    names = dict.fromkeys(name for figures in found.values() for name in figures if name not in ("series", "error"))
    print_table(["memory", *found], [[name, *(figures.get(name) for figures in found.values())] for name in names])
    for model, figures in found.items():
        print_verdicts(model, figures, _TARGETS)
    return int(any("error" in figures for figures in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
