"""A loaded platform on this machine: two dry-run engines, a gateway over them, and requests of every outcome."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from mini_infer_contract.launch import Endpoint, EndpointsFile
from tests.engine.server.dry_server import HANG_S, DryServer, environment, free_port, wait_until

MODEL, AWAY = "loaded", "away"
REQUESTS = 12


@dataclass(frozen=True, slots=True)
class Platform:
    """Where its parts are."""

    gateway: str
    engines: list[DryServer]

    def scrape(self) -> dict[str, str]:
        """The text of /metrics, by component."""
        return {
            "gateway": httpx.get(f"{self.gateway}/metrics", timeout=60).text,
            "engine": self.engines[0].client.get("/metrics").text,
        }

    def send(self, model: str) -> int:
        """One short chat; the status of the answer."""
        message = {"role": "user", "content": f"How are {model} engines? " * 20}
        body = {"model": model, "messages": [message], "max_tokens": 4}
        return httpx.post(f"{self.gateway}/v1/chat/completions", json=body, timeout=60).status_code


@contextlib.contextmanager
def loaded_platform(folder: Path) -> Iterator[Platform]:
    """Started and asked; one engine has been killed, so that there were retries and errors too."""
    with contextlib.ExitStack() as stack:
        engines, listed = [], [Endpoint(name="none", url=f"http://127.0.0.1:{free_port()}", model=AWAY)]
        for name in ("first", "second"):
            events, replay = free_port(), free_port()
            flags = ("--served-model-name", MODEL, "--events-port", str(events), "--replay-port", str(replay))
            engine = stack.enter_context(DryServer(*flags, "--dry-run-step-ms", "1"))
            engines.append(engine)
            addresses = {"events": f"tcp://127.0.0.1:{events}", "replay": f"tcp://127.0.0.1:{replay}"}
            listed.append(Endpoint(name=name, url=engine.url, model=MODEL, **addresses))
        endpoints = folder / "endpoints.json"
        endpoints.write_bytes(msgspec.json.encode(EndpointsFile(endpoints=listed)))
        platform = Platform(stack.enter_context(_gateway(endpoints)), engines)
        assert [platform.send(MODEL) for _ in range(REQUESTS)] == [200] * REQUESTS
        assert platform.send("nobody's") == 404
        assert platform.send(AWAY) >= 500
        engines[1].process.kill()
        engines[1].process.wait()
        assert [platform.send(MODEL) for _ in range(REQUESTS)] == [200] * REQUESTS
        yield platform


@contextlib.contextmanager
def _gateway(endpoints: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "mini_infer_gateway", f"--port={port}", f"--endpoints={endpoints}"]
    flags = ["--routing=round-robin", "--seed=1"]  # so that the engine that is killed later gets requests
    with (endpoints.parent / "gateway.log").open("wb") as log:
        process = subprocess.Popen([*command, *flags], stdout=log, stderr=log, env=environment())
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: _ready(url))
        yield url
    finally:
        process.terminate()
        process.wait(HANG_S)


def _ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/readyz", timeout=2).status_code == 200
    return False
