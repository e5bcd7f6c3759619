"""The front's end of the line to the core: requests out, outputs to whoever waits for them. Knows no HTTP."""

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence

import zmq
import zmq.asyncio

from mini_infer_contract.launch import Role
from mini_infer_engine.api.generation import Generation
from mini_infer_engine.api.metrics import ServerMetrics
from mini_infer_engine.core.request import Output
from mini_infer_engine.core_process import messages
from mini_infer_process import zmq_limits
from mini_infer_web.api_errors import ApiError

logger = logging.getLogger(__name__)


class CoreFailedError(RuntimeError):
    """The core could not start or go on; the message is for people."""


class CoreClient:
    """One DEALER socket. `receive` runs as a task that its maker owns."""

    def __init__(self, address: str, metrics: ServerMetrics, engine: int = 0) -> None:
        """`engine`: the core's number, where there are several."""
        self.engine = engine
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        zmq_limits.LOCAL.apply(self._socket)
        self._socket.connect(address)
        self._metrics = metrics
        self._waiting: dict[str, tuple[Generation, int]] = {}
        self._snapshots: dict[int, asyncio.Future[bytes]] = {}
        self._tickets = itertools.count()
        self.model: messages.ModelInfo | None = None
        """None until the core is ready."""
        self.failure: ApiError | None = None
        """Why the core takes no requests any more."""
        self._heard_at_s = time.monotonic()
        """When the core last said something, or had nothing to do."""
        self._send(messages.Hello())

    def submit(self, generation: Generation, choices: Sequence[int] | None = None) -> None:
        """Send all choices, or some of them; their outputs are pushed from now on."""
        if self.failure is not None:
            generation.fail(self.failure)
            return
        if not self._owes_work:
            self._heard_at_s = time.monotonic()
        for index in range(len(generation.replies)) if choices is None else choices:
            reply = generation.replies[index]
            generation.engines[index] = self.engine
            self._waiting[reply.request.request_id] = generation, index
            if reply.request.leads:
                self._send(messages.Add(reply.request))

    @property
    def _owes_work(self) -> bool:
        """Whether a step must come: somebody waits, or the core said that it has something to do."""
        stats = self._metrics.engines[self.engine].stats
        return bool(self._waiting or stats.running or stats.waiting)

    def silent_s(self, now_s: float) -> float:
        """For how long the core has said nothing while it has work; 0 while it has none, or still loads."""
        return now_s - self._heard_at_s if self.model is not None and self._owes_work else 0.0

    def leave(self, generation: Generation) -> None:
        """The request is over for its client; what the core still makes for it is stopped."""
        ids = [reply.request.request_id for reply in generation.replies]
        unfinished = [request_id for request_id in ids if self._waiting.pop(request_id, None) is not None]
        if unfinished and self.failure is None:
            self._send(messages.Abort(unfinished))

    async def snapshot(self) -> bytes:
        """The engine's cached chains, encoded."""
        if self.failure is not None:
            raise self.failure
        ticket = next(self._tickets)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._snapshots[ticket] = answer
        self._send(messages.SnapshotWanted(ticket))
        return await answer

    def switch_role(self, role: Role) -> None:
        """See `Core.switch_role`."""
        self._send(messages.SwitchRole(role))

    def stop(self) -> None:
        """Tell the core to leave."""
        self._send(messages.Stop())

    async def receive(self) -> None:
        """Take messages until cancelled. CoreFailedError: the core said that it fails."""
        while True:
            message = messages.decode_from_core(await self._socket.recv())
            self._heard_at_s = time.monotonic()
            match message:
                case messages.StepOutputs(outputs, stats):
                    self._metrics.take_stats(stats, self.engine)
                    self._push(outputs)
                case messages.SnapshotTaken(ticket, payload):
                    answer = self._snapshots.pop(ticket)
                    if not answer.done():
                        answer.set_result(payload)
                case messages.Ready(model):
                    self.model = self._metrics.engines[self.engine].model = model
                    logger.info(
                        "%sready: context %d tokens, KV cache %d pages of %d tokens",
                        f"engine {self.engine} " if len(self._metrics.engines) > 1 else "",
                        model.max_model_len,
                        model.num_pages,
                        model.page_size,
                    )
                case messages.Published(topic, payload):
                    self._take_published(topic, payload)
                case messages.Failed(reason):
                    raise CoreFailedError(reason)

    def _take_published(self, topic: bytes, payload: bytes) -> None:
        """What the core would publish; a core that is alone publishes by itself."""

    def _push(self, outputs: list[Output]) -> None:
        now = time.perf_counter()
        aborts = []
        for output in outputs:
            waiting = self._waiting.get(output.request_id)
            if waiting is None:
                continue  # it left, and the core does not know yet
            generation, index = waiting
            try:
                stop = generation.push(index, output, now)
            except Exception:
                logger.exception("request %s: its output cannot be made into text", output.request_id)
                generation.fail(ApiError(500, "the output cannot be made into text; the log says why", code="internal"))
                stop = True
            if stop:
                aborts.append(output.request_id)
            if stop or output.finish_reason is not None:
                del self._waiting[output.request_id]
        if aborts:
            self._send(messages.Abort(aborts))

    def fail(self, error: ApiError) -> None:
        """There is nothing more to expect: all who wait are told."""
        self.failure = error
        for generation, _ in self._waiting.values():
            generation.fail(error)
        self._waiting.clear()
        for answer in self._snapshots.values():
            if not answer.done():
                answer.set_exception(error)

    def close(self) -> None:
        """Close the socket; the last messages have a moment to leave."""
        self._context.destroy(linger=200)

    def _send(self, message: messages.FrontMessage) -> None:
        """Without a high-water mark a send never waits: its future is done already."""
        self._socket.send(messages.encode(message))
