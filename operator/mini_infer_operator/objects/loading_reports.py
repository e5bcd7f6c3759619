"""Asks an engine that has started how long its own stages took, and where its weights came from.

Nobody waits for an answer: it is there at a later observation, which is announced. Engines may send anything.
"""

import asyncio
from collections.abc import Callable
from typing import Annotated, Literal

import aiohttp
import msgspec
from msgspec import Meta

from mini_infer_contract.launch import READY_PATH
from mini_infer_operator.objects.engine_answers import read_answer

Service = tuple[str, str]
"""A namespace and a name."""
_Seconds = Annotated[float, Meta(ge=0, le=86_400)]
_MOST_STAGES = 16


class LoadingReports:
    """The answers of one engine of each service, each of which is taken once."""

    def __init__(self, session: aiohttp.ClientSession, changed: Callable[[Service], None]) -> None:
        """Calls `changed` when the answer for a service has come.

        `session` must not decompress bodies: a few kilobytes may become gigabytes.
        """
        self._session, self._changed = session, changed
        self._queries: dict[Service, asyncio.Task[None]] = {}
        self._messages: dict[Service, str] = {}

    def ask(self, service: Service, url: str) -> None:
        """Begins to ask the engine at this URL. Must be called while an event loop runs."""
        self.forget(service)
        self._queries[service] = asyncio.create_task(self._query(service, url), name=f"start of {service[1]}")

    def take(self, service: Service) -> str | None:
        """Returns the stages as a phrase, once, or None if there is no answer, or none yet."""
        return self._messages.pop(service, None)

    def forget(self, service: Service) -> None:
        """Drops what is known of a service, such as one that is deleted."""
        self._messages.pop(service, None)
        if (query := self._queries.pop(service, None)) is not None:
            query.cancel()

    async def close(self) -> None:
        """Cancels all queries, and waits for their end."""
        tasks = list(self._queries.values())
        for service in list(self._queries):
            self.forget(service)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _query(self, service: Service, url: str) -> None:
        answer = await read_answer(self._session, url + READY_PATH, _Ready)
        if answer is not None and answer.start_seconds:
            self._messages[service] = answer.message
            self._changed(service)


class _Weights(msgspec.Struct):
    source: Literal["peer", "files", "dummy"]
    num_bytes: Annotated[int, Meta(ge=0, lt=1 << 50)] = 0


class _Ready(msgspec.Struct):
    start_seconds: Annotated[
        dict[Annotated[str, Meta(pattern="^[A-Za-z ]{1,32}$")], _Seconds], Meta(max_length=_MOST_STAGES)
    ] = {}
    weights: _Weights | None = None

    @property
    def message(self) -> str:
        """The stages as a phrase."""
        stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.start_seconds.items())
        if self.weights is None:
            return stages
        origin = "a peer" if self.weights.source == "peer" else self.weights.source
        return f"{stages}; {self.weights.num_bytes / 1e9:.1f} GB of weights from {origin}"
