"""Servers under test: started with caches of their own, watched until the first token, ended with their children."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.caches import cache_variables
from common.engines import SETTINGS, SMOKE_SETTINGS, peer_environment
from mini_infer_operator.local.ports import free_ports

_READY = {"ours": "/readyz", "vllm": "/health"}
_MODULES = {"ours": "mini_infer_engine.server.cli", "vllm": "vllm.entrypoints.openai.api_server"}
_POLL_S = 0.01


class Server:
    """One that runs."""

    def __init__(self, kind: str, port: int, process: subprocess.Popen[bytes], begin_s: float) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._kind, self._port, self._process, self._begin_s = kind, port, process, begin_s

    def first_token(self, limit_s: float) -> dict[str, float]:
        """Seconds from exec until the port answered, it said that it is ready, a streamed request had a token.

        Raises:
            TimeoutError: there was none in time, or the process has ended.

        """
        found: dict[str, float] = {}
        while "token s" not in found:
            for name, path in (("open s", "/v1/models"), ("ready s", _READY[self._kind])):
                if name not in found and self._answers("GET", path):
                    found[name] = time.perf_counter() - self._begin_s
            if "open s" in found and self._answers("POST", "/v1/completions"):
                found["token s"] = time.perf_counter() - self._begin_s
            if self._process.poll() is not None or time.perf_counter() - self._begin_s > limit_s:
                raise TimeoutError(f"{self._kind}: no token after {time.perf_counter() - self._begin_s:.0f} s")
            time.sleep(_POLL_S)
        return {"ready s": found["token s"]} | found

    def metrics(self, part: str) -> list[str]:
        """Lines of its metrics whose names have this part."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return [line for line in lines if part in line and not line.startswith("#")]

    def _answers(self, method: str, path: str) -> bool:
        """Whether a GET is answered with 200, a POST with a first token."""
        body = {"model": "measured", "prompt": [5, 6, 7, 8, 9, 10, 11, 12], "max_tokens": 4, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5 if method == "GET" else 300)
        try:
            payload = json.dumps(body) if method == "POST" else None
            connection.request(method, path, payload, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status == 200 and (method == "GET" or response.readline().startswith(b"data: {"))
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def command(kind: str, model: str, port: int, settings: dict[str, Any], smoke: bool) -> list[str]:
    """How a server without tokenizer is started: the same flags for both."""
    flags = {"model": model, "served_model_name": "measured", "host": "127.0.0.1", "port": port}
    flags |= SETTINGS | settings | (SMOKE_SETTINGS if smoke else {})
    arguments = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, "-m", _MODULES[kind], *arguments, "--skip-tokenizer-init"]


@contextlib.contextmanager
def started(
    kind: str,
    model: str,
    settings: dict[str, Any],
    caches: Path,
    smoke: bool = False,
    variables: dict[str, str] | None = None,
) -> Iterator[Server]:
    """Run a server that keeps compiled code in `caches`; on leaving, its process group ends.

    Settings are flags of both servers, with underscores; `variables` go into its environment. Its output is shown only
    if something fails.
    """
    environment = os.environ if kind == "ours" else peer_environment()
    environment = environment | cache_variables(caches) | (variables or {})
    port = free_port()
    with tempfile.TemporaryFile(mode="w+") as log:
        begin_s = time.perf_counter()
        process = subprocess.Popen(
            command(kind, model, port, settings, smoke),
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield Server(kind, port, process, begin_s)
        except BaseException:
            log.seek(0)
            print(f"--- last words of {kind}:\n{log.read()[-3000:]}", file=sys.stderr, flush=True)
            raise
        finally:
            _end(process)


def read_packages() -> None:
    """Read from disk, once, what servers import: the page cache is then as warm for the first as for the last."""
    folders = [os.environ["PEER_SITE"]] if os.environ.get("PEER_SITE") else []
    for package in ("torch", "triton", "nvidia", "vllm", "transformers"):
        spec = find_spec(package)
        folders += list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        for path in Path(folder).rglob("*"):
            if path.suffix in (".so", ".py", ".pyc") or ".so." in path.name:
                with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
                    while file.read(1 << 24):
                        pass


def free_port() -> int:
    """Of this machine."""
    return free_ports(1)[0]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Killed with all its children: it has nothing to save, and the GPU's memory is wanted."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
