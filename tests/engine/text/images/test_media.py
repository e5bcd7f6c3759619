"""Images by URL: which addresses are connected to, what is followed and read, and what is not."""

import asyncio
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpcore
import pytest

from mini_infer_engine.text.images import media
from mini_infer_engine.text.images.media import MediaReader, MediaRules, is_public
from mini_infer_prompts.image_prompts import ImageError

HOST, OTHER = "images.example.com", "other.example.com"
PUBLIC = "93.184.216.34"
RULES = MediaRules.of([HOST, "Second.Example.com."], None, 1000)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (PUBLIC, True),
        ("8.8.8.8", True),
        ("2606:4700:4700::1111", True),
        ("127.0.0.1", False),
        ("127.8.8.8", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("192.0.0.8", False),
        ("198.18.0.1", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("192.88.99.1", False),
        ("::", False),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("::127.0.0.1", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("fec0::1", False),
        ("fc00::1", False),
        ("fd12:3456::1", False),
        ("ff02::1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b:1::7f00:1", False),
        ("2002:7f00:1::", False),
        ("2001:0:4136:e378::", False),
        ("2001:db8::1", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_an_address_is_public_when_it_is_of_the_internet(address: str, expected: bool) -> None:
    assert is_public(address) is expected


class Network(httpcore.AsyncNetworkBackend):
    """Answers connections with the given bytes in turn, and records where they went."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.connected: list[tuple[str, int]] = []
        self.server_names: list[str | None] = []

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  # the library's interface
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.connected.append((host, port))
        return _Stream(self, self.answers.pop(0))


class _Stream(httpcore.AsyncMockStream):
    def __init__(self, network: Network, answer: bytes) -> None:
        super().__init__([answer])
        self._network = network

    async def start_tls(
        self,
        ssl_context: Any,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore.AsyncNetworkStream:
        self._network.server_names.append(server_hostname)
        return self


def answer(body: bytes = b"image", status: str = "200 OK", **headers: str) -> bytes:
    lines = {"Content-Length": str(len(body))} | {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


def redirect(target: str) -> bytes:
    return answer(b"", "302 Found", Location=target)


async def found(host: str, port: int) -> Sequence[str]:
    return [PUBLIC]


async def read(
    url: str, *answers: bytes, resolve: Any = found, rules: MediaRules = RULES, network: Network | None = None
) -> bytes:
    reader = MediaReader(rules, network=network or Network(*answers), resolve=resolve)
    return await reader.read(url, lambda count: None)


async def test_an_image_is_fetched_from_the_address_that_was_checked() -> None:
    network = Network(answer(b"first"), answer(b"second"))
    assert await read(f"https://{HOST}/a.png?x=1", network=network) == b"first"
    assert await read("http://second.EXAMPLE.com/a", network=network) == b"second"
    assert network.connected == [(PUBLIC, 443), (PUBLIC, 80)]
    assert network.server_names == [HOST]


async def test_each_hop_is_checked_when_a_host_redirects() -> None:
    network = Network(redirect("/b"), redirect("https://second.example.com/c"), answer(b"image"))
    assert await read(f"https://{HOST}/a", network=network) == b"image"
    assert len(network.connected) == 3


HOPS = {
    "another host": f"https://{OTHER}/",
    "a private address": "https://169.254.169.254/latest/meta-data",
    "a file": "file:///etc/passwd",
    "from https to http": f"http://{HOST}/",
    "another port": f"https://{HOST}:8443/",
    "credentials": f"https://u:p@{HOST}/",
    "nothing": "",
    "a data URL": "data:image/png;base64,AAAA",
}


@pytest.mark.parametrize("name", HOPS)
async def test_a_redirect_is_refused_when_it_leads_to(name: str) -> None:
    network = Network(*[redirect(HOPS[name])] * 5)
    with pytest.raises(ImageError):
        await read(f"https://{HOST}/a", network=network)
    assert {host for host, _ in network.connected} == {PUBLIC}


async def test_redirects_are_refused_when_they_never_end() -> None:
    network = Network(*[redirect("/again")] * 9)
    with pytest.raises(ImageError, match="redirects"):
        await read(f"https://{HOST}/a", network=network)
    assert len(network.connected) == media.MAX_REDIRECTS + 1


@pytest.mark.parametrize(
    "url",
    [
        f"https://{OTHER}/a",
        f"https://sub.{HOST}/a",
        f"https://{HOST}.evil.com/a",
        f"https://{HOST}@evil.com/a",
        f"https://user@{HOST}/a",
        f"https://:secret@{HOST}/a",
        f"https://{HOST}:22/a",
        f"https://{HOST}:port/a",
        f"https://{HOST}\\@evil.com/a",
        f"https://{HOST}/a b",
        f"https://{HOST}/a\r\nHost: evil.com",
        f"https://{HOST}/ä",
        f"https://{HOST}\t.evil.com/",
        "https:///a",
        "https://",
        "https:",
        "https://[::1]/a",
        "https://[::1/a",
        "http://127.0.0.1/a",
        "http://2130706433/a",
        "http://0x7f000001/a",
        "ftp://images.example.com/a",
        "gopher://images.example.com/a",
        "//images.example.com/a",
        "/etc/passwd",
        "a.png",
        "",
        "javascript:alert(1)",
        "blob:https://images.example.com/1",
    ],
)
async def test_a_url_is_refused_before_anything_is_connected(url: str) -> None:
    network = Network()
    with pytest.raises(ImageError):
        await read(url, network=network)
    assert network.connected == []


@pytest.mark.parametrize(
    "addresses", [[], ["127.0.0.1"], [PUBLIC, "10.0.0.1"], ["::ffff:169.254.169.254"], ["fe80::1"]], ids=str
)
async def test_a_host_is_refused_when_one_of_its_addresses_is_not_public(addresses: list[str]) -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return addresses

    network = Network(answer())
    with pytest.raises(ImageError, match="not public"):
        await read(f"https://{HOST}/a", network=network, resolve=resolve)
    assert network.connected == []


async def test_a_name_is_resolved_once_for_each_connection() -> None:
    answers = iter([[PUBLIC], ["127.0.0.1"]])

    async def resolve(host: str, port: int) -> Sequence[str]:
        return next(answers)

    assert await read(f"https://{HOST}/a", answer(), resolve=resolve) == b"image"
    assert next(answers) == ["127.0.0.1"], "what was checked is what was connected to"


ANSWERS = {
    "missing": answer(b"", "404 Not Found"),
    "an error": answer(b"", "500 Oops"),
    "no content": answer(b"", "204 No Content"),
    "compressed": answer(b"x", Content_Encoding="gzip"),
    "announced as too large": answer(b"x" * 1001),
    "too large in chunks": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + (b"200\r\n" + b"x" * 512 + b"\r\n") * 2
        + b"0\r\n\r\n"
    ),
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "nothing": b"",
    "shorter than announced": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc",
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_is_refused_when_it_is(name: str) -> None:
    with pytest.raises(ImageError):
        await read(f"https://{HOST}/a", ANSWERS[name])


async def test_a_fetch_is_refused_when_it_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(media, "FETCH_TIMEOUT_S", 0.01)
    with pytest.raises(ImageError, match=r"0\.01 s"):
        await read(f"https://{HOST}/a", resolve=resolve)


async def test_a_host_that_cannot_be_resolved_is_the_urls_fault() -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        raise OSError("no such host")

    with pytest.raises(ImageError, match="cannot be fetched"):
        await read(f"https://{HOST}/a", resolve=resolve)


async def test_nothing_is_fetched_when_no_host_is_allowed() -> None:
    with pytest.raises(ImageError, match="--allowed-media-domains"):
        await read(f"https://{HOST}/a", rules=MediaRules())


async def test_bytes_are_counted_while_they_are_read() -> None:
    taken: list[int] = []
    reader = MediaReader(RULES, network=Network(answer(b"x" * 900)), resolve=found)
    await reader.read(f"https://{HOST}/a", taken.append)
    assert sum(taken) == 900


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an image, and what must not be reached from it."""
    inside = tmp_path / "media"
    (inside / "sub").mkdir(parents=True)
    (inside / "a b.png").write_bytes(b"image")
    (inside / "sub" / "c.png").write_bytes(b"other")
    (inside / "large.png").write_bytes(bytes(1001))
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "media-2").mkdir()
    (tmp_path / "media-2" / "x").write_text("secret")
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "up").symlink_to(tmp_path)
    (inside / "loop").symlink_to(inside / "loop")
    (inside / "good").symlink_to(inside / "sub" / "c.png")
    os.mkfifo(inside / "pipe")
    return inside


def local(folder: Path) -> MediaRules:
    return MediaRules.of([], str(folder), 1000)


@pytest.mark.parametrize(
    ("path", "content"), [("a%20b.png", b"image"), ("sub/c.png", b"other"), ("sub/../good", b"other")]
)
async def test_files_of_the_folder_are_read(folder: Path, path: str, content: bytes) -> None:
    assert await read(f"file://{folder}/{path}", rules=local(folder)) == content
    assert await read(f"file://localhost{folder}/{path}", rules=local(folder)) == content


@pytest.mark.parametrize(
    "path",
    [
        "link",
        "up/secret",
        "../secret",
        "%2e%2e/secret",
        "sub/../../secret",
        "../media-2/x",
        "loop",
        "pipe",
        "sub",
        "",
        "none.png",
        "a%00b",
        "large.png",
    ],
)
async def test_a_file_is_refused_when_it_is_not_one_of_the_folder(folder: Path, path: str) -> None:
    with pytest.raises(ImageError):
        await read(f"file://{folder}/{path}", rules=local(folder))


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "file://host/etc/passwd", "file:", "file://", "FILE:///etc/passwd"]
)
async def test_other_files_are_refused_when_a_folder_is_named(folder: Path, url: str) -> None:
    with pytest.raises(ImageError):
        await read(url, rules=local(folder))


async def test_no_file_is_read_when_no_folder_is_named(folder: Path) -> None:
    with pytest.raises(ImageError, match="--allowed-local-media-path"):
        await read(f"file://{folder}/sub/c.png", rules=MediaRules())


@pytest.mark.parametrize("name", ["https://a.com", "a.com/b", "a.com:443", "*.a.com", "u@a.com", "", "[::1]"])
def test_a_flag_is_refused_when_it_names_no_host(name: str) -> None:
    with pytest.raises(ValueError, match="--allowed-media-domains"):
        MediaRules.of([name], None, 1)


def test_a_flag_is_refused_when_it_names_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--allowed-local-media-path"):
        MediaRules.of([], str(tmp_path / "none"), 1)
