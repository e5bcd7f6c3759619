"""Decides which requests of a service with a canary are copied or replayed, within bounds.

A copy never delays or fails its request: nothing is sent before the client has its answer, and nothing at all while
requests wait. What is over a bound is dropped, since a sample is enough.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import msgspec

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.fleet.backlog import Backlog
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.fleet.registry import Fleet
from mini_infer_gateway.http.upstream import Upstream
from mini_infer_gateway.metrics import Outcome
from mini_infer_gateway.pipeline.call import Call, Copy
from mini_infer_gateway.pipeline.canary.figures import CanaryFigures
from mini_infer_gateway.pipeline.canary.mirror import Mirror, copied_body
from mini_infer_gateway.pipeline.canary.replay import Divergence, Replay, may_replay
from mini_infer_gateway.routing.base import Candidate
from mini_infer_gateway.routing.filters.canary_share import share_point
from mini_infer_gateway.routing.router import Router

MAX_COPY_BYTES: Final = 256 << 10
"""Longest body that is copied."""
MAX_COPIES: Final = 64
"""Copies that are retained at a time, until their originals are answered and then until they are."""
MAX_SENT: Final = 16
"""Copies and replays that are sent at a time."""
REPLAY_PAUSE_S: Final = 2.0
"""Seconds between the beginnings of two replays of one service."""

QUIET_S: Final = 0.5
"""Seconds after a replay from which copies are timed."""

log = logging.getLogger(__name__)


class Copies(Protocol):
    """Copies requests. Without a canary, nothing is copied."""

    def take(self, call: Call) -> Copy | None:
        """Returns what is retained of a request that was tokenised; None if it is not to be copied."""

    def send(self, call: Call) -> None:
        """Sends the copy of a request that has ended, if it has one. Returns at once."""


@dataclass(frozen=True, slots=True)
class _Nothing:
    def take(self, call: Call) -> Copy | None:
        return None

    def send(self, call: Call) -> None:
        pass


NO_COPIES: Final[Copies] = _Nothing()


class CanaryCopies:
    """The copies and replays of one gateway."""

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        ledger: LoadLedger,
        backlog: Backlog,
        upstream: Upstream,
        figures: CanaryFigures,
        clock: Callable[[], float],
    ) -> None:
        self._fleet, self._router, self._ledger, self._backlog = fleet, router, ledger, backlog
        self._figures, self._clock = figures, clock
        self._mirror, self._replay = Mirror(upstream, clock, self._is_quiet), Replay(upstream)
        self._replayed_s = float("-inf")
        self._replaying = 0
        self._retained = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._replay_due_s: dict[str, float] = {}

    def take(self, call: Call) -> Copy | None:
        """Returns what is retained of a request that was tokenised; None if it is not to be copied."""
        if not self._fleet.canaries or call.row.continued != "chunks" or call.placed_as != call.model:
            return None
        state = next((self._fleet.endpoints[name] for name in call.endpoints if name in self._fleet.endpoints), None)
        canary = self._fleet.canaries.get(state.endpoint.service) if state else None
        if state is None or canary is None or len(call.body) > MAX_COPY_BYTES or self._retained >= MAX_COPIES:
            return None
        answers_itself = share_point(canary.revision, call.request.session) < canary.weight
        mirrored = not answers_itself and share_point(f"mirror {canary.revision}", call.request_id) < canary.mirror
        service, now_s = state.endpoint.service, self._clock()
        replayed = (
            canary.replay
            and now_s >= self._replay_due_s.get(service, 0.0)
            and may_replay(call.row.path, call.fields, call.request.prompt_tokens)
        )
        if not mirrored and not replayed:
            return None
        if replayed:
            self._replay_due_s[service] = now_s + REPLAY_PAUSE_S
        self._retained += 1
        request = replace(call.request, session="", attempted=frozenset())
        return Copy(service, canary.revision, call.exchange.target, call.body, request, mirrored, replayed)

    def send(self, call: Call) -> None:
        """Sends the copy of a request that has ended, if it has one. Returns at once."""
        copy, call.copy = call.copy, None
        if copy is None:
            return
        if call.outcome is not Outcome.OK or len(self._tasks) >= MAX_SENT or self._backlog.depth(call.placed_as):
            self._retained -= 1
            return
        task = asyncio.create_task(self._send(copy, call.row.path, call.request_id, call.endpoints), name="copy")
        self._tasks.add(task)
        task.add_done_callback(self._sent)

    async def close(self) -> None:
        """Cancels all that is being sent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._retained -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a copy for a canary failed: %r", error, exc_info=error)

    async def _send(self, copy: Copy, path: str, request_id: str, names: Sequence[str]) -> None:
        now_s = self._clock()
        current = [one for one in self._fleet.candidates(names, now_s) if one.endpoint.service == copy.service]
        new = [one for one in current if one.endpoint.revision == copy.revision]
        decision = self._router.route(copy.request, new, now_s)
        counts = self._figures.counts(copy.service, copy.revision)
        if decision is None or counts is None or self._ledger.load(decision.decode.name).waiting:
            return
        fields = msgspec.json.decode(copy.body)
        is_ours = next(one.resumes for one in new if one.name == decision.decode.name)
        if copy.mirrored:
            body = copied_body(copy.body, decision.decode.model, fields, has_priorities=is_ours)
            await self._mirror.send(copy, body, request_id, decision, counts)
        old = self._idle([one for one in current if one.canary is None and one.resumes])
        if copy.replayed and is_ours and old is not None:
            found = await self._compare(path, fields, old, decision.decode)
            if found is not None and found.nats is not None:
                counts.diverged(found.nats)
            elif found is not None:
                counts.unscored += 1
                log.warning("revision %s did not score an answer: %s", copy.revision, found.detail)

    async def _compare(self, path: str, fields: dict[str, Any], old: Candidate, new: Endpoint) -> Divergence | None:
        self._replaying += 1
        try:
            return await self._replay.compare(path, fields, old.endpoint, new)
        finally:
            self._replaying -= 1
            self._replayed_s = self._clock()

    def _is_quiet(self) -> bool:
        """True if no replay has kept engines busy for a moment: copies have no priority over it."""
        return not self._replaying and self._clock() - self._replayed_s > QUIET_S

    def _idle(self, candidates: list[Candidate]) -> Candidate | None:
        """Returns the candidate with the fewest requests, if none waits there."""
        able = [one for one in candidates if one.ready and not one.circuit_open and not one.computes_for_others]
        best = min(able, key=lambda one: self._ledger.load(one.name).running, default=None)
        return None if best is None or self._ledger.load(best.name).waiting else best
