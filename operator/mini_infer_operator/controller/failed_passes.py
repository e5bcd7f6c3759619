"""Reports a reconcile that fails repeatedly in the service's status; a failure that passes is not reported."""

import contextlib
import logging
from collections.abc import Callable, Hashable
from datetime import UTC, datetime
from typing import Generic, TypeVar

from mini_infer_operator.reconcile import Backend, reconcile
from mini_infer_operator.status import error_status, ready_transition

log = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)

REPORT_AFTER = 3
"""Failures in a row after which the status reports them. With the queue's back-off the third comes two seconds after
the first.
"""
_LONGEST_MESSAGE = 2000


class FailedPasses(Generic[Key]):
    """Runs `reconcile` for keys and counts failures in a row; the queue decides when to try again."""

    def __init__(self, backend: Callable[[Key], Backend]) -> None:
        self._backend = backend
        self._failures: dict[Key, int] = {}

    async def reconcile(self, key: Key) -> float | None:
        """Runs one pass and raises its error; the status reports it from the third failure in a row (REPORT_AFTER)."""
        try:
            pause_s = await reconcile(self._backend(key))
        except Exception as error:
            self._failures[key] = failures = self._failures.get(key, 0) + 1
            if failures >= REPORT_AFTER:
                with contextlib.suppress(Exception):  # the same fault most likely; the queue logs the first one
                    await _report(self._backend(key), error)
            raise
        self._failures.pop(key, None)
        return pause_s


async def _report(backend: Backend, error: Exception) -> None:
    stored = await backend.read()
    if stored is None:
        return
    generation, previous = stored["metadata"].get("generation", 0), stored.get("status") or {}
    status = error_status(generation, error_message(error), previous=previous, now=datetime.now(UTC))
    await backend.report(stored, status)
    if (transition := ready_transition(previous, status)) is not None:
        backend.record_event(stored, *transition)


def error_message(error: Exception) -> str:
    """Returns a status message with the server's or the network's own words, and the failed request if it is known."""
    words = " ".join(str(error).split()) or type(error).__name__
    request = "; ".join(getattr(error, "__notes__", ()))
    detail = f"{request}: {words}" if request else words
    return f"the operator's requests fail, and engines are left as they are: {detail}"[:_LONGEST_MESSAGE]
