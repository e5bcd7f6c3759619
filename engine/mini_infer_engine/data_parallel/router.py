"""What was sent to which engine and has not ended, and where the next request goes. No sockets, no clock."""

from collections.abc import Iterable
from dataclasses import dataclass

from mini_infer_contract.events import KVEvent
from mini_infer_engine.core.request import Request
from mini_infer_engine.data_parallel.held_blocks import HeldBlocks, prompt_hashes
from mini_infer_engine.data_parallel.routing import Candidate, choose_engine


@dataclass(slots=True)
class _Sent:
    """A request at an engine."""

    engine: int
    tokens: int
    """Prompt, and output so far."""
    uncached_tokens: int
    promised: list[int]
    """Blocks; empty once there is output."""
    has_output: bool = False


@dataclass(slots=True)
class _Work:
    """Of one engine: see `Candidate`."""

    requests: int = 0
    queued_tokens: int = 0
    running_tokens: int = 0
    is_alive: bool = True


class EngineRouter:
    """One for each server."""

    def __init__(self, engines: int, *, caches_prefixes: bool = True) -> None:
        self.blocks = HeldBlocks(engines)
        self._caches_prefixes = caches_prefixes
        self._work = [_Work() for _ in range(engines)]
        self._sent: dict[str, _Sent] = {}
        self._turn = 0

    @property
    def has_work(self) -> bool:
        """Whether an engine owes an answer."""
        return bool(self._sent)

    def engine_of(self, request_id: str) -> int | None:
        """Where it is; None: nowhere any more."""
        sent = self._sent.get(request_id)
        return None if sent is None else sent.engine

    def route(self, request: Request, revision: str) -> int | None:
        """The engine that gets it; it counts there from now on. None: no engine lives.

        `revision`: what the engines' block keys begin with.
        """
        tokens = request.prompt_token_ids
        if request.resumed_token_ids:
            tokens = [*tokens, *request.resumed_token_ids]
        hashes = prompt_hashes(tokens, revision, request.cache_salt) if self._caches_prefixes else []
        candidates = [self._candidate(engine, hashes) for engine in range(len(self._work))]
        chosen = choose_engine(len(tokens), candidates, self._turn)
        if chosen is None:
            return None
        self._turn += 1
        uncached = len(tokens) - candidates[chosen].held_tokens
        self._sent[request.request_id] = _Sent(chosen, len(tokens), uncached, hashes)
        self.blocks.promise(chosen, hashes)
        work = self._work[chosen]
        work.requests += 1
        work.queued_tokens += uncached
        return chosen

    def _candidate(self, engine: int, hashes: list[int]) -> Candidate:
        work, held = self._work[engine], self.blocks.depth(engine, hashes)
        return Candidate(held, work.requests, work.queued_tokens, work.running_tokens, work.is_alive)

    def heard(self, request_id: str, num_tokens: int) -> None:
        """It has so many more tokens of output. Requests that have ended are ignored."""
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
        """They have finished, or nobody waits for them any more; unknown ones are ignored."""
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
        """Nothing more goes there."""
        self._work[engine].is_alive = False
        self.ended([request_id for request_id, sent in self._sent.items() if sent.engine == engine])

    def apply(self, engine: int, events: Iterable[KVEvent]) -> list[KVEvent]:
        """See `HeldBlocks.apply`."""
        return self.blocks.apply(engine, events)
