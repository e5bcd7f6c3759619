"""Canaries of services in a cluster: whose figures are read, and what is queued."""

import aiohttp
import pytest
from aiohttp import web

from mini_infer_contract.rollouts import ROLLOUTS_PATH, GatewayRollouts, RevisionFigures
from mini_infer_operator.canary.state import CanaryState
from mini_infer_operator.controller.canaries import Canaries
from mini_infer_operator.objects.gateway_loads import GatewayLoadReader

KEY = ("default", "demo")


def stored(phase: str) -> dict[str, object]:
    state = CanaryState(phase, "new", "old")  # type: ignore[arg-type]  # a phase
    return {"status": {"canary": state.status().model_dump(by_alias=True, exclude_none=True)}}


def reports(requests: int) -> dict[str, GatewayRollouts]:
    return {"http://a": GatewayRollouts(1.0, {"default/demo": {"new": RevisionFigures(requests=requests)}})}


def test_figures_are_kept_while_a_canary_runs() -> None:
    changed: list[tuple[str, str]] = []
    canaries = Canaries(None, changed.append, lambda: 1.0)  # type: ignore[arg-type]  # nothing is read
    canaries.take(reports(5))
    assert (changed, canaries.observed(KEY).is_reported) == ([], False)
    canaries.update(KEY, stored("Running"))
    for requests in (5, 8):
        canaries.take(reports(requests))
    assert (changed, canaries.observed(KEY).new.requests) == ([KEY, KEY], 3)
    canaries.update(KEY, stored("RolledBack"))
    canaries.take(reports(9))
    assert (len(changed), canaries.observed(KEY).is_reported) == (2, False)
    canaries.update(KEY, stored("Running"))
    canaries.update(KEY, None)
    canaries.take(reports(9))
    assert len(changed) == 2


@pytest.mark.parametrize(
    ("body", "count"),
    [(b'{"started_s": 1.0, "services": {"default/demo": {"new": {"requests": 4}}}}', 1), (b"{}", 0), (b"<html>", 0)],
)
async def test_reports_of_gateways_are_read_unless_they_are_something_else(body: bytes, count: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body)

    app = web.Application()
    app.router.add_get(ROLLOUTS_PATH, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        name = f"127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            found = await GatewayLoadReader(session, [name]).rollouts()
    finally:
        await runner.cleanup()
    assert len(found) == count
