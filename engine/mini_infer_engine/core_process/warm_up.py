"""Decides when an engine does the part of its start that readiness did not wait for. It knows nothing of that work."""

from collections.abc import Callable

INTERVAL_S = 0.5
"""Seconds between two parts while requests are served. They wait for it, mostly less than 0.1 s."""


class WarmUp:
    """Runs the parts of one engine's warm-up, one at a time."""

    def __init__(self, run: Callable[[], bool]) -> None:
        """`run` does one part, and returns False once nothing is left."""
        self._run = run
        self._due_s = 0.0
        self.is_over = False
        """True if nothing is left."""

    def run(self, now_s: float, *, is_idle: bool) -> None:
        """Does one part if nothing else is to be done, or if the last one was `INTERVAL_S` ago."""
        if self.is_over or (not is_idle and now_s < self._due_s):
            return
        self.is_over = not self._run()
        self._due_s = now_s + INTERVAL_S
