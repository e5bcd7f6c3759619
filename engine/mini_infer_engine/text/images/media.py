"""Reads images that clients name by URL, from the hosts and the folder that the server's operator allows.

Whoever names a URL has this server connect to it, so nothing is read by default, and never from an address of a private
network: the address is checked that is connected to, at each redirect again. No proxy of the environment is used.
"""

import asyncio
import ipaddress
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import httpcore

from mini_infer_prompts.image_prompts import ImageError

FETCH_TIMEOUT_S = 10.0
"""Seconds for one image with all its redirects."""
MAX_REDIRECTS = 3
MAX_FETCHES = 16
"""Most images that are fetched at once; more wait."""
_SCHEMES = {"http": 80, "https": 443}
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_HEADERS = ((b"accept", b"image/*"), (b"accept-encoding", b"identity"), (b"user-agent", b"mini-infer"))
_BLOCKED = tuple(
    map(
        ipaddress.ip_network,
        (
            "100.64.0.0/10",  # shared addresses of providers
            "192.0.0.0/24",
            "192.88.99.0/24",
            "64:ff9b::/96",  # from here on IPv6 addresses that stand for IPv4 ones: NAT64, 6to4 and Teredo
            "64:ff9b:1::/48",
            "2002::/16",
            "2001::/32",
            "fec0::/10",  # the site-local addresses of old
        ),
    )
)


@dataclass(frozen=True, slots=True)
class MediaRules:
    """The hosts, folder and bytes that may be read for clients."""

    domains: frozenset[str] = frozenset()
    """Names of hosts from which http and https URLs are fetched."""
    folder: Path | None = None
    """The folder whose files file URLs name, without symbolic links in its own path."""
    max_bytes: int = 16 << 20
    """Most bytes of one image."""

    @classmethod
    def of(cls, domains: Iterable[str], folder: str | None, max_bytes: int) -> "MediaRules":
        """Returns the rules of flags. Raises ValueError if a host is no name, or the folder none."""
        names = {domain.strip().lower().rstrip(".") for domain in domains}
        for name in names:
            if not name or any(character in name for character in "/:@*[] "):
                raise ValueError(f"--allowed-media-domains {name!r} is no host's name: write images.example.com")
        path = None if folder is None else Path(folder).expanduser().resolve()
        if path is not None and not path.is_dir():
            raise ValueError(f"--allowed-local-media-path {folder} is no folder: name one")
        return cls(frozenset(names), path, max_bytes)


Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host."""


def is_public(address: str) -> bool:
    """True if an IP address is one of the public internet."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return parsed.is_global and not (
        parsed.is_multicast
        or parsed.is_reserved
        or parsed.is_private
        or parsed.is_link_local
        or any(parsed in network for network in _BLOCKED if network.version == parsed.version)
    )


async def resolve(host: str, port: int) -> Sequence[str]:
    """Returns the addresses of a host. Raises OSError if it has none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[4][0]) for address in found]


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to the addresses of hosts that are public, and to no others."""

    def __init__(self, network: httpcore.AsyncNetworkBackend, resolve: Resolve) -> None:
        self._network, self._resolve = network, resolve

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  # the library's interface
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await self._resolve(host, port)
        # One that is not public shows that the name leads into a private network, now or later.
        if not addresses or not all(map(is_public, addresses)):
            raise ImageError(f"names the host {host}, whose address is not public: send the image as a data URL")
        return await self._network.connect_tcp(addresses[0], port, timeout, local_address, socket_options)

    async def sleep(self, seconds: float) -> None:
        await self._network.sleep(seconds)


class MediaReader:
    """Reads images by their URLs. It belongs to one event loop."""

    def __init__(
        self, rules: MediaRules, *, network: httpcore.AsyncNetworkBackend | None = None, resolve: Resolve = resolve
    ) -> None:
        """`network` makes connections, and `resolve` finds addresses; the defaults are those of the system."""
        self._rules = rules
        self._network = _CheckedNetwork(network or httpcore.AnyIOBackend(), resolve)
        self._fetches = asyncio.Semaphore(MAX_FETCHES)

    async def read(self, url: str, take: Callable[[int], None]) -> bytes:
        """Returns the content of an http, https or file URL. `take` is called with the numbers of bytes that are read.

        Raises ImageError if it is not allowed, too large or too slow, or cannot be read, and what `take` raises.
        """
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "file":
            return await asyncio.to_thread(self._read_file, url, take)
        if scheme not in _SCHEMES:
            raise ImageError("must be a URL that begins with data:, https:, http: or file:")
        if not self._rules.domains:
            raise ImageError(
                "is fetched from nowhere: send the image as a data URL; a server fetches from hosts that its "
                "--allowed-media-domains names"
            )
        try:
            async with self._fetches, asyncio.timeout(FETCH_TIMEOUT_S):
                return await self._fetch(url, take)
        except TimeoutError:
            raise ImageError(f"has not been fetched within {FETCH_TIMEOUT_S:g} s: send a data URL") from None
        except (OSError, httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            raise ImageError(f"cannot be fetched ({type(error).__name__}): send a data URL") from None

    async def _fetch(self, url: str, take: Callable[[int], None]) -> bytes:
        async with httpcore.AsyncConnectionPool(network_backend=self._network, max_keepalive_connections=0) as pool:
            for _ in range(MAX_REDIRECTS + 1):
                self._check(url)
                async with pool.stream("GET", url, headers=_HEADERS) as response:
                    if response.status not in _REDIRECTS:
                        return await self._content(response, take)
                    url = _redirected(url, response)
        raise ImageError(f"leads to more than {MAX_REDIRECTS} redirects: send the last URL")

    def _check(self, url: str) -> None:
        """Raises ImageError if the URL may not be fetched."""
        if not url.isascii() or any(character <= " " or character == "\\" for character in url):
            raise ImageError("has characters that no URL has: percent-encode them")
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme.lower(), (parts.hostname or "").lower().rstrip("."), parts.port
            httpcore.URL(url)
        except (ValueError, TypeError):
            raise ImageError("is no URL: send one such as https://images.example.com/a.png") from None
        if scheme not in _SCHEMES:
            raise ImageError(f"leads to a {scheme[:20]} URL, and only http and https are fetched")
        if parts.username is not None or parts.password is not None:
            raise ImageError("has a user name or a password: leave them out")
        if host not in self._rules.domains:
            raise ImageError(
                f"leads to the host {host[:100]!r}, which is none of those that this server fetches from "
                "(--allowed-media-domains): send a data URL"
            )
        if port not in (None, _SCHEMES[scheme]):
            raise ImageError(f"leads to port {port}, and only {_SCHEMES[scheme]} is allowed for {scheme}")

    async def _content(self, response: httpcore.Response, take: Callable[[int], None]) -> bytes:
        if response.status != 200:
            raise ImageError(f"is answered with the status {response.status}: send another URL")
        headers = {name.lower(): value for name, value in response.headers}
        if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"identity", b""):
            raise ImageError("is answered with a compressed body, which is not read")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > self._rules.max_bytes:
            raise self._too_large()
        content = bytearray()
        async for part in response.aiter_stream():
            content += part
            take(len(part))
            if len(content) > self._rules.max_bytes:
                raise self._too_large()
        return bytes(content)

    def _too_large(self) -> ImageError:
        return ImageError(f"is an image of more than {self._rules.max_bytes} bytes: send a smaller one")

    def _read_file(self, url: str, take: Callable[[int], None]) -> bytes:
        folder = self._rules.folder
        if folder is None:
            raise ImageError(
                "is a file URL, and no files are read: send the image as a data URL; a server reads files of the "
                "folder that its --allowed-local-media-path names"
            )
        not_here = ImageError("is no image file within the folder of --allowed-local-media-path: name one")
        try:
            parts = urlsplit(url)
            if parts.netloc not in ("", "localhost"):
                raise not_here
            # Resolved before it is opened, so that no link leads out of the folder.
            path = Path(unquote(parts.path)).resolve(strict=True)
            if folder not in path.parents:
                raise not_here
            # A pipe or a device would block or never end.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise not_here
                content = file.read(self._rules.max_bytes + 1)
        except (OSError, ValueError, RuntimeError):
            raise not_here from None
        if len(content) > self._rules.max_bytes:
            raise self._too_large()
        take(len(content))
        return content


def _redirected(url: str, response: httpcore.Response) -> str:
    location = next((value for name, value in response.headers if name.lower() == b"location"), b"")
    target = urljoin(url, location.decode("latin-1").strip())
    if url[:8].lower() == "https://" and target[:8].lower() != "https://":
        raise ImageError("is redirected from https to another scheme: send a data URL")
    return target
