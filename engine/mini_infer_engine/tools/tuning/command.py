"""Implements `mini-infer tune`: selects the products, the time and the table's place, and reports the gains."""

import argparse
import contextlib
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mini_infer_engine.config.parallelism.tensor_parallel import TensorParallel
from mini_infer_engine.kernels.gemm.tuned_configs import (
    GemmConfig,
    Shape,
    TunedConfigs,
    cached_configs,
    file_name,
    packaged_configs,
    tuned_configs_folder,
    tuned_configs_json,
)
from mini_infer_engine.model_path import resolve_model
from mini_infer_process.logs import show_crashes

if TYPE_CHECKING:  # they need torch, which may not be there
    from mini_infer_engine.tools.tuning.products import Product
    from mini_infer_engine.tools.tuning.small_m_tuner import Measured

_COMPILERS = 14
_DESCRIPTION = """\
Measure tile configs for the products of decode steps on this GPU (Hopper), and keep the fastest where engines find
them. Engines name the tables they use when they start; --disable tuned_configs does without.
"""


class TuneError(Exception):
    """Raised if nothing can be tuned; the message is for the user, in one line."""


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="mini-infer tune", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", action="append", default=[], metavar="DIR", help="folder or hub id; may be given several times"
    )
    parser.add_argument(
        "--checkpoints", action="store_true", help="the shapes of the twenty most used checkpoints of 0.5B to 32B"
    )
    parser.add_argument(
        "--time-limit-s", type=float, default=600.0, metavar="S", help="stop measuring after so long (default: 600)"
    )
    parser.add_argument(
        "--rows",
        type=_rows,
        default=(8, 32, 16, 64),
        metavar="M,...",
        help="batches up to which a config serves, of 8, 16, 32, 64, the most important first (default: 8,32,16,64)",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=1,
        metavar="N",
        help="tune what one of N tensor-parallel ranks computes (default: 1)",
    )
    parser.add_argument("--again", action="store_true", help="also products that have a measured config already")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write a whole table there, with all that is known, for shipping",
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="all times of all configs, as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit status."""
    show_crashes()
    parser = make_parser()
    options = parser.parse_args(arguments)
    if not options.model and not options.checkpoints:
        parser.error("what is to be tuned? --model DIR, or --checkpoints")
    try:
        return tune(options)
    except (TuneError, ValueError, OSError) as error:
        print(f"mini-infer tune: {error}", file=sys.stderr)
        return 1


def tune(options: argparse.Namespace) -> int:
    """Compiles and measures until the time is up. The table on disk is rewritten after each measurement."""
    started = time.monotonic()
    _check_device()
    import torch

    from mini_infer_engine.kernels.context import KernelContext
    from mini_infer_engine.tools.tuning.small_m_tuner import SmallMTuner

    models = _models(options)
    tuner = SmallMTuner(KernelContext.of(torch.device("cuda"), ()))
    policy = tuner.policy
    if not policy.pdl:
        reason = policy.profile.gluon_obstacle or "programmatic dependent launch is not available"
        raise TuneError(f"{policy.profile.name}: only Hopper's kernels are tuned, and they cannot run here: {reason}")
    print(f"{policy.profile.name}, engine so far: {policy.tuned.origin}", flush=True)
    products = list(dict.fromkeys(product for counts in models.values() for product in counts))
    measured: dict[tuple[Product, int], Measured] = {}
    table: dict[Shape, GemmConfig | None] = {}
    deadline = started + options.time_limit_s
    for rows in options.rows:
        tuned = {} if options.again else policy.tuned.with_pdl
        jobs = [(product, rows) for product in products if key_of(product, rows) not in tuned]
        if not jobs or time.monotonic() > deadline:
            continue
        compile_jobs(jobs, deadline)
        for product, _ in jobs:
            if time.monotonic() > deadline:
                print(f"time is up at {len(measured)} of {len(products) * len(options.rows)} measurements", flush=True)
                break
            found = tuner.measure(product, rows)
            measured[product, rows] = found
            table[key_of(product, rows)] = found.config
            print(line_of(found), flush=True)
            place = write_table(policy.profile.name, table, options.out)
        if options.log is not None:
            options.log.write_text(json.dumps([asdict(each) for each in measured.values()], indent=1))
    if not measured:
        print("nothing to measure: all products have measured configs (--again measures them anyway)")
        return 0
    for sentence in gains(models, measured, options.rows):
        print(sentence)
    print(f"{len(measured)} products measured in {time.monotonic() - started:.0f} s; engines find them in {place}")
    return 0


def key_of(product: "Product", rows: int) -> Shape:
    """Returns a product's key in the engine's table."""
    return product.n, product.k, product.gated, rows


def write_table(device: str, table: dict[Shape, GemmConfig | None], out: Path | None) -> Path:
    """Adds the configs to the user's table, or with `out` to a copy of the shipped table in that folder."""
    if out is None:
        folder, tuned = tuned_configs_folder(), cached_configs(device) or TunedConfigs(device, {}, {})
    else:
        folder, tuned = out, packaged_configs(device)
    folder.mkdir(parents=True, exist_ok=True)
    made = replace(tuned, device=device, with_pdl={**tuned.with_pdl, **table})
    place = folder / file_name(device)
    temporary = place.with_suffix(".part")
    temporary.write_text(tuned_configs_json(made))
    temporary.replace(place)  # an engine that starts meanwhile reads the old one or the new one
    return place


def line_of(found: "Measured") -> str:
    """Formats one measurement for people."""
    product = found.product
    kind = "gated" if product.gated else "residual" if product.writes_residual else ""
    speed = product.byte_count / found.us / 1e6
    name = type(found.config).__name__.removesuffix("Config") if found.config is not None else "cuBLAS"
    config = "" if found.config is None else str(tuple(asdict(found.config).values()))
    return (
        f"{product.n:6} x {product.k:5} {kind:8} M {found.rows:2}: {found.before_us:7.2f} -> {found.us:7.2f} us "
        f"({found.gain:6.1%}), {speed:.2f} TB/s, {name} {config}"
    )


def gains(
    models: "dict[str, Counter[Product]]", measured: "dict[tuple[Product, int], Measured]", rows: Sequence[int]
) -> list[str]:
    """Returns a line for each model and batch that was measured: time of a step's products before and after."""
    lines = []
    for name, counts in models.items():
        for each in rows:
            pairs = [
                (measured[product, each], count) for product, count in counts.items() if (product, each) in measured
            ]
            if not pairs:
                continue
            before = sum(found.before_us * count for found, count in pairs)
            after = sum(found.us * count for found, count in pairs)
            lines.append(
                f"{name}, up to {each} rows: {len(pairs)} of {len(counts)} products of a step, "
                f"{before / 1e3:.3f} -> {after / 1e3:.3f} ms ({1 - after / before:.1%} less)"
            )
    return lines


def compile_jobs(jobs: "list[tuple[Product, int]]", deadline: float) -> None:
    """Fills Triton's cache from several processes, for no longer than half of the remaining time."""
    wait_s = max(1.0, (deadline - time.monotonic()) / 2)
    started = time.monotonic()
    pool = multiprocessing.get_context("spawn").Pool(_COMPILERS, initializer=show_crashes)
    try:
        work = pool.map_async(_compile, [jobs[part::_COMPILERS] for part in range(_COMPILERS)], chunksize=1)
        work.wait(wait_s)
    finally:
        pool.terminate()
        pool.join()
    print(f"compiled for {time.monotonic() - started:.0f} s", flush=True)


def _compile(jobs: "list[tuple[Product, int]]") -> None:
    import torch

    from mini_infer_engine.kernels.context import KernelContext
    from mini_infer_engine.tools.tuning.small_m_tuner import SmallMTuner

    torch.set_num_threads(1)
    SmallMTuner(KernelContext.of(torch.device("cuda"), ())).compile(jobs)


def _models(options: argparse.Namespace) -> "dict[str, Counter[Product]]":
    """Returns each model's products by its name. Raises ValueError if a folder cannot be read."""
    from mini_infer_engine.models.registry import model_class, read_config
    from mini_infer_engine.tools.tuning.checkpoints import CHECKPOINTS
    from mini_infer_engine.tools.tuning.products import products_of

    ranks = options.tensor_parallel_size
    if ranks < 1:
        raise ValueError(f"--tensor-parallel-size {ranks}: must be positive.")
    models = {}
    for name in options.model:
        config = replace(
            read_config(resolve_model(name, None, weights=False)), tensor_parallel=TensorParallel(rank=0, size=ranks)
        )
        model_class(config.architecture).check_split(config)
        models[name] = products_of(config)
        if config.quantization is not None:
            count = models[name].total()
            print(f"{name}: layers with quantised weights are left out, {count} products of a step are not", flush=True)
    for name, shape in CHECKPOINTS.items() if options.checkpoints else ():
        with contextlib.suppress(ValueError):  # so many ranks cannot share it out
            models[name] = shape.of_rank(ranks).products
    return models


def _check_device() -> None:
    try:
        import torch
    except ImportError:
        raise TuneError("torch is not installed: it needs the engine, on a machine with an NVIDIA GPU.") from None
    if not torch.cuda.is_available():
        raise TuneError("there is no NVIDIA GPU that torch can use here: run it on the GPU that is to be tuned.")
    try:
        import triton  # noqa: F401  # only whether it is there
    except ImportError:
        raise TuneError("triton is not installed: our kernels need it.") from None


def _rows(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not set(parts) <= {"8", "16", "32", "64"}:
        raise argparse.ArgumentTypeError(f"{text!r}: a list of 8, 16, 32 and 64, as 8,32")
    return tuple(map(int, dict.fromkeys(parts)))


if __name__ == "__main__":
    sys.exit(main())
