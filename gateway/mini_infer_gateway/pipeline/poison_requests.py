"""Remembers requests that ended engines by their content, so that a client's own retries cannot end more. Pure.

Client libraries retry after a 5xx. Without this memory, each of their retries could end as many engines as one request
may. A request is identified by its path and body, of which only a short hash is stored.
"""

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

KILLS_LIMIT = 2
"""Number of engines that one request may end before it is refused."""
RETENTION_S = 300.0
"""Seconds after the last engine that a request ended until the request may be tried again."""
MAX_REQUESTS = 1024
APART_S = 2.0
"""Seconds within which two ends of one endpoint count as one: no engine starts faster."""

_Key = tuple[int, bytes]


@dataclass(slots=True)
class _Kills:
    """The engines that one request has ended."""

    count: int
    endpoint: str
    last_s: float


class PoisonRequests:
    """The requests that ended engines lately, oldest first."""

    def __init__(self) -> None:
        self._kills: OrderedDict[_Key, _Kills] = OrderedDict()
        self._lengths: dict[int, int] = {}
        """Number of these requests by length of body: a body of another length needs no hash."""

    def __len__(self) -> int:
        return len(self._kills)

    def kills(self, path: str, body: bytes, now_s: float) -> int:
        """Returns how many engines this request has ended lately."""
        if not self._kills:
            return 0
        self._evict_old(now_s)
        if len(body) not in self._lengths:
            return 0
        entry = self._kills.get(_key(path, body))
        return entry.count if entry else 0

    def killed(self, path: str, body: bytes, endpoint: str, now_s: float) -> None:
        """Counts an engine that ended while it processed this request."""
        self._evict_old(now_s)
        key = _key(path, body)
        entry = self._pop(key) or _Kills(0, "", now_s)
        is_same = entry.endpoint == endpoint and now_s - entry.last_s < APART_S
        self._kills[key] = _Kills(entry.count + (not is_same), endpoint, now_s)
        self._lengths[len(body)] = self._lengths.get(len(body), 0) + 1
        if len(self._kills) > MAX_REQUESTS:
            self._pop(next(iter(self._kills)))

    def answered(self, path: str, body: bytes) -> None:
        """Forgets a request that an engine has answered: it was not the cause of the earlier failures."""
        if len(body) in self._lengths:
            self._pop(_key(path, body))

    def _evict_old(self, now_s: float) -> None:
        while self._kills:
            key, oldest = next(iter(self._kills.items()))
            if now_s - oldest.last_s < RETENTION_S:
                return
            self._pop(key)

    def _pop(self, key: _Key) -> _Kills | None:
        entry = self._kills.pop(key, None)
        if entry:
            self._lengths[key[0]] -= 1
            if not self._lengths[key[0]]:
                del self._lengths[key[0]]
        return entry


def _key(path: str, body: bytes) -> _Key:
    return len(body), blake2b(body, digest_size=16, person=blake2b(path.encode(), digest_size=16).digest()).digest()
