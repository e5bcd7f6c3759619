"""`mini-infer-gateway`: converts flags to settings, and starts a server with the application on a socket."""

import argparse
import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import msgspec

from mini_infer_contract.peer_auth import PeerSecret, read_peer_secret
from mini_infer_gateway import __version__
from mini_infer_gateway.app import Gateway
from mini_infer_gateway.endpoints.base import EndpointSource
from mini_infer_gateway.endpoints.static_file import StaticFile
from mini_infer_gateway.fleet.name_owners import read_rules
from mini_infer_gateway.http.server import DrainingServer
from mini_infer_gateway.memory import parse_size
from mini_infer_gateway.routing.policies import POLICIES
from mini_infer_gateway.settings import GatewaySettings
from mini_infer_process.command_line import parse_flags, port_number, seconds, whole_number
from mini_infer_process.heap import map_large_blocks
from mini_infer_process.interpreter import favour_event_loop
from mini_infer_process.listening import bound_socket
from mini_infer_process.logs import FORMATS, configure_logging, show_crashes
from mini_infer_process.open_files import raise_open_file_limit
from mini_infer_web.api_keys import API_KEY_ENV, ENGINE_API_KEY_ENV, configured_keys, keys_in
from mini_infer_web.body_fields import UnknownFieldsMode
from mini_infer_web.cors import CorsPolicy
from mini_infer_web.http_server.connection import limited
from mini_infer_web.http_server.hosts import allowed_hosts
from mini_infer_web.http_server.limits import ConnectionLimits
from mini_infer_web.http_server.server import connections_for, server_config
from mini_infer_web.tls import TlsFiles, client_context, server_tls

TIMES = (
    "connect_timeout",
    "head_timeout",
    "request_deadline",
    "request_timeout",
    "sse_keepalive",
    "queue_timeout",
    "start_timeout",
    "idle_timeout",
    "responses_ttl",
    "drain",
    "shutdown_timeout",
)
"""Flags in seconds, whose settings end with `_s`."""
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
BACKLOG = 2048


def parse(arguments: Sequence[str] | None = None) -> GatewaySettings:
    """Returns the settings from the command line; exits with the usage if they are invalid."""
    defaults = GatewaySettings()
    parser = argparse.ArgumentParser(
        prog="mini-infer-gateway",
        usage="mini-infer-gateway (--endpoints FILE | --kubernetes) [--flag=value ...]   (--help: all flags)",
        description="Sends OpenAI requests to the engine that holds their prompt's KV cache.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mini-infer-gateway {__version__}")
    parser.add_argument("--host", default=defaults.host, help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=port_number,
        metavar="PORT",
        default=defaults.port,
        help="port to listen on (default: %(default)s)",
    )
    parser.add_argument(
        "--admin-port",
        type=port_number,
        metavar="PORT",
        help="port for /metrics and /debug/endpoints, beside /healthz and /readyz (default: --port where --host is a "
        "loopback address, else they are not served)",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--endpoints", metavar="FILE", help="engines from this JSON or YAML file, re-read when replaced"
    )
    source.add_argument("--kubernetes", action="store_true", help="engines from the pods that the operator labels")
    parser.add_argument("--namespace", help="only pods of this namespace (default: all)")
    parser.add_argument("--kubeconfig", metavar="FILE", help="(default: in the cluster, else the usual places)")
    parser.add_argument(
        "--tokenizer",
        action="append",
        default=[],
        metavar="[MODEL=]DIR|ask",
        help="folder with the tokenizer of servers that do not report how they tokenise, such as vLLM's: prompts go to "
        "where their prefix is cached, which is known exactly of those that publish KV events; once for each model. "
        '"ask": their own /tokenize is asked, which costs each request a round trip with its prompt',
    )
    parser.add_argument(
        "--model-namespaces",
        type=_names,
        default=(),
        metavar="MODEL=NAMESPACE,...",
        help="only services of these namespaces may own the bare name of a model; *=NAMESPACE: all names that are not "
        "named here (default: the oldest service that claims it, of any namespace)",
    )
    parser.add_argument("--routing", choices=POLICIES, default=defaults.routing, help="(default: %(default)s)")
    parser.add_argument(
        "--routing-headers",
        action="store_true",
        help="answer with x-mini-infer-pod, -hit-tokens, -prompt-tokens, -reason and -index: which engine answered and "
        "what it had cached, which reveals tenants to each other",
    )
    _add_console_flags(parser)
    parser.add_argument(
        "--no-continuation",
        dest="continuation",
        action="store_false",
        help="end a stream with an error where its engine dies, instead of going on with it on another engine",
    )
    parser.add_argument(
        "--no-kv-leases",
        dest="kv_leases",
        action="store_false",
        help="do not learn when sessions return, and do not have engines evict their KV cache late until then",
    )
    parser.add_argument(
        "--forward-authorization",
        action="store_true",
        help="send clients' Authorization header on to engines, for servers that check API keys of their own",
    )
    _add_key_flags(parser)
    _add_cors_flags(parser)
    _add_tls_flags(parser)
    parser.add_argument(
        "--max-local-prefill-tokens",
        type=whole_number(0),
        metavar="N",
        help="where there are prefill engines: a prompt of which the decode engine lacks more tokens than this is "
        "computed by one of them, any other by the decode engine itself; 0: all go to a prefill engine (default: "
        "whatever takes less time, by measured rates, queues and how many requests decode there)",
    )
    parser.add_argument(
        "--unknown-fields",
        choices=get_args(UnknownFieldsMode),
        default=defaults.unknown_fields,
        help="in responses that the gateway accepts before an engine sees them (background); all other requests are "
        "judged by engines, by their own flag of this name (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, help="makes ties repeatable")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default=defaults.log_level, help="(default: %(default)s)")
    parser.add_argument(
        "--log-format",
        choices=FORMATS,
        default=defaults.log_format,
        help="json: one object a line, for collectors (default: %(default)s)",
    )
    parser.add_argument(
        "--no-access-log",
        dest="access_log",
        action="store_false",
        help="no line for each request (those that fail are warnings)",
    )
    for (name, low), help_text in {
        ("max-body-bytes", 1): "longer requests get 413; an engine's --max-body-size should be the same",
        ("max-attempts", 1): "endpoints that one request is tried on",
        ("max-queue", 0): "requests of one model that wait here for an engine with room, so that engines get only what "
        "keeps them busy and the rest is placed when it can start; one more gets 429 with Retry-After; 0: none waits",
        ("index-max-blocks", 1): "16-token blocks that the prefix index holds, about 300 bytes each; default: what "
        "--memory-limit leaves",
    }.items():
        default = getattr(defaults, name.replace("-", "_"))
        parser.add_argument(
            f"--{name}",
            type=whole_number(low),
            metavar="N",
            default=default,
            help=f"{help_text}" + (f" (default: {default})" if default else ""),
        )
    parser.add_argument(
        "--memory-limit",
        type=_size,
        metavar="SIZE",
        default=defaults.memory_limit_bytes,
        help="what the process may take, such as its container's limit: 900M, 2Gi; how it is shared out stands in "
        "docs/configuration.md (default: 1Gi)",
    )
    parser.add_argument(
        "--responses-memory",
        type=_size,
        metavar="SIZE",
        help="of that, for responses of /v1/responses, which are kept here; the least recently used go first (default: "
        "5 %% of --memory-limit)",
    )
    parser.add_argument(
        "--replicas",
        type=_names,
        default=(),
        metavar="HOST[:PORT],...",
        help="where all replicas of this gateway listen, such as the name of a headless Service, of which each address "
        "is one: a request to /v1/responses that goes on from a response of another replica is answered there",
    )
    parser.add_argument(
        "--replica-host",
        metavar="ADDRESS",
        help="the address among them that is this one's own, such as its pod's (default: --host)",
    )
    _add_connection_limits(parser, defaults.connections)
    parser.add_argument(
        "--allowed-hosts",
        type=_names,
        default=(),
        metavar="HOST,...",
        help="hosts that clients may name in the Host header, without ports; *.example.com: all below; *: all; others "
        "get 421 (default: no domain where --host is a loopback address and there are no API keys, as web pages could "
        "pretend to be from here otherwise; else all)",
    )
    for name, help_text in {
        "connect-timeout": "for a connection to an engine",
        "head-timeout": "for a response to begin, on one endpoint",
        "request-deadline": "from a request's arrival until its answer begins, over all endpoints tried",
        "request-timeout": "for a whole request, 408 then, or an error in its stream; a client's header "
        "x-request-timeout makes it shorter; 0: no limit",
        "sse-keepalive": "after which a stream that has not begun gets a comment, and then again, so that no proxy "
        "cuts it; from then on an error is reported inside of it; 0: never",
        "queue-timeout": "that a request waits here for an engine with room before it gets 503",
        "start-timeout": "that a request waits for the first engine of a service with minReplicas 0 before it gets 429",
        "idle-timeout": "between two pieces of a stream",
        "responses-ttl": "for which a response of /v1/responses is kept after its last use",
        "drain": "at most, from SIGTERM until it stops to listen: /readyz is 503 and connections close after an answer",
        "shutdown-timeout": "for requests in flight at the end",
    }.items():
        default = getattr(defaults, name.replace("-", "_") + "_s")
        parser.add_argument(
            f"--{name}", type=seconds, metavar="SECONDS", default=default, help=f"{help_text} (default: {default:g})"
        )
    options = vars(parse_flags(parser, arguments))
    if not options["kubernetes"] and (options["namespace"] or options["kubeconfig"]):
        parser.error("--namespace and --kubeconfig need --kubernetes")
    if options["admin_port"] == options["port"]:
        parser.error("--admin-port must be another port than --port")
    if options["replicas"] and not options["replica_host"]:
        options["replica_host"] = options["host"]
    if options["replicas"] and options["replica_host"] in ("0.0.0.0", "::"):
        parser.error("--replicas needs --replica-host, the address by which the others reach this one")
    try:
        read_rules(options["model_namespaces"])
    except ValueError as error:
        parser.error(str(error))
    options["memory_limit_bytes"] = options.pop("memory_limit")
    options["responses_memory_bytes"] = options.pop("responses_memory")
    options["connections"] = ConnectionLimits(
        **{field.name: options.pop(field.name) for field in fields(ConnectionLimits)}
    )
    options["engine_api_key"] = _engine_key(options.pop("engine_api_key_file"))
    options["peer_secret"] = _peer_secret(options.pop("peer_key_file"))
    options["api_key"] = tuple(options["api_key"])
    options["cors"] = CorsPolicy(**{field.name: options.pop(field.name) for field in fields(CorsPolicy)})
    options["tls"] = TlsFiles(**{field.name: options.pop(field.name) for field in fields(TlsFiles)})
    options["endpoints_file"] = options.pop("endpoints")
    options["tokenizers"] = _by_model(options.pop("tokenizer"))
    for name in TIMES:
        options[f"{name}_s"] = options.pop(name)
    return GatewaySettings(**options)


def _by_model(named: Sequence[str]) -> dict[str, str]:
    """Returns folders by model: in `MODEL=DIR` the model ends at the first equals sign; `DIR` has the model ""."""
    parts = (text.partition("=") for text in named)
    return {first if equals else "": folder if equals else first for first, equals, folder in parts}


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_connection_limits(parser: argparse.ArgumentParser, defaults: ConnectionLimits) -> None:
    group = parser.add_argument_group("clients' connections")
    for name, unit, help_text in (
        ("max_connections", "N", "more get 503, or take the place of those that wait without a request"),
        (
            "max_connections_per_peer",
            "N",
            "the same of one address, or of one /64 of IPv6; a proxy in front of the gateway is one address",
        ),
        ("max_header_bytes", "N", "of one request; more get 431"),
        ("idle_timeout_s", "SECONDS", "for a new connection's first request to begin"),
        ("head_timeout_s", "SECONDS", "for a request's headers to arrive; later ones get 408"),
        ("body_timeout_s", "SECONDS", "for a body to arrive, and more for its length: see --client-min-body-rate"),
        ("min_body_rate", "BYTES", "a second that a body must come at; slower ones get 408"),
        ("write_timeout_s", "SECONDS", "for a client to read anything of what waits for it"),
        ("websocket_idle_timeout_s", "SECONDS", "without a message on a WebSocket"),
    ):
        default = getattr(defaults, name)
        flag = "--client-" + name.removesuffix("_s").replace("_", "-")
        group.add_argument(
            flag,
            dest=name,
            type=seconds if unit == "SECONDS" else whole_number(1),
            metavar=unit,
            default=default,
            help=f"{help_text} (default: {default})",
        )


def _add_key_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "API keys", "without any, every client is answered; what is free anyway: docs/api.md"
    )
    group.add_argument(
        "--api-key",
        nargs="+",
        metavar="KEY",
        default=(),
        help="keys of clients; other users of this machine can read them here, but not in a file or in the environment "
        f"variable {API_KEY_ENV}, which holds one more",
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="keys of clients, one a line, such as KEY name=team-a weight=2 max-priority=-1; admin=true for keys "
        "that see others' use in the console; read again when changed",
    )
    group.add_argument(
        "--max-priority",
        type=int,
        metavar="N",
        default=0,
        help="the lowest number, which goes first, that a request may have as its priority, where its key's line in "
        "--api-key-file has none (default: 0)",
    )
    group.add_argument(
        "--no-cache-salt-by-key",
        dest="cache_salt_by_key",
        action="store_false",
        help="clients of different keys share prefix caches, so that they can find out how others' prompts begin",
    )
    group.add_argument(
        "--max-pinned-tokens",
        type=int,
        metavar="N",
        default=262_144,
        help="prompt tokens that one client may pin in engines' KV caches at a time (kv_hints); pins beyond them are "
        "ordinary leases (default: 262144)",
    )
    group.add_argument(
        "--engine-api-key-file",
        metavar="FILE",
        help=f"holds the key that is sent to engines (default: what {ENGINE_API_KEY_ENV} says, else none)",
    )
    group.add_argument(
        "--peer-key-file",
        metavar="FILE",
        help="the root secret (64 hexadecimal digits, `openssl rand -hex 32`) that proves to engines that the gateway "
        "belongs to their service: without it engines that require proof send it no KV events (default: none)",
    )


def _add_console_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the console", "a web page at /: docs/console.md")
    group.add_argument("--no-console", dest="console", action="store_false", help="no web page, and nothing behind it")
    group.add_argument(
        "--console-texts",
        action="store_true",
        help="keep the first characters of prompts, so that the console shows them to the key that sent them and to "
        "administrators (default: no text is kept)",
    )
    group.add_argument("--grafana-url", metavar="URL", type=_web_url, help="a Grafana that the console links to")


def _web_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} must begin with http:// or https://")
    return text


def _add_cors_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pages from elsewhere (CORS)", "off unless origins are named")
    group.add_argument(
        "--allowed-origins",
        type=_names,
        default=(),
        metavar="ORIGIN,...",
        help="pages whose scripts may use the gateway from a browser, such as https://chat.example.com; *: every page",
    )
    for name, what in (("methods", "do"), ("headers", "send")):
        group.add_argument(
            f"--allowed-{name}",
            type=_names,
            default=("*",),
            metavar=f"{name[:-1].upper()},...",
            help=f"what they may {what} (default: *, all)",
        )
    group.add_argument(
        "--allow-credentials", action="store_true", help="browsers may send cookies and client certificates"
    )


def _add_tls_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("TLS", "files are read again when they change; --admin-port stays plain HTTP")
    for name, help_text in {
        "ssl-certfile": "the gateway's certificate and those behind it (default: none, plain HTTP)",
        "ssl-keyfile": "its key (default: in --ssl-certfile)",
        "ssl-ca-certs": "the CA that clients' certificates must be of",
        "engine-ca-certs": "the CA of engines whose address is https:// (default: the system's)",
        "engine-certfile": "the gateway's own certificate towards engines (default: none)",
        "engine-keyfile": "its key (default: in --engine-certfile)",
    }.items():
        group.add_argument(f"--{name}", metavar="FILE", help=help_text)
    group.add_argument(
        "--ssl-cert-reqs",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="whether clients must have a certificate: 0 no, 1 they may, 2 they must (default: 0)",
    )
    group.add_argument(
        "--engine-server-name", metavar="NAME", help="in engines' certificates (default: that of their address)"
    )


def _names(text: str) -> tuple[str, ...]:
    """Parses names separated by commas, or a JSON list as vLLM has it."""
    if not text.lstrip().startswith("["):
        return tuple(name.strip() for name in text.split(","))
    try:
        return msgspec.json.decode(text, type=tuple[str, ...])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of strings in JSON: {error}") from None


def _engine_key(file: str | None) -> str:
    """Returns the first key of a file, else the environment's. Raises SystemExit if the file has none."""
    if file is None:
        return os.environ.get(ENGINE_API_KEY_ENV, "")
    try:
        return keys_in(Path(file).read_text())[0]
    except (OSError, UnicodeDecodeError, IndexError) as error:
        raise SystemExit(f"mini-infer-gateway: no key in --engine-api-key-file {file}: {error}") from None


def _peer_secret(file: str | None) -> PeerSecret | None:
    """Returns the root secret. Raises SystemExit if the file has none."""
    if file is None:
        return None
    try:
        return read_peer_secret(Path(file))
    except (OSError, ValueError) as error:
        raise SystemExit(f"mini-infer-gateway: --peer-key-file: {error}") from None


def make_source(settings: GatewaySettings) -> EndpointSource:
    """Returns the source of endpoints that the settings select."""
    if settings.endpoints_file is not None:
        return StaticFile(settings.endpoints_file)
    # Imported late: the client takes a fifth of a second that a static file need not wait for.
    from mini_infer_gateway.endpoints.kubernetes_watch import KubernetesWatch
    from mini_infer_web.kubernetes_api import AccessError, load_configuration

    try:
        asyncio.run(load_configuration(settings.kubeconfig))  # or the server would start, and never see an engine
    except AccessError as error:
        raise SystemExit(f"mini-infer-gateway: --kubernetes: {error}") from None
    return KubernetesWatch(settings.namespace, settings.kubeconfig)


def listen(host: str, port: int) -> socket.socket:
    """Returns a bound socket. Raises SystemExit, which says what is wrong with the address."""
    try:
        server = bound_socket(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SystemExit(
                f"port {port} on {host} is in use: stop what listens there or choose another --port"
            ) from None
        raise SystemExit(f"cannot listen on {host} port {port}: {error}") from None
    server.listen(BACKLOG)
    server.setblocking(False)
    return server


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the gateway until it is stopped."""
    show_crashes()
    map_large_blocks()
    # Prompts are spread over threads of ours, of low priority, and never over the library's own.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    settings = parse(arguments)
    configure_logging(settings.log_level, settings.log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        keys = configured_keys(settings.api_key, settings.api_key_file)
    except (OSError, ValueError) as error:
        raise SystemExit(f"mini-infer-gateway: API keys: {error}") from None
    try:
        tls = server_tls(settings.tls)
        upstream_tls = client_context(settings.engine_ca_certs, settings.engine_certfile, settings.engine_keyfile)
    except ValueError as error:
        raise SystemExit(f"mini-infer-gateway: TLS: {error}") from None
    most = connections_for(raise_open_file_limit(), settings.connections.max_connections)
    if most < settings.connections.max_connections:
        logging.getLogger(__name__).warning(
            "at most %d clients' connections, not %d: the limit of open files is too low (ulimit -n)",
            most,
            settings.connections.max_connections,
        )
    sockets = [listen(settings.host, settings.port)]
    if settings.admin_port is not None:
        sockets.append(listen(settings.host, settings.admin_port))
    try:
        gateway = Gateway(settings, make_source(settings), keys, upstream_tls)
    except ValueError as error:
        raise SystemExit(f"mini-infer-gateway: {error}") from None
    hosts = allowed_hosts(
        settings.allowed_hosts, settings.host, has_keys=bool(keys), origins=settings.cors.allowed_origins
    )
    config = server_config(
        gateway,
        limited(replace(settings.connections, max_connections=most), hosts, has_direct_writes=True),
        settings.max_body_bytes,
        loop="auto",
        lifespan="on",
        date_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=int(settings.shutdown_timeout_s),
    )
    scheme = "https" if tls else "http"
    logging.getLogger(__name__).info("gateway at %s://%s:%d", scheme, *sockets[0].getsockname()[:2])
    favour_event_loop()
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it once more when it has stopped.
        DrainingServer(config, settings.drain_s, gateway.stop_gently, tls).run(sockets=sockets)
