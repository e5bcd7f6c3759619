"""Answers GET /progress with the bytes of a model that are there, which the operator writes into a service's status."""

import json
import socket
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from mini_infer_contract.launch import PROGRESS_PATH
from mini_infer_engine.tools.fetch.manifest import FetchError


class ProgressServer:
    """A server in a thread of its own; a context manager that ends it."""

    def __init__(self, port: int) -> None:
        """Raises FetchError if nothing can listen on the port. 0 takes a free one."""
        self._progress: dict[str, int | None] = {"bytes": 0, "total_bytes": None}
        try:
            self._server = _Server(("", port), partial(_Handler, self._progress))
        except (OSError, OverflowError) as error:
            raise FetchError(f"--progress-port {port}: {error}") from None
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return self._server.server_port

    def report(self, done: int, total: int | None) -> None:
        """Sets what is answered from now on."""
        self._progress.update(bytes=done, total_bytes=total)

    def __enter__(self) -> "ProgressServer":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """Listens on all addresses, of both families where the machine has both."""

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def server_bind(self) -> None:
        """Takes IPv4 connections on the IPv6 socket, too."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class _Handler(BaseHTTPRequestHandler):
    timeout = 5
    """Seconds after which a client that sends nothing is dropped."""

    def __init__(self, progress: dict[str, int | None], *arguments: object) -> None:
        self._progress = progress
        super().__init__(*arguments)  # type: ignore[arg-type]  # the server's own, passed on

    def do_GET(self) -> None:
        """Answers the progress as JSON, and 404 for other paths."""
        if self.path != PROGRESS_PATH:
            self.send_error(404)
            return
        body = json.dumps(self._progress).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Logs nothing: the operator asks every few seconds."""
