"""A stall of the event loop is seen and told; a large snapshot causes none."""

import asyncio
import time

from mini_infer_contract.blocks import block_keys
from mini_infer_gateway.index.prefix_index import prompt_root
from mini_infer_gateway.loop_lag import WINDOW_S, LoopLag
from tests.support.fake_engine import BLOCK, ROOT, FakeEngine
from tests.support.running_gateway import running_gateway, until


async def test_loop_lag_counts_a_stall_when_the_event_loop_is_blocked() -> None:
    lag = LoopLag()
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0.02)
    time.sleep(0.1)  # noqa: ASYNC251 - this is the stall
    await until(lambda: lag.stalls > 0)
    assert lag.longest_s > 0.08
    task.cancel()


def test_loop_lag_reports_the_longest_stall_of_the_last_minute() -> None:
    lag = LoopLag()
    for number, seconds in enumerate((0.5, 0.01, 0.03, 0.001)):
        lag.observe(seconds, now_s=100 + number * WINDOW_S)
        assert lag.longest_s == (0.5, 0.5, 0.03, 0.03)[number]
    assert lag.stalls == 2
    samples = {sample.name: sample.value for metric in lag.collect() for sample in metric.samples}
    assert samples == {
        "mini_infer_gateway_event_loop_lag_seconds": 0.03,
        "mini_infer_gateway_event_loop_stalls_total": 2,
    }


async def test_requests_are_served_when_a_large_snapshot_is_applied() -> None:
    """300,000 tokens, which took half a second at once."""
    async with FakeEngine("a", capacity=20_000) as engine:
        ids = [number % 50_000 for number in range(300_000)]
        keys = block_keys(ids, ROOT)
        engine.cache.serve(keys)
        engine.tokens = {key: ids[position * BLOCK : (position + 1) * BLOCK] for position, key in enumerate(keys)}
        async with running_gateway(engine.endpoint) as gateway:
            stored = set[int]()
            while gateway.app.index.cached_blocks("a") < len(keys):
                stored.add(gateway.app.index.cached_blocks("a"))
                await asyncio.sleep(0)
            longest = max(after - before for before, after in zip(sorted(stored), sorted(stored)[1:], strict=False))
            assert longest <= 2_048, "blocks between two turns of the event loop"
            await gateway.settled()
            assert gateway.app.index.hit("a", block_keys(ids, prompt_root()), 0.0).blocks == len(keys)
