"""Asks engines which code computes their model: a file of the engine's own, or transformers'.

Nobody waits for an answer: it is there at a later observation, which is announced. An engine is asked once; one that
does not answer is asked again after a while, as a network policy may block us.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import aiohttp
import msgspec
from msgspec import Meta

from mini_infer_contract.launch import MODELS_PATH
from mini_infer_operator.objects.engine_answers import read_answer

RETRY_S = 60.0
"""Seconds until an engine that did not answer may be asked again."""
Service = tuple[str, str]
"""A namespace and a name."""


@dataclass(slots=True)
class _Query:
    engine: str
    began_s: float
    task: "asyncio.Task[None]"
    implementation: str | None = None


class ModelImplementations:
    """Caches the answer of the newest engine of each service."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        changed: Callable[[Service], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Calls `changed` when the answer for a service has come.

        `session` must not decompress bodies: a few kilobytes may become gigabytes.
        """
        self._session, self._changed, self._clock = session, changed, clock
        self._queries: dict[Service, _Query] = {}

    def of_service(self, service: Service, engine: str, url: str) -> str | None:
        """Returns `native` or `transformers`, or None if the engine at this URL has not reported it, or not yet.

        `engine` identifies the process or pod. Must be called while an event loop runs.
        """
        known = self._queries.get(service)
        if known is not None and known.engine == engine and not self._is_due(known):
            return known.implementation
        self.forget(service)
        task = asyncio.create_task(self._query(service, url), name=f"implementation of {service[1]}")
        self._queries[service] = _Query(engine, self._clock(), task)
        return None

    def _is_due(self, query: _Query) -> bool:
        return query.implementation is None and self._clock() - query.began_s >= RETRY_S

    async def _query(self, service: Service, url: str) -> None:
        answer = await read_answer(self._session, url + MODELS_PATH, _Models)
        found = next((model.model_impl for model in answer.data if model.model_impl), None) if answer else None
        if found is not None:
            self._queries[service].implementation = found
            self._changed(service)

    def forget(self, service: Service) -> None:
        """Drops what is known of a service, such as one that is deleted."""
        if (query := self._queries.pop(service, None)) is not None:
            query.task.cancel()

    async def close(self) -> None:
        """Cancels all queries, and waits for their end."""
        tasks = [query.task for query in self._queries.values()]
        for service in list(self._queries):
            self.forget(service)
        await asyncio.gather(*tasks, return_exceptions=True)


class _Model(msgspec.Struct):
    model_impl: Annotated[str, Meta(pattern="^[a-z_]{1,32}$")] | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []
