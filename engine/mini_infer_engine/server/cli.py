"""`mini-infer-serve`: flags to settings, and what must be known to be right before anything slow begins."""

import argparse
import logging
import re
import signal
import socket
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from mini_infer_contract.launch import DEMO_MODEL, HTTP_PORT, MAX_BODY_BYTES
from mini_infer_contract.logs import FORMATS, LEVELS, configure_logging
from mini_infer_engine import __version__
from mini_infer_engine.config.mechanisms import Mechanism, parse_mechanisms
from mini_infer_engine.config.model_path import resolve_model
from mini_infer_engine.config.settings import EngineSettings
from mini_infer_engine.core_process.build import DryRun, describe_kernels
from mini_infer_engine.core_process.core_config import CoreConfig
from mini_infer_engine.dry.vocabulary import DRY_MODEL
from mini_infer_engine.server.child_process import CoreProcess

logger = logging.getLogger(__name__)

_UNITS = {
    "": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40
}  # fmt: skip
_EPILOG = """\
examples:
  mini-infer-serve --model demo                          the small model that comes with the package
  mini-infer-serve --model ~/models/Qwen3-0.6B --served-model-name qwen
  mini-infer-serve --dry-run                             no weights, no torch: it repeats what it is asked
"""


class StartError(Exception):
    """The server cannot start; the message is for the user, in one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if not options.dry_run and options.model is None:
        parser.error("--model is needed (or --dry-run)")
    if options.dry_run and options.model not in (None, DRY_MODEL):
        parser.error(f"--dry-run pretends a model and loads none: leave out --model {options.model}")
    configure_logging(options.log_level, options.log_format)
    try:
        return run(options)
    except StartError as error:
        print(f"mini-infer-serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def run(options: argparse.Namespace) -> int:
    """Take the port, find the model, start the core, serve."""
    settings = settings_from(options)
    dry_run = DryRun(step_ms=options.dry_run_step_ms) if options.dry_run else None
    listening = listen(options.host, options.port)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # until the server takes over
    try:
        directory = None if dry_run is not None else _find_model(settings)
    except (ValueError, OSError) as error:
        raise StartError(str(error)) from None
    config = CoreConfig(
        settings=settings,
        dry_run=dry_run,
        host=options.host,
        events_port=options.events_port,
        replay_port=options.replay_port,
        log_level=options.log_level,
        log_format=options.log_format,
    )
    with CoreProcess(config) as core:
        # Imported while the core starts: the web framework takes most of a second.
        from mini_infer_engine.api.state import ServeOptions
        from mini_infer_engine.server.serve import serve
        from mini_infer_engine.text.text_model import TextModel

        names = settings.served_model_name or (settings.model,)
        try:
            text = TextModel.load(names, directory, settings.skip_tokenizer_init)
        except (ValueError, OSError) as error:
            raise StartError(str(error)) from None
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        logger.info("mini-infer %s serves %s at http://%s:%d", __version__, ", ".join(names), shown, port)
        limits = ServeOptions(
            max_body_bytes=options.max_body_size,
            body_timeout_s=options.body_timeout,
            access_log=options.access_log,
            max_choices=settings.max_num_seqs + options.max_waiting,
            max_tokenizing_bytes=options.max_tokenizing_size,
            drain_timeout_s=options.drain_timeout,
            health_timeout_s=options.health_timeout,
        )
        return serve(listening, text, core, limits)


def _find_model(settings: EngineSettings) -> Path:
    """The model's folder, its weights downloaded too where it is a hub's: the core should find all there."""
    return resolve_model(settings.model, settings.revision, weights=settings.load_format != "dummy")


def listen(host: str, port: int) -> socket.socket:
    """The listening socket, taken before anything slow: a busy port should say so at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listening.bind((host, port))
        listening.listen(4096)
    except (OSError, OverflowError) as error:
        listening.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StartError(f"cannot listen on {host}:{port} ({reason}): choose another --port or --host") from None
    return listening


def settings_from(options: argparse.Namespace) -> EngineSettings:
    """The engine's part of the flags."""
    values = {name: getattr(options, name) for name in EngineSettings.__struct_fields__}
    values["model"] = DRY_MODEL if options.dry_run else values["model"]
    values["served_model_name"] = tuple(values["served_model_name"])
    return EngineSettings(**values)


def byte_size(text: str) -> int:
    """Bytes from "512MiB", "2GB", "1.5g" or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", text.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write bytes, or a number with KB, MB, GB, MiB, GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def make_parser() -> argparse.ArgumentParser:
    """All flags, in the groups that a newcomer looks for."""
    parser = argparse.ArgumentParser(
        prog="mini-infer-serve",
        description="Serve one model over OpenAI's HTTP API.",
        epilog=_EPILOG + _mechanisms_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show the version and the kernels that run here, and exit"
    )
    _add_model_flags(parser.add_argument_group("model", "what is served"))
    _add_batching_flags(parser.add_argument_group("batching and memory", "the defaults suit most machines"))
    _add_server_flags(parser.add_argument_group("server", "addresses, limits, logs"))
    _add_dry_run_flags(parser.add_argument_group("dry run", "the whole server without a model"))
    return parser


def _mechanisms_help() -> str:
    lines = [
        textwrap.fill(f"  {mechanism:23} {mechanism.description}", 100, subsequent_indent=" " * 26)
        for mechanism in Mechanism
    ]
    return "\n".join(["", "mechanisms of the GPU path, for --disable:", *lines])


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", metavar="DIR|HF-ID|demo", help=f'a folder, a hub id, or "{DEMO_MODEL}" (no default)')
    group.add_argument(
        "--served-model-name", nargs="+", default=(), metavar="NAME", help="what clients call it (default: as --model)"
    )
    group.add_argument("--revision", help="branch, tag or commit on the hub (default: its main one)")
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="auto: the checkpoint's, fp32 on a CPU (default: auto)",
    )
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: a GPU where there is one (default: auto)",
    )
    group.add_argument(
        "--max-model-len", type=_positive, metavar="TOKENS", help="prompt and output together (default: the model's)"
    )
    group.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights, for benchmarks (default: auto, from the files)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of dummy weights (default: 0)")
    group.add_argument(
        "--skip-tokenizer-init",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="token ids in, token ids out, no text (default: off)",
    )
    group.add_argument(
        "--role",
        type=_role,
        default="unified",
        metavar="ROLE",
        help="unified: prefill and decode in one (the only one yet, and the default)",
    )


def _add_batching_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-num-seqs", type=_positive, default=256, metavar="N", help="sequences that run at once (default: 256)"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=_positive,
        metavar="TOKENS",
        help="of one forward pass (default: 2048 on a CPU, 8192 on a GPU)",
    )
    group.add_argument(
        "--long-prefill-token-threshold",
        type=_natural,
        default=0,
        metavar="TOKENS",
        help="largest prefill chunk; smaller ones make decoding smoother (default: 0, only the budget cuts)",
    )
    group.add_argument(
        "--page-size", type=_positive, metavar="TOKENS", help="a multiple of 16 (default: 16 on a CPU, 128 on a GPU)"
    )
    group.add_argument(
        "--kv-cache-memory",
        "--kv-cache-memory-bytes",
        type=byte_size,
        metavar="SIZE",
        help="page pool, in bytes or as 512MiB (default: 2GB on a CPU, what --gpu-memory-utilization leaves on a GPU)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=_share,
        default=0.9,
        metavar="SHARE",
        help="of a GPU's memory for this engine, weights included, 0.01 to 1 (default: 0.9)",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="prompts share the KV cache of equal beginnings (default: on)",
    )
    group.add_argument(
        "--attention-backend",
        choices=("auto", "torch", "flash", "triton"),
        default="auto",
        help="auto: our kernels on a GPU; flash: flash-attn for prompts; torch: the slow reference (default: auto)",
    )
    group.add_argument(
        "--enforce-eager", action="store_true", help="no CUDA graphs on a GPU: slower, easier to debug (default: off)"
    )
    group.add_argument(
        "--disable",
        type=_mechanisms,
        default=(),
        metavar="NAME,...",
        help="mechanisms of the GPU path to switch off, which are described below (default: none)",
    )
    group.add_argument(
        "--step-depth",
        type=int,
        choices=(0, 1),
        default=1,
        help="passes in flight while the host plans the next (default: 1)",
    )


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="0.0.0.0: reachable from other machines (default: 127.0.0.1)",
    )
    group.add_argument(
        "--port", type=_port, default=HTTP_PORT, metavar="PORT", help=f"0: a free one (default: {HTTP_PORT})"
    )
    group.add_argument(
        "--events-port",
        type=_port,
        default=0,
        metavar="PORT",
        help="publish KV events and load over ZMQ (default: 0, do not)",
    )
    group.add_argument(
        "--replay-port",
        type=_port,
        default=0,
        metavar="PORT",
        help="let gateways ask for events that they missed (default: 0, do not)",
    )
    group.add_argument(
        "--max-body-size",
        type=byte_size,
        default=MAX_BODY_BYTES,
        metavar="SIZE",
        help="of one request, in bytes or as 2MB (default: 16MiB)",
    )
    group.add_argument(
        "--body-timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="for a request's body to come; a slower one is answered with 408 (default: 60)",
    )
    group.add_argument(
        "--max-waiting",
        type=_natural,
        default=4096,
        metavar="N",
        help="choices of requests that wait, beside --max-num-seqs that run; what is above is answered with 429 and "
        "Retry-After (default: 4096)",
    )
    group.add_argument(
        "--max-tokenizing-size",
        type=byte_size,
        default=256 * 2**20,
        metavar="SIZE",
        help="of bodies that are being made into prompts at once; what is above is answered with 429 (default: 256MiB)",
    )
    group.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="after SIGTERM, for running requests to finish (default: 30)",
    )
    group.add_argument(
        "--health-timeout",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="/healthz answers 503 when the core has work and has finished no step for so long; above what the largest "
        "step takes, which on a CPU can be a minute; 0: never (default: 120)",
    )
    group.add_argument(
        "--log-format", choices=FORMATS, default="text", help="json: one object a line, for collectors (default: text)"
    )
    group.add_argument(
        "--access-log",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a line for each request; those that fail are warnings (default: on)",
    )
    group.add_argument("--log-level", choices=LEVELS, default="info", help="the least that is logged (default: info)")


def _add_dry_run_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dry-run",
        action="store_true",
        help='a model "dry" that repeats what it is asked; needs no torch (default: off)',
    )
    group.add_argument(
        "--dry-run-step-ms",
        type=_seconds,
        default=2.0,
        metavar="MS",
        help="pretended time of a forward pass (default: 2)",
    )


def _number(text: str, kind: type[int] | type[float], low: float, high: float, what: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _role(text: str) -> str:
    if text != "unified":
        raise argparse.ArgumentTypeError(f"{text!r} is not supported: engines are unified, prefill and decode in one")
    return text


class _Version(argparse.Action):
    """Prints the version, and below it which kernels would run on this machine, which takes as long as torch does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(__version__)
        print(f"kernels: {describe_kernels()}")
        parser.exit()


def _mechanisms(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    try:
        parse_mechanisms(names)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("disable: ")) from None
    return names


def _positive(text: str) -> int:
    return int(_number(text, int, 1, 2**31 - 1, "a positive integer"))


def _natural(text: str) -> int:
    return int(_number(text, int, 0, 2**31 - 1, "an integer from 0 on"))


def _port(text: str) -> int:
    return int(_number(text, int, 0, 65_535, "a port, from 0 to 65535"))


def _seconds(text: str) -> float:
    return float(_number(text, float, 0, 86_400, "a number from 0 to 86400"))


def _share(text: str) -> float:
    return float(_number(text, float, 0.01, 1, "a share between 0.01 and 1"))


if __name__ == "__main__":
    sys.exit(main())
