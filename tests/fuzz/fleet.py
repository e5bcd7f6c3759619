"""The fleet that is attacked: a gateway, two unified engines and a prefill/decode pair as processes on loopback."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil

from mini_infer_contract.launch import PROMPT_ASSETS_PATH
from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_operator.local.ports import free_ports

START_LIMIT_S = 180.0
HOSTILE_MODEL = "hostile"
_ENGINES = ("unified-0", "unified-1", "prefill", "decode")
_STOP_LIMIT_S = 30.0


@dataclass(slots=True)
class Fleet:
    """Addresses and processes of what runs. The first model is served by two engines, the second by the pair."""

    folder: Path
    seed: int
    secret: PeerSecret
    gateway_url: str
    engine_urls: list[str]
    zmq_addresses: list[str]
    transfer_addresses: list[str]
    """Of the prefill engine, and of the decode engine."""
    hostile_port: int
    hostile_events_port: int
    models: tuple[str, str] = ("demo", "demo-apart")
    a_revision: str = ""
    """What the healthy engines call their tokenizer, for a pod that claims to have the same one."""
    pace: float = 1.0
    """Attackers pause this many times as long."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def decode_url(self) -> str:
        """The decode engine's own port."""
        return self.engine_urls[3]

    @property
    def endpoints_file(self) -> Path:
        """What the gateway reads."""
        return self.folder / "endpoints.json"

    def write_endpoints(self, content: bytes) -> None:
        """Replaces the endpoints file at once."""
        new = self.folder / "endpoints.new"
        new.write_bytes(content)
        new.replace(self.endpoints_file)

    async def pause(self, random: Random, mean_s: float) -> None:
        """Waits between two attempts of an attacker."""
        await asyncio.sleep(random.uniform(0.2, 1.8) * mean_s * self.pace)

    def members(self) -> dict[str, list[psutil.Process]]:
        """Returns the processes of each part: the one that was started and those that it started."""
        found: dict[str, list[psutil.Process]] = {}
        for name, process in self.processes.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                found[name] = [parent, *parent.children(recursive=True)]
        return found

    def log(self, name: str) -> str:
        """Returns what a part has printed."""
        return (self.folder / f"{name}.log").read_text(errors="replace")


@contextlib.contextmanager
def running_fleet(seed: int) -> Iterator[Fleet]:
    """Starts the fleet, waits until it is ready, and ends it. Raises TimeoutError with the logs' ends."""
    with tempfile.TemporaryDirectory() as name:
        fleet, commands = _planned(Path(name), seed)
        try:
            for part, command in commands.items():
                with (fleet.folder / f"{part}.log").open("wb") as log:
                    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
                    fleet.processes[part] = subprocess.Popen(
                        [sys.executable, "-m", *command],
                        stdout=log,
                        stderr=log,
                        env=environment,
                        start_new_session=True,
                    )
            for url in (*fleet.engine_urls, fleet.gateway_url):
                _wait_until_ready(fleet, url)
            assets = json.loads(_get(fleet.engine_urls[0] + PROMPT_ASSETS_PATH))
            fleet.a_revision = str(assets.get("revision", ""))
            yield fleet
        finally:
            _stop(fleet)


def _planned(folder: Path, seed: int) -> tuple[Fleet, dict[str, list[str]]]:
    secret = PeerSecret.generate()
    key = folder / "peer.key"
    key.touch(0o600)
    key.write_text(secret.hex())
    ports = iter(free_ports(2 + 4 * len(_ENGINES) + 2))
    gateway_port, admin_port = next(ports), next(ports)
    endpoints: list[dict[str, Any]] = []
    commands: dict[str, list[str]] = {}
    addresses, transfers, urls = [], [], []
    for name in _ENGINES:
        http, events, replay, transfer = (next(ports) for _ in range(4))
        is_unified = name.startswith("unified")
        role = "unified" if is_unified else name
        model = "demo" if is_unified else "demo-apart"
        command = [
            "mini_infer_engine.server.cli",
            "--model",
            "demo",
            "--dtype",
            "float32",
            "--served-model-name",
            model,
        ]
        command += ["--port", str(http), "--events-port", str(events), "--replay-port", str(replay)]
        command += ["--peer-key-file", str(key), "--kv-cache-memory", "64MB", "--no-access-log"]
        endpoint = {
            "name": name,
            "url": f"http://127.0.0.1:{http}",
            "model": model,
            "role": role,
            "peer_auth": "shared",
        }
        endpoint |= {"events": f"tcp://127.0.0.1:{events}", "replay": f"tcp://127.0.0.1:{replay}"}
        addresses += [endpoint["events"], endpoint["replay"]]
        if not is_unified:
            command += ["--role", role, "--transfer-port", str(transfer), "--kv-transport", "shm"]
            endpoint |= {"transfer": f"tcp://127.0.0.1:{transfer}", "revision": "one", "service": "default/apart"}
            transfers.append(endpoint["transfer"])
        commands[name] = command
        urls.append(endpoint["url"])
        endpoints.append(endpoint)
    fleet = Fleet(
        folder=folder,
        seed=seed,
        secret=secret,
        gateway_url=f"http://127.0.0.1:{gateway_port}",
        engine_urls=urls,
        zmq_addresses=[*addresses, *transfers],
        transfer_addresses=transfers,
        hostile_port=next(ports),
        hostile_events_port=next(ports),
    )
    hostile = {"name": "hostile", "url": f"http://127.0.0.1:{fleet.hostile_port}", "model": HOSTILE_MODEL}
    hostile["events"] = f"tcp://127.0.0.1:{fleet.hostile_events_port}"
    fleet.write_endpoints(json.dumps({"endpoints": [*endpoints, hostile]}).encode())
    gateway = ["mini_infer_gateway", "--endpoints", str(fleet.endpoints_file), "--port", str(gateway_port)]
    gateway += ["--admin-port", str(admin_port), "--peer-key-file", str(key), "--no-access-log"]
    commands["gateway"] = gateway
    return fleet, commands


def _wait_until_ready(fleet: Fleet, url: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        with contextlib.suppress(OSError):
            _get(url + "/readyz")
            return
        dead = [name for name, process in fleet.processes.items() if process.poll() is not None]
        if dead or time.monotonic() > deadline:
            tails = "\n".join(f"--- {name}\n{fleet.log(name)[-2000:]}" for name in dead or fleet.processes)
            raise TimeoutError(f"{url} is not ready\n{tails}")
        time.sleep(0.2)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as response:
        return str(response.read().decode())


def _stop(fleet: Fleet) -> None:
    """Asks every part to end, and kills the process group of one that does not."""
    for process in fleet.processes.values():
        process.terminate()
    for process in fleet.processes.values():
        try:
            process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
