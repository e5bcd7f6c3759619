"""Our engine beside others where they are installed, offline, with random weights: one JSON, one table, a plot.

    python benchmarks/engine_offline.py --engines ours,vllm --models qwen2.5-7b,qwen3-0.6b --repeats 3 --out FILE

Engines run in turns, each in a process of its own; figures are medians over the repeats. Engines: ours, vllm,
vllm-inproc (its core in the same process), nano-vllm, transformers (batch 1 only). PEER_SITE names a folder of
packages that only peers see. The loads are in common/loads.py; bounds, in common/models.py, are an H200's.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import engines, loads
from common.isolation import isolated
from common.models import Bound, model_folder
from common.report import print_table, save, say


def measure(engine: str, model: str, settings: dict[str, Any], smoke: bool) -> dict[str, Any]:
    """One engine's figures; runs in a process of its own."""
    begin = time.perf_counter()
    loaded = engines.load(engine, model, settings)
    start_s = time.perf_counter() - begin
    sizes = loads.SMOKE if smoke else loads.FULL
    return {"start s": start_s, **loads.run_loads(loaded, sizes, say, is_slow=engine == "transformers")}


def is_rate(figure: str) -> bool:
    """Whether more is better."""
    return figure.endswith("tok_s")


def show(model: str, found: dict[str, dict[str, float]], limits: dict[str, float]) -> dict[str, dict[str, float]]:
    """Print medians, ours against the best peer, and our share of the bound; returns the two."""
    ours = found.get("ours", {})
    peers = {name: figures for name, figures in found.items() if name != "ours"}
    names = list(dict.fromkeys(figure for figures in found.values() for figure in figures))
    ratios: dict[str, dict[str, float]] = {"ours / best peer": {}, "share of the bound": {}}
    for name in names:
        theirs = [figures[name] for figures in peers.values() if name in figures]
        if name in ours and theirs:
            ratios["ours / best peer"][name] = ours[name] / (max(theirs) if is_rate(name) else min(theirs))
        if name in ours and name in limits:
            share = ours[name] / limits[name]
            ratios["share of the bound"][name] = share if is_rate(name) else 1 / share
    head = [model, *found, *ratios]
    print_table(head, [[name, *(column.get(name) for column in (*found.values(), *ratios.values()))] for name in names])
    return ratios


def plot(path: Path, ratios: dict[str, dict[str, dict[str, float]]]) -> None:
    """How many times as fast as the best peer, a bar a figure and model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = {model: found["ours / best peer"] for model, found in ratios.items()}
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    figure, axes = pyplot.subplots(figsize=(10, 0.35 * len(names) * len(columns) + 1.5))
    for offset, (model, column) in enumerate(columns.items()):
        faster = [column.get(name, 0) if is_rate(name) else 1 / column[name] if name in column else 0 for name in names]
        places = [index + offset / (len(columns) + 1) for index in range(len(names))]
        axes.barh(places, faster, height=1 / (len(columns) + 1), label=model)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks([index + 0.3 for index in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as the best peer")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="ours,vllm,vllm-inproc,nano-vllm", metavar="NAME,...")
    parser.add_argument("--models", default="qwen2.5-7b,qwen2.5-1.5b,qwen3-0.6b", metavar="NAME,...")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-num-seqs", default="512", metavar="N,...", help="several: peers are measured with each")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--smoke", action="store_true", help="the demo model on a CPU, tiny loads: does it run?")
    options = parser.parse_args()
    numbers = [int(text) for text in options.max_num_seqs.split(",")]
    models = ["demo"] if options.smoke else options.models.split(",")
    wanted = ["ours"] if options.smoke else options.engines.split(",")
    present = [name for name in wanted if engines.is_present(name)]
    for name in wanted:
        if name not in present:
            say(f"{name} is not installed here: left out")
    contenders = [
        (name if name == "ours" or len(numbers) == 1 else f"{name} {number}", name, number)
        for name in present
        for number in (numbers[:1] if name == "ours" else numbers)
    ]
    result: dict[str, Any] = {"runs": {}, "medians": {}, "bounds": {}, "ratios": {}}
    failed = False
    with tempfile.TemporaryDirectory() as root:
        for model in models:
            runs: dict[str, list[dict[str, Any]]] = {label: [] for label, _, _ in contenders}
            result["runs"][model] = runs
            for repeat in range(1 if options.smoke else options.repeats):
                for label, name, number in contenders:
                    say(f"{model}, {label}, repeat {repeat + 1}")
                    settings: dict[str, Any] = {"max_num_seqs": number}
                    if options.smoke:
                        settings = smoke_settings()
                    folder = model_folder(model, Path(root))
                    runs[label].append(isolated(measure, name, folder, settings, options.smoke))
                    failed |= "error" in runs[label][-1]
                    save(options.out, result)
            good = {label: [run for run in found if "error" not in run] for label, found in runs.items()}
            medians = {
                label: {name: median(run[name] for run in found) for name in found[0]}
                for label, found in good.items()
                if found
            }
            bound = Bound.of(model)
            limits = {} if bound is None else loads.bounds(bound)
            result["medians"][model], result["bounds"][model] = medians, limits
            result["ratios"][model] = show(model, medians, limits)
            save(options.out, result)
    if options.plot and any(ratios["ours / best peer"] for ratios in result["ratios"].values()):
        plot(options.plot, result["ratios"])
    return int(failed)


def smoke_settings() -> dict[str, Any]:
    """The demo model on any machine's CPU."""
    return {
        "max_num_seqs": 8,
        "device": "cpu",
        "load_format": "auto",
        "dtype": "float32",
        "max_model_len": 512,
        "kv_cache_memory": 100_000_000,
    }


if __name__ == "__main__":
    raise SystemExit(main())
