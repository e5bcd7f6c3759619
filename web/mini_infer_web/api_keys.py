"""Decides whether a request has sent one of a server's API keys, so that it may be served, at the gateway and at an
engine.

Keys come from flags, from the environment and from a file that may change while the server runs, such as a mounted
Secret. They are kept as SHA-256 hashes and looked up by those; no message and no log line ever holds one. A line of the
file may say more of its key: `KEY name=team-a weight=2 max-priority=-1`.
"""

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from mini_infer_contract import launch
from mini_infer_web.api_docs import DOCS_PATHS, FAVICON_PATH, OPENAPI_PATH
from mini_infer_web.api_errors import ApiError

API_KEY_ENV: Final = "MINI_INFER_API_KEY"
"""Environment variable with one more key of a server, for where it should not stand in the list of processes."""
ENGINE_API_KEY_ENV: Final = "MINI_INFER_ENGINE_API_KEY"
"""Environment variable with the key that a gateway sends to engines."""

FREE_PATHS: Final = frozenset(
    (
        launch.HEALTH_PATH,
        launch.READY_PATH,
        launch.METRICS_PATH,
        launch.DRAIN_PATH,
        "/health",
        "/ping",
        "/version",
        "/load",
        OPENAPI_PATH,
        FAVICON_PATH,
        *DOCS_PATHS,
    )
)
"""Paths that need no key: probes, metrics, descriptions, and what an operator counts; POST /drain has a guard of its
own (the engine's api/admin_guard.py). None reveals a request's content.
"""

LOOK_EVERY_S: Final = 1.0
"""Seconds between two looks at a file of keys, while requests come."""

MOST_PRIORITY: Final = 2**31
"""Priorities lie between this number's negative and it, as engines take them."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LARGEST_WEIGHT: Final = 1e6

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeyGrant:
    """The rights of one API key. Keys of one name, such as an old and a new one, have the same name and share."""

    digest: bytes
    name: str
    """Name for logs and for fair sharing; a key without a name has one made from its hash."""
    weight: float = 1.0
    """The key's share of the engines relative to other keys whose requests wait."""
    max_priority: int | None = None
    """The lowest number, which goes first, that its requests may have as their priority; None for the server's default.
    """
    admin: bool = False
    """True if its owner administers the server, and so may see other keys' use of it."""

    @cached_property
    def cache_salt(self) -> str:
        """Salt that separates its prefix cache from that of other keys. A client cannot guess the salt of a key that it
        lacks.
        """
        return SALTED_BY_KEY + hashlib.sha256(b"mini-infer cache salt\0" + self.digest).hexdigest()[:32]


SALTED_BY_KEY: Final = "by-key:"
"""Prefix of a cache salt that a gateway has already derived from a key."""


def salted(grant: KeyGrant, own: str) -> str:
    """Returns the cache salt of a request of this key whose own salt is `own`."""
    return f"{grant.cache_salt}:{own}" if own else grant.cache_salt


def clamped(priority: int, lowest: int) -> int:
    """Returns the priority of a request that sent `priority` and may have `lowest` or more."""
    return max(lowest, -MOST_PRIORITY, min(MOST_PRIORITY - 1, priority))


class ApiKeys:
    """The keys of one server. It is false if the server has none and needs none."""

    def __init__(
        self,
        keys: Iterable[str] = (),
        file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ValueError or OSError if the file has no key, or cannot be read."""
        self._own = {_digest(key): grant_of(key) for key in keys if key}
        self._file, self._clock = file, clock
        self._looked_s = clock()
        self._signature = _signature(file) if file else None
        self._of_file: Mapping[bytes, KeyGrant] = _grants_of(file) if file else {}

    def __bool__(self) -> bool:
        """True if requests need a key."""
        return bool(self._own or self._file)

    def refusal(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> ApiError | None:
        """Returns the 401 of a request without a key of ours; None if it may be served. Header names are in lower case.

        OPTIONS is free: before it sends keys, a browser requests with it what it may send.
        """
        if not self or path in FREE_PATHS or method == "OPTIONS":
            return None
        headers = list(headers)
        if self.grant(headers) is not None:
            return None
        problem = "the API key is not one of this server's" if presented_key(headers) else "there is no API key"
        return ApiError(
            401,
            f"{problem}: send yours in the header Authorization, as Bearer KEY, or in x-api-key",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )

    def grant(self, headers: Iterable[tuple[bytes, bytes]]) -> KeyGrant | None:
        """Returns the rights of a request's key; None if it has none of ours.

        A lookup by the hash leaks nothing to a client that measures time: it cannot choose how its guess's hash begins.
        """
        if not self or (sent := presented_key(headers)) is None:
            return None
        self._look()
        digest = hashlib.sha256(sent).digest()
        return self._of_file.get(digest) or self._own.get(digest)

    def is_lone(self, grant: KeyGrant) -> bool:
        """True if no key of another name exists, so that there are no other clients whose use could be seen."""
        return all(one.name == grant.name for one in (*self._own.values(), *self._of_file.values()))

    def _look(self) -> None:
        """Reads the file again if it has changed; while it cannot be read, the keys that it had stay valid."""
        now_s = self._clock()
        if self._file is None or now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        try:
            signature = _signature(self._file)
            if signature != self._signature:
                self._of_file = _grants_of(self._file)
                self._signature = signature
                log.info("%s has changed: %d API keys", self._file, len(self._of_file))
        except (OSError, ValueError) as error:
            log.warning("the keys of before stay in force: %s", error)


def configured_keys(keys: Sequence[str], file: str | None) -> ApiKeys:
    """Returns the keys of flags, file and environment. Raises ValueError or OSError as `ApiKeys` does."""
    return ApiKeys([*keys, os.environ.get(API_KEY_ENV, "")], Path(file) if file else None)


def presented_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Returns the key that a request sends: `Authorization: Bearer KEY` as OpenAI's clients do, or `x-api-key`, as
    Anthropic's.
    """
    found = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer" and key.strip():
                return key.strip()
        elif name == b"x-api-key" and value.strip():
            found = value.strip()
    return found


def keys_in(text: str) -> tuple[str, ...]:
    """Returns the keys of a text, one a line, its first word. Empty lines are skipped, and a # at the beginning or
    after a blank begins a comment.
    """
    return tuple(words[0] for _, words in _lines(text))


def grants_in(text: str) -> dict[bytes, KeyGrant]:
    """Returns the keys of a file by their hashes, with the fields of their lines. Raises a ValueError that names the
    line at fault.
    """
    grants: dict[bytes, KeyGrant] = {}
    weights: dict[str, float] = {}
    for number, (key, *fields) in _lines(text):
        try:
            grant = grant_of(key, fields)
            if weights.setdefault(grant.name, grant.weight) != grant.weight:
                raise ValueError(f"name={grant.name} has two weights: give its keys the same")
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        grants[grant.digest] = grant
    return grants


def _lines(text: str) -> Iterable[tuple[int, list[str]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if words := re.sub(r"(^|\s)#.*", "", line).split():
            yield number, words


def grant_of(key: str, fields: Sequence[str] = ()) -> KeyGrant:
    """Returns the rights of a key whose line of the file has these `fields`. Raises ValueError if one of those is
    wrong.
    """
    digest = _digest(key)
    values: dict[str, str] = {}
    for field in fields:
        name, equals, value = field.partition("=")
        if not equals or name not in ("name", "weight", "max-priority", "admin") or name in values:
            # Never the word itself: it may be a part of a key.
            known = "name=NAME, weight=NUMBER, max-priority=NUMBER, admin=true"
            raise ValueError(f"behind the key stand {known}, each once at most")
        values[name] = value
    name = values.get("name", f"key-{hashlib.sha256(digest).hexdigest()[:8]}")
    if not _NAME.fullmatch(name):
        raise ValueError("name must have 1 to 64 letters, digits, dots, dashes or underscores")
    try:
        weight = float(values.get("weight", 1))
        max_priority = int(values["max-priority"]) if "max-priority" in values else None
    except ValueError:
        raise ValueError("weight must be a number, and max-priority a whole one") from None
    if values.get("admin", "true") != "true":
        raise ValueError("admin must be true: leave it out for keys of clients")
    if not 0 < weight <= _LARGEST_WEIGHT:
        raise ValueError(f"weight must lie above 0 and be at most {_LARGEST_WEIGHT:.0f}")
    if max_priority is not None and not -MOST_PRIORITY <= max_priority < MOST_PRIORITY:
        raise ValueError(f"max-priority must lie between {-MOST_PRIORITY} and {MOST_PRIORITY - 1}")
    return KeyGrant(digest, name, weight, max_priority, "admin" in values)


def _grants_of(file: Path) -> dict[bytes, KeyGrant]:
    try:
        grants = grants_in(file.read_text())
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no text: write API keys into it, one a line") from None
    except ValueError as error:
        raise ValueError(f"{file}, {error}") from None
    if not grants:
        raise ValueError(f"{file} has no API key: write one into it, or several, one a line")
    return grants


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _signature(file: Path) -> tuple[int, int, int]:
    found = file.stat()  # Through links: a mounted Secret changes by what its link leads to.
    return found.st_mtime_ns, found.st_ino, found.st_size
