"""Decides which hosts a server answers for, and which origins' pages may change its state: protection from web pages.

A page whose name resolves to 127.0.0.1 (DNS rebinding) is of the same origin as a server on loopback, so that a browser
lets it read answers; only the Host header tells the two apart. It names the page's domain then, never an address and
never a name without a dot, which public DNS does not resolve. Pure: headers in, an error out.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from typing import Final

from mini_infer_process.listening import is_loopback
from mini_infer_web.api_errors import ApiError

ANY: Final = "*"
_SAFE_METHODS: Final = (b"GET", b"HEAD", b"OPTIONS")
_LONGEST_HOST: Final = 300
"""Bytes of a Host header that may name a host: a domain name has at most 253, a port five more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedHosts:
    """The hosts of one server. `AllowedHosts()` answers for every host."""

    names: tuple[str, ...] = (ANY,)
    """Host names without ports, in lower case; IPv6 addresses without brackets; `*.example.com` stands for all names
    below it.
    """
    origins: tuple[str, ...] = ()
    """Origins of pages elsewhere that may change state, as CORS allows them; `*` allows all."""
    undotted: bool = False
    """True if addresses, names without a dot and requests without a Host are allowed too: no web page comes by those.
    """

    def refusal(
        self, method: bytes, headers: Iterable[tuple[bytes, bytes]], *, opens_websocket: bool
    ) -> ApiError | None:
        """Returns the error of a request for another host, or of a page from elsewhere; None if it may be served.

        Browsers send an Origin with whatever changes state, and with WebSocket handshakes, which CORS does not cover.
        """
        hosts, sent_origin = [], b""
        for name, value in headers:
            if name == b"host":
                hosts.append(value)
            elif name == b"origin":
                sent_origin = sent_origin or value
        if len(hosts) > 1:
            return ApiError(400, "the request has several Host headers: send one", param="Host", code="invalid_host")
        if ANY in self.names:
            return None
        sent_host = hosts[0] if hosts else b""
        host = sent_host.decode("latin-1")
        if len(sent_host) > _LONGEST_HOST or not _allows(self.names, self.undotted, host):
            message = f"this server does not answer for host {host[:100]!r}: name it with --allowed-hosts"
            return ApiError(421, message, param="Host", code="host_not_allowed")
        if method in _SAFE_METHODS and not opens_websocket:
            return None
        origin = sent_origin.decode("latin-1")
        if not origin or ANY in self.origins or origin in self.origins or origin.partition("://")[2] == host:
            return None
        message = f"pages of {origin[:100]!r} may not use this server: name the origin with --allowed-origins"
        return ApiError(403, message, param="Origin", code="origin_not_allowed")


@lru_cache(maxsize=1024)
def _allows(names: tuple[str, ...], undotted: bool, host: str) -> bool:
    """Returns True if a server of these `names` answers for a Host header. Clients send few different ones."""
    name = _name_of(host)
    if name in names or any(one[0:2] == "*." and name.endswith(one[1:]) for one in names):
        return True
    return undotted and ("." not in name or _is_address(name))


def allowed_hosts(
    configured: tuple[str, ...], host: str, *, has_keys: bool, origins: tuple[str, ...] = ()
) -> AllowedHosts:
    """Returns the hosts of a server that listens at `host`.

    Without `configured`, a server on loopback that needs no key answers for no domain: all programs on its machine may
    use it, the web pages in a browser there may not. Every other server answers for all hosts, as clients come by names
    that it does not know.
    """
    if configured:
        return AllowedHosts(names=tuple(map(_name_of, configured)), origins=origins)
    if has_keys or not is_loopback(host):
        return AllowedHosts(origins=origins)
    return AllowedHosts(names=("127.0.0.1", "localhost", "*.localhost", _name_of(host)), origins=origins, undotted=True)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _name_of(host: str) -> str:
    """Returns a host without its port and brackets, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    name, colon, _ = host.rpartition(":")
    return (name if colon and ":" not in name else host).lower().rstrip(".")
