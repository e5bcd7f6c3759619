"""The front's end of the lines to several cores, which the rest of the server sees as one. Knows no HTTP."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from mini_infer_contract.events import merge_snapshots
from mini_infer_contract.launch import DRAINING_HEADER, Role
from mini_infer_engine.api.generation import Generation
from mini_infer_engine.api.metrics import ServerMetrics
from mini_infer_engine.core.request import Output
from mini_infer_engine.core_process.messages import ModelInfo
from mini_infer_engine.data_parallel.model import model_of_all
from mini_infer_engine.data_parallel.publishing import UnitedPublisher
from mini_infer_engine.data_parallel.router import EngineRouter
from mini_infer_engine.server.core_client import CoreClient
from mini_infer_web.api_errors import ApiError


class EngineLine(CoreClient):
    """The line to one of several cores: what happens on it is told to the router and the publisher."""

    def __init__(
        self, address: str, metrics: ServerMetrics, engine: int, router: EngineRouter, publisher: UnitedPublisher
    ) -> None:
        super().__init__(address, metrics, engine)
        self._router, self._publisher = router, publisher

    def leave(self, generation: Generation) -> None:
        """See CoreClient."""
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
                self._router.heard(output.request_id, len(output.token_ids))
            else:
                self._router.ended([output.request_id])

    def _take_published(self, topic: bytes, payload: bytes) -> None:
        self._publisher.take(self.engine, topic, payload)

    def fail(self, error: ApiError) -> None:
        """See CoreClient; nothing more goes to this engine."""
        self._router.died(self.engine)
        self._publisher.forget(self.engine)
        super().fail(error)


class DataParallelClient:
    """`Core` of several engines: each request goes to one of them."""

    def __init__(self, lines: Sequence[EngineLine], router: EngineRouter, publisher: UnitedPublisher) -> None:
        self._lines, self._router, self._publisher = lines, router, publisher
        self._model: ModelInfo | None = None

    @property
    def model(self) -> ModelInfo | None:
        """None until every core is ready."""
        if self._model is None:
            models = [line.model for line in self._lines if line.model is not None]
            if len(models) == len(self._lines):
                self._model = model_of_all(models)
        return self._model

    @property
    def failure(self) -> ApiError | None:
        """Why no requests are taken any more: a core has failed, and the server ends when the others have finished."""
        for line in self._lines:
            if line.failure is not None:
                return ApiError(
                    503, f"engine {line.engine}: {line.failure.message}", code=line.failure.code, headers=_ELSEWHERE
                )
        return None

    def submit(self, generation: Generation) -> None:
        """See Core. Beams go where the first of their search goes; all else has an engine of its own choice."""
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
        """See Core."""
        for line in self._lines:
            line.leave(generation)

    def silent_s(self, now_s: float) -> float:
        """For how long the most silent of the cores that have work has said nothing."""
        return max(line.silent_s(now_s) for line in self._lines)

    async def snapshot(self) -> bytes:
        """What any of the engines holds.

        Events after the sequence number that it tells may be contained already: applied again they change nothing.
        """
        sequence = self._publisher.last_sequence
        return merge_snapshots(sequence, await asyncio.gather(*(line.snapshot() for line in self._lines)))

    def switch_role(self, role: Role) -> None:
        """See Core."""
        for line in self._lines:
            line.switch_role(role)


_ELSEWHERE = {DRAINING_HEADER: "true", "retry-after": "1"}
