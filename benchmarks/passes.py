"""The mixed load W1 pass by pass, and which kernels a pass of full decode rows and one of prompts is made of.

    python benchmarks/passes.py --engines qwen2.5-7b:tp1,qwen2.5-7b:tp2,qwen2.5-14b:pp2 --out FILE
    python benchmarks/passes.py --engines qwen2.5-7b:tp2,qwen2.5-7b:tp2:overlapped_sums --out FILE

Mechanisms to do without stand behind an engine's kind; `eager` there is --enforce-eager. Of each engine, in a process
of its own: how long passes take by their rows (decode rows in steps of 32, prompt tokens in steps of 512), and how long
the host launches them and waits for them; then torch's profile of the first rank.
"""

import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import engines, loads
from common.isolation import Figures
from common.kernel_times import show_kernel_times
from common.models import config_of, has_recurrent_state, kv_bytes_per_token, model_folder, vocabulary
from common.report import log_line, make_parser, print_table, save, words
from common.together import Start, measure_alternately

_KV_TOKENS = 200_000
_PROFILED_PROMPTS, _PROFILED_DECODES = 6, 12
"""Passes."""
_KINDS = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}


class Watched:
    """An engine's runner, whose calls are timed."""

    def __init__(self, runner: Any) -> None:
        self.launches: list[tuple[float, float, int, int]] = []
        """When, for how long, decode rows, prompt tokens."""
        self.waited_s = 0.0
        self._launch: Callable[[Any], Any] = runner.launch
        self._collect: Callable[[Any], Any] = runner.collect
        runner.launch, runner.collect = self.launch, self.collect

    def launch(self, batch: Any) -> Any:
        """As the runner's."""
        begin = time.perf_counter()
        handle = self._launch(batch)
        prompts = sum(row.count for row in batch.rows[batch.num_decodes :])
        self.launches.append((begin, time.perf_counter() - begin, batch.num_decodes, prompts))
        return handle

    def collect(self, handle: Any) -> Any:
        """As the runner's."""
        begin = time.perf_counter()
        result = self._collect(handle)
        self.waited_s += time.perf_counter() - begin
        return result

    def by_rows(self) -> dict[str, dict[str, float]]:
        """Passes by their kind, from one launch to the next."""
        found: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
        for (begin, took, decodes, prompts), (after, *_) in pairwise(self.launches):
            kind = f"{prompts // 512 * 512} tokens of prompts" if prompts else f"{-(-decodes // 32) * 32} decode rows"
            found[kind].append((after - begin, took, decodes + prompts))
        return {
            kind: {
                "passes": len(passes),
                "ms each": sum(one[0] for one in passes) / len(passes) * 1e3,
                "launch ms": sum(one[1] for one in passes) / len(passes) * 1e3,
                "rows": sum(one[2] for one in passes) / len(passes),
            }
            for kind, passes in sorted(found.items())
        }


def measure(label: str, folder: str, settings: dict[str, Any], rows: int, smoke: bool) -> Iterator[Figures]:
    """Yields the figures of one engine that decodes so many rows together."""
    from mini_infer_engine.config.options.settings import EngineSettings
    from mini_infer_engine.core.request import Request, SamplingParams
    from mini_infer_engine.core_process.build import build_engine

    engine = build_engine(EngineSettings(**settings), record_events=False).engine
    yield {}
    dice, vocabulary_size = random.Random(0), vocabulary(folder, 150_000)
    sizes = loads.SMOKE if smoke else loads.FULL
    rows, (low, high) = min(sizes.batch, rows), sizes.mixed

    def add(name: str, lengths: list[int], limits: list[int]) -> None:
        for place, (length, limit) in enumerate(zip(lengths, limits, strict=True)):
            prompt = [dice.randrange(vocabulary_size) for _ in range(length)]
            sampling = SamplingParams(temperature=0.6, max_tokens=limit, ignore_eos=True)
            engine.add(Request(request_id=f"{name}{place}", prompt_token_ids=prompt, sampling=sampling))

    def run() -> None:
        while engine.has_work:
            engine.step()

    add("warm", [low] * 8, [16] * 8)
    run()
    watched = Watched(engine._runner)
    limits = [dice.randint(low, high) for _ in range(rows)]
    add("w1", [dice.randint(low, high) for _ in range(rows)], limits)
    begin = time.perf_counter()
    run()
    took = time.perf_counter() - begin
    kinds = watched.by_rows()
    names = ("passes", "ms each", "launch ms", "rows")
    print_table([f"{label}, W1", *names], [[kind, *(one[name] for name in names)] for kind, one in kinds.items()])
    yield {f"{label}, W1": {"tok_s": sum(limits) / took, "waited s": watched.waited_s, "s": took, "by rows": kinds}}
    if smoke:
        return
    add("kernels", [600] * rows, [400] * rows)
    for _ in range(min(3, rows // 64)):
        engine.step()
    log_line(f"{label}: passes with prompts")
    yield {f"{label}, prompts": show_kernel_times(engine.step, min(_PROFILED_PROMPTS, 1 + rows // 32))}
    while watched.launches[-1][3]:
        engine.step()
    log_line(f"{label}: {rows} decode rows")
    yield {f"{label}, decodes": show_kernel_times(engine.step, _PROFILED_DECODES)}
    run()


def settings_of(kind: str, disabled: list[str], folder: str, smoke: bool) -> dict[str, Any]:
    """Of an engine by its short name: tp2, pp2."""
    size = int(kind[2:])
    settings = engines.SETTINGS | {"model": folder, "max_num_seqs": loads.FULL.batch, _KINDS[kind[:2]]: size}
    settings |= {"disable": tuple(name for name in disabled if name != "eager"), "enforce_eager": "eager" in disabled}
    if not has_recurrent_state(config_of(folder)):
        settings["kv_cache_memory"] = _KV_TOKENS * kv_bytes_per_token(folder) // size
    return settings | (engines.SMOKE_SETTINGS if smoke else {})


def main() -> int:
    """See the module."""
    parser = make_parser(__doc__)
    usual = words("qwen2.5-7b:tp1,qwen2.5-7b:tp2")
    parser.add_argument(
        "--engines", type=words, default=usual, metavar="MODEL:tpN|ppN[:OFF...],...", help="one after another"
    )
    parser.add_argument("--rows", type=int, default=loads.FULL.batch, metavar="N", help="requests at a time")
    options = parser.parse_args()
    if options.smoke:
        options.engines = [f"{engines.SMOKE_MODEL}:tp1"]
    result: dict[str, Any] = {"passes": {}, "errors": []}

    def note(label: str, part: Figures) -> None:
        result["passes"].update(part)
        save(options.out, result)

    with tempfile.TemporaryDirectory() as root:
        starts: dict[str, Start] = {}
        for label in options.engines:
            model, kind, *disabled = label.split(":")
            folder = str(model_folder(model, Path(root)))
            settings = settings_of(kind, disabled, folder, options.smoke)
            starts[label] = (measure, (label, folder, settings, options.rows, options.smoke))
        result["errors"] = measure_alternately(starts, options.time_limit_s, note)
    save(options.out, result)
    return int(bool(result["errors"]))


if __name__ == "__main__":
    raise SystemExit(main())
