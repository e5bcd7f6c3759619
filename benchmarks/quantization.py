"""What quantised weights cost and gain: precision of the demo model, speed of a 7B shape, and of its single products.

    python benchmarks/quantization.py --precision --out FILE         the tool mini-infer-compare (--kv fp8,int8: KV too)
    python benchmarks/quantization.py --gpu --out FILE --models qwen2.5-7b,qwen3-14b --schemes bf16,int8,fp8,int4
    python benchmarks/quantization.py --products --out FILE          single products, and configs tuned for them

With --gpu: random weights; time between tokens of 1, 8 and 32 rows, 256 requests of 512 + 256 tokens, time to the first
token of 512 and 4,096, bytes of weights. Schemes one after another, each in a process of its own; vLLM with the same
scheme where it is installed (`--engines ours,vllm`). --products writes the fastest configs to the folder of --out, in
the file that belongs into the engine's kernels/gemm/configs/.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import engines, loads
from common.budget import Budget
from common.isolation import isolated
from common.models import model_folder, vocabulary
from common.report import integers, make_parser, print_table, save, say, words
from common.targets import Target, print_verdicts

_WANTED = ("itl ms", "w2 tok_s", "ttft ms 512", "ttft ms 4096")
_VLLM_ON_LOAD = ("bf16", "fp8")
"""What vLLM makes of unquantised weights when it loads them. Its other schemes need a checkpoint that says so."""
_VLLM_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "int8": {"num_bits": 8, "strategy": "channel"},
    "int4": {"num_bits": 4, "strategy": "group", "group_size": 128},
}
"""Weights of compressed-tensors' checkpoints that are stored as ours are (W8A16, W4A16); they run by Marlin there."""
_TARGETS = {
    "int8 itl ms bs 1": Target(2.4, aim=2.0),
    "fp8 itl ms bs 1": Target(2.4, aim=2.0),
    "int4 itl ms bs 1": Target(1.9, aim=1.5),
    "fp8 prefill of 4096, times bf16": Target(1.4, at_least=True, aim=1.6),
    "fp8 w2 tok_s, times bf16": Target(1.3, at_least=True),
}
"""On one H200, of the 7B shape."""
_SMOKE_LOADS = ("itl ms", "ttft ms")


def measure(engine: str, folder: str, settings: dict[str, Any], smoke: bool) -> Iterator[dict[str, float]]:
    """One engine's figures with one scheme, in a process of its own."""
    sizes = loads.SMOKE if smoke else replace(loads.FULL, first_token=(512, 4096))
    sizes = replace(sizes, vocabulary=vocabulary(folder, sizes.vocabulary))
    begin = time.perf_counter()
    loaded = engines.load(engine, folder, settings)
    yield {"start s": time.perf_counter() - begin}
    wanted = _SMOKE_LOADS if smoke else _WANTED
    for name, value in loads.run_loads(loaded, sizes, 0, lambda name: name.startswith(wanted)):
        yield {name: value}


def speed(options: argparse.Namespace) -> int:
    """All schemes of all models, and verdicts of the 7B shape's."""
    budget = Budget(options.time_limit_s)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    errors: list[str] = []
    result: dict[str, Any] = {"figures": figures, "errors": errors}
    with tempfile.TemporaryDirectory() as root:
        for model in [engines.SMOKE_MODEL] if options.smoke else options.models:
            folder, found = model_folder(model, Path(root)), figures.setdefault(model, {})
            for scheme in options.schemes:
                for engine in options.engines:
                    label = scheme if engine == "ours" else f"{engine} {scheme}"
                    if not _can_run(engine, scheme) or not budget.allows(engine, 40.0):
                        continue
                    say(f"{model}, {label}")
                    with budget.spending(engine):
                        made = isolated(
                            measure, engine, *_loaded_from(engine, scheme, folder, options), options.smoke,
                            timeout_s=budget.left_s, note=lambda part: say(f"  {part}"),
                        )  # fmt: skip
                    if "error" in made:
                        errors.append(f"{model}, {label}: {made.pop('error')}")
                    found[label] = made
                    save(options.out, result)
            names = list(dict.fromkeys(name for each in found.values() for name in each))
            print_table([model, *found], [[name, *(each.get(name) for each in found.values())] for name in names])
            if model == "qwen2.5-7b":
                print_verdicts(model, compared(found), _TARGETS)
    save(options.out, result)
    return int(bool(errors))


def compared(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """The values that have targets."""
    values = {f"{scheme} {name}": value for scheme, each in found.items() for name, value in each.items()}
    plain, fp8 = found.get("bf16", {}), found.get("fp8", {})
    if "ttft ms 4096" in plain and "ttft ms 4096" in fp8:
        values["fp8 prefill of 4096, times bf16"] = plain["ttft ms 4096"] / fp8["ttft ms 4096"]
    if "w2 tok_s" in plain and "w2 tok_s" in fp8:
        values["fp8 w2 tok_s, times bf16"] = fp8["w2 tok_s"] / plain["w2 tok_s"]
    return values


def _can_run(engine: str, scheme: str) -> bool:
    known = engine == "ours" or scheme in _VLLM_ON_LOAD or scheme in _VLLM_CHECKPOINTS
    return engines.is_present(engine) and known


def _loaded_from(engine: str, scheme: str, folder: str, options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The folder that an engine loads a scheme from, and its settings."""
    settings: dict[str, Any] = dict(engines.SMOKE_SETTINGS) if options.smoke else {"max_num_seqs": 256}
    if options.disable and engine == "ours":
        settings["disable"] = tuple(options.disable)
    if scheme == "bf16":
        return folder, settings
    if engine != "ours" and scheme in _VLLM_CHECKPOINTS:
        return packed_folder(folder, _VLLM_CHECKPOINTS[scheme]), settings
    return folder, settings | {"quantization": scheme}


def packed_folder(folder: str, weights: dict[str, Any]) -> str:
    """The same shape as a compressed-tensors checkpoint of integers, all linear layers but the head."""
    group = {
        "targets": ["Linear"],
        "weights": {"type": "int", "symmetric": True, "dynamic": False} | weights,
        "input_activations": None,
        "output_activations": None,
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    made = Path(f"{folder}-int{weights['num_bits']}")
    shutil.copytree(folder, made, dirs_exist_ok=True)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return str(made)


def products(options: argparse.Namespace) -> int:
    """Single products with quantised weights."""
    from common.quantized_tuner import tune_all

    folder = options.out.parent if options.out else None
    results = []
    for line in tune_all(folder, time.monotonic() + options.time_limit_s, tuple(options.rows)):
        say(
            ", ".join(
                f"{name} {round(value, 2) if isinstance(value, float) else value}" for name, value in line.items()
            )
        )
        results.append(line)
        save(options.out, {"products": results})
    return 0


def main() -> int:
    """Parse, and run one part."""
    parser = make_parser(__doc__)
    part = parser.add_mutually_exclusive_group(required=True)
    part.add_argument("--precision", action="store_true", help="mini-infer-compare of the demo model; PNG beside --out")
    part.add_argument("--gpu", action="store_true", help="speed of models with random weights on a GPU")
    part.add_argument("--products", action="store_true", help="time and tune single products on a GPU")
    parser.add_argument("--models", type=words, default=["qwen2.5-7b"], metavar="NAME,...")
    parser.add_argument("--schemes", type=words, default=words("bf16,int8,fp8,int4"), metavar="NAME,...")
    parser.add_argument("--kv", type=words, default=[], metavar="NAME,...", help="with --precision: fp8, int8")
    parser.add_argument(
        "--rows", type=integers, default=[], metavar="M,...", help="with --products: 8 ... 64, 128 ... 4096"
    )
    parser.add_argument(
        "--disable", type=words, default=[], metavar="NAME,...", help="with --gpu: see mini-infer-serve"
    )
    parser.add_argument("--engines", type=words, default=["ours"], metavar="NAME,...")
    options = parser.parse_args()
    if options.precision:
        from mini_infer_engine.compare.cli import main as compare

        flags = ["--device", "cpu", "--limit", "2"] if options.smoke else ["--limit", "100"]
        if options.out:
            flags += ["--json", str(options.out), "--plot", str(options.out.with_suffix(".png"))]
        return compare([*flags, "--schemes", ",".join(options.schemes), "--kv", ",".join(options.kv)])
    if options.products:
        return products(options)
    return speed(options)


if __name__ == "__main__":
    raise SystemExit(main())
