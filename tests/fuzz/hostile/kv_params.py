"""Clients that name engines, pin pages and ask for other clients' prefixes, by body fields and by headers."""

from random import Random
from typing import Any

from tests.fuzz.fleet import Fleet
from tests.fuzz.hostile.load import Findings, post
from tests.fuzz.mutation import mutated

_PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": True,
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "remote_request_id": "x",
    "remote_engine_id": "y",
    "remote_block_ids": [1, 2, 3],
}
_HEADERS = ("x-mini-infer-prefill-from", "x-mini-infer-fetch-from", "X-Mini-Infer-Peer", "x_mini_infer_peer")


async def attack(fleet: Fleet, random: Random, found: Findings) -> None:
    """Sends one request after the other that tries to steer KV transfer."""
    while True:
        keys = random.sample(list(_PARAMS), random.randint(1, len(_PARAMS)))
        body: dict[str, Any] = {
            "model": random.choice(fleet.models),
            "prompt": "one two three " * random.choice((1, 100)),
            "max_tokens": random.choice((1, 8)),
            "cache_salt": random.choice(("", "x", "a" * 5000)),
            "priority": random.choice((-(2**40), -1, 0, 5)),
        }
        if random.random() < 0.8:
            params = {key: _PARAMS[key] for key in keys}
            body["kv_transfer_params"] = mutated(random, params) if random.random() < 0.5 else params
        headers = {random.choice(_HEADERS): random.choice(("tcp://127.0.0.1:1", "x", "tcp://[::1]:9", "0" * 64))}
        url = fleet.gateway_url if random.random() < 0.5 else random.choice(fleet.engine_urls)
        give_up_s = random.choice((0.0, 0.0, 0.0, 0.1))
        await post(url + "/v1/completions", body, found, "kv_params", headers, give_up_s)
        await fleet.pause(random, 0.2)
