"""Connects the front to a core: sends requests, and passes outputs to the clients that wait for them. It
knows no HTTP.
"""

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
from mini_infer_engine.core.request import Output, Request
from mini_infer_engine.core_process import messages
from mini_infer_process import zmq_limits
from mini_infer_web.api_errors import ApiError

logger = logging.getLogger(__name__)


class CoreFailedError(RuntimeError):
    """The core could not start or go on; the message is for people."""


class CoreClient:
    """A connection to one core, by a DEALER socket. Its owner runs `receive` as a task."""

    def __init__(self, address: str, metrics: ServerMetrics, engine: int = 0) -> None:
        """Connects to a core. `engine` is its number if there are several."""
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
        """The core's model, or None until the core is ready."""
        self.failure: ApiError | None = None
        """The error with which new requests fail, or None while the core accepts them."""
        self._last_seen_s = time.monotonic()
        """Time of the core's last message, or of the last moment in which it had nothing to do."""
        self._send(messages.Hello())

    def submit(self, generation: Generation, choices: Sequence[int] | None = None) -> None:
        """Sends all choices of a generation, or some of them. Their outputs are pushed to it from now on."""
        if self.failure is not None:
            generation.fail(self.failure)
            return
        if not self._has_unfinished_work:
            self._last_seen_s = time.monotonic()
        for index in range(len(generation.replies)) if choices is None else choices:
            reply = generation.replies[index]
            generation.engines[index] = self.engine
            self._waiting[reply.request.request_id] = generation, index
            if reply.request.leads:
                self._send(messages.Add(reply.request))

    @property
    def _has_unfinished_work(self) -> bool:
        """True if a step must follow: a request waits for output, or the core has reported running or waiting ones."""
        stats = self._metrics.engines[self.engine].stats
        return bool(self._waiting or stats.running or stats.waiting)

    def silent_s(self, now_s: float) -> float:
        """Returns the seconds for which the core has sent nothing while it has work; 0 if it has none,
        or still loads.
        """
        return now_s - self._last_seen_s if self.model is not None and self._has_unfinished_work else 0.0

    def leave(self, generation: Generation) -> None:
        """Ends a request for its client, and aborts its choices that have not finished."""
        ids = [reply.request.request_id for reply in generation.replies]
        unfinished = [request_id for request_id in ids if self._waiting.pop(request_id, None) is not None]
        if unfinished and self.failure is None:
            self._send(messages.Abort(unfinished))

    async def snapshot(self) -> bytes:
        """Requests a snapshot of the engine's prefix cache, and returns it encoded."""
        if self.failure is not None:
            raise self.failure
        ticket = next(self._tickets)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._snapshots[ticket] = answer
        self._send(messages.SnapshotRequest(ticket))
        return await answer

    def switch_role(self, role: Role) -> None:
        """Sends the engine's new role."""
        self._send(messages.SwitchRole(role))

    def hint(self, request: Request) -> None:
        """Sends a request whose prompt is cached and gets the request's lease."""
        self._send(messages.Hint(request))

    def prefetch(self, request_ids: Sequence[str], ttl_s: float) -> None:
        """Sends the ids of requests whose sessions return within `ttl_s` seconds."""
        self._send(messages.Prefetch(list(request_ids), ttl_s))

    def stop(self) -> None:
        """Sends `Stop` to the core."""
        self._send(messages.Stop())

    async def receive(self) -> None:
        """Handles messages until it is cancelled. Raises CoreFailedError if the core reports a failure."""
        while True:
            message = messages.decode_from_core(await self._socket.recv())
            self._last_seen_s = time.monotonic()
            match message:
                case messages.StepOutputs(outputs, stats):
                    self._metrics.take_stats(stats, self.engine)
                    self._push(outputs)
                case messages.SnapshotReply(ticket, payload):
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
        """Handles a message for gateways. The base class ignores it: a core without siblings publishes by itself."""

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
        """Fails all requests and snapshots that wait for the core, and all later ones."""
        self.failure = error
        for generation, _ in self._waiting.values():
            generation.fail(error)
        self._waiting.clear()
        for answer in self._snapshots.values():
            if not answer.done():
                answer.set_exception(error)

    def close(self) -> None:
        """Closes the socket, after a moment for the last messages."""
        self._context.destroy(linger=200)

    def _send(self, message: messages.ApiServerMessage) -> None:
        """Sends a message without awaiting it: there is no high-water mark, so the future is done already."""
        self._socket.send(messages.encode(message))
