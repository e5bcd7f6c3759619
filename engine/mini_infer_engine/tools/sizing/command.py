"""Implements `mini-infer size`: reads a model's config, and prints a service that keeps latency targets, or why not."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.flags import byte_size
from mini_infer_engine.model_path import resolve_model
from mini_infer_engine.tools.sizing.fit import Load, NoFit, Targets, size
from mini_infer_engine.tools.sizing.gpu import GPUS, Gpu
from mini_infer_engine.tools.sizing.manifest import Subject, manifest
from mini_infer_engine.tools.sizing.precision import BF16, PRECISIONS, Precision
from mini_infer_engine.tools.sizing.shape import ModelShape, UnsizedModelError
from mini_infer_process.logs import show_crashes

_TENSOR_SIZES = (1, 2, 4, 8)
_DESCRIPTION = """\
Print an InferenceService that serves a load within latency targets, with the fewest GPUs. Nothing is measured and no
GPU is needed: the times come from the engine's model of a pass, which published figures of an H200 confirm.

  mini-infer size --model Qwen/Qwen2.5-7B-Instruct --gpu H200 --ttft 500 --itl 15 --rate 8 | kubectl apply -f -

The comments above the service say what to expect and which limit decides: the time to the first token, the time
between tokens, the KV cache, or the largest batch. If no number of GPUs is enough the exit code is 1, and the message
says why and which targets could be kept. A service of several roles, experts, checkpoints that are quantised already
and speculation are not modelled.
"""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="mini-infer size", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="folder with a config.json, hub id, or demo; no weights are read",
    )
    parser.add_argument("--gpu", required=True, type=_gpu, help=f"{' or '.join(gpu.name for gpu in GPUS.values())}")
    parser.add_argument(
        "--ttft", required=True, type=_above_zero, metavar="MS", help="time to the first token, 95th percentile"
    )
    parser.add_argument("--itl", required=True, type=_above_zero, metavar="MS", help="mean time between two tokens")
    parser.add_argument("--rate", required=True, type=_above_zero, metavar="N", help="requests a second, all together")
    parser.add_argument("--prompt-tokens", type=_count, default=1024, metavar="N", help="of a request (default: 1024)")
    parser.add_argument("--output-tokens", type=_count, default=256, metavar="N", help="of a request (default: 256)")
    parser.add_argument(
        "--cached-tokens", type=int, default=0, metavar="N", help="of a prompt, in the prefix cache (default: 0)"
    )
    parser.add_argument(
        "--max-tensor",
        type=int,
        choices=_TENSOR_SIZES,
        default=_TENSOR_SIZES[-1],
        help="most GPUs of one engine, which is at most those of a node (default: 8)",
    )
    parser.add_argument(
        "--quantization",
        choices=[name for name in PRECISIONS if name != BF16.name],
        help="the engine's --quantization of a bf16 checkpoint (default: none)",
    )
    parser.add_argument(
        "--kv-host-memory",
        type=byte_size,
        default=0,
        metavar="SIZE",
        help="main memory of each engine for the prefix cache, such as 64GiB: kvCache.host (default: none)",
    )
    parser.add_argument("--name", type=_name, help="of the service (default: by the model's name)")
    parser.add_argument("--uri", help="model.uri of the service, such as pvc://claim/path (default: by --model)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a service to standard output, or the reason to standard error. Returns 0, 1 if nothing fits, or 2."""
    show_crashes()
    parser = build_parser()
    options = parser.parse_args(arguments)
    if not 0 <= options.cached_tokens < options.prompt_tokens:
        parser.error(f"--cached-tokens {options.cached_tokens}: write 0 to {options.prompt_tokens - 1}")
    load = Load(
        requests_per_s=options.rate,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        cached_tokens=options.cached_tokens,
    )
    targets = Targets(ttft_s=options.ttft / 1e3, itl_s=options.itl / 1e3)
    try:
        precision = PRECISIONS[options.quantization or BF16.name]
        shape = _shape(options.model, load.context, precision)
    except (ModelError, UnsizedModelError) as error:
        print(f"mini-infer size: {error}", file=sys.stderr)
        return 2
    subject = Subject(
        name=options.name or _service_name(options.model),
        uri=options.uri or _uri(options.model),
        gpu=options.gpu,
        precision=precision,
        host_mib=-(-options.kv_host_memory // (1 << 20)),
        host_tokens=int(options.kv_host_memory // shape.kv_bytes_per_token),
    )
    fit = size(shape, options.gpu, load, targets, [t for t in _TENSOR_SIZES if t <= options.max_tensor])
    if isinstance(fit, NoFit):
        print(f"mini-infer size: no engine on {options.gpu.name} serves this:", file=sys.stderr)
        print("".join(f"  {reason}\n" for reason in fit.reasons) + f"What fits: {fit.remedy}.", file=sys.stderr)
        return 1
    print(manifest(subject, fit, load, targets), end="")
    return 0


def _shape(model: str, context: int, precision: Precision) -> ModelShape:
    from mini_infer_engine.models.registry import read_config

    return ModelShape.of(read_config(resolve_model(model, weights=False)), context, precision)


def _uri(model: str) -> str:
    path = Path(model).expanduser()
    if path.is_dir():
        return f"file://{path.resolve()}"
    return model if model == "demo" else f"hf://{model}"


def _service_name(model: str) -> str:
    """Returns the last part of a model's name as a name that Kubernetes accepts."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(model).expanduser().name.lower()).strip("-")
    return name[:40].strip("-") or "model"


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no name of a service: write at most 40 of a-z, 0-9 and -, a letter first and no - at the end"
        )
    return text


def _gpu(text: str) -> Gpu:
    found = GPUS.get(text.lower())
    if found is None:
        names = ", ".join(gpu.name for gpu in GPUS.values())
        raise argparse.ArgumentTypeError(f"{text!r}: passes were measured on {names} only; write one of these")
    return found


def _above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r}: write a number above 0 and below 1e9")
    return number


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 10_000_000:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number above 0")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
