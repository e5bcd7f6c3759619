"""What clients see while something goes wrong: one table, one row a disruption.

`python benchmarks/gateway_disruptions.py [--json FILE] [--only WORD] [--clients N] [--disconnects N]` starts two
dry-run engines and a gateway and disturbs them while clients ask, half of them streaming. Every answer is compared with
an undisturbed engine's. It tells failed requests of those sent, what their clients saw, the slowest answer, and how
long after an engine (or a gateway) was ready again it was used.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gateway_faults.clients import Clients
from benchmarks.gateway_faults.faults import Fault, faults
from benchmarks.gateway_faults.world import World

SETTLE_S = 1.0


async def disturb(name: str, fault: Fault, clients: int) -> dict[str, Any]:
    """One row, in a world of its own."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        try:
            await world.start()
            async with Clients(list(world.gateways), clients) as driver:
                await asyncio.sleep(SETTLE_S)
                recovery_s = await fault(world, driver)
                await asyncio.sleep(SETTLE_S)
            result = driver.result
        finally:
            await world.stop()
    return {
        "disruption": name,
        "sent": result.sent,
        "failed": sum(result.failed.values()),
        "clients_see": dict(result.failed),
        "slowest_s": round(max(result.seconds), 2),
        "used_again_after_s": None if recovery_s is None else round(recovery_s, 2),
    }


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    seen = ", ".join(f"{count} x {what}" for what, count in row["clients_see"].items()) or "-"
    again = "-" if row["used_again_after_s"] is None else f"{row['used_again_after_s']:.2f} s"
    return f"| {row['disruption']} | {row['failed']} / {row['sent']} | {seen} | {row['slowest_s']:.2f} s | {again} |"


async def main() -> None:
    """Prints the table as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    parser.add_argument("--only", metavar="WORD", help="disruptions whose name has this in it")
    parser.add_argument("--clients", type=int, default=24, help="requests in flight (default: %(default)s)")
    parser.add_argument("--disconnects", type=int, default=10_000, help="clients that leave (default: %(default)s)")
    options = parser.parse_args()
    rows = []
    print(
        "| disruption | failed / sent | what clients see | slowest answer | used again after |\n|---|---|---|---|---|"
    )
    for name, fault in faults(options.disconnects).items():
        if options.only and options.only not in name:
            continue
        rows.append(await disturb(name, fault, options.clients))
        print(line(rows[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
