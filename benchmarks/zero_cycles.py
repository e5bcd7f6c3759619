"""Cycles of `mini-infer up` to zero and back: requests that fail, and the time from zero to the first token.

In each cycle the last engine stops for lack of requests; then many come at once, are held by the gateway, wake the
service and are answered. Others begin while the engine is about to stop. Real engines with the demo, on this machine;
`tests/e2e/zero.py` runs the same cycles on a cluster.
"""

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from benchmarks.common.report import make_parser, save
from mini_infer_operator.local.ports import free_ports

NAME = "sleepy"
SERVICE = {
    "apiVersion": "serving.mini-infer.io/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": NAME, "namespace": "default"},
    "spec": {
        "model": {"uri": "demo", "name": NAME},
        "unified": {
            "engine": {"device": "cpu", "kvCacheMemory": "256Mi"},
            "scaling": {"minReplicas": 0, "maxReplicas": 1, "windows": {"zeroSeconds": 2}},
        },
    },
}


async def chat(session: aiohttp.ClientSession, url: str, number: int) -> tuple[str, float]:
    """Returns the outcome of one request, and the seconds to its first token."""
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": f"number {number}"}],
        "max_tokens": 8,
        "stream": True,
    }
    return await streamed(session, url + "/v1/chat/completions", body)


async def streamed(session: aiohttp.ClientSession, address: str, body: dict[str, Any]) -> tuple[str, float]:
    """Returns the outcome of one request that streams, and the seconds to its first token."""
    begin_s, first_s, done = time.monotonic(), 0.0, False
    try:
        async with session.post(address, json=body) as response:
            if response.status != 200:
                return f"HTTP {response.status}", 0.0
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: "):
                    if b'"error"' in line:
                        return f"in the stream: {line.decode()[:200]}", 0.0
                    first_s = first_s or time.monotonic() - begin_s
    except (aiohttp.ClientError, TimeoutError) as error:
        return type(error).__name__, 0.0
    return ("ok" if done else "cut"), first_s


async def engines(count: Callable[[], Awaitable[int]], number: int, limit_s: float) -> None:
    """Waits until there are this many engines."""
    end_s = time.monotonic() + limit_s
    while await count() != number:
        if time.monotonic() > end_s:
            raise TimeoutError(f"there are not {number} engines after {limit_s:.0f} s")
        await asyncio.sleep(0.05)


async def run(url: str, count: Callable[[], Awaitable[int]], cycles: int, requests: int) -> dict[str, Any]:
    """Runs all cycles; half of a cycle's requests wake the service, half follow them over the next seconds.

    `count` returns the number of engines. The service has one when this begins. `begun_s` of what is returned are the
    times of each cycle's first request, by the monotonic clock.
    """
    outcomes: Counter[str] = Counter()
    wakes_s, begun_s = list[float](), list[float]()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300)
    ) as session:
        await engines(count, 1, 120)
        for cycle in range(cycles):
            await engines(count, 0, 120)
            begun_s.append(time.monotonic())
            held = [asyncio.create_task(chat(session, url, number)) for number in range(requests // 2)]
            later = []
            for number in range(requests - len(held)):
                later.append(asyncio.create_task(chat(session, url, requests + number)))
                await asyncio.sleep(4.0 / requests)
            answers = await asyncio.gather(*held, *later)
            outcomes.update(outcome for outcome, _ in answers)
            wakes_s.append(min((first_s for _, first_s in answers if first_s), default=float("nan")))
            print(f"cycle {cycle + 1}: {dict(outcomes)}, first token after {wakes_s[-1]:.2f} s", flush=True)
    firsts_s = [round(one, 3) for one in wakes_s]
    return {"cycles": cycles, "outcomes": dict(outcomes), "first_token_s": firsts_s, "begun_s": begun_s}


def main() -> int:
    """Starts `mini-infer up`, runs the cycles, and ends it."""
    parser = make_parser(__doc__)
    parser.add_argument("--cycles", type=int, default=10, metavar="N")
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="of each cycle (default: 200)")
    options = parser.parse_args()
    cycles, requests = (2, 10) if options.smoke else (options.cycles, options.requests)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left when a time limit ends it
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        (folder / "cr.yaml").write_text(yaml.safe_dump(SERVICE))
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "mini_infer_operator.cli", "up", "-f", "cr.yaml", f"--port={port}"]
        with (folder / "output").open("w+") as output:
            process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, start_new_session=True)
            try:
                endpoints = folder / ".mini-infer" / NAME / "endpoints.json"

                async def count() -> int:
                    return len(json.loads(endpoints.read_text())["endpoints"])

                while not endpoints.exists():
                    if process.poll() is not None:
                        raise RuntimeError((folder / "output").read_text())
                    time.sleep(0.05)
                found = asyncio.run(run(f"http://127.0.0.1:{port}", count, cycles, requests))
            except TimeoutError:
                print((folder / "output").read_text()[-4000:], flush=True)
                raise
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(60)
    save(options.out, found)
    return 0 if set(found["outcomes"]) == {"ok"} else 1


if __name__ == "__main__":
    raise SystemExit(main())
