"""Resumes a stream whose endpoint was lost: on other endpoints of the same revision, or on the same one when it is
back. A stream of a canary goes on at the old revision, if the canary has no other engine.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.http.asgi import ClientDisconnectedError
from mini_infer_gateway.http.upstream import UpstreamError
from mini_infer_gateway.pipeline.call import Call
from mini_infer_gateway.pipeline.errors import endpoint_failed
from mini_infer_gateway.pipeline.poison_requests import KILLS_LIMIT
from mini_infer_gateway.pipeline.serving import Serving
from mini_infer_gateway.pipeline.stages.attempt import StreamCut, attempt
from mini_infer_gateway.routing.base import Candidate, Decision

CONTINUATION_WAIT_S = 20.0
"""Seconds from the loss of a stream's endpoint in which another must continue the stream: an engine may have to start.
"""
CONTINUATION_PAUSE_S = 0.1

log = logging.getLogger(__name__)


async def resume(call: Call, cut: StreamCut, serving: Serving) -> None:
    """Resumes the stream until it ends. If no endpoint continues it, it ends with an error event: raises
    UpstreamError then.
    """
    clock, continuation = serving.clock, call.continuation
    give_up_s, progress, idle = clock() + CONTINUATION_WAIT_S, continuation.progress, 0
    while not continuation.done and idle < KILLS_LIMIT and clock() < give_up_s:
        decision = _route(call, cut, serving)
        if decision is None:
            await asyncio.sleep(CONTINUATION_PAUSE_S)
            if call.exchange.abandoned:
                raise ClientDisconnectedError
            continue
        log.info("request %s goes on at %s: %s", call.request_id, decision.decode.name, cut.detail)
        next_cut = await attempt(call, serving.flow.place_now(call.request, decision, call.request_id), serving)
        if next_cut is None:
            serving.metrics.continued(True)
            return
        cut = next_cut
        if continuation.progress > progress:
            give_up_s, progress, idle = clock() + CONTINUATION_WAIT_S, continuation.progress, 0
        else:
            idle += KILLS_LIMIT if cut.refused else cut.died
        await asyncio.sleep(CONTINUATION_PAUSE_S)
    await _end(call, cut, serving)


def _route(call: Call, cut: StreamCut, serving: Serving) -> Decision | None:
    """Chooses an endpoint that can resume the stream, if possible another one than that which was lost."""
    now_s, lost, request = serving.clock(), cut.endpoint, call.request
    able = [
        candidate
        for candidate in serving.fleet.candidates(call.endpoints, now_s)
        if candidate.resumes and not candidate.circuit_open
    ]
    same = [candidate for candidate in able if candidate.endpoint.revision == lost.revision]
    elsewhere, anywhere = frozenset({lost.name}), frozenset[str]()
    return (
        serving.router.route(replace(request, attempted=elsewhere), same, now_s)
        or serving.router.route(replace(request, attempted=elsewhere), _beside_canary(able, lost, serving), now_s)
        or serving.router.route(replace(request, attempted=anywhere), same, now_s)
    )


def _beside_canary(able: Sequence[Candidate], lost: Endpoint, serving: Serving) -> list[Candidate]:
    """Returns engines of the old revision that read the same token ids, if `lost` is a canary's; else an empty list.

    A canary may have a single engine, and its stream is worth more than the purity of its weights.
    """
    canary = serving.fleet.canaries.get(lost.service)
    if canary is None or canary.revision != lost.revision:
        return []
    assets = serving.fleet.assets_revisions([lost.name])
    return [one for one in able if one.canary is None and one.assets_revision in assets]


async def _end(call: Call, cut: StreamCut, serving: Serving) -> None:
    """Ends a stream that no endpoint continues: with its last event if only that is missing, else with an error."""
    continuation = call.continuation
    if continuation.finished and not continuation.returns_usage:
        rest = b"" if continuation.done else continuation.end
        await call.exchange.send({"type": "http.response.body", "body": rest})
        return
    serving.metrics.continued(False)
    await call.exchange.send_error_event(endpoint_failed(cut.detail))
    raise UpstreamError(cut.detail)
