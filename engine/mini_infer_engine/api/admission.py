"""Limits how much a server accepts: choices that run or wait, and bodies that are being made into prompts. No HTTP, no
model.

Requests above a limit are refused with Retry-After: a queue without a bound only turns overload into memory and
latency.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from mini_infer_web.api_errors import ApiError
from mini_infer_web.fair_budget import FairBudget

_RETRY_HEADERS = {"retry-after": "1"}


@dataclass(slots=True)
class Admission:
    """Limits and counts of one process."""

    max_choices: int
    """Most choices of all requests, running or waiting: each becomes one sequence of the engine."""
    max_body_bytes: int
    """Most bytes of bodies that have arrived and are no token ids yet."""
    max_image_bytes: int = 4 << 30
    """Most bytes of values of images, in requests that run or wait."""
    num_choices: int = field(default=0, init=False)
    reading: FairBudget = field(init=False)
    """Bytes of bodies that are being read, of which each client gets its share; as many as `max_body_bytes`."""
    num_body_bytes: int = field(default=0, init=False)
    num_image_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.reading = FairBudget(self.max_body_bytes)

    @contextmanager
    def read(self, client: str) -> Iterator[Callable[[int], None]]:
        """Counts a body as being read. Yields a function that takes its length so far, and raises ApiError 429 if
        others leave no room for so much.
        """
        taken = 0

        def grow(size_bytes: int) -> None:
            nonlocal taken
            if size_bytes > taken:
                if not self.reading.take(size_bytes - taken, client):
                    raise ApiError(
                        429,
                        f"{self.reading.used} bytes of requests are being read, and this server takes "
                        f"{self.max_body_bytes} at once (--max-tokenizing-size): send the request again later",
                        code="queue_full",
                        headers=_RETRY_HEADERS | {"connection": "close"},
                    )
                taken = size_bytes

        try:
            yield grow
        finally:
            self.reading.give_back(taken, client)

    @contextmanager
    def choices(self, count: int) -> Iterator[None]:
        """Counts so many more choices as running or waiting. Raises ApiError 429 if there is no room."""
        if self.num_choices + count > self.max_choices:
            raise ApiError(
                429,
                f"{self.num_choices} choices run or wait, and this server takes {self.max_choices} at once "
                "(--max-num-seqs and --max-waiting): send the request again later",
                code="queue_full",
                headers=_RETRY_HEADERS,
            )
        self.num_choices += count
        try:
            yield
        finally:
            self.num_choices -= count

    @contextmanager
    def fetched(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that counts bytes that are read beside a body, such as images that it names, until the
        block ends. The function raises ApiError 429 if others leave no room.
        """
        with ExitStack() as stack:
            yield lambda count: stack.enter_context(self.body(count))

    @contextmanager
    def image_values(self, size_bytes: int) -> Iterator[None]:
        """Counts the values of a request's images; one request alone always may have them. Raises ApiError 429 if
        others leave no room.
        """
        if self.num_image_bytes and self.num_image_bytes + size_bytes > self.max_image_bytes:
            raise ApiError(
                429,
                f"images of {self.num_image_bytes} bytes of values run or wait, and this server takes "
                f"{self.max_image_bytes} at once (--max-image-memory): send the request again later",
                code="queue_full",
                headers=_RETRY_HEADERS,
            )
        self.num_image_bytes += size_bytes
        try:
            yield
        finally:
            self.num_image_bytes -= size_bytes

    @contextmanager
    def body(self, size_bytes: int) -> Iterator[None]:
        """Counts a body as being made into a prompt; one alone always may be. Raises ApiError 429 if others leave no
        room.
        """
        if self.num_body_bytes and self.num_body_bytes + size_bytes > self.max_body_bytes:
            raise ApiError(
                429,
                f"{self.num_body_bytes} bytes of other requests are being tokenised, and this server takes "
                f"{self.max_body_bytes} at once (--max-tokenizing-size): send the request again later",
                code="queue_full",
                headers=_RETRY_HEADERS,
            )
        self.num_body_bytes += size_bytes
        try:
            yield
        finally:
            self.num_body_bytes -= size_bytes
