"""Who may drain an engine, switch its role or read its cache."""

from typing import Any, cast

import httpx
import msgspec
import pytest
from fastapi import Request

from mini_infer_contract.peer_auth import PEER_HEADER, PeerSecret
from mini_infer_engine.api.admin_guard import AdminGuard
from mini_infer_engine.api.admission import Admission
from mini_infer_engine.api.app import make_admin_app, make_app
from mini_infer_engine.api.state import ApiServerState
from mini_infer_engine.config.options.server_options import ServerOptions
from mini_infer_web.api_keys import ApiKeys
from mini_infer_web.cors import CorsPolicy

SECRET = PeerSecret(bytes(range(32)))
TOKEN = {PEER_HEADER: SECRET.http_token()}
ANY = {PEER_HEADER: "1"}
KEY = {"authorization": "Bearer key"}
LOCAL, FAR = "127.0.0.1", "10.88.0.7"
ACTIONS = (("POST", "/drain"), ("POST", "/role"), ("GET", "/kv_snapshot"), ("POST", "/kv_prefetch"))


class Core:
    model = None
    failure = None


class FakeApiServer:
    """What the routes touch: a model that is still loading, so that /role and /kv_snapshot answer 503 once let in."""

    def __init__(self) -> None:
        self.draining, self.in_flight = False, 0
        self.options = ServerOptions()
        self.admission = Admission(1, 1)
        self.core = Core()

    def start_drain(self) -> None:
        self.draining = True

    async def read_json(self, request: Request) -> bytes:
        return await request.body()


async def send_request(
    app: Any, method: str, path: str, headers: dict[str, str], client: str, host: str = "127.0.0.1:8000"
) -> httpx.Response:
    transport = httpx.ASGITransport(app, client=(client, 1234))
    body = {"/role": {"role": "decode"}, "/kv_prefetch": {"request_ids": ["a"]}}.get(path)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as http:
        return await http.request(method, path, headers=headers, json=body)


@pytest.mark.parametrize(("method", "path"), ACTIONS)
@pytest.mark.parametrize(
    ("secret", "keys", "headers", "client", "host", "refusal"),
    [
        (SECRET, (), TOKEN, FAR, "10.88.0.9:8000", None),
        (SECRET, (), {PEER_HEADER.upper(): SECRET.http_token()}, FAR, "10.88.0.9:8000", None),
        (SECRET, (), {}, LOCAL, "127.0.0.1:8000", "peer_not_authenticated"),  # a mesh's sidecar
        (SECRET, (), ANY, LOCAL, "127.0.0.1:8000", "peer_not_authenticated"),
        (SECRET, (), {PEER_HEADER: SECRET.for_service("a/b").http_token()}, LOCAL, "x", "peer_not_authenticated"),
        (SECRET, (), {PEER_HEADER: ""}, LOCAL, "127.0.0.1:8000", "peer_not_authenticated"),
        (SECRET, ("key",), KEY, LOCAL, "127.0.0.1:8000", "peer_not_authenticated"),
        (None, (), ANY, LOCAL, "127.0.0.1:8000", None),
        (None, (), ANY, "::1", "[::1]:8000", None),
        (None, (), ANY, "::ffff:127.0.0.1", "localhost:8000", None),
        (None, (), {}, LOCAL, "127.0.0.1:8000", "peer_header_missing"),  # a web page's form
        (None, (), ANY, LOCAL, "rebound.example:8000", "from_elsewhere"),  # DNS rebinding
        (None, (), ANY, FAR, "10.88.0.9:8000", "from_elsewhere"),
        (None, (), ANY, "fd00::7", "[fd00::9]:8000", "from_elsewhere"),
        (None, (), ANY, "testclient", "127.0.0.1", "from_elsewhere"),
        (None, ("key",), ANY | KEY, FAR, "engine:8000", None),
    ],
)
async def test_admin_paths_are_refused_when_nothing_proves_the_peer(
    method: str,
    path: str,
    secret: PeerSecret | None,
    keys: tuple[str, ...],
    headers: dict[str, str],
    client: str,
    host: str,
    refusal: str | None,
) -> None:
    api_server, known = FakeApiServer(), ApiKeys(keys)
    app = make_app(cast("ApiServerState", api_server), known, AdminGuard(secret, known))
    if keys and path != "/drain":
        headers = headers | KEY
    answer = await send_request(app, method, path, headers, client, host)
    if refusal is None:
        assert answer.status_code == (200 if path == "/drain" else 503), answer.text
        assert api_server.draining == (path == "/drain")
    else:
        assert answer.status_code == 403
        assert answer.json()["error"]["code"].endswith(refusal)
        assert not api_server.draining


@pytest.mark.parametrize("secret", [SECRET, None])
@pytest.mark.parametrize("path", ["/drain", "/healthz", "/readyz"])
async def test_probes_and_drain_count_need_no_authentication(secret: PeerSecret | None, path: str) -> None:
    app = make_app(cast("ApiServerState", _served()), None, AdminGuard(secret))
    assert (await send_request(app, "GET", path, {}, FAR)).status_code in (200, 503)


async def test_the_snapshot_and_prefetches_are_open_to_anybody_when_the_event_ports_are() -> None:
    app = make_app(cast("ApiServerState", FakeApiServer()), None, AdminGuard(events_are_open=True))
    assert (await send_request(app, "GET", "/kv_snapshot", ANY, FAR)).status_code == 503
    assert (await send_request(app, "POST", "/kv_prefetch", ANY, FAR)).status_code == 503
    assert (await send_request(app, "POST", "/drain", ANY, FAR)).status_code == 403


async def test_the_admin_socket_serves_only_admin_paths_and_probes() -> None:
    api_server = _served()
    app = make_admin_app(cast("ApiServerState", api_server))
    assert (await send_request(app, "GET", "/healthz", {}, "")).status_code == 200
    assert (await send_request(app, "POST", "/v1/completions", {}, "")).status_code == 404
    assert (await send_request(app, "POST", "/drain", {}, "")).status_code == 200
    assert api_server.draining


@pytest.mark.parametrize("allowed", [("*",), ("content-type", PEER_HEADER.title())])
def test_no_page_from_elsewhere_may_send_the_peer_header_when_cors_allows_all(allowed: tuple[str, ...]) -> None:
    policy = CorsPolicy(allowed_origins=("*",), allowed_headers=allowed)
    requested = f"Content-Type, {PEER_HEADER.upper()} ,X-Mini-Infer-Peer".encode()
    headers = [
        (b"origin", b"https://evil.example"),
        (b"access-control-request-method", b"POST"),
        (b"access-control-request-headers", requested),
    ]
    answered = dict(policy.preflight_headers(headers))
    assert answered[b"access-control-allow-headers"].lower() == b"content-type"


def _served() -> FakeApiServer:
    api_server = FakeApiServer()
    api_server.core_problem = None  # type: ignore[attr-defined]  # only probes read it
    api_server.text = msgspec.defstruct("Text", [("names", list[str])])(["dry"])  # type: ignore[attr-defined]
    return api_server
