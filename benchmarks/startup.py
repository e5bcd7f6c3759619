"""From exec to the first token over HTTP, with random weights: every cache of compiled code cold, then warm.

    python benchmarks/startup.py --servers ours,vllm --models qwen2.5-7b --out FILE

Servers run in turns. "open": the port answers; "ready": it says so; "token": a streamed request of eight token ids,
sent again and again from the start, brings its first token. Packages are read from disk once before, by a run that does
not count, so that the page cache is warm for all.
"""

import argparse
import http.client
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import engines, servers
from common.models import model_folder
from common.report import print_table, save, say

_READY = {"ours": "/readyz", "vllm": "/health"}


def measure(kind: str, model: str, caches: Path, flags: list[str], limit_s: float) -> dict[str, float]:
    """Seconds since the start of the process."""
    port = servers.free_port()
    arguments = servers.command(kind, model, port, 256, *flags)
    found: dict[str, float] = {}
    begin = time.perf_counter()
    with servers.started(kind, arguments, servers.cold_caches(caches)):
        while "token" not in found:
            for name, path in (("open", "/v1/models"), ("ready", _READY[kind])):
                if name not in found and _status(port, path) == 200:
                    found[name] = time.perf_counter() - begin
            if "open" in found and _first_token(port):
                found["token"] = time.perf_counter() - begin
            if time.perf_counter() - begin > limit_s:
                raise TimeoutError(f"{kind}: no token after {limit_s:.0f} s")
            time.sleep(0.01)
    found.setdefault("ready", found["token"])
    return found


def _status(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def _first_token(port: int) -> bool:
    body = {"model": "measured", "prompt": [5, 6, 7, 8, 9, 10, 11, 12], "max_tokens": 4, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status == 200 and response.readline().startswith(b"data: {")
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default="ours,vllm", metavar="NAME,...")
    parser.add_argument("--models", default="qwen2.5-7b,qwen3-0.6b", metavar="NAME,...")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=400)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--smoke", action="store_true", help="the demo model on a CPU: does it run?")
    options = parser.parse_args()
    kinds = [kind for kind in options.servers.split(",") if engines.is_present(kind)]
    models, repeats = options.models.split(","), options.repeats
    flags: list[str] = []
    states = ["cold", "warm"]
    if options.smoke:
        kinds, models, repeats, states = ["ours"], ["demo"], 1, ["cold"]
        flags = ["--device", "cpu", "--max-model-len", "512", "--kv-cache-memory", "100MB"]
    failed = False
    result: dict[str, Any] = {}
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for model in models:
            runs: dict[str, list[dict[str, float]]] = {}
            for repeat in range(-1 if not options.smoke else 0, repeats):
                for kind in kinds:
                    with tempfile.TemporaryDirectory() as caches:
                        for state in states if repeat >= 0 else ("unread",):
                            try:
                                found = measure(
                                    kind, model_folder(model, Path(root)), Path(caches), flags, options.limit_s
                                )
                            except (TimeoutError, OSError) as error:
                                say(f"{model}, {kind}, {state}: {error}")
                                failed = True
                                continue
                            say(f"{model}, {kind}, {state}: " + ", ".join(f"{k} {v:.2f} s" for k, v in found.items()))
                            runs.setdefault(f"{kind}, {state}", []).append(found)
                            save(options.out, result | {model: runs})
            result[model] = runs
            medians = {
                name: {key: median(run[key] for run in found) for key in found[0]} for name, found in runs.items()
            }
            for name, figures in medians.items():
                peer = medians.get("vllm, " + name.split(", ")[1], {}).get("token")
                rows.append([f"{model}, {name}", figures["open"], figures["ready"], figures["token"],
                             figures["token"] / peer if peer else None])  # fmt: skip
    print_table(["", "open s", "ready s", "token s", "/ vllm"], rows)
    save(options.out, result)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
