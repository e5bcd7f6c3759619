"""Whether a request may be served: it has sent one of a server's API keys. The same at the gateway and at an engine.

Keys come from flags, from the environment and from a file that may change while the server runs, such as a mounted
Secret. They are kept as hashes and compared in constant time; no message and no log line ever holds one.
"""

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from mini_infer_contract import launch
from mini_infer_contract.api_errors import ApiError

API_KEY_ENV: Final = "MINI_INFER_API_KEY"
"""One more key of a server's, for where it should not stand in the list of processes."""
ENGINE_API_KEY_ENV: Final = "MINI_INFER_ENGINE_API_KEY"
"""The key that a gateway sends to engines."""

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
        "/docs",
        "/openapi.json",
    )
)
"""Asked without a key: probes, metrics, descriptions, and what an operator counts; /drain begins one only for its own
machine. None tells what anybody has asked."""

LOOK_EVERY_S: Final = 1.0
"""How often a file of keys is looked at, when requests come."""

log = logging.getLogger(__name__)


class ApiKeys:
    """The keys of one server. False: it has none and asks for none."""

    def __init__(
        self,
        keys: Iterable[str] = (),
        file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """ValueError, OSError: the file has no key, or cannot be read."""
        self._own = tuple(_digest(key) for key in keys if key)
        self._file, self._clock = file, clock
        self._looked_s = clock()
        self._signature = _signature(file) if file else None
        self._of_file = _keys_of(file) if file else ()

    def __bool__(self) -> bool:
        """Whether requests need a key."""
        return bool(self._own or self._file)

    def refusal(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> ApiError | None:
        """The 401 of a request without a key of ours; None: it may be served. Header names are in lower case.

        OPTIONS is free: a browser asks with it, before it sends keys, what it may send.
        """
        if not self or path in FREE_PATHS or method == "OPTIONS":
            return None
        sent = presented_key(headers)
        if sent is not None and self._knows(sent):
            return None
        problem = "the API key is not one of this server's" if sent else "there is no API key"
        return ApiError(
            401,
            f"{problem}: send yours in the header Authorization, as Bearer KEY, or in x-api-key",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )

    def _knows(self, sent: bytes) -> bool:
        self._look()
        digest = hashlib.sha256(sent).digest()
        found = False
        for known in (*self._own, *self._of_file):  # All of them: the time must not tell which was right.
            found |= hmac.compare_digest(known, digest)
        return found

    def _look(self) -> None:
        """Reads the file again where it has changed; while it cannot be read, the keys that it had are good."""
        now_s = self._clock()
        if self._file is None or now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        try:
            signature = _signature(self._file)
            if signature != self._signature:
                self._of_file = _keys_of(self._file)
                self._signature = signature
                log.info("%s has changed: %d API keys", self._file, len(self._of_file))
        except (OSError, ValueError) as error:
            log.warning("the keys of before stay in force: %s", error)


def configured_keys(keys: Sequence[str], file: str | None) -> ApiKeys:
    """Those of flags, file and environment. ValueError, OSError: see ApiKeys."""
    return ApiKeys([*keys, os.environ.get(API_KEY_ENV, "")], Path(file) if file else None)


def presented_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """What a request sends: `Authorization: Bearer KEY` as OpenAI's clients do, or `x-api-key`, as Anthropic's."""
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
    """One a line; empty lines are none, and a # at the beginning or after a blank begins a comment."""
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
    return tuple(line for line in lines if line)


def _keys_of(file: Path) -> tuple[bytes, ...]:
    try:
        keys = keys_in(file.read_text())
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no text: write API keys into it, one a line") from None
    if not keys:
        raise ValueError(f"{file} has no API key: write one into it, or several, one a line")
    return tuple(map(_digest, keys))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _signature(file: Path) -> tuple[int, int, int]:
    found = file.stat()  # Through links: a mounted Secret changes by what its link leads to.
    return found.st_mtime_ns, found.st_ino, found.st_size
