"""Remembers sessions whose next request is expected, so that their blocks can be prefetched before it comes. Pure.

Each is the sequence of the session's last request, without pages. Times are passed in.
"""

from collections import OrderedDict
from copy import copy
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count

import msgspec

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_engine.core.sequence import Sequence, State

MAX_SESSIONS = 1024
MAX_TOKENS = 4 << 20
"""Tokens of all sessions together; each takes some 7 bytes, key included."""
LOOK_EVERY_S = 1.0
"""Seconds between two looks at a session while it is expected."""
_SEARCHED_BLOCKS = 1024
"""Blocks at the end of a sequence among which the session's earlier request ends."""


class _Session:
    __slots__ = ("keys", "name", "sequence", "until_s")

    def __init__(self, name: str, sequence: Sequence, until_s: float) -> None:
        self.name, self.sequence, self.until_s = name, sequence, until_s
        ends = len(sequence.keys), min(len(sequence.keys), sequence.num_prompt // BLOCK_SIZE_TOKENS)
        self.keys = {sequence.keys[end - 1] for end in ends if end}
        """Keys of the last blocks of prompt and answer: a next prompt may have the answer in other tokens."""


class ReturningSessions:
    """The sessions that may return, by the id of their last request."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._by_key: dict[bytes, _Session] = {}
        """Sessions by the keys of their last blocks."""
        self._num_tokens = 0
        self._due: list[tuple[float, int, _Session]] = []
        self._serials = count()

    def __len__(self) -> int:
        return len(self._sessions)

    def ended(self, sequence: Sequence, now_s: float) -> None:
        """Remembers the session of a sequence that ends, in place of its earlier request, if it has a lease."""
        request = sequence.request
        self.forget(sequence)
        if request.lease_s <= 0 or not sequence.keys:
            return
        remembered = copy(sequence)
        remembered.request = msgspec.structs.replace(request, prompt_token_ids=(), images=[])
        if sequence.images:
            inputs = tuple(msgspec.structs.replace(image, pixels=b"") for image in sequence.images.inputs)
            remembered.images = replace(sequence.images, inputs=inputs)
        remembered.pages, remembered.more_page_tables, remembered.host_pages = [], [], []
        remembered.state, remembered.matcher, remembered.group = State.ENDED, None, None
        name = client_id(request.request_id)
        if (earlier := self._sessions.get(name)) is not None:
            self._remove(earlier)
        session = _Session(name, remembered, now_s + request.lease_s)
        self._sessions[name] = session
        self._by_key.update(dict.fromkeys(session.keys, session))
        self._num_tokens += len(remembered.token_ids)
        while len(self._sessions) > MAX_SESSIONS or self._num_tokens > MAX_TOKENS:
            self._remove(next(iter(self._sessions.values())))
        if request.returns_s:
            heappush(self._due, (now_s + request.returns_s, next(self._serials), session))

    def forget(self, sequence: Sequence) -> None:
        """Forgets the session that a sequence continues."""
        if not self._by_key:
            return
        for key in reversed(sequence.keys[-_SEARCHED_BLOCKS:]):
            if (session := self._by_key.get(key)) is not None:
                self._remove(session)

    def named(self, name: str) -> Sequence | None:
        """Returns the sequence of the request with a client's id, or None if it is not remembered."""
        session = self._sessions.get(name)
        return None if session is None else session.sequence

    @property
    def next_due_s(self) -> float:
        """The time at which `due` returns something; infinite if it never does."""
        return self._due[0][0] if self._due else float("inf")

    def due(self, now_s: float) -> tuple[Sequence, float] | None:
        """Returns a session whose return nears and the end of its lease, or None. It is due again a while later."""
        while self._due and self._due[0][0] <= now_s:
            _, _, session = heappop(self._due)
            if self._sessions.get(session.name) is not session or session.until_s <= now_s:
                continue
            heappush(self._due, (now_s + LOOK_EVERY_S, next(self._serials), session))
            return session.sequence, session.until_s
        return None

    def clear(self) -> None:
        """Forgets all sessions."""
        self._sessions.clear()
        self._by_key.clear()
        self._due.clear()
        self._num_tokens = 0

    def _remove(self, session: _Session) -> None:
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]
            self._num_tokens -= len(session.sequence.token_ids)
        for key in session.keys:
            if self._by_key.get(key) is session:
                del self._by_key[key]


def client_id(request_id: str) -> str:
    """Returns the client's id in the core's id of a request, which has a serial number after it."""
    return request_id.rpartition("#")[0] or request_id
