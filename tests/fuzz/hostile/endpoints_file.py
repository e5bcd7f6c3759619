"""Whoever writes the gateway's endpoints file breaks it, and later writes the right one again."""

import json
from random import Random

from tests.fuzz.fleet import Fleet
from tests.fuzz.hostile.load import Findings
from tests.fuzz.mutation import mutated, mutated_bytes


async def attack(fleet: Fleet, random: Random, found: Findings) -> None:
    """Writes broken files; of mutated ones only such as keep the healthy endpoints."""
    good = fleet.endpoints_file.read_text()
    healthy = json.loads(good)["endpoints"]
    while True:
        await fleet.pause(random, 4.0)
        draw = random.random()
        if draw < 0.4:
            fleet.write_endpoints(mutated_bytes(random, good.encode()[:-2]) + b"\x00")
        elif draw < 0.5:
            fleet.write_endpoints(b"endpoints: [" * 5000)
        else:
            added = mutated(random, {**healthy[0], "name": f"odd{random.random()}", "model": "odd"})
            text = json.dumps({"endpoints": [*healthy, added]}, default=repr)
            fleet.write_endpoints(text.encode("utf-8", "surrogatepass"))
        found.count("endpoints_file", "written")
        await fleet.pause(random, 1.0)
        fleet.write_endpoints(good.encode())
