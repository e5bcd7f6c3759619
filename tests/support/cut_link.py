"""A TCP connection's way through this process, which can be held up or cut."""

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

_AT_ONCE = 1 << 16


class CutLink:
    """Listens on a port of its own and passes on, both ways, what comes for another port of this machine."""

    def __init__(self, port: int) -> None:
        self._there = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._flows = threading.Event()
        self._flows.set()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def pause(self) -> None:
        """Nothing gets through any more, and nobody is told; what is sent waits, as where a cable is pulled."""
        self._flows.clear()

    def heal(self) -> None:
        """What has waited goes on its way."""
        self._flows.set()

    def cut(self) -> None:
        """Both ends of all connections see them end."""
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                here, _ = self._listener.accept()
                try:
                    there = socket.create_connection(("127.0.0.1", self._there))
                except OSError:
                    here.close()
                    continue
                self._open |= {here, there}
                for source, sink in ((here, there), (there, here)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_AT_ONCE):
                self._flows.wait()
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
        self._open.discard(source)
        source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.heal()
        self._listener.close()
        self.cut()
