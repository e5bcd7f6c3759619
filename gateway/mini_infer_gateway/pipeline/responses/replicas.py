"""Finds the gateway replica that stores the response named by an id, and forwards requests to it.

A replica writes its tag into the ids of what it stores. A replica that receives an id with another tag forwards the
whole request with the client's own credentials, so each key has access to the same objects through any replica. What a
replica stored is lost with it: a request for it is then answered as one with an unknown id.
"""

import asyncio
import hashlib
import logging
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mini_infer_apis.dialects.response_object import TAG_CHARACTERS
from mini_infer_contract.launch import QUEUE_TIMEOUT_HEADER, REQUEST_ID_HEADER, TARGET_HEADERS
from mini_infer_gateway.http.asgi import ClientDisconnectedError, client_disconnected
from mini_infer_gateway.http.headers import to_client, to_endpoint
from mini_infer_gateway.http.upstream import ConnectError, Response, Upstream, UpstreamError
from mini_infer_web.api_errors import ApiError
from mini_infer_web.asgi import Headers, Receive, Scope, Send
from mini_infer_web.tls import TlsFiles, client_context

FORWARDED_HEADER = b"x-mini-infer-forwarded"
"""Header that ends forwarding: a replica that receives it answers itself, so that no two replicas loop."""
LOOK_EVERY_S = 10.0
"""Seconds for which the addresses of replicas are cached."""
LOOK_AGAIN_S = 1.0
"""Seconds for which they are cached if an id matches none of them: a replica may have started since."""
RESOLVE_TIMEOUT_S = 2.0

_TAG = re.compile(rf"[a-z]+_([0-9a-f]{{{TAG_CHARACTERS}}})[0-9a-f]{{16,}}")
_OWN_HEADERS = (b"x-mini-infer-pod", b"x-mini-infer-index", b"x-mini-infer-reason")
_FROM_CLIENTS = tuple(name.encode() for name in (QUEUE_TIMEOUT_HEADER, *TARGET_HEADERS.values()))

log = logging.getLogger(__name__)


def ids_in(body: dict[str, Any]) -> Iterable[str]:
    """Yields the ids that a request to /v1/responses refers to: a previous response, and items of earlier ones."""
    if isinstance(previous := body.get("previous_response_id"), str):
        yield previous
    given = body.get("input")
    for item in given if isinstance(given, list) else ():
        if isinstance(item, dict) and (item.get("type") == "item_reference" or item.keys() == {"id"}):
            yield str(item.get("id"))


def replica_url(host: str, port: int, is_tls: bool) -> str:
    """Returns the URL that identifies a replica among the others."""
    name = f"[{host}]" if ":" in host else host
    return f"{'https' if is_tls else 'http'}://{name}:{port}"


def replica_tag(url: str) -> str:
    """Returns the tag that stands in the ids of what a replica stores."""
    return hashlib.sha256(url.encode()).hexdigest()[:TAG_CHARACTERS]


class Replicas:
    """All replicas of one gateway, found by their names in DNS."""

    def __init__(
        self,
        own_host: str | None,
        names: Sequence[str],
        port: int,
        connect_timeout_s: float,
        tls: TlsFiles,
        clock: Callable[[], float],
        on_forward: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        """`own_host` is the host of this replica. `names` are HOST or HOST:PORT of all, each with one or more
        addresses.

        `tls` is the certificate of this replica, which the others have too. `on_forward` is called with "answered",
        "gone" or "failed".
        """
        self._names = [_host_and_port(name, port) for name in names] if own_host else []
        self._tls, self._clock, self._on_forward = tls, clock, on_forward
        self._own_url = replica_url(own_host, port, self._is_tls) if own_host else ""
        self.tag = replica_tag(self._own_url) if self._names else ""
        self._by_tag: dict[str, str] = {}
        self._looked_s = -LOOK_EVERY_S
        context = _context(tls) if self._is_tls else None
        self._upstream = Upstream(connect_timeout_s, tls=context)

    @property
    def _is_tls(self) -> bool:
        return self._tls.ssl_certfile is not None

    async def owner(self, scope: Scope, ids: Iterable[str]) -> str | None:
        """Returns the address of another replica that stores one of these ids; None if this replica is to answer."""
        if not self._names or any(name == FORWARDED_HEADER for name, _ in scope["headers"]):
            return None
        tags = {found[1] for one in ids if (found := _TAG.match(one))} - {self.tag}
        if not tags:
            return None
        age_s = self._clock() - self._looked_s
        if age_s > LOOK_EVERY_S or (age_s > LOOK_AGAIN_S and tags.isdisjoint(self._by_tag)):
            self._looked_s = self._clock()
            await self._look()
        return next((self._by_tag[tag] for tag in sorted(tags) if tag in self._by_tag), None)

    async def forward(self, url: str, scope: Scope, body: bytes, receive: Receive, send: Send, idle_s: float) -> bool:
        """Forwards a request to another replica. Returns False if that replica is gone; nothing was sent then.

        `receive` is past the body. `idle_s` is the time-out between pieces of the answer. Raises ApiError 502 if the
        replica failed before it answered.
        """
        connections: list[Response] = []

        def left(watch: asyncio.Task[None]) -> None:
            if not watch.cancelled():
                for connection in connections:
                    connection.cut()

        watch = asyncio.create_task(client_disconnected(receive))
        watch.add_done_callback(left)
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        try:
            response = await self._upstream.request(
                url, scope["method"], target, _headers(scope), body, idle_s, on_connection=connections.append
            )
        except ConnectError as error:
            log.info("the replica at %s is gone: %s", url, error)
            self._on_forward("gone")
            return False
        except UpstreamError as error:
            if watch.done() and not watch.cancelled():
                raise ClientDisconnectedError from None
            self._on_forward("failed")
            message = f"the replica of the gateway that keeps this conversation did not answer: {error}"
            raise ApiError(502, message, code="replica_failed") from error
        else:
            await self._relay(response, send, idle_s)
            self._on_forward("answered")
            return True
        finally:
            watch.remove_done_callback(left)
            watch.cancel()

    async def _relay(self, response: Response, send: Send, idle_s: float) -> None:
        try:
            headers = to_client(response.headers, [])
            headers = [header for header in headers if not header[0].startswith(b"access-control-")]
            headers += [header for header in response.headers if header[0] in _OWN_HEADERS]
            await send({"type": "http.response.start", "status": response.status, "headers": headers})
            while piece := await response.read(idle_s):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            response.close()

    async def _look(self) -> None:
        """Resolves the names again. A name without addresses does not hide the replicas of other names."""
        loop, found = asyncio.get_running_loop(), dict[str, str]()
        for host, port in self._names:
            try:
                async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, TimeoutError, UnicodeError) as error:
                log.warning("no address of --replicas %s: %r", host, error)
                continue
            for _, _, _, _, address in addresses:
                url = replica_url(str(address[0]), port, self._is_tls)
                found[replica_tag(url)] = url
        found.pop(self.tag, None)
        self._by_tag = found

    def close(self) -> None:
        """Closes the connections to other replicas."""
        self._upstream.close()


def _headers(scope: Scope) -> Headers:
    headers = to_endpoint(scope["headers"], forward_authorization=True)
    headers += [header for header in scope["headers"] if header[0] in _FROM_CLIENTS]
    return [*headers, (REQUEST_ID_HEADER.encode(), scope["request_id"].encode()), (FORWARDED_HEADER, b"1")]


def _host_and_port(name: str, port: int) -> tuple[str, int]:
    """Parses HOST, HOST:PORT, [IPV6] or [IPV6]:PORT. Raises ValueError if it is none of them."""
    found = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+))(?::(\d{1,5}))?", name)
    if not found:
        raise ValueError(f"--replicas {name!r}: write HOST, HOST:PORT or [IPV6]:PORT")
    return found[1] or found[2], int(found[3] or port)


def _context(tls: TlsFiles) -> Any:
    """Returns the TLS context for replicas. It trusts their common certificate itself, whatever its names."""
    context = client_context(tls.ssl_certfile, tls.ssl_certfile, tls.ssl_keyfile)
    context.check_hostname = False
    context.verify_flags |= 0x80000  # X509_V_FLAG_PARTIAL_CHAIN: the certificate need not be a CA's.
    return context
