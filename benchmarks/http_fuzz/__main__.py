"""Random bodies and rude clients against a server: no 5xx, no hang, nothing left over.

    python -m benchmarks.http_fuzz --count 100000                       # a dry-run engine, and a gateway before it
    python -m benchmarks.http_fuzz --url http://127.0.0.1:8000 --model demo --count 1000
    python -m benchmarks.http_fuzz --seed 7 --first 4711 --count 1      # one request again

Prints statuses by server; exits with 1 where something is wrong, with the requests that show it.
"""

import argparse
import asyncio
import sys
import time
from urllib.parse import urlsplit

from benchmarks.http_fuzz.client import Findings, run
from benchmarks.http_fuzz.servers import Servers

PART = 2000
"""Requests between two looks at what is left over."""


def main() -> int:
    """The command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.http_fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--url", help="(default: a dry-run engine and a gateway, started for this)")
    parser.add_argument("--model", default="dry", help="(default: dry)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first request (default: 0)")
    parser.add_argument("--count", type=int, default=1000, help="for each server (default: 1000)")
    parser.add_argument("--clients", type=int, default=16, help="at once (default: 16)")
    parser.add_argument("--limit", type=float, default=30.0, metavar="SECONDS", help="of one request (default: 30)")
    options = parser.parse_args()
    if options.url:
        return _report(options.url, _play(options, options.url))
    with Servers() as servers:
        return max(
            [_report(name, _watched(options, servers, name)) for name in servers.urls],
        )


def _play(options: argparse.Namespace, url: str) -> Findings:
    return _part(options, url, options.first, options.count)


def _part(options: argparse.Namespace, url: str, first: int, count: int) -> Findings:
    address = urlsplit(url)
    host, port = address.hostname or "", address.port or 80
    return asyncio.run(run(host, port, options.model, options.seed, first, count, options.clients, options.limit))


def _watched(options: argparse.Namespace, servers: Servers, name: str) -> Findings:
    """In parts, between which nothing may be left over."""
    found, began_s = Findings(), time.monotonic()
    for first in range(options.first, options.first + options.count, PART):
        count = min(PART, options.first + options.count - first)
        part = _part(options, servers.urls[name], first, count)
        found.statuses += part.statuses
        found.manners += part.manners
        found.wrong += part.wrong + servers.left_over()
        line = f"{name}: {first + count - options.first} requests in {time.monotonic() - began_s:.0f} s, "
        print(line + f"{servers.sizes()}, {len(found.wrong)} wrong", file=sys.stderr, flush=True)
    return found


def _report(name: str, findings: Findings) -> int:
    print(f"{name}: {dict(sorted(findings.statuses.items()))} by {dict(sorted(findings.manners.items()))}")
    for line in findings.wrong[:20]:
        print(f"  {line}")
    return 1 if findings.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
