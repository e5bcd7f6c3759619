"""Our engine beside vLLM on what has a start of minutes: groups of engines on one or two GPUs, which all start at once.

    python benchmarks/beside_vllm.py ranks:qwen2.5-7b:1+2+vllm2 checkpoint:deepseek-v2-lite:9@1 --out FILE
    python benchmarks/beside_vllm.py quantized:llama-3.1-8b:int8+fp8+int4:32@0 quantized:qwen2.5-1.5b:int8+int4:32@1
    python benchmarks/beside_vllm.py speculation:head+ngram:0.8+0.6@0 quantized:qwen2.5-7b:w8a8-int8:32@1

Groups, with random weights:
- ranks:MODEL:N+vllmN: our engine and vLLM with so many tensor-parallel ranks; the loads of tensor_parallel.py.
- offline:MODEL:GB: our engine and vLLM with a KV cache of so many GB each; W1, time between tokens, first tokens.
- transformers:MODEL:GB: both by transformers' code of the model, and our engine by its own file of it; time between
  tokens.
- checkpoint:MODEL:GB: as offline, with both engines from one checkpoint of random weights. Dummy weights of vLLM are so
  small that a router's bias chooses the same few experts for all tokens.
- speculation:METHOD+METHOD:P+P: a 7B shape with a draft of 0.5B's, a head (vLLM's is one of EAGLE-3) or prompt look-up
  (ngram), of whose guesses a share of P is right, and without guesses; tokens a second at batch 1, 8 and 32, by
  speculation.py, all from one set of checkpoints. Each engine's gain over itself without guesses is told, too.
- quantized:MODEL:SCHEME+SCHEME:N: the loads of quantization.py with N requests; integers from one checkpoint for both.
`@G` puts a group on that GPU, with its share of the cores. Groups of all GPUs are measured first, one engine at a time;
then each GPU's engines, one at a time of each GPU. Engines must fit the GPUs' memory together.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_offline
import quantization
import speculation
import tensor_parallel
from common import engines
from common.budget import Budget
from common.isolation import Figures
from common.models import kv_bytes_per_token, model_folder
from common.quiet import measuring
from common.report import log_line, make_parser, print_table, save
from common.shared_checkpoint import shared_checkpoint
from common.targets import is_rate
from common.together import Start, Together

_KV_TOKENS = 280_000
"""Of every engine that runs W1."""
_OFFLINE_LOADS = ("itl", "ttft", "w1")
_FIRST_TOKENS = (512, 4096, 16384)
"""Lengths of prompts whose first token is timed, of the group `offline`."""
_BATCHES = [1, 8, 32]
_SPECULATION = "speculation "
_WITHOUT = f"{_SPECULATION}without "
"""Before a group's methods: its plain engines."""
_PARTS = {"ours": "shapes", "vllm": "vllm"}
"""Of speculation.py."""


@dataclass(frozen=True, slots=True)
class Group:
    """What the command line names."""

    kind: str
    arguments: tuple[str, ...]
    gpu: int | None

    @classmethod
    def parse(cls, text: str) -> "Group":
        """What follows on the command line. ArgumentTypeError: there is no such kind."""
        words, _, gpu = text.partition("@")
        kind, *arguments = words.split(":")
        if kind not in STARTS:
            raise argparse.ArgumentTypeError(f"{text}: there are {', '.join(STARTS)}")
        return cls(kind, tuple(arguments), int(gpu) if gpu else None)


def ranks(group: Group, root: Path, budget: Budget, stack: ExitStack, smoke: bool) -> dict[str, Start]:
    """Engines by numbers of ranks."""
    model, sizes = group.arguments
    folder = str(model_folder(model, root))
    starts = dict[str, Start]()
    for text in sizes.split("+"):
        engine, size = ("vllm", int(text[4:])) if text.startswith("vllm") else ("ours", int(text))
        settings = engines.share_of_gpu(kv_bytes_per_token(folder) * _KV_TOKENS // size)
        settings |= {"max_num_seqs": 256, "tensor_parallel_size": size} | (engines.SMOKE_SETTINGS if smoke else {})
        selected = tensor_parallel.SMOKE_FIGURES if smoke else tensor_parallel.FIGURES
        arguments = (engine, folder, settings, smoke, None, *selected)
        starts[f"{model} x{size}, {engine}"] = (one_round, arguments)
    return starts


def offline(group: Group, root: Path, budget: Budget, stack: ExitStack, smoke: bool) -> dict[str, Start]:
    """Both with memory for keys, values and recurrent states that fits beside other engines."""
    model, gigabytes = group.arguments
    folder = str(model_folder(engines.SMOKE_MODEL if smoke else model, root))
    settings = {"max_num_seqs": 256, "max_model_len": 2 * max(_FIRST_TOKENS)}
    settings |= engines.share_of_gpu(int(float(gigabytes) * 1e9))
    settings |= engines.SMOKE_SETTINGS if smoke else {}
    arguments = (folder, settings, smoke, None, *_OFFLINE_LOADS)
    function = one_round if smoke else partial(one_round, first_token=_FIRST_TOKENS)
    return {f"{model}, {engine}": (function, (engine, *arguments)) for engine in ("ours", "vllm")}


def through_transformers(group: Group, root: Path, budget: Budget, stack: ExitStack, smoke: bool) -> dict[str, Start]:
    """Both by transformers' code, and ours by its own file."""
    both = offline(group, root, budget, stack, smoke)
    model = group.arguments[0]

    def by(impl: str, engine: str) -> Start:
        measure, (name, folder, settings, *_) = both[f"{model}, {engine}"]
        return measure, (name, folder, settings | {"model_impl": impl}, smoke, None, "itl")

    return {
        f"{model} by its own file, ours": by("native", "ours"),
        f"{model} through transformers, ours": by("transformers", "ours"),
        f"{model} through transformers, vllm": by("transformers", "vllm"),
    }


def checkpoint(group: Group, root: Path, budget: Budget, stack: ExitStack, smoke: bool) -> dict[str, Start]:
    """Starts both as `offline` does, from one checkpoint."""
    model = engines.SMOKE_MODEL if smoke else group.arguments[0]
    written = root / f"{model} written"
    stack.enter_context(shared_checkpoint(model_folder(model, root), written, None, budget))

    def read(function: Any, arguments: tuple[Any, ...]) -> Start:
        engine, _, settings, *loads = arguments
        return function, (engine, str(written), settings | {"load_format": "auto"}, *loads)

    return {name: read(*start) for name, start in offline(group, root, budget, stack, smoke).items()}


def one_round(*arguments: Any, **options: Any) -> Iterator[Figures]:
    """`engine_offline.measure`, once."""
    parts = engine_offline.measure(*arguments, **options)
    yield next(parts)
    yield from takewhile(bool, parts)


def speculating(group: Group, root: Path, budget: Budget, stack: ExitStack, smoke: bool) -> dict[str, Start]:
    """Both with as many guesses and the same shares of right ones; the plain engines first."""
    methods, shares = (argument.split("+") for argument in group.arguments)
    acceptances = [float(share) for share in shares]
    batches = [1, 2] if smoke else _BATCHES
    options = SimpleNamespace(
        smoke=smoke,
        target=engines.SMOKE_MODEL if smoke else "qwen2.5-7b",
        draft=engines.SMOKE_MODEL if smoke else "qwen2.5-0.5b",
        draft_vocab_size=32_000,
        guesses=5,
        acceptances=acceptances,
        peer_acceptances=acceptances,
        methods=["draft", "head", "eagle3"],
        peer_methods=methods,
    )
    written = stack.enter_context(speculation.written_checkpoints(options, root, budget))
    variants = {engine: speculation.variants_of(part, options) for engine, part in _PARTS.items()}
    variants["ours"] |= speculation.variants_of("ngram", options)
    starts = dict[str, Start]()
    for engine, part in _PARTS.items():
        function = speculation.shapes if engine == "ours" else speculation.peer
        settings, more = speculation.settings_of(part, options, root, max(batches), written)
        settings |= (engines.SMOKE_SETTINGS if smoke else {}) | {"load_format": "auto"}
        settings, own = speculation.with_folders(part, settings, variants[engine])
        for label in ("plain", *methods):
            arguments = (function, label, settings, {label: own[label]}, batches, *more)
            name = f"{_WITHOUT}{'+'.join(methods)}" if label == "plain" else f"{_SPECULATION}{label}"
            starts[f"{name}, {engine}"] = (rates_by_batch, arguments)
    return starts


def rates_by_batch(function: Callable[..., Iterator[Figures]], label: str, *arguments: Any) -> Iterator[Figures]:
    """The rates, which both engines have, and how many tokens passes make; names are without the label."""
    parts = function(*arguments)
    yield next(parts)
    for part in parts:
        for name, figures in part.items():
            place = name.removeprefix(label).lstrip(", ")
            of_both = {"all tok_s": "tok_s", "tokens a pass": "tokens a pass", "guesses a pass": "guesses a pass"}
            yield {f"{place} {figure_name}": figures[one] for one, figure_name in of_both.items() if one in figures}


def quantized(group: Group, root: Path, budget: Budget, stack: ExitStack, smoke: bool) -> dict[str, Start]:
    """Both with each scheme."""
    model, schemes, requests = group.arguments
    folder = str(model_folder(model, root))
    options = SimpleNamespace(engines=["ours", "vllm"], smoke=smoke, together=8, requests=int(requests), disable=[])
    starts = dict[str, Start]()
    for scheme in schemes.split("+"):
        checkpoint, _ = stack.enter_context(quantization.checkpoint_of(scheme, folder, root, options, budget))
        for one in quantization.contenders_of(model, scheme, checkpoint, folder, options):
            arguments = (one.engine, one.folder, one.settings, smoke, quantization.FIGURES, options.requests)
            starts[f"{model} {scheme}, {one.engine}"] = (quantization.measure, arguments)
    return starts


STARTS = {
    "ranks": ranks,
    "offline": offline,
    "transformers": through_transformers,
    "checkpoint": checkpoint,
    "speculation": speculating,
    "quantized": quantized,
}


def on_gpu(gpu: int, num_gpus: int, function: Callable[..., Iterator[Figures]], *arguments: Any) -> Iterator[Figures]:
    """In a process that sees one GPU, and its share of the cores."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // num_gpus
    os.sched_setaffinity(0, cores[gpu * share : (gpu + 1) * share])
    yield from function(*arguments)


def main() -> int:
    """Start all, measure in turn."""
    parser = make_parser(__doc__)
    parser.add_argument("groups", nargs="+", type=Group.parse, metavar="GROUP[@GPU]")
    options = parser.parse_args()
    budget = Budget(options.time_limit_s)
    figures: dict[str, dict[str, float]] = {}
    result: dict[str, Any] = {"figures": figures, "ratios": {}, "gains": {}, "errors": []}

    def note(label: str, part: Figures) -> None:
        figures.setdefault(label, {}).update(part)
        log_line(f"  {label}: {part}")
        save(options.out, result)

    num_gpus = 1 + max((group.gpu for group in options.groups if group.gpu is not None), default=0)
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        together = Together(stack, lambda: budget.left_s, note)
        result["errors"] = together.errors
        lanes: dict[int | None, list[str]] = {}
        for group, starts in prepared(options.groups, Path(root), budget, stack, options.smoke):
            for label, (function, arguments) in starts.items():
                lanes.setdefault(group.gpu, []).append(label)
                start = (function, arguments)
                if group.gpu is not None:
                    start = (on_gpu, (group.gpu, num_gpus, function, *arguments))
                together.start(label, start)
        ready = together.ready()
        log_line(f"{len(ready)} of {sum(map(len, lanes.values()))} engines are ready")
        lanes = {gpu: [label for label in labels if label in ready] for gpu, labels in lanes.items()}
        with measuring():
            together.measure(lanes.pop(None, []))
            with ThreadPoolExecutor(max(1, len(lanes))) as pool:
                list(pool.map(together.measure, lanes.values()))
    result["ratios"], result["gains"] = ratios_of(figures), gains_of(figures)
    save(options.out, result)
    return int(bool(result["errors"]))


def prepared(
    groups: list[Group], root: Path, budget: Budget, stack: ExitStack, smoke: bool
) -> Iterator[tuple[Group, dict[str, Start]]]:
    """What each group starts, in the order in which their checkpoints are written."""
    with ThreadPoolExecutor(len(groups)) as pool:
        waiting = {}
        for number, group in enumerate(groups):
            folder = root / str(number)
            folder.mkdir()
            own = stack.enter_context(ExitStack())
            waiting[pool.submit(STARTS[group.kind], group, folder, budget, own, smoke)] = group
        for done in as_completed(waiting):
            yield waiting[done], done.result()


def ratios_of(figures: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Ours to vLLM's, of each pair of labels that differ in nothing else; prints them."""
    found: dict[str, dict[str, float]] = {}
    for label, ours in figures.items():
        name, _, engine = label.rpartition(", ")
        theirs = figures.get(f"{name}, vllm")
        if engine == "vllm" or theirs is None:
            print_table([label, "ours"], [[figure, value] for figure, value in ours.items()])
            continue
        found[name] = {figure: ours[figure] / theirs[figure] for figure in ours if figure in theirs}
        rows = [
            [figure, ours[figure], theirs[figure], ratio, "higher is better" if is_rate(figure) else ""]
            for figure, ratio in found[name].items()
        ]
        print_table([name, "ours", "vLLM", "ours / vLLM", ""], rows)
    return found


def gains_of(figures: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Of engines with guesses: their rates to those of the same engine without, at the same batch; prints them."""
    found: dict[str, dict[str, float]] = {}
    plains = {label: label.removeprefix(_WITHOUT).rpartition(", ") for label in figures if label.startswith(_WITHOUT)}
    for label, guessing in figures.items():
        method, _, engine = label.removeprefix(_SPECULATION).rpartition(", ")
        own = (one for one, (methods, _, of) in plains.items() if of == engine and method in methods.split("+"))
        plain = figures.get(next(own, ""), {})
        if not label.startswith(_SPECULATION) or label in plains:
            continue
        rates = {figure: figure.rpartition(", ")[2] for figure in guessing if is_rate(figure)}
        found[label] = {figure: guessing[figure] / plain[base] for figure, base in rates.items() if base in plain}
        print_table([label, "times without guesses"], [[figure, ratio] for figure, ratio in found[label].items()])
    return found


if __name__ == "__main__":
    os.environ |= {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    raise SystemExit(main())
