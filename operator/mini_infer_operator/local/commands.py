"""Builds the command lines and environments of local engines and the local gateway. Starts nothing itself."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mini_infer_contract.launch import HEALTH_PATH, READY_PATH, WEIGHTS_PEERS_ENV, WEIGHTS_PORT_ENV
from mini_infer_operator.launch import Addresses, Launch, grace_s, serve_arguments
from mini_infer_operator.local.ports import HOST
from mini_infer_operator.local.supervise import Command
from mini_infer_web.api_keys import API_KEY_ENV

ENGINE = "mini_infer_engine.server.cli"
GATEWAY = "mini_infer_gateway.cli"
_PYTHON = (sys.executable, "-P", "-c")  # -P: a logging.py in the user's folder is not ours to import
_RUN = "import sys; from {module} import main; sys.exit(main())"
"""The program that starts a module's `main`. It is not the console script, which may belong to another environment."""


def engine_command(
    launch: Launch,
    ports: tuple[int, int, int, int],
    peer_key: Path,
    *,
    threads: int,
    gpus: Sequence[str],
    kv_host: str = "",
    kv_disk: Path = Path("kv-cache"),
    weights_port: int = 0,
    weights_peers: Sequence[int] = (),
) -> Command:
    """Returns the command of an engine with its HTTP, events, replay and transfer ports.

    `gpus` are those that it may see; if empty, it inherits ours. `kv_host` is the folder in memory for its KV cache, ""
    if there is no such file system here, and `kv_disk` the folder on the disk, if it has one. `weights_port` is the
    first of the ports at which it serves its weights, and `weights_peers` are those of engines from which it may load
    them.
    """
    http_port, events_port, replay_port, transfer_port = ports
    addresses = Addresses(
        host=HOST, http_port=http_port, events_port=events_port, replay_port=replay_port, transfer_port=transfer_port
    )
    arguments = serve_arguments(
        launch,
        addresses,
        model_mount="",
        kv_host_path=kv_host,
        kv_disk_path=str(kv_disk),
        drain_s=grace_s(launch),
        peer_key_file=str(peer_key),
    )
    environment = _environment({"OMP_NUM_THREADS": str(threads)} if "OMP_NUM_THREADS" not in os.environ else {})
    # Keys are for clients of the gateway; engines listen on loopback, where the gateway would need one for them.
    environment.pop(API_KEY_ENV, None)
    environment.pop("LWS_GROUP_SIZE", None)  # of the group that this process may be in: the engine is whole by itself
    environment[WEIGHTS_PORT_ENV] = str(weights_port)
    environment[WEIGHTS_PEERS_ENV] = ",".join(f"{HOST}:{port}" for port in weights_peers)
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    container = launch.template.container
    for item in (container.env or []) if container else []:
        value = item.model_dump().get("value")
        if isinstance(value, str):
            environment[item.name] = value
    return Command(
        [*_PYTHON, _RUN.format(module=ENGINE), *arguments],
        environment,
        f"http://{HOST}:{http_port}{READY_PATH}",
    )


def gateway_command(host: str, port: int, endpoints: Path, peer_key: Path) -> Command:
    """Returns the command of the gateway that reads the endpoints file."""
    addresses = [f"--host={host}", f"--port={port}", f"--endpoints={endpoints}"]
    arguments = [*addresses, f"--peer-key-file={peer_key}", "--routing-headers"]
    return Command(
        [*_PYTHON, _RUN.format(module=GATEWAY), *arguments],
        _environment({}),
        f"http://{reachable(host)}:{port}{HEALTH_PATH}",
    )


def reachable(host: str) -> str:
    """Returns the address at which to reach a server that listens on `host`."""
    if host in {"0.0.0.0", "::", ""}:
        return HOST
    return f"[{host}]" if ":" in host else host


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", **extra}
