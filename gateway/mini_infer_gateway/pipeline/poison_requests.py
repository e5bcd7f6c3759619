"""Requests that ended engines, remembered by their content, so that a client's own retries cannot end more. Pure.

A client's library asks again after a 5xx. Without this memory each of its tries would end as many engines as one
request may. A request is known by path and body, a short hash of which is all that is kept.
"""

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

from mini_infer_web.api_errors import ApiError

KILLS_LIMIT = 2
"""Engines that one request may end."""
REMEMBERED_S = 300.0
"""From the last engine that a request ended until it may be tried again."""
REMEMBERED_REQUESTS = 1024
APART_S = 2.0
"""Two ends of one endpoint that are closer than this are one: no engine starts faster."""

_Key = tuple[int, bytes]


@dataclass(slots=True)
class _Kills:
    """What one request has ended."""

    count: int
    endpoint: str
    last_s: float


class PoisonRequests:
    """The requests that ended engines lately, the oldest first."""

    def __init__(self) -> None:
        self._kills: OrderedDict[_Key, _Kills] = OrderedDict()
        self._lengths: dict[int, int] = {}
        """How many of them have a body of this length: others need no hash."""

    def __len__(self) -> int:
        return len(self._kills)

    def kills(self, path: str, body: bytes, now_s: float) -> int:
        """Returns how many engines this request has ended lately."""
        if not self._kills:
            return 0
        self._forget_old(now_s)
        if len(body) not in self._lengths:
            return 0
        known = self._kills.get(_key(path, body))
        return known.count if known else 0

    def killed(self, path: str, body: bytes, endpoint: str, now_s: float) -> None:
        """Counts an engine that ended while it had this request."""
        self._forget_old(now_s)
        key = _key(path, body)
        known = self._pop(key) or _Kills(0, "", now_s)
        is_same = known.endpoint == endpoint and now_s - known.last_s < APART_S
        self._kills[key] = _Kills(known.count + (not is_same), endpoint, now_s)
        self._lengths[len(body)] = self._lengths.get(len(body), 0) + 1
        if len(self._kills) > REMEMBERED_REQUESTS:
            self._pop(next(iter(self._kills)))

    def answered(self, path: str, body: bytes) -> None:
        """Forgets a request that an engine has answered: it was not what ended the others."""
        if len(body) in self._lengths:
            self._pop(_key(path, body))

    def _forget_old(self, now_s: float) -> None:
        while self._kills:
            key, oldest = next(iter(self._kills.items()))
            if now_s - oldest.last_s < REMEMBERED_S:
                return
            self._pop(key)

    def _pop(self, key: _Key) -> _Kills | None:
        known = self._kills.pop(key, None)
        if known:
            self._lengths[key[0]] -= 1
            if not self._lengths[key[0]]:
                del self._lengths[key[0]]
        return known


def endpoints_ended(model: str, kills: int, detail: str = "") -> ApiError:
    """The 502 of a request that ended engines. OpenAI's and Anthropic's clients do not repeat it by themselves."""
    return ApiError(
        502,
        f"{kills} endpoints of model {model!r} ended while they had this request, so it is not tried on another"
        f"{detail and f' ({detail})'}; the same request is refused for {REMEMBERED_S:g} s",
        code="endpoints_ended",
        headers={"x-should-retry": "false"},
    )


def _key(path: str, body: bytes) -> _Key:
    return len(body), blake2b(body, digest_size=16, person=blake2b(path.encode(), digest_size=16).digest()).digest()
