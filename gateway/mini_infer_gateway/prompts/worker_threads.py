"""Threads that share long work fairly: each job has a short turn, then the next one. Abandoned jobs are dropped.

A job is a generator that yields every few milliseconds. A prompt of a million tokens therefore delays another prompt in
the queue by one turn, not by a second. The threads run at a lower priority than the event loop. Knows no prompts.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from mini_infer_process.interpreter import lower_thread_priority

Result = TypeVar("Result")

SLICE_S = 0.01
"""Seconds of a turn, after which a job goes to the end of the queue."""


class AbandonedError(Exception):
    """Nobody waits for this job any more."""


class _Job(Generic[Result]):
    def __init__(self, steps: Generator[Any, None, Result], abandoned: Callable[[], bool]) -> None:
        self._steps, self._abandoned = steps, abandoned
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Result] = self._loop.create_future()

    def run_slice(self, until_s: float) -> bool:
        """Works until `until_s`, on a thread. Returns False if the job ended."""
        try:
            while not self._abandoned():
                next(self._steps)
                if time.monotonic() >= until_s:
                    return True
            self._steps.close()
            self._finish(error=AbandonedError())
        except StopIteration as end:
            self._finish(result=end.value)
        except BaseException as error:  # Panics of Rust are no Exceptions, and would end the thread.
            self._finish(error=_without_frames(error))
        return False

    def _finish(self, result: Any = None, error: BaseException | None = None) -> None:
        with contextlib.suppress(RuntimeError):  # The loop was closed meanwhile.
            self._loop.call_soon_threadsafe(self._end, result, error)

    def _end(self, result: Any, error: BaseException | None) -> None:
        if self.done.done():
            return
        if error:
            self.done.set_exception(error)
        else:
            self.done.set_result(result)


def _without_frames(error: BaseException) -> Exception:
    """Returns the error without the frames of its thread: their variables refer to the job, and so to the error."""
    links: list[BaseException | None] = [error]
    while links:
        if link := links.pop():
            link.__traceback__ = None
            links += [link.__cause__, link.__context__]
    if isinstance(error, Exception):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


class WorkerThreads:
    """A pool of threads, which are started with the first jobs and ended by `close`."""

    def __init__(self, threads: int) -> None:
        self._count = threads
        self._threads: list[threading.Thread] = []
        self._queue: deque[_Job[Any]] = deque()
        self._changed = threading.Condition()
        self._closed = False

    @property
    def queued(self) -> int:
        """Number of jobs that wait for their turn."""
        return len(self._queue)

    async def run(self, steps: Generator[Any, None, Result], abandoned: Callable[[], bool]) -> Result:
        """Returns the result of `steps`. Raises AbandonedError if `abandoned`, called between steps, returned True."""
        # No variable here may hold the job: an error refers to this frame, and the job to the error.
        return await self._put(_Job(steps, abandoned))

    def _put(self, job: _Job[Result]) -> asyncio.Future[Result]:
        with self._changed:
            if len(self._threads) < self._count:
                thread = threading.Thread(target=self._work, name=f"tokenize-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._queue.append(job)
            self._changed.notify()
        return job.done

    def close(self) -> None:
        """Lets the threads end after their turns; queued jobs are dropped."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        lower_thread_priority()
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Works on the next job. Returns False if the pool is closed. An idle thread keeps no job alive."""
        job = self._next()
        if job is None:
            return False
        if job.run_slice(time.monotonic() + SLICE_S):
            with self._changed:
                self._queue.append(job)
                # The next loop of this thread takes a job: no other thread need be woken.
        return True

    def _next(self) -> "_Job[Any] | None":
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            return None if self._closed else self._queue.popleft()
