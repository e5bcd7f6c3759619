"""Runs `mini-infer-serve`: converts flags to settings, and checks all that it can before anything slow begins."""

import argparse
import logging
import os
import signal
import socket
import sys
import textwrap
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from mini_infer_contract.engine_options import EngineOptions
from mini_infer_contract.launch import WEIGHTS_PEERS_ENV, WEIGHTS_PORT_ENV
from mini_infer_contract.peer_auth import PeerSecret, read_peer_secret
from mini_infer_engine import __version__
from mini_infer_engine.config.options.flags import ENGINE_GROUPS, add_flags, add_speculative_config, options_from
from mini_infer_engine.config.options.idle_options import idle_options
from mini_infer_engine.config.options.mechanisms import Mechanism
from mini_infer_engine.config.options.server_options import SERVER, ServerOptions, missing_port_fault
from mini_infer_engine.config.options.settings import (
    EngineSettings,
    master_address,
    node_rank,
    num_nodes,
    transfer_fault,
)
from mini_infer_engine.config.options.speculation import options_of_config
from mini_infer_engine.config.peer_ports import PeerPorts, peer_ports
from mini_infer_engine.core_process.core_config import CoreConfig
from mini_infer_engine.data_parallel.processes import core_processes
from mini_infer_engine.dry.dry_run import DRY_MODEL, DryRun
from mini_infer_engine.dry.script import read_script
from mini_infer_engine.kv_transfer.transfer_port import TransferPort
from mini_infer_engine.model_path import resolve_model
from mini_infer_engine.server.admin_socket import admin_socket
from mini_infer_engine.server.model_lock import locked_model
from mini_infer_engine.server.vllm_flags import split_flags, vllm_flags
from mini_infer_engine.weight_transfer.addresses import split_address
from mini_infer_engine.weight_transfer.exchange import WeightExchange
from mini_infer_process.heap import map_large_blocks
from mini_infer_process.interpreter import import_permanently
from mini_infer_process.listening import bound_socket, is_loopback, usable_host
from mini_infer_process.logs import configure_logging, show_crashes
from mini_infer_process.open_files import raise_open_file_limit
from mini_infer_web.api_keys import configured_keys
from mini_infer_web.tls import server_tls

logger = logging.getLogger(__name__)

_EPILOG = """\
examples:
  mini-infer-serve demo                                  the small model that comes with the package
  mini-infer-serve ~/models/Qwen3-0.6B --served-model-name qwen
  mini-infer-serve --dry-run                             no weights, no torch: it repeats its input
"""
_LONGEST_STEP_MS = 86_400
_SERVER_GROUPS = {SERVER: "addresses, limits, logs"}


class StartError(Exception):
    """The server cannot start; the message is for the user, in one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, and returns the exit status."""
    show_crashes()
    map_large_blocks()
    parser = make_parser()
    own, vllms = split_flags(sys.argv[1:] if arguments is None else arguments, parser)
    options, others = parser.parse_known_args(own)
    try:
        without_effect = vllm_flags([*others, *vllms], parser, options.model or options.MODEL)
    except ValueError as error:
        parser.error(str(error))
    if options.MODEL is not None and options.model not in (None, options.MODEL):
        parser.error(f"two models are named: {options.MODEL} and --model {options.model}")
    options.model = options.model if options.MODEL is None else options.MODEL
    if not options.dry_run and options.model is None:
        parser.error("which model? Name a folder, a hub id or demo: mini-infer-serve MODEL (or --dry-run)")
    if options.dry_run_script is not None and not options.dry_run:
        parser.error("--dry-run-script is for --dry-run: a real model says what it says")
    if options.dry_run and options.model not in (None, DRY_MODEL):
        parser.error(f"--dry-run pretends a model and loads none: leave out {options.model}")
    try:
        settings = settings_from(options)
    except ValueError as error:
        name, blank, fault = str(error).partition(" ")
        parser.error(f"--{name.removeprefix('--').replace('_', '-')}{blank}{fault}")
    configure_logging(options.log_level, options.log_format)
    if without_effect:
        logger.info("flags of vLLM's without effect here: %s", ", ".join(without_effect))
    if idle := idle_options(settings):
        logger.warning("options without effect: %s", ", ".join(idle))
    try:
        return run(options, settings)
    except StartError as error:
        print(f"mini-infer-serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def run(options: argparse.Namespace, settings: EngineSettings) -> int:
    """Takes the port, finds the model, starts the core, and serves."""
    server = options_from(options, ServerOptions)
    server = msgspec.structs.replace(server, host=usable_host(server.host))
    try:
        keys = configured_keys(server.api_key, server.api_key_file)
    except (OSError, ValueError) as error:
        raise StartError(f"API keys: {error}") from None
    try:
        tls = server_tls(server.tls)
    except ValueError as error:
        raise StartError(f"TLS: {error}") from None
    peers = peer_ports(server.host, _peer_secret(server), allow_unauthenticated=server.allow_unauthenticated_peers)
    dry_run = _dry_run(options) if options.dry_run else None
    raise_open_file_limit()
    listening = listen(server.host, server.port)
    try:
        node = node_rank(settings)
        if num_nodes(settings) > 1:
            master_address(settings)  # or it is missed only when the others wait
    except ValueError as error:
        raise StartError(str(error)) from None
    if node and dry_run is None:
        from mini_infer_engine.server.worker_node import WorkerNode

        worker = WorkerNode(settings, node, server.drain_timeout_s, server.log_level, server.log_format, peers.key)
        with locked_model(settings.model):
            return worker.run(listening)
    _warn_of_open_ports(server, peers)
    fault = transfer_fault(settings) if server.listening_transfer_port else missing_port_fault(server, settings)
    if fault is not None:
        raise StartError(fault)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # until the server takes over
    try:
        directory = None if dry_run is not None else _find_model(settings)
    except (ValueError, OSError) as error:
        raise StartError(str(error)) from None
    try:
        weights = _weight_exchange(server, peers)
    except ValueError as error:
        raise StartError(f"--{error}") from None
    config = CoreConfig(
        settings=settings,
        dry_run=dry_run,
        peers=peers,
        events_port=server.events_port,
        replay_port=server.replay_port,
        transfer=TransferPort(host=peers.host, port=server.listening_transfer_port, role=server.role),
        weights=weights,
        log_level=server.log_level,
        log_format=server.log_format,
    )
    failure = ""
    with ExitStack() as stack:
        if dry_run is None:
            stack.enter_context(locked_model(settings.model))
        try:
            admin = stack.enter_context(admin_socket(server.admin_socket))
        except OSError as error:
            raise StartError(f"--admin-socket {server.admin_socket}: {error}: choose another path") from None
        try:
            cores = stack.enter_context(core_processes(config))
        except ValueError as error:
            raise StartError(str(error)) from None
        # Imported while the core starts: the web framework takes most of a second.
        import_permanently("mini_infer_engine.server.serve")
        from mini_infer_engine.parsing.registry import ParserChoice
        from mini_infer_engine.server.serve import serve
        from mini_infer_engine.text.images.media import MediaRules
        from mini_infer_engine.text.text_model import TextModel

        names = settings.served_model_name or (settings.model,)
        try:
            parsers = ParserChoice(
                tool_call_parser=settings.tool_call_parser,
                reasoning_parser=settings.reasoning_parser,
                enable_auto_tool_choice=settings.enable_auto_tool_choice,
            )
            text = TextModel.load(
                names,
                directory,
                settings.skip_tokenizer_init,
                settings.generation_config,
                parsers,
                settings.chat_template,
                MediaRules.of(settings.allowed_media_domains, settings.allowed_local_media_path, server.max_body_bytes),
            )
        except (ValueError, OSError) as error:
            raise StartError(str(error)) from None
        logger.info("tool calls: %s; reasoning: %s", *text.formats.shown)
        host, port = listening.getsockname()[:2]
        scheme = "https" if tls else "http"
        shown = f"[{host}]" if ":" in host else host
        where, model = f"{scheme}://{shown}:{port}", ", ".join(names)
        logger.info("mini-infer %s: listening at %s; loading %s, which it serves once ready", __version__, where, model)
        failure = serve(listening, text, cores, server, settings, keys, tls, peers, admin)
    if failure:
        # Only now that the cores have ended: whoever shows the end of this process quotes its last line.
        logger.error("%s", failure)
    return 1 if failure else 0


def _peer_secret(server: ServerOptions) -> PeerSecret | None:
    if server.peer_key_file is None:
        return None
    try:
        return read_peer_secret(Path(server.peer_key_file))
    except (OSError, ValueError) as error:
        raise StartError(f"--peer-key-file: {error}") from None


def _weight_exchange(server: ServerOptions, peers: PeerPorts) -> WeightExchange:
    """Returns the exchange of weights, by flags or by the operator's environment.

    Raises ValueError if the environment or an address is wrong.
    """
    addresses = server.weights_peers or tuple(filter(None, os.environ.get(WEIGHTS_PEERS_ENV, "").split(",")))
    for address in addresses:
        split_address(address)
    port = server.weights_port
    if port is None:
        text = os.environ.get(WEIGHTS_PORT_ENV, "") or "0"
        if not text.isascii() or not text.isdecimal() or int(text) >= 65_280:
            raise ValueError(f"weights-port: {WEIGHTS_PORT_ENV} = {text!r} is no port: unset it, or set a number")
        port = int(text)
    return WeightExchange(host=peers.host, port=port, peers=addresses, key=peers.key)


def _warn_of_open_ports(server: ServerOptions, peers: PeerPorts) -> None:
    """Warns once which ports peers can use without a proof of membership."""
    ports = [port for port in (server.events_port, server.replay_port, server.listening_transfer_port) if port]
    if not ports or peers.key:
        return
    if peers.host != server.host:
        logger.warning(
            "event, replay and transfer ports listen at %s, not at %s: without --peer-key-file nobody proves there to "
            "belong to the service (--allow-unauthenticated-peers opens them to anyone who reaches this machine)",
            peers.host,
            server.host,
        )
    elif not is_loopback(peers.host):
        logger.warning(
            "--allow-unauthenticated-peers: anyone who reaches event, replay and transfer ports at %s reads prompts",
            peers.host,
        )


def _dry_run(options: argparse.Namespace) -> DryRun:
    try:
        script = read_script(options.dry_run_script) if options.dry_run_script is not None else ()
    except (ValueError, OSError) as error:
        raise StartError(f"--dry-run-script: {error}") from None
    return DryRun(step_ms=options.dry_run_step_ms, script=script)


def _find_model(settings: EngineSettings) -> Path:
    """Returns the model's folder, and downloads its weights from a hub if necessary, so that the core finds all files
    there.
    """
    return resolve_model(settings.model, settings.revision, weights=settings.load_format != "dummy")


def listen(host: str, port: int) -> socket.socket:
    """Returns the listening socket. It is opened before anything slow, so that a busy port is reported at once."""
    try:
        listening = bound_socket(host, port)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening.listen(4096)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StartError(f"cannot listen on {host}:{port} ({reason}): choose another --port or --host") from None
    return listening


def settings_from(options: argparse.Namespace) -> EngineSettings:
    """Returns the engine's settings of the parsed flags. Raises ValueError if a value names something that does not
    exist.
    """
    speculation = {} if options.speculative_config is None else options_of_config(options.speculative_config)
    return options_from(options, EngineSettings, model=DRY_MODEL if options.dry_run else options.model, **speculation)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser with all flags, in groups for newcomers."""
    parser = argparse.ArgumentParser(
        prog="mini-infer-serve",
        usage="mini-infer-serve MODEL [--flag=value ...]   (mini-infer-serve --help: all flags)",
        description="Serve one model over OpenAI's HTTP API.",
        epilog=_EPILOG + _mechanisms_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("MODEL", nargs="?", help="what is served, as --model (default: none)")
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show the version and the kernels that run here, and exit"
    )
    add_flags(parser, EngineOptions, ENGINE_GROUPS)
    add_flags(parser, ServerOptions, _SERVER_GROUPS)
    add_speculative_config(parser)
    _add_dry_run_flags(parser.add_argument_group("dry run", "the whole server without a model"))
    return parser


class _Version(argparse.Action):
    """Prints the version, and below it the kernels that would run on this machine, which takes as long as importing
    torch.
    """

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(__version__)
        from mini_infer_engine.core_process.build import describe_kernels  # with the engine, which no server needs here

        print(f"kernels: {describe_kernels()}")
        parser.exit()


def _mechanisms_help() -> str:
    lines = [
        textwrap.fill(f"  {mechanism:23} {mechanism.description}", 100, subsequent_indent=" " * 26)
        for mechanism in Mechanism
    ]
    return "\n".join(["", "mechanisms of the GPU path, for --disable:", *lines])


def _add_dry_run_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dry-run",
        action="store_true",
        help='a model "dry" that repeats its input; needs no torch (default: off)',
    )
    group.add_argument(
        "--dry-run-step-ms",
        type=_milliseconds,
        default=2.0,
        metavar="MS",
        help="pretended time of a forward pass (default: 2)",
    )
    group.add_argument(
        "--dry-run-script",
        type=Path,
        metavar="FILE",
        help='answers for tests of clients: a JSON list of {"when": TEXT, "say": TEXT}; the first whose "when" is '
        "part of the prompt is used (default: it repeats its input)",
    )


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _LONGEST_STEP_MS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up to {_LONGEST_STEP_MS}")
    return value


if __name__ == "__main__":
    sys.exit(main())
