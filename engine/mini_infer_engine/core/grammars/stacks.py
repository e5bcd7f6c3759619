"""Enlarges the stacks of the threads on which llguidance recurses, to sixteen times the one on which grammars are
proved.

A stack that overflows ends the process, whatever language has caught it. The library compiles on the caller's thread
and computes masks on the caller's or on those of its pools, which have 2 MiB unless a variable says otherwise.
"""

import contextlib
import os
import resource
import threading
from collections.abc import Iterator

from mini_infer_engine.structured.limits import CORE_STACK_BYTES

_RUST_THREADS = "RUST_MIN_STACK"
"""The variable that Rust's standard library reads when the first thread is started."""
_lock = threading.Lock()


@contextlib.contextmanager
def deep_stacks() -> Iterator[None]:
    """Threads of Python that are started within have deep stacks. Their memory is only taken where it is used."""
    with _lock:
        before = threading.stack_size(CORE_STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)


def deepen_mask_threads() -> None:
    """Gives the calling process deep stacks where masks are computed: its first thread, and the library's pools.

    Call it before the first of them.
    """
    os.environ.setdefault(_RUST_THREADS, str(CORE_STACK_BYTES))
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    desired = CORE_STACK_BYTES if hard == resource.RLIM_INFINITY else min(CORE_STACK_BYTES, hard)
    if soft != resource.RLIM_INFINITY and soft < desired:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_STACK, (desired, hard))
