"""Routes requests to the engines of a server, and tracks those that have not ended. No sockets, no clock."""

from collections.abc import Iterable
from dataclasses import dataclass

from mini_infer_contract.events import KVEvent
from mini_infer_engine.core.request import Request
from mini_infer_engine.data_parallel.engine_blocks import EngineBlocks, prompt_hashes
from mini_infer_engine.data_parallel.routing import Candidate, choose_engine


@dataclass(slots=True)
class _Sent:
    """A request that was sent to an engine."""

    engine: int
    tokens: int
    """Tokens of the prompt, and of the output so far."""
    uncached_tokens: int
    promised: list[int]
    """Names of the prompt's blocks that the engine will hold; empty once there is output."""
    has_output: bool = False


@dataclass(slots=True)
class _Work:
    """The load of one engine, with the fields of `Candidate`."""

    requests: int = 0
    queued_tokens: int = 0
    running_tokens: int = 0
    is_alive: bool = True


class EngineRouter:
    """Routes the requests of one server."""

    def __init__(self, engines: int, *, caches_prefixes: bool = True) -> None:
        self.blocks = EngineBlocks(engines)
        self._caches_prefixes = caches_prefixes
        self._work = [_Work() for _ in range(engines)]
        self._sent: dict[str, _Sent] = {}
        self._rotation = 0

    @property
    def has_work(self) -> bool:
        """True if a request has not ended."""
        return bool(self._sent)

    def engine_of(self, request_id: str) -> int | None:
        """Returns the engine of a request, or None if it has ended."""
        sent = self._sent.get(request_id)
        return None if sent is None else sent.engine

    def route(self, request: Request, revision: str) -> int | None:
        """Chooses the engine of a request, to whose load it counts from now on. Returns None if no engine is alive.

        `revision` is the root of the engines' block keys.
        """
        tokens = request.prompt_token_ids
        if request.resumed_token_ids:
            tokens = [*tokens, *request.resumed_token_ids]
        hashes: list[int] = []
        if self._caches_prefixes:
            hashes = prompt_hashes(tokens, revision, request.cache_salt, request.images)
        candidates = [self._candidate(engine, hashes) for engine in range(len(self._work))]
        chosen = choose_engine(len(tokens), candidates, self._rotation)
        if chosen is None:
            return None
        self._rotation += 1
        uncached = len(tokens) - candidates[chosen].cached_tokens
        self._sent[request.request_id] = _Sent(chosen, len(tokens), uncached, hashes)
        self.blocks.promise(chosen, hashes)
        work = self._work[chosen]
        work.requests += 1
        work.queued_tokens += uncached
        return chosen

    def _candidate(self, engine: int, hashes: list[int]) -> Candidate:
        work, cached = self._work[engine], self.blocks.depth(engine, hashes)
        return Candidate(cached, work.requests, work.queued_tokens, work.running_tokens, work.is_alive)

    def record_output(self, request_id: str, num_tokens: int) -> None:
        """Records further output tokens of a request. Requests that have ended are ignored."""
        sent = self._sent.get(request_id)
        if sent is None:
            return
        work = self._work[sent.engine]
        sent.tokens += num_tokens
        work.running_tokens += num_tokens
        if not sent.has_output:
            sent.has_output = True
            work.queued_tokens -= sent.uncached_tokens
            work.running_tokens += sent.tokens - num_tokens
            self._settle(sent)

    def _settle(self, sent: _Sent) -> None:
        self.blocks.settle(sent.engine, sent.promised)
        sent.promised = []

    def ended(self, request_ids: Iterable[str]) -> None:
        """Removes requests that have finished or were aborted. Unknown ids are ignored."""
        for request_id in request_ids:
            sent = self._sent.pop(request_id, None)
            if sent is None:
                continue
            work = self._work[sent.engine]
            work.requests -= 1
            if sent.has_output:
                work.running_tokens -= sent.tokens
            else:
                work.queued_tokens -= sent.uncached_tokens
                self._settle(sent)

    def died(self, engine: int) -> None:
        """Removes all requests of an engine that has ended. No more are routed to it."""
        self._work[engine].is_alive = False
        self.ended([request_id for request_id, sent in self._sent.items() if sent.engine == engine])

    def apply(self, engine: int, events: Iterable[KVEvent]) -> list[KVEvent]:
        """Applies an engine's events to the record of its blocks, and returns the events of the server as a whole."""
        return self.blocks.apply(engine, events)
