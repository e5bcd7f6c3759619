"""Stages from exec to the first token of a model with real files: in the page cache, on the disk, and from a peer.

    python benchmarks/start_times.py --model qwen2.5-7b --out FILE

It writes a checkpoint of random weights first. "peer" starts a second engine on the same GPU while the first one
decodes, and shows the time between tokens of the first with and without the transfer.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common.models import model_folder
from safetensors.torch import save_file

from mini_infer_engine.models.registry import class_of, read_config
from mini_infer_engine.models.weights.without_memory import without_memory

_SHARD_BYTES = 4 << 30
_PORT = 18_700
_STREAMS = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--folder", type=Path, help="a folder for the checkpoint, which is used again if it is there")
    parser.add_argument("--states", default="first,files,cold,peer", help="first: caches of compiled code may be cold")
    parser.add_argument("--flags", default="", help="more flags of every engine")
    parser.add_argument("--root", type=Path, help="a folder on the disk that is measured")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"model": options.model}
    with tempfile.TemporaryDirectory(dir=options.root) as root:
        folder = options.folder or Path(root)
        if not any(folder.glob("*.safetensors")):
            folder = _written(options.model, folder)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        print(f"{folder}: {size / 1e9:.1f} GB", flush=True)
        key = Path(root) / "peers.key"
        key.write_text(os.urandom(32).hex())
        for number, state in enumerate(options.states.split(",")):
            flags = [f"--peer-key-file={key}", *options.flags.split()]
            port = _PORT + 10 * number
            results[state] = _of_peer(folder, port, flags) if state == "peer" else _of_files(folder, port, flags, state)
            print(state, json.dumps(results[state]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1))
    return 0


def _of_files(folder: Path, port: int, flags: list[str], state: str) -> dict[str, Any]:
    if state == "cold":
        _drop_caches(folder)
    with Server(folder, port, [*flags, "--weights-from=files"]).running() as server:
        return server.times()


def _of_peer(folder: Path, port: int, flags: list[str]) -> dict[str, Any]:
    with ExitStack() as stack:
        first = stack.enter_context(Server(folder, port, [*flags, f"--weights-port={port + 1}"]).running())
        first.times()
        gaps = Gaps(first)
        stack.enter_context(gaps.collected())
        quiet = gaps.over(3.0)
        second = Server(folder, port + 5, [*flags, "--weights-from=peers", f"--weights-peers=127.0.0.1:{port + 1}"])
        begin_s = time.monotonic()
        found = stack.enter_context(second.running()).times()
        loaded = gaps.between(begin_s, time.monotonic())
        return found | {"between tokens, ms": {"quiet": quiet, "while a peer starts": loaded}}


@dataclass
class Server:
    """One engine as a process."""

    folder: Path
    port: int
    flags: list[str]
    begin_s: float = 0.0

    @contextmanager
    def running(self) -> Iterator["Server"]:
        """Starts it, and ends it with the block."""
        command = [sys.executable, "-m", "mini_infer_engine.server.cli", str(self.folder), f"--port={self.port}"]
        command += ["--skip-tokenizer-init", "--served-model-name=model", "--no-access-log", *self.flags]
        with tempfile.TemporaryDirectory() as caches:  # calibrated weights of another engine are not on this node
            self.begin_s = time.monotonic()
            process = subprocess.Popen(command, env=os.environ | {"XDG_CACHE_HOME": caches})
            try:
                yield self
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(30)

    def times(self) -> dict[str, Any]:
        """Waits for the first token; returns seconds since exec, and those of the engine's own stages."""
        while True:
            with contextlib.suppress(OSError):  # it does not listen yet
                self.post({"prompt": [5, 6, 7, 8], "max_tokens": 1})
                break
            time.sleep(0.02)
        token_s = time.monotonic() - self.begin_s
        metrics = self.get("/metrics")
        stages = re.findall(r'mini_infer_engine_start_seconds\{stage="([^"]*)"\} (\S+)', metrics)
        ready = json.loads(self.get("/readyz"))
        return {
            "token s": round(token_s, 2),
            "stages s": {name: round(float(value), 2) for name, value in stages},
            "weights": ready.get("weights"),
        }

    def get(self, path: str) -> str:
        """Returns the body of a GET."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            body: bytes = answer.read()
        return body.decode()

    def post(self, body: dict[str, Any]) -> Any:
        """Sends a completion, and returns the open answer."""
        data = json.dumps({"model": "model", "temperature": 0, "ignore_eos": True} | body).encode()
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        request = urllib.request.Request(url, data, {"content-type": "application/json"})
        return urllib.request.urlopen(request, timeout=120)


@dataclass
class Gaps:
    """Times between tokens of streams that an engine decodes all the time."""

    server: Server
    seen: list[tuple[float, float]] = field(default_factory=list)
    """Time and gap of each token."""
    stopping: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Decodes in threads until the block ends."""
        threads = [threading.Thread(target=self._stream, daemon=True) for _ in range(_STREAMS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.stopping.set()
            for thread in threads:
                thread.join(60)

    def _stream(self) -> None:
        while not self.stopping.is_set():
            with self.server.post({"prompt": [5, 6, 7], "max_tokens": 2000, "stream": True}) as lines:
                last_s = None
                for line in lines:
                    if self.stopping.is_set():
                        return
                    if line.startswith(b"data: {"):
                        now_s = time.monotonic()
                        if last_s is not None:
                            self.seen.append((now_s, now_s - last_s))
                        last_s = now_s

    def over(self, seconds: float) -> dict[str, float]:
        """Waits so long, and returns the gaps of that time."""
        begin_s = time.monotonic()
        self.stopping.wait(seconds)
        return self.between(begin_s, time.monotonic())

    def between(self, begin_s: float, end_s: float) -> dict[str, float]:
        """Returns percentiles of the gaps in milliseconds."""
        found = sorted(1000 * gap for at_s, gap in self.seen if begin_s <= at_s <= end_s)
        if len(found) < 100:
            return {"count": len(found)}
        cuts = statistics.quantiles(found, n=100)
        return {"count": len(found), "p50": round(cuts[49], 2), "p99": round(cuts[98], 2), "max": round(found[-1], 2)}


def _written(name: str, root: Path) -> Path:
    """Writes a checkpoint of random weights for one of our configs, and returns its folder."""
    shutil.copytree(model_folder(name, root / "config"), root, dirs_exist_ok=True)
    folder = root
    config = read_config(folder)
    with without_memory(torch.bfloat16):
        model = class_of(config)(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shard: dict[str, torch.Tensor] = {}
    index: dict[str, str] = {}
    count = size = 0
    begin_s = time.monotonic()
    for tensor, placement in model.checkpoint_tensors().items():
        shape = placement.allowed_shapes[0]
        made = torch.ones(shape) if tensor.endswith("norm.weight") else torch.randn(shape, device=device) * 0.02
        shard[tensor] = made.to(torch.bfloat16).cpu()
        size += shard[tensor].numel() * 2
        index[tensor] = f"model-{count}.safetensors"
        if size >= _SHARD_BYTES:
            save_file(shard, folder / index[tensor])
            shard, size, count = {}, 0, count + 1
    if shard:
        save_file(shard, folder / f"model-{count}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    print(f"written in {time.monotonic() - begin_s:.1f} s", flush=True)
    return folder


def _drop_caches(folder: Path) -> None:
    """Takes the weights out of the page cache."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    raise SystemExit(main())
