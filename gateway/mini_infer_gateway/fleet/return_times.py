"""Learns when sessions return: the time from the end of an answer to the session's next request. Pure: times come in.

A session is recognised by its prompt: the next request continues it. Gaps are learned for each client, apart for
answers that were tool calls, which programs continue within seconds, and for others, which people read. Whether an
answer was a tool call is seen when the session returns, with the tool's result as its last message; before, it is
expected as often as requests of this kind had such answers.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log2
from typing import Literal, NamedTuple

from mini_infer_contract.launch import MAX_LEASE_S

RequestKind = Literal["result", "tools", "chat"]
"""The last message of a request is a tool's *result*, or it offers *tools*, or neither (*chat*)."""

HORIZON_S = 600.0
"""Seconds after which a session counts as ended."""
MAX_SESSIONS = 20_000
MAX_CLIENTS = 1_000
SEARCHED_BLOCKS = 1_024
"""Blocks at the end of a prompt among which the end of the prompt before it is searched: 16,000 tokens of one turn."""
LEAST_RETURNS = 8.0
"""Returns of a client before its own gaps count; until then those of all do."""
LEAST_SHARE = 0.3
"""Share of sessions that return below which none is expected to: most of what is retained would be in vain."""
QUANTILE = 0.9
"""Share of returns that are to come within a lease. Later ones find what LRU has left; with longer leases, more is
retained for sessions that have ended (benchmarks/kv_leases.py).
"""
EARLY_QUANTILE = 0.1
"""Share of returns that come before one is said to near: their blocks are loaded when they are admitted."""
MEMORY = 0.995
"""Factor by which each observation lessens the weight of those before it."""
_FIRST_S, _PER_OCTAVE, _BUCKETS = 0.25, 4, 56


class Expected(NamedTuple):
    """The time of a session's next request, in seconds after the answer."""

    lease_s: float = 0.0
    """Seconds within which it is expected; 0 if it is not."""
    returns_s: float = 0.0
    """Seconds before which it is not expected; 0 if it may come at once."""


NOT_EXPECTED = Expected()


class Return(NamedTuple):
    """A request that continues a session."""

    gap_s: float
    """Seconds since the session's last answer ended."""
    request_id: str
    """Id of the request that it continues, as its engine has it."""
    endpoint: str
    """The engine that answered it."""


class _Gaps:
    """A histogram of gaps, in steps of a factor of 1.2 from 0.25 s on, in which older ones fade."""

    __slots__ = ("_counts", "total")

    def __init__(self) -> None:
        self._counts = [0.0] * _BUCKETS
        self.total = 0.0

    def add(self, gap_s: float) -> None:
        step = int(_PER_OCTAVE * log2(gap_s / _FIRST_S)) + 1 if gap_s > _FIRST_S else 0
        self._counts = [MEMORY * count for count in self._counts]
        self._counts[min(step, _BUCKETS - 1)] += 1.0
        self.total = MEMORY * self.total + 1.0

    def return_times(self) -> "Expected":
        """Returns the lower end of the step with the early quantile, and the upper end of that with the late one."""
        return Expected(self._end_s(self._step(QUANTILE)), self._end_s(self._step(EARLY_QUANTILE) - 1))

    def _step(self, share: float) -> int:
        below = 0.0
        for step, count in enumerate(self._counts):
            below += count
            if below >= share * self.total:
                return step
        return _BUCKETS - 1

    @staticmethod
    def _end_s(step: int) -> float:
        end_s: float = _FIRST_S * 2.0 ** (step / _PER_OCTAVE)
        return 0.0 if step < 0 else min(MAX_LEASE_S, end_s)


@dataclass(slots=True)
class _Kind:
    """Counts the sessions that returned, or did not, after requests of one kind."""

    returned: float = 0.0
    tool_calls: float = 0.0
    """Returns with a tool's result."""
    lost: float = 0.0

    def add(self, *, returned: bool, was_tool_call: bool = False) -> None:
        self.returned = MEMORY * self.returned + returned
        self.tool_calls = MEMORY * self.tool_calls + was_tool_call
        self.lost = MEMORY * self.lost + (not returned)


@dataclass(slots=True)
class _Client:
    """The gaps and returns of one client's sessions."""

    after_tool_call: _Gaps = field(default_factory=_Gaps)
    after_text: _Gaps = field(default_factory=_Gaps)
    kinds: dict[RequestKind, _Kind] = field(default_factory=dict)

    def kind(self, kind: RequestKind) -> _Kind:
        return self.kinds.setdefault(kind, _Kind())

    def expected(self, kind: RequestKind) -> Expected | None:
        """Returns when sessions return; None if too little is known."""
        seen = self.kinds.get(kind)
        if seen is None or seen.returned + seen.lost < LEAST_RETURNS:
            return None
        if seen.returned < LEAST_SHARE * (seen.returned + seen.lost):
            return NOT_EXPECTED
        is_tool_call = 2 * seen.tool_calls >= seen.returned
        return (self.after_tool_call if is_tool_call else self.after_text).return_times()


@dataclass(frozen=True, slots=True)
class _Ended:
    at_s: float
    client: str
    kind: RequestKind
    request_id: str
    endpoint: str


class ReturnTimes:
    """The sessions that may return, and the gaps of all clients."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[bytes, _Ended] = OrderedDict()
        """Sessions by a key near the end of their latest prompt, in the order in which its answer ended."""
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._all = _Client()

    def arrived(self, keys: Sequence[bytes], *, is_result: bool, now_s: float) -> Return | None:
        """Records a request. Returns the request that it continues; None for a new session."""
        if not self._waiting:
            return None
        for key in reversed(keys[-SEARCHED_BLOCKS:]):
            ended = self._waiting.pop(key, None)
            if ended is not None:
                gap_s = max(0.0, now_s - ended.at_s)
                for client in (self._client(ended.client), self._all):
                    (client.after_tool_call if is_result else client.after_text).add(gap_s)
                    client.kind(ended.kind).add(returned=True, was_tool_call=is_result)
                return Return(gap_s, ended.request_id, ended.endpoint)
        return None

    def ended(
        self,
        keys: Sequence[bytes],
        client: str,
        kind: RequestKind,
        now_s: float,
        request_id: str = "",
        endpoint: str = "",
    ) -> None:
        """Records that a request with this prompt was answered, by an engine that knows it by `request_id`."""
        if len(keys) < 2:
            return
        # The last block may hold the beginning of an answer as the template writes it, which it need not repeat.
        key = keys[-2]
        self._waiting.pop(key, None)
        self._waiting[key] = _Ended(now_s, client, kind, request_id, endpoint)
        oldest = next(iter(self._waiting.values()))
        while oldest.at_s < now_s - HORIZON_S or len(self._waiting) > MAX_SESSIONS:
            self._waiting.popitem(last=False)
            for one in (self._client(oldest.client), self._all):
                one.kind(oldest.kind).add(returned=False)
            oldest = next(iter(self._waiting.values()))

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forgets the session that a prompt continues: its client says that it does not return."""
        for key in reversed(keys[-SEARCHED_BLOCKS:]):
            if self._waiting.pop(key, None) is not None:
                return

    def expected(self, client: str, kind: RequestKind) -> Expected:
        """Returns when the session of a request is expected to return."""
        own = self._clients[client].expected(kind) if client in self._clients else None
        return (self._all.expected(kind) if own is None else own) or NOT_EXPECTED

    def lease_s(self, client: str, kind: RequestKind) -> float:
        """Returns the seconds after the answer's end within which the session is expected; 0 if it is not."""
        return self.expected(client, kind).lease_s

    def _client(self, name: str) -> _Client:
        client = self._clients.pop(name, None) or _Client()
        self._clients[name] = client
        if len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)
        return client
