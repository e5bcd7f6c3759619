"""Notifies a request that its client's connection is lost."""

from collections.abc import Callable

CLIENT_LINK = "mini_infer_client_link"
"""Key in a scope: the `ClientLink` of the connection that the request came over."""


class ClientLink:
    """Notifies the request that is being served that its client's connection is lost, without a task that waits for
    that.
    """

    __slots__ = ("_lost", "_on_loss", "_resume_reading")

    def __init__(self, resume_reading: Callable[[], None]) -> None:
        """Takes `resume_reading`: without it the loss of a connection whose body filled its buffer is not seen."""
        self._resume_reading, self._lost = resume_reading, False
        self._on_loss: Callable[[], None] | None = None

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Calls `on_loss` when the connection is lost, or at once if it already is. Call it when the body has been
        read.
        """
        if self._lost:
            on_loss()
        else:
            self._on_loss = on_loss
            self._resume_reading()

    def unwatch(self) -> None:
        """Forgets the callback: the request is over."""
        self._on_loss = None

    def lose(self) -> None:
        """Reports that the connection is lost."""
        self._lost = True
        if self._on_loss:
            self._on_loss()
