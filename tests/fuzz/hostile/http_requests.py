"""Random bodies, encodings, chunkings and rude clients against the gateway and an engine's own port."""

from random import Random
from urllib.parse import urlsplit

from tests.fuzz.fleet import Fleet
from tests.fuzz.hostile.http_client import play
from tests.fuzz.hostile.http_grammar import fuzzed_request
from tests.fuzz.hostile.load import ANSWER_LIMIT_S, Findings

_ALLOWED = ("502", "503", "504")
"""Statuses of a gateway whose engines are busy, hostile, or gone: not faults by themselves."""


async def attack(fleet: Fleet, random: Random, found: Findings) -> None:
    """Plays one fuzzed request after the other."""
    index = 0
    while True:
        index += 1
        url = fleet.gateway_url if random.random() < 0.7 else random.choice(fleet.engine_urls)
        request = fuzzed_request(fleet.seed, index, random.choice(fleet.models))
        address = urlsplit(url)
        try:
            outcome = await play(address.hostname or "", address.port or 80, request, ANSWER_LIMIT_S)
        except TimeoutError:
            outcome = "hang"
        except OSError:
            outcome = "refused"  # a limit on connections, of which other attackers have many
        found.count("http", outcome)
        if outcome == "hang" or (outcome.startswith("5") and outcome not in _ALLOWED):
            found.note(f"http: {outcome} from {url}: seed {fleet.seed} number {index}: {request.wire[:300]!r}")
        await fleet.pause(random, 0.05)
