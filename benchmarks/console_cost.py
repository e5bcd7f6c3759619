"""What the console costs the gateway: CPU of small requests with it and without, and of ten consoles that are open.

`python benchmarks/console_cost.py [--requests N] [--rounds N] [--seconds S] [--engines N] [--consoles N] [--out FILE]`
runs two gateways on loopback before the same fake endpoint, one with --no-console, and lets them take turns. Then it
opens consoles at the first, and compares what it uses of a core with those that are open and without.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks.gateway_load import client, routers
from benchmarks.gateway_load.client import Target

ENDPOINT = Path(client.__file__).with_name("endpoint.py")
CONNECTIONS = 8


@contextlib.asynccontextmanager
async def gateways(folder: Path, engines: int) -> AsyncIterator[tuple[routers.Running, routers.Running]]:
    """A gateway with the console and one without, before the same endpoint under several names."""
    async with contextlib.AsyncExitStack() as stack:
        port = routers.free_port()
        command = [sys.executable, str(ENDPOINT), str(port), "m"]
        await stack.enter_async_context(routers.running("endpoint", command, port, folder / "endpoint.log", b""))
        found = []
        for name, flags in (("console", []), ("none", ["--no-console"])):
            own = routers.free_port()
            command = [*routers.our_command(own, engines * [f"http://127.0.0.1:{port}"], folder), *flags]
            ready = client.chat([("user", "hi")])
            log = folder / f"{name}.log"
            found.append(await stack.enter_async_context(routers.running(name, command, own, log, ready)))
        yield found[0], found[1]


async def request_us(gateway: routers.Running, number: int, requests: int) -> float:
    """CPU microseconds of one small request."""
    bodies = [client.chat([("user", f"question {number + one}: what is it, and why?")]) for one in range(requests)]
    before_s = gateway.cpu_s()
    answers = await client.closed_loop(Target(gateway.port), bodies, CONNECTIONS)
    assert {answer.status for answer in answers} == {200}
    return 1e6 * (gateway.cpu_s() - before_s) / requests


async def read_events(port: int, opened: asyncio.Event) -> None:
    """One console: reads its stream until cancelled."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /console/api/events HTTP/1.1\r\nhost: 127.0.0.1:%d\r\n\r\n" % port)
        while line := await reader.readline():
            if line.startswith(b"event: fleet"):
                opened.set()
    finally:
        writer.close()


async def core_share(gateway: routers.Running, seconds: float, rate: float) -> float:
    """The share of a core that a gateway uses for `seconds`, while `rate` small requests a second come."""
    before_s, began_s = gateway.cpu_s(), time.monotonic()
    number = 0
    while (left_s := began_s + seconds - time.monotonic()) > 0:
        if not rate:
            await asyncio.sleep(left_s)
            continue
        body = client.chat([("user", f"question {number}: what is it, and why?")])
        await client.closed_loop(Target(gateway.port), [body], 1)
        number += 1
        await asyncio.sleep(max(0.0, began_s + number / rate - time.monotonic()))
    return (gateway.cpu_s() - before_s) / (time.monotonic() - began_s)


async def measured(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything in one run."""
    async with gateways(folder, given.engines) as (console, none):
        for gateway in (console, none):
            await request_us(gateway, 1_000_000, given.requests)
        pairs = []
        for turn in range(given.rounds):
            order = (console, none) if turn % 2 else (none, console)
            costs = {
                gateway.name: await request_us(gateway, turn * given.requests, given.requests) for gateway in order
            }
            pairs.append((costs["console"], costs["none"]))
        shares: dict[str, Any] = {}
        for rate in (0.0, given.rate):
            closed = await core_share(console, given.seconds, rate)
            opened = [asyncio.Event() for _ in range(given.consoles)]
            readers = [asyncio.create_task(read_events(console.port, one)) for one in opened]
            await asyncio.gather(*(one.wait() for one in opened))
            with_consoles = await core_share(console, given.seconds, rate)
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            shares[f"{rate:g} requests/s"] = {"closed": closed, "open": with_consoles, "more": with_consoles - closed}
    return {
        "request_us": {
            "console": statistics.median(a for a, _ in pairs),
            "none": statistics.median(b for _, b in pairs),
        },
        "request_ratio": statistics.median(a / b for a, b in pairs),
        "core_share": shares,
        "consoles": given.consoles,
        "engines": given.engines,
    }


def main() -> None:
    """Measures, prints, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="of a round (default: 2000)")
    parser.add_argument("--rounds", type=int, default=20, help="of either gateway, in turns (default: 20)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each share of a core (default: 20)")
    parser.add_argument(
        "--rate", type=float, default=20.0, help="requests a second while consoles are open (default: 20)"
    )
    parser.add_argument("--engines", type=int, default=10, help="endpoints (default: 10)")
    parser.add_argument("--consoles", type=int, default=10, help="open consoles (default: 10)")
    parser.add_argument("--out", type=Path, help="JSON goes here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measured(given, Path(folder)))
    costs = found["request_us"]
    print(f"a small request: {costs['console']:.0f} us with the console, {costs['none']:.0f} us without", end="")
    print(f", ratio {found['request_ratio']:.3f} (median of pairs)")
    for name, share in found["core_share"].items():
        print(f"{given.consoles} consoles, {given.engines} engines, {name}: {share['more']:+.2%} of a core", end="")
        print(f" ({share['closed']:.2%} without any open)")
    if given.out:
        given.out.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
