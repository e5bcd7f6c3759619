"""How a request learns that its client's connection is lost."""

from collections.abc import Callable

CLIENT_LINK = "mini_infer_client_link"
"""In a scope: the `ClientLink` of the connection that the request came over."""


class ClientLink:
    """Tells the request that is being served that its client's connection is lost, without a task that waits for it."""

    __slots__ = ("_lost", "_on_loss", "_resume_reading")

    def __init__(self, resume_reading: Callable[[], None]) -> None:
        """`resume_reading`: without it the loss of a connection whose body filled its buffer is not seen."""
        self._resume_reading, self._lost = resume_reading, False
        self._on_loss: Callable[[], None] | None = None

    def watch(self, on_loss: Callable[[], None]) -> None:
        """`on_loss` is called when the connection is lost, at once where it is already; the body has been read."""
        if self._lost:
            on_loss()
        else:
            self._on_loss = on_loss
            self._resume_reading()

    def unwatch(self) -> None:
        """The request is over."""
        self._on_loss = None

    def lose(self) -> None:
        """The connection is lost."""
        self._lost = True
        if self._on_loss:
            self._on_loss()
