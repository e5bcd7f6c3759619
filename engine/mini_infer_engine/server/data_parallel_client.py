"""Connects the front to several cores, which the rest of the server sees as one. It knows no HTTP."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from mini_infer_contract.events import merge_snapshots
from mini_infer_contract.launch import DRAINING_HEADER, Role
from mini_infer_engine.api.generation import Generation
from mini_infer_engine.api.metrics import ServerMetrics
from mini_infer_engine.core.request import Output, Request
from mini_infer_engine.core_process.messages import ModelInfo
from mini_infer_engine.data_parallel.model import model_of_all
from mini_infer_engine.data_parallel.publishing import UnitedPublisher
from mini_infer_engine.data_parallel.router import EngineRouter
from mini_infer_engine.server.core_client import CoreClient
from mini_infer_web.api_errors import ApiError


class EngineLine(CoreClient):
    """A connection to one of several cores, which reports its events to the router and the publisher."""

    def __init__(
        self, address: str, metrics: ServerMetrics, engine: int, router: EngineRouter, publisher: UnitedPublisher
    ) -> None:
        super().__init__(address, metrics, engine)
        self._router, self._publisher = router, publisher

    def leave(self, generation: Generation) -> None:
        """Ends a request for its client, and removes its choices at this engine from the router."""
        super().leave(generation)
        self._router.ended(
            reply.request.request_id
            for reply, engine in zip(generation.replies, generation.engines, strict=True)
            if engine == self.engine
        )

    def _push(self, outputs: list[Output]) -> None:
        super()._push(outputs)
        for output in outputs:
            if output.request_id in self._waiting:
                self._router.record_output(output.request_id, len(output.token_ids))
            else:
                self._router.ended([output.request_id])

    def _take_published(self, topic: bytes, payload: bytes) -> None:
        self._publisher.take(self.engine, topic, payload)

    def fail(self, error: ApiError) -> None:
        """Fails all requests of this engine, to which no more are routed."""
        self._router.died(self.engine)
        self._publisher.remove_engine(self.engine)
        super().fail(error)


class DataParallelClient:
    """Implements `Core` for several engines: each choice goes to one of them."""

    def __init__(self, lines: Sequence[EngineLine], router: EngineRouter, publisher: UnitedPublisher) -> None:
        self._lines, self._router, self._publisher = lines, router, publisher
        self._model: ModelInfo | None = None

    @property
    def model(self) -> ModelInfo | None:
        """The model as all engines serve it, or None until every core is ready."""
        if self._model is None:
            models = [line.model for line in self._lines if line.model is not None]
            if len(models) == len(self._lines):
                self._model = model_of_all(models)
        return self._model

    @property
    def failure(self) -> ApiError | None:
        """The error with which new requests fail once a core has failed; the server ends when the others have finished.
        None while all run.
        """
        for line in self._lines:
            if line.failure is not None:
                return ApiError(
                    503, f"engine {line.engine}: {line.failure.message}", code=line.failure.code, headers=_ELSEWHERE
                )
        return None

    def submit(self, generation: Generation) -> None:
        """Routes and sends all choices. The beams of a search go to the engine of its first beam; other choices are
        routed one by one.
        """
        assert self.model is not None
        revision = self.model.revision
        choices = defaultdict[int, list[int]](list)
        for index, reply in enumerate(generation.replies):
            request = reply.request
            leader = request.request_id if request.beam_search is None else request.beam_search.request_ids[0]
            engine = self._router.route(request, revision) if request.leads else self._router.engine_of(leader)
            if engine is None:
                generation.fail(self.failure or ApiError(503, "no engine is there", code="engine_dead"))
                return
            choices[engine].append(index)
        for engine, indices in choices.items():
            self._lines[engine].submit(generation, indices)

    def leave(self, generation: Generation) -> None:
        """Ends a request at all engines."""
        for line in self._lines:
            line.leave(generation)

    def silent_s(self, now_s: float) -> float:
        """Returns the longest silence of any core that has work, in seconds."""
        return max(line.silent_s(now_s) for line in self._lines)

    async def snapshot(self) -> bytes:
        """Returns a snapshot of the blocks that any of the engines holds.

        It may contain events after its sequence number already: applying them again changes nothing.
        """
        sequence = self._publisher.last_sequence
        return merge_snapshots(sequence, await asyncio.gather(*(line.snapshot() for line in self._lines)))

    def hint(self, request: Request) -> None:
        """Sends a request whose prompt gets another lease to all engines: any may have cached it."""
        for line in self._lines:
            line.hint(request)

    def prefetch(self, request_ids: Sequence[str], ttl_s: float) -> None:
        """Sends the ids of sessions that return to all engines: each knows its own."""
        for line in self._lines:
            line.prefetch(request_ids, ttl_s)

    def switch_role(self, role: Role) -> None:
        """Sends the new role to all engines."""
        for line in self._lines:
            line.switch_role(role)


_ELSEWHERE = {DRAINING_HEADER: "true", "retry-after": "1"}
