"""What quantised weights cost and gain: precision of the demo model, speed of a 7B shape, and of its single products.

    python benchmarks/quantization.py --precision --out FILE         the tool mini-infer-compare (--kv fp8,int8: KV too)
    python benchmarks/quantization.py --gpu --out FILE --models qwen2.5-7b,qwen3-14b --schemes bf16,int8,fp8,int4
    python benchmarks/quantization.py --products --out FILE          single products, and configs tuned for them

With --gpu: random weights; time between tokens of 1, 8 and 32 rows, 256 requests of 512 + 256 tokens, time to the first
token of 512 and 4,096. Schemes one after another, each in a process of its own; int8+head is int8 with the output layer
quantised, too, by our engine alone. vLLM with the same scheme where it is installed (`--engines ours,vllm`): with int8,
int4 and w8a8-int8 (activations are int8 too) both read one checkpoint, written for them and deleted afterwards. With
--together N engines of all models start N at a time, which saves their starts: they share the GPU's memory, and one
works at a time. --products writes the fastest configs to the folder of --out, in the file that belongs into the
engine's kernels/gemm/configs/.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from common import engines, loads
from common.budget import Budget
from common.models import kv_bytes_per_token, model_folder, vocabulary
from common.report import integers, log_line, make_parser, print_table, save, words
from common.shared_checkpoint import shared_checkpoint
from common.targets import Target, print_verdicts
from common.together import measure_alternately

FIGURES = ("itl ms", "w2 tok_s", "ttft ms 512", "ttft ms 4096")
_ON_LOAD = ("bf16", "fp8")
"""What peers make of unquantised weights when they load them. Their other schemes need a checkpoint."""
_HEAD = "+head"
"""After a scheme's name: the output layer is quantised, too."""
_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "int8": {"num_bits": 8, "strategy": "channel"},
    "int4": {"num_bits": 4, "strategy": "group", "group_size": 128},
    "w8a8-int8": {
        "num_bits": 8,
        "strategy": "channel",
        "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True},
    },
}
"""Weights of compressed-tensors' checkpoints that both engines read: W8A16 and W4A16, which run by Marlin in vLLM, and
W8A8 with a scale for each output channel and, while it runs, for each token, which there runs by CUTLASS."""
_SMOKE_GROUP = 32
"""Columns that the tiny model's layers can be cut into."""
_TARGETS = {
    "int8 itl ms bs 1": Target(2.4, aim=2.0),
    "fp8 itl ms bs 1": Target(2.4, aim=2.0),
    "int4 itl ms bs 1": Target(1.9, aim=1.5),
    "fp8 prefill of 4096, times bf16": Target(1.4, at_least=True, aim=1.6),
    "fp8 w2 tok_s, times bf16": Target(1.3, at_least=True),
}
"""On one H200, of the 7B shape."""
_SMOKE_LOADS = ("itl ms", "ttft ms")
_TOKENS_A_REQUEST, _LEAST_REQUESTS = 800, 32
"""What a request of W2 holds in the KV cache, and how many of those all other loads need."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine with a scheme: its table and column, and what it loads."""

    model: str
    label: str
    engine: str
    folder: str
    settings: dict[str, Any]


def measure(
    engine: str, folder: str, settings: dict[str, Any], smoke: bool, figure_names: tuple[str, ...], requests: int
) -> Iterator[dict[str, float]]:
    """One engine's figures with one scheme, in a process of its own; first that of its start."""
    sizes = loads.SMOKE if smoke else replace(loads.FULL, first_token=(512, 4096), batch=requests)
    sizes = replace(sizes, vocabulary=vocabulary(folder, sizes.vocabulary))
    begin = time.perf_counter()
    loaded = engines.load(engine, folder, settings)
    yield {"start s": time.perf_counter() - begin}
    for name, value in loads.run_loads(
        loaded, sizes, 0, lambda name: name.startswith(_SMOKE_LOADS if smoke else figure_names)
    ):
        yield {name: value}


def speed(options: argparse.Namespace) -> int:
    """All schemes of all models, and verdicts of the 7B shape's."""
    budget = Budget(options.time_limit_s)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    checkpoints: dict[str, dict[str, float]] = {}
    errors: list[str] = []
    result = {"requests": options.requests, "figures": figures, "checkpoints": checkpoints, "errors": errors}
    models = [engines.SMOKE_MODEL] if options.smoke else options.models
    pairs = [(model, scheme) for model in models for scheme in options.schemes]
    with tempfile.TemporaryDirectory() as root:
        for chosen in batched(pairs, max(1, options.together // len(options.engines))):
            with ExitStack() as stack:
                contenders: list[Contender] = []
                for model, scheme in chosen:
                    folder = model_folder(model, Path(root))
                    checkpoint, build_report = stack.enter_context(
                        checkpoint_of(scheme, folder, Path(root), options, budget)
                    )
                    if build_report:
                        checkpoints[f"{model}, {scheme}"] = build_report
                    if "error" in build_report:
                        errors.append(f"{model}, checkpoint of {scheme}: {build_report['error']}")
                    contenders += contenders_of(model, scheme, checkpoint, folder, options)
                for group in batched(contenders, options.together):
                    errors += _measured(group, figures, options, budget)
                    save(options.out, result)
    for model, found in figures.items():
        names = list(dict.fromkeys(name for each in found.values() for name in each))
        print_table([model, *found], [[name, *(each.get(name) for each in found.values())] for name in names])
        if model == "qwen2.5-7b":
            print_verdicts(model, compared(found), _TARGETS)
    save(options.out, result)
    return int(bool(errors))


def batched(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """So many at a time, in order."""
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


def _measured(
    group: Sequence[Contender],
    figures: dict[str, dict[str, dict[str, float]]],
    options: argparse.Namespace,
    budget: Budget,
) -> list[str]:
    """Start a group at once, then have one at a time run the loads; figures are by model and label. Returns errors."""
    names = {f"{contender.model}, {contender.label}": contender for contender in group}
    kind = "; ".join(names)
    if not budget.allows(kind, 40.0):
        return []
    log_line(kind)

    def note(name: str, part: dict[str, float]) -> None:
        one = names[name]
        figures.setdefault(one.model, {}).setdefault(one.label, {}).update(part)
        log_line(f"  {name}: {part}")

    with budget.spending(kind):
        return measure_alternately(
            {
                name: (
                    measure,
                    (each.engine, each.folder, each.settings, options.smoke, tuple(options.loads), options.requests),
                )
                for name, each in names.items()
            },
            budget.left_s,
            note,
        )


@contextmanager
def checkpoint_of(
    scheme: str, folder: str, root: Path, options: argparse.Namespace, budget: Budget
) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """The folder that all engines load integers from, and what writing it took, where a peer is measured, too.

    None: each engine makes its own weights. An engine that leaves packed integers unwritten multiplies zeros, faster.
    """
    peers = [engine for engine in options.engines if engine != "ours" and engines.is_present(engine)]
    if scheme not in _CHECKPOINTS or not peers or not budget.allows("checkpoint", 15.0):
        yield None, {}
        return
    weights = _CHECKPOINTS[scheme]
    if options.smoke and "group_size" in weights:
        weights = weights | {"group_size": _SMOKE_GROUP}
    target = root / f"{Path(folder).name}-{scheme}"
    with shared_checkpoint(folder, target, weights, budget) as written:
        yield None if "error" in written else str(target), written


def compared(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """The values that have targets."""
    values = {f"{scheme} {name}": value for scheme, each in found.items() for name, value in each.items()}
    plain, fp8 = found.get("bf16", {}), found.get("fp8", {})
    if "ttft ms 4096" in plain and "ttft ms 4096" in fp8:
        values["fp8 prefill of 4096, times bf16"] = plain["ttft ms 4096"] / fp8["ttft ms 4096"]
    if "w2 tok_s" in plain and "w2 tok_s" in fp8:
        values["fp8 w2 tok_s, times bf16"] = fp8["w2 tok_s"] / plain["w2 tok_s"]
    return values


def contenders_of(
    model: str, scheme: str, checkpoint: str | None, folder: str, options: argparse.Namespace
) -> list[Contender]:
    """The engines that can run a scheme."""
    return [
        Contender(
            model,
            scheme if engine == "ours" else f"{engine} {scheme}",
            engine,
            checkpoint or folder,
            _settings(engine, scheme, checkpoint, folder, options),
        )
        for engine in options.engines
        if engines.is_present(engine) and (engine == "ours" or scheme in _ON_LOAD or checkpoint is not None)
    ]


def _settings(
    engine: str, scheme: str, checkpoint: str | None, folder: str, options: argparse.Namespace
) -> dict[str, Any]:
    """What an engine is told."""
    settings: dict[str, Any] = dict(engines.SMOKE_SETTINGS) if options.smoke else {"max_num_seqs": 256}
    if options.together > 1 and not options.smoke:
        tokens = _TOKENS_A_REQUEST * max(options.requests, _LEAST_REQUESTS)
        settings |= engines.share_of_gpu(tokens * kv_bytes_per_token(folder))
    if options.disable and engine == "ours":
        settings["disable"] = tuple(options.disable)
    if checkpoint is not None:
        return settings | {"load_format": "auto"}
    kind = scheme.removesuffix(_HEAD)
    if kind != "bf16":
        settings["quantization"] = kind
    if kind != scheme:
        settings["quantize_lm_head"] = True
    return settings


def products(options: argparse.Namespace) -> int:
    """Single products with quantised weights."""
    from common.quantized_tuner import tune_all

    folder = options.out.parent if options.out else None
    results = []
    for line in tune_all(folder, time.monotonic() + options.time_limit_s, tuple(options.rows)):
        log_line(
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
    parser.add_argument(
        "--schemes", type=words, default=words("bf16,int8,fp8,int4"), metavar="NAME,...",
        help="with --gpu also int8+head, fp8+head, int4+head: the output layer is quantised, too",
    )  # fmt: skip
    parser.add_argument("--kv", type=words, default=[], metavar="NAME,...", help="with --precision: fp8, int8")
    parser.add_argument(
        "--rows", type=integers, default=[], metavar="M,...", help="with --products: 8 ... 64, 128 ... 4096"
    )
    parser.add_argument(
        "--disable", type=words, default=[], metavar="NAME,...", help="with --gpu: see mini-infer-serve"
    )
    parser.add_argument("--engines", type=words, default=["ours"], metavar="NAME,...")
    parser.add_argument("--requests", type=int, default=256, metavar="N", help="with --gpu: of W2 (default: 256)")
    parser.add_argument(
        "--together", type=int, default=1, metavar="N", help="with --gpu: engines on the GPU at a time (default: 1)"
    )
    parser.add_argument(
        "--loads", type=words, default=FIGURES, metavar="NAME,...", help="with --gpu: figures that begin so"
    )
    options = parser.parse_args()
    if options.precision:
        from mini_infer_engine.tools.compare.cli import main as compare

        flags = ["--device", "cpu", "--limit", "2"] if options.smoke else ["--limit", "100"]
        if options.out:
            flags += ["--json", str(options.out), "--plot", str(options.out.with_suffix(".png"))]
        return compare([*flags, "--schemes", ",".join(options.schemes), "--kv", ",".join(options.kv)])
    if options.products:
        return products(options)
    return speed(options)


if __name__ == "__main__":
    raise SystemExit(main())
