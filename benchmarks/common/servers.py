"""Servers under test: started with a free port, waited for, and ended with all their processes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from common.engines import CONTEXT_TOKENS, MEMORY_SHARE, peer_environment

_READY = {"ours": "/readyz", "vllm": "/health"}
_CACHES = {  # whatever keeps compiled code between runs
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "VLLM_CACHE_ROOT": "vllm",
    "XDG_CACHE_HOME": "xdg",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}


def cold_caches(folder: Path) -> dict[str, str]:
    """Environment that points every cache of compiled code into `folder`."""
    return {name: str(folder / part) for name, part in _CACHES.items()}


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(kind: str, model: str, port: int, max_num_seqs: int, *flags: str) -> list[str]:
    """How a server without tokenizer is started. A model that is no folder ("demo") keeps its own weights."""
    module = {"ours": "mini_infer_engine.server.cli", "vllm": "vllm.entrypoints.openai.api_server"}[kind]
    given = ["--model", model, "--served-model-name", "measured", "--port", str(port), "--host", "127.0.0.1"]
    given += ["--skip-tokenizer-init", "--max-num-seqs", str(max_num_seqs)]
    if os.path.isdir(model):
        given += ["--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", str(CONTEXT_TOKENS)]
        given += ["--gpu-memory-utilization", str(MEMORY_SHARE)]
    return [sys.executable, "-m", module, *given, *flags]


@contextlib.contextmanager
def started(kind: str, arguments: list[str], extra_environment: dict[str, str] | None = None) -> Iterator[None]:
    """Run a server; on leaving, its whole process group ends. Its output is shown only if it fails."""
    environment = (dict(os.environ) if kind == "ours" else peer_environment()) | (extra_environment or {})
    with tempfile.TemporaryFile(mode="w+") as log:
        process = subprocess.Popen(arguments, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            yield
        except BaseException:
            log.seek(0)
            print(f"--- last words of {kind}:\n{log.read()[-3000:]}", file=sys.stderr, flush=True)
            raise
        finally:
            _end(process)


def wait_ready(kind: str, url: str, limit_s: float = 600) -> None:
    """Until it says that it is ready."""
    end = time.monotonic() + limit_s
    while True:
        with (
            contextlib.suppress(OSError, urllib.error.URLError),
            urllib.request.urlopen(url + _READY[kind], timeout=5) as response,
        ):
            if response.status == 200:
                return
        if time.monotonic() > end:
            raise TimeoutError(f"{kind} was not ready after {limit_s:.0f} s")
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with contextlib.suppress(ProcessLookupError):  # itself, or children that outlived it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
