"""What stands in for vLLM's `tests/utils.py`: its server fixture, which starts `mini-infer-serve` with the demo model.

vLLM's flags are handed on where `mini-infer-serve --help` knows them; those of a GPU, of a named model's parser and the
like are dropped, for the demo model has its own.
"""

import atexit
import functools
import os
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

VLLM_PATH = Path(os.environ["CONFORMANCE_SOURCES"])
SERVE = shlex.split(os.environ["CONFORMANCE_SERVE"])
START_LIMIT_S = 180.0
TIMEOUT_S = 30.0
"""Of a request: the demo model goes on for as long as it may where a test sets no limit."""
ROCM_ENV_OVERRIDES: dict[str, str] = {}
ROCM_EXTRA_ARGS: list[str] = []

_OF_THE_NAMED_MODEL = {
    "port",
    "dtype",
    "tool-call-parser",
    "reasoning-parser",
    "chat-template",
    "load-format",
    "revision",
    "generation-config",
    "seed",
    "gpu-memory-utilization",
    "enforce-eager",
    "attention-backend",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RemoteOpenAIServer:
    """One engine for as long as its fixture lives, or longer where the next one asks for it by the same words."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self, model: str, vllm_serve_args: list[str], *, env_dict: dict[str, str] | None = None, **ignored: Any
    ) -> None:
        flags = [*_our_flags(tuple(vllm_serve_args))]
        if not any(flag.startswith("--served-model-name") for flag in flags):
            flags.append(f"--served-model-name={model}")
        own_environment = {k: v for k, v in (env_dict or {}).items() if os.environ.get(k) != v}
        if "VLLM_API_KEY" in own_environment:
            flags.append(f"--api-key={own_environment['VLLM_API_KEY']}")
        self._engine = _engine(
            os.environ["CONFORMANCE_DEMO_MODEL"],
            tuple(flags),
            tuple(sorted(own_environment.items())),
            tuple(vllm_serve_args),
        )
        self.host, self.port, self.uds = "127.0.0.1", self._engine.port, self._engine.uds
        self.proc = self._engine.process
        self.show_hidden_metrics = False

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "http://localhost/" + "/".join(parts) if self.uds else self.url_root + "/" + "/".join(parts)

    def get_client(self, **kwargs: Any) -> openai.OpenAI:
        kwargs.setdefault("timeout", TIMEOUT_S)
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **kwargs)

    def get_async_client(self, **kwargs: Any) -> openai.AsyncOpenAI:
        kwargs.setdefault("timeout", TIMEOUT_S)
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **kwargs)

    def get_client_anthropic(self, **kwargs: Any) -> Any:
        import anthropic

        kwargs.setdefault("timeout", TIMEOUT_S)
        return anthropic.Anthropic(base_url=self.url_for(), api_key=self.DUMMY_API_KEY, max_retries=0, **kwargs)

    def get_async_client_anthropic(self, **kwargs: Any) -> Any:
        import anthropic

        kwargs.setdefault("timeout", TIMEOUT_S)
        return anthropic.AsyncAnthropic(base_url=self.url_for(), api_key=self.DUMMY_API_KEY, max_retries=0, **kwargs)


class _Engine:
    def __init__(self, model: str, flags: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> None:
        self.uds = next((flag.partition("=")[2] for flag in flags if flag.startswith("--uds")), None)
        self.port = free_port()
        where = [] if self.uds else [f"--port={self.port}"]
        command = [*SERVE, model, *where, *flags]
        log_path = Path(os.environ["CONFORMANCE_LOGS"]) / f"engine-{self.port}.log"
        with log_path.open("w") as log:
            log.write(shlex.join(command) + "\n")
            log.flush()
            own = os.environ | dict(environment) | {"OMP_NUM_THREADS": "1"}
            own.pop("PYTHONPATH", None)
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=own)
        self._wait_until_ready(log_path)

    def _wait_until_ready(self, log_path: Path) -> None:
        transport = httpx.HTTPTransport(uds=self.uds)
        deadline = time.monotonic() + START_LIMIT_S
        with httpx.Client(transport=transport) as client:
            while time.monotonic() < deadline and self.process.poll() is None:
                try:
                    if client.get(f"http://127.0.0.1:{self.port}/readyz").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"the engine did not start:\n{log_path.read_text()[-2000:]}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


_running: dict[tuple[Any, ...], _Engine] = {}


def _engine(*key: Any) -> _Engine:
    """One that runs, where it is the same and lives; else another. Two run at most: a module's fixtures may overlap."""
    engine = _running.get(key)
    if engine is None or engine.process.poll() is not None:
        while len(_running) > 1:
            _running.pop(next(iter(_running))).stop()
        engine = _running[key] = _Engine(*key[:3])
    return engine


def stop_all() -> None:
    """End every engine that was started here."""
    for engine in _running.values():
        engine.stop()
    _running.clear()


atexit.register(stop_all)


@functools.cache
def _known_flags() -> dict[str, bool]:
    """Flags of `mini-infer-serve`, and whether a value follows."""
    text = subprocess.run([*SERVE, "--help"], capture_output=True, text=True, check=True).stdout
    listed = re.findall(r"^  (--[a-z].*?)(?:  +|$)", text, re.MULTILINE)
    flags = {}
    for line in listed:
        for part in line.split(", "):
            name, _, value = part.removeprefix("--").partition(" ")
            flags[name] = bool(value)
    return flags


def _our_flags(vllm_flags: tuple[str, ...]) -> list[str]:
    """`--name=value` for each flag that this server has, too."""
    flags: list[str] = []
    position = 0
    while position < len(vllm_flags):
        name, equals, value = vllm_flags[position].removeprefix("--").partition("=")
        name = name.replace("_", "-")
        position += 1
        values = [value] if equals else []
        while not equals and position < len(vllm_flags) and not vllm_flags[position].startswith("--"):
            values.append(vllm_flags[position])
            position += 1
        if name not in _known_flags() or name in _OF_THE_NAMED_MODEL:
            continue
        flags += [f"--{name}={values[0]}"] if len(values) == 1 else [f"--{name}", *values]
    return flags


def _skipping(reason: str) -> Callable[..., Any]:
    def decorate(*args: Any, **kwargs: Any) -> Any:
        return pytest.mark.skip(reason=reason)

    return decorate


def _runs_here(function: Any) -> Any:
    return function


multi_gpu_only = _skipping("needs GPUs")
requires_fp8 = pytest.mark.skip(reason="needs a GPU with FP8")
create_new_process_for_each_test = _skipping("needs vLLM's own process")
large_gpu_mark = _skipping("needs a GPU")
