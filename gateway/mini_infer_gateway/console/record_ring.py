"""Keeps the latest finished requests in memory that is allocated once.

What a request leaves of its own is its id: its numbers are packed, and names that requests share are kept once. With
objects of its own each of a thousand would cost every small request 2 % more CPU, as misses of the processor's caches.
"""

from collections.abc import Iterator
from math import isnan
from struct import Struct
from typing import Final, NamedTuple

_NUMBERS: Final = Struct("6d6q")


class Attempt(NamedTuple):
    """One attempt at an endpoint."""

    sent_s: float
    waited_s: float
    """Seconds in the queue before it."""
    first_byte_s: float | None
    failed_s: float | None
    """The time at which it failed; None if it did not."""
    failure: str
    engine: str
    hit_tokens: int
    reason: str
    index_kind: str
    prefill: str
    prefill_reason: str
    fetch: str
    host_tokens: int = 0
    disk_tokens: int = 0


class Record(NamedTuple):
    """A finished request."""

    serial: int
    request_id: str
    path: str
    arrived_s: float
    tokenized_s: float | None
    """The time at which it was read and tokenised; None if it was refused before."""
    ended_s: float
    model: str
    key: str
    status: int
    outcome: str
    error: str
    prompt_tokens: int
    completion_tokens: int | None
    """Number of output tokens; None if the gateway does not know it."""
    text: str
    attempts: tuple[Attempt, ...]


class Rest(NamedTuple):
    """The fields that few requests have."""

    error: str
    text: str
    failures: tuple[Attempt, ...]
    """The attempts before the last one."""


_NO_REST: Final = Rest("", "", ())


class RecordRing:
    """The latest `size` finished requests. Their serial numbers count from 1."""

    def __init__(self, size: int) -> None:
        self.latest = 0
        """The serial number of the request that ended last; 0 if none has."""
        self._size = size
        self._numbers = bytearray(size * _NUMBERS.size)
        self._ids = [""] * size
        self._names: list[tuple[str, ...]] = [()] * size
        self._rests: list[Rest] = [_NO_REST] * size
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}
        """Names that are in use, each once."""

    def append(
        self,
        request_id: str,
        names: tuple[str, str, str, str, str, str, str, str, str, str],
        arrived_s: float,
        tokenized_s: float,
        ended_s: float,
        sent_s: float,
        waited_s: float,
        first_byte_s: float,
        status: int,
        prompt_tokens: int,
        completion_tokens: int,
        hit_tokens: int,
        host_tokens: int,
        disk_tokens: int,
        rest: Rest | None,
    ) -> None:
        """Adds a request, in place of the oldest.

        `names` are its path, model, key and outcome, then those of its last attempt in the order of `Attempt`. Times
        from `sent_s` on are that attempt's. A time that is not known is NaN, and so many tokens are -1.
        """
        shared = self._known.get(names)
        if shared is None:
            if len(self._known) >= self._size:
                self._known.clear()  # Clients choose some of the names; records keep what they have.
            shared = self._known[names] = names
        row = self.latest % self._size
        self.latest += 1
        _NUMBERS.pack_into(
            self._numbers,
            row * _NUMBERS.size,
            arrived_s,
            tokenized_s,
            ended_s,
            sent_s,
            waited_s,
            first_byte_s,
            status,
            prompt_tokens,
            completion_tokens,
            hit_tokens,
            host_tokens,
            disk_tokens,
        )
        self._ids[row], self._names[row], self._rests[row] = request_id, shared, rest or _NO_REST

    def newest_first(self) -> Iterator[Record]:
        """Yields all records."""
        for serial in range(self.latest, max(0, self.latest - self._size), -1):
            yield self._record(serial)

    def _record(self, serial: int) -> Record:
        row = (serial - 1) % self._size
        arrived_s, tokenized_s, ended_s, sent_s, waited_s, first_byte_s, *counts = _NUMBERS.unpack_from(
            self._numbers, row * _NUMBERS.size
        )
        status, prompt_tokens, completion_tokens, hit_tokens, host_tokens, disk_tokens = counts
        path, model, key, outcome, engine, reason, index_kind, prefill, prefill_reason, fetch = self._names[row]
        rest = self._rests[row]
        attempts = rest.failures
        if not isnan(sent_s):
            last = Attempt(
                sent_s=sent_s,
                waited_s=waited_s,
                first_byte_s=known(first_byte_s),
                failed_s=None,
                failure="",
                engine=engine,
                hit_tokens=hit_tokens,
                reason=reason,
                index_kind=index_kind,
                prefill=prefill,
                prefill_reason=prefill_reason,
                fetch=fetch,
                host_tokens=host_tokens,
                disk_tokens=disk_tokens,
            )
            attempts = (*attempts, last)
        return Record(
            serial=serial,
            request_id=self._ids[row],
            path=path,
            arrived_s=arrived_s,
            tokenized_s=known(tokenized_s),
            ended_s=ended_s,
            model=model,
            key=key,
            status=status,
            outcome=outcome,
            error=rest.error,
            prompt_tokens=prompt_tokens,
            completion_tokens=None if completion_tokens < 0 else completion_tokens,
            text=rest.text,
            attempts=attempts,
        )


def known(time_s: float) -> float | None:
    """Returns a time; None for NaN."""
    return None if isnan(time_s) else time_s
