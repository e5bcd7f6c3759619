"""Thousands of streams while an engine is killed every five seconds: none fails, and every text is that of a quiet run.

`MINI_INFER_SOAK_STREAMS=10000 pytest tests/gateway/pipeline/test_soak.py` (about a quarter of an hour on two cores).
"""

import asyncio
import os
import random
import time
from collections.abc import Sequence

import pytest

from tests.gateway.pipeline.continuation.test_base import QUESTION, Engine, killed_at_the_end, reported, serving
from tests.gateway.pipeline.test_disaggregated import Side, fleet
from tests.gateway.test_metrics import value
from tests.support.running_gateway import RunningGateway, running_gateway, until

STREAMS = int(os.environ.get("MINI_INFER_SOAK_STREAMS", "0"))
CLIENTS = 24
KILL_EVERY_S = 5.0

pytestmark = [
    pytest.mark.skipif(not STREAMS, reason="takes long: MINI_INFER_SOAK_STREAMS=10000"),
    pytest.mark.timeout(3600),
]


async def soak(gateway: RunningGateway, victims: Sequence[Engine]) -> None:
    """Asks until STREAMS answers are there; kills one of `victims` at a time, and starts it again."""
    left = iter(range(STREAMS))
    answers = 0

    async def send_request() -> None:
        nonlocal answers
        for number in left:
            question = f"{number}: {QUESTION}"
            assert (await reported(gateway, question, temperature=1.0))[0] == f"You said: {question}"
            answers += 1

    async def kill() -> None:
        dice = random.Random(1)
        while True:
            victim, began_s = dice.choice(victims), time.monotonic()
            await asyncio.sleep(dice.uniform(0.2, 1.0))
            victim.kill()
            victim.start()
            await victim.ready()
            state = gateway.app.fleet.endpoints[victim.name]
            await until(lambda state=state: state.breaker.closed and state.subscriber.live)  # type: ignore[misc]
            await asyncio.sleep(max(0.0, KILL_EVERY_S - (time.monotonic() - began_s)))

    killing = asyncio.create_task(kill())
    try:
        await asyncio.gather(*(send_request() for _ in range(CLIENTS)))
        assert not killing.done(), killing.exception()
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
    assert answers == STREAMS
    assert value(gateway, "continuations_total", outcome="broke") == 0
    assert value(gateway, "continuations_total", outcome="whole") > 0
    print(f"{answers} streams, {value(gateway, 'continuations_total', outcome='whole'):.0f} of them continued")


async def test_soak_of_unified_engines_fails_no_stream() -> None:
    with killed_at_the_end([Engine(name) for name in "abc"]) as engines:
        async with (
            serving(*engines),
            running_gateway(*(engine.endpoint for engine in engines), log_level="warning") as gateway,
        ):
            await gateway.settled()
            await soak(gateway, engines)


async def test_soak_of_prefill_and_decode_engines_fails_no_stream() -> None:
    sides = [Side("p1", "prefill"), Side("p2", "prefill"), Side("d1", "decode"), Side("d2", "decode")]
    with killed_at_the_end(sides):
        async with fleet(*sides, max_local_prefill_tokens=0, log_level="warning") as gateway:
            await soak(gateway, sides)
            assert value(gateway, "prefill_placements_total", placement="apart") > STREAMS / 2
