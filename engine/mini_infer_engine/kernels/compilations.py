"""Notices kernels that Triton compiles because its cache on the disk has none."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any


@contextmanager
def noticed_compilations() -> Iterator[Event]:
    """Gives an event that is set once a kernel was compiled in this block, by whatever thread."""
    from triton import knobs  # which is not installed on CPUs

    has_compiled = Event()
    before = knobs.compilation.listener

    def listen(*, cache_hit: bool, **others: Any) -> None:
        if not cache_hit:
            has_compiled.set()
        if before is not None:
            before(cache_hit=cache_hit, **others)

    knobs.compilation.listener = listen
    try:
        yield has_compiled
    finally:
        knobs.compilation.listener = before
