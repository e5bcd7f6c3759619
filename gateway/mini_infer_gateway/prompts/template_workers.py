"""Manages the processes that render templates of unbounded cost: few, shared by all models in turn.

A template that takes too long or too much memory ends its process, and its request is routed without prompt keys. A
template that does so repeatedly is not rendered here for a while. No model waits for another one's template beyond its
turn.
"""

import asyncio
import logging
import os
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from mini_infer_gateway.prompts.template_worker import LENGTH, RenderAnswer, RenderRequest
from mini_infer_prompts.prompt import PromptText

WORKERS = 2
RENDER_TIMEOUT_S = 2.0
"""Time-out of one request in seconds, from the first byte sent to the last byte of the answer."""
START_TIMEOUT_S = 20.0
MEMORY_BYTES = 192 << 20
"""Memory of one process in bytes, without the code of its libraries; it needs 30 MB at the start."""
ANSWER_BYTES = 96 << 20
QUEUE_LIMIT = 64
"""Largest number of waiting requests of one model; further ones are not rendered."""
FAILURES_LIMIT = 3
"""Number of failures of one model's template, without a success in between, that suspend it."""
SUSPENDED_S = 300.0

_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
"""All environment variables that a process receives: no secret of ours is accessible to a template."""

log = logging.getLogger(__name__)


class RenderFailedError(Exception):
    """A template could not be rendered within its limits; the message is the reason."""


@dataclass(eq=False, slots=True)
class _Job:
    frame: bytes
    """The request as the process reads it."""
    abandoned: Callable[[], bool]
    done: asyncio.Future[RenderAnswer]


@dataclass(slots=True)
class _Model:
    """The jobs and failures of one revision's template."""

    waiting: deque[_Job] = field(default_factory=deque)
    is_busy: bool = False
    failures: int = 0
    suspended_until_s: float = 0.0
    reason: str = ""
    """The reason of its last failure."""


class TemplateWorkers:
    """A pool of rendering processes, which are started with the first request that needs them and ended by `close`."""

    def __init__(
        self,
        clock: Callable[[], float],
        on_failure: Callable[[str], None] = lambda reason: None,
        on_change: Callable[[], None] = lambda: None,
        *,
        workers: int = WORKERS,
        timeout_s: float | None = None,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """`on_failure` is called with "time", "memory" or "suspended"; `on_change` when a process was started."""
        self._clock, self._on_failure, self._on_change = clock, on_failure, on_change
        self._count, self._memory_bytes = workers, memory_bytes
        self._timeout_s = RENDER_TIMEOUT_S if timeout_s is None else timeout_s
        self._models: OrderedDict[str, _Model] = OrderedDict()
        """Models in the order of their turns, the next one first."""
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def memory_bytes(self) -> int:
        """Bytes that the started processes may take."""
        return len(self._tasks) * self._memory_bytes

    def reason(self, revision: str) -> str:
        """Returns why a revision's template is not rendered now; "" if it is."""
        model = self._models.get(revision)
        return model.reason if model and self._clock() < model.suspended_until_s else ""

    async def prompts(
        self,
        revision: str,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        reader: str,
        body: dict[str, Any],
        abandoned: Callable[[], bool],
        image_files: Mapping[str, str] = MappingProxyType({}),
    ) -> list[PromptText | list[int]] | None:
        """Returns the prompts that a reader makes of the body; None if it rejects it. Raises RenderFailedError.

        `image_files` say how the model reads images; empty if it reads none.
        """
        model = self._models.setdefault(revision, _Model())
        if self._clock() < model.suspended_until_s or len(model.waiting) >= QUEUE_LIMIT:
            self._on_failure("suspended")
            raise RenderFailedError(model.reason or "too many requests wait for its template")
        cpu_s = int(self._timeout_s) + 1
        request = RenderRequest(revision, reader, body, dict(templates), dict(special_tokens), dict(image_files), cpu_s)
        job = _Job(_encoded(request), abandoned, asyncio.get_running_loop().create_future())
        model.waiting.append(job)
        if len(self._tasks) < min(self._count, 1 + sum(one.is_busy for one in self._models.values())):
            self._tasks.append(asyncio.create_task(self._work(), name=f"render templates {len(self._tasks)}"))
            self._on_change()
        async with self._changed:
            self._changed.notify()
        answer = await job.done
        if answer.error:
            log.info("a template refuses a request: %s", answer.error)
            return None
        return [one.prompt for one in answer.prompts]

    def keep(self, revisions: set[str]) -> None:
        """Forgets the state of other revisions' templates."""
        for revision in self._models.keys() - revisions:
            if not self._models[revision].waiting and not self._models[revision].is_busy:
                del self._models[revision]

    async def close(self) -> None:
        """Ends the processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self) -> None:
        process: _Process | None = None
        try:
            while True:
                revision, model, job = await self._next()
                try:
                    if job.abandoned():
                        raise RenderFailedError("nobody waits for it any more")
                    process = process or await _Process.start(self._memory_bytes)
                    answer = await process.render(job.frame, self._timeout_s)
                    model.failures = 0
                    _settle(job, answer)
                except Exception as error:  # Whatever it is, the next requests need this task.
                    if isinstance(error, _LimitError):
                        self._failed(revision, model, error)
                    elif not isinstance(error, RenderFailedError | OSError):
                        log.exception("a request for the template of revision %.12s failed", revision)
                    if process and process.is_broken:
                        await process.end()
                        process = None
                    _settle(job, error)
                finally:
                    model.is_busy = False
                    async with self._changed:
                        self._changed.notify()
        finally:
            if process:
                await process.end()

    async def _next(self) -> tuple[str, _Model, _Job]:
        """Returns the next job of the model that has waited longest for a turn and has none now."""
        async with self._changed:
            while True:
                for revision, model in self._models.items():
                    if model.waiting and not model.is_busy:
                        model.is_busy = True
                        self._models.move_to_end(revision)
                        return revision, model, model.waiting.popleft()
                await self._changed.wait()

    def _failed(self, revision: str, model: _Model, error: "_LimitError") -> None:
        model.failures += 1
        model.reason = str(error)
        self._on_failure(error.word)
        if model.failures < FAILURES_LIMIT:
            log.warning("the chat template of revision %.12s failed: %s", revision, error)
            return
        model.failures, model.suspended_until_s = 0, self._clock() + SUSPENDED_S
        log.warning(
            "the chat template of revision %.12s is not rendered here for %g s, its engines tokenise: %s",
            revision,
            SUSPENDED_S,
            error,
        )
        while model.waiting:
            _settle(model.waiting.popleft(), error)


class _LimitError(RenderFailedError):
    def __init__(self, word: str, message: str) -> None:
        super().__init__(message)
        self.word = word


class _Process:
    """A process that handles one request at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.is_broken = False

    @classmethod
    async def start(cls, memory_bytes: int) -> "_Process":
        """Starts a process and waits until it is ready. Raises RenderFailedError."""
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}
        process = cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-X", "faulthandler", "-m", "mini_infer_gateway.prompts.template_worker"),
                str(memory_bytes),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
            )
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await process._read()
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            await process.end()
            raise RenderFailedError(f"a process for templates did not start: {error!r}") from error
        except BaseException:
            await process.end()
            raise
        return process

    async def render(self, frame: bytes, timeout_s: float) -> RenderAnswer:
        """Renders one request. Raises RenderFailedError; if the process is broken then, it must be ended."""
        assert self._process.stdin
        self.is_broken = True
        try:
            async with asyncio.timeout(timeout_s):
                self._process.stdin.write(LENGTH.pack(len(frame)) + frame)
                await self._process.stdin.drain()
                answer = msgspec.msgpack.decode(await self._read(), type=RenderAnswer)
        except TimeoutError:
            raise _LimitError("time", f"it took longer than {timeout_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError) as error:
            raise _LimitError("memory", f"its process ended ({type(error).__name__})") from None
        self.is_broken = bool(answer.limit)
        if answer.limit:
            raise _LimitError(answer.limit, answer.error)
        return answer

    async def _read(self) -> bytes:
        assert self._process.stdout
        (length,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
        if length > ANSWER_BYTES:
            raise _LimitError("memory", f"it made a prompt of {length} bytes")
        return await self._process.stdout.readexactly(length)

    async def end(self) -> None:
        """Kills the process."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


def _encoded(request: RenderRequest) -> bytes:
    """Returns a request as a process reads it. Raises RenderFailedError if its body has what MessagePack lacks."""
    try:
        return msgspec.msgpack.encode(request)
    except (OverflowError, RecursionError, ValueError, TypeError) as error:
        raise RenderFailedError(f"its body cannot be handed to a process: {error}") from None


def _settle(job: _Job, outcome: RenderAnswer | Exception) -> None:
    if job.done.done():
        return
    if isinstance(outcome, RenderAnswer):
        job.done.set_result(outcome)
    else:
        job.done.set_exception(RenderFailedError(str(outcome)))
