"""The application around the requests: which pages are where, errors of its own, and an end that loses nothing."""

import asyncio
import gc
import gzip
import logging
import time
import tomllib
import zlib
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import zstandard

from mini_infer_gateway import __version__, app
from mini_infer_gateway.endpoints.base import Listed, Publish
from mini_infer_gateway.pipeline.call import Call
from mini_infer_gateway.pipeline.exchange import Exchange
from mini_infer_gateway.pipeline.stages.attempt import Attempt
from mini_infer_gateway.prompts.tokenizers import INLINE_BYTES
from mini_infer_gateway.settings import GatewaySettings
from mini_infer_web.api_keys import ApiKeys
from mini_infer_web.cors import CorsPolicy
from mini_infer_web.tls import ServerTls, TlsFiles, client_context
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import RunningGateway, running_gateway, until
from tests.support.tls_files import make_ca, make_certificate, needs_openssl

ADMIN_PAGES = ("/metrics", "/debug/endpoints")


async def status_of(gateway: RunningGateway, url: str) -> int:
    async with gateway.client.get(url) as response:
        return response.status


@pytest.mark.parametrize(("host", "served"), [("127.0.0.1", 200), ("localhost", 200), ("::1", 200), ("0.0.0.0", 404)])
async def test_admin_pages_are_served_on_loopback_only_when_there_is_no_admin_port(host: str, served: int) -> None:
    async with running_gateway(host=host) as gateway:
        for page in ADMIN_PAGES:
            assert await status_of(gateway, gateway.url + page) == served


async def test_idle_connections_stay_open_longer_than_clients_keep_them() -> None:
    async with running_gateway() as gateway:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        # httpx and the clients made of it keep connections for five seconds, and then may be about to use one.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(), 5.5)
        writer.close()


async def test_admin_pages_are_served_on_the_admin_port_only_when_there_is_one() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, admin_port=1) as gateway:
        await until(lambda: gateway.app.fleet.is_ready)
        for page in ADMIN_PAGES:
            assert await status_of(gateway, gateway.url + page) == 404
            assert await status_of(gateway, gateway.admin_url + page) == 200
        for page in ("/healthz", "/readyz"):
            assert await status_of(gateway, gateway.url + page) == await status_of(gateway, gateway.admin_url + page)
        assert await status_of(gateway, gateway.url + "/v1/models") == 200
        assert await status_of(gateway, gateway.admin_url + "/v1/models") == 404
        async with gateway.client.post(gateway.admin_url + "/v1/chat/completions", json={"model": "m"}) as response:
            assert response.status == 404
        assert engine.bodies == []


@pytest.mark.parametrize("path", ["/drain", "/kv_snapshot", "/prompt_assets", "/v1/../drain", "/%2fdrain"])
async def test_engine_pages_are_not_reachable_through_the_gateway(path: str) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        before = engine.snapshots
        for method in ("GET", "POST"):
            async with gateway.client.request(method, gateway.url + path) as response:
                assert response.status == 404
        assert engine.snapshots == before


async def test_the_endpoint_is_named_only_when_routing_headers_are_on() -> None:
    async with (
        FakeEngine("a") as engine,
        running_gateway(engine.endpoint, routing_headers=False) as gateway,
        gateway.chat("hi") as response,
    ):
        assert response.status == 200
        assert not [name for name in response.headers if name.lower().startswith("x-mini-infer")]
        assert len(response.headers["x-request-id"]) == 32
    assert not GatewaySettings().routing_headers


@pytest.mark.parametrize("ids", [["x" * 201], ["a b"], ["\u0085"], ["one", "two"], [""]])
async def test_a_request_is_refused_when_its_id_cannot_be_logged(ids: list[str]) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        headers = [("x-request-id", value) for value in ids]
        async with gateway.client.post(
            gateway.url + "/v1/chat/completions", json={"model": "m", "messages": []}, headers=headers
        ) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "x-request-id"
            assert len(response.headers["x-request-id"]) == 32
        assert engine.bodies == []


async def test_an_internal_error_has_openais_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:

        def broken(*_: Any) -> Any:
            raise RuntimeError("a mistake")

        monkeypatch.setattr(gateway.app.router, "route", broken)
        async with gateway.chat("hi") as response:
            assert response.status == 500
            error = (await response.json())["error"]
            assert (error["type"], error["code"]) == ("server_error", "internal")
            assert "a mistake" not in error["message"]


async def test_shutdown_loses_no_request_when_connections_are_kept_alive() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, drain_s=1.0) as gateway:
        statuses: list[int] = []

        async def keep_sending() -> None:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as client:
                closing = False
                while not closing:
                    body = {"model": "m", "prompt": "hi"}
                    async with client.post(gateway.url + "/v1/completions", json=body) as response:
                        await response.read()
                        statuses.append(response.status)
                        closing = response.headers.get("connection") == "close"

        pending = [asyncio.create_task(keep_sending()) for _ in range(8)]
        await until(lambda: len(statuses) > 50)
        gateway.server.begin_drain()
        await until(lambda: gateway.app.stopping)
        assert await status_of(gateway, gateway.url + "/readyz") == 503
        async with gateway.chat("hi") as response:
            assert response.status == 200
            assert response.headers["connection"] == "close"
        # Each is told to leave its connection by an answer; a connection that breaks is a request that was lost.
        async with asyncio.timeout(60.0):
            await asyncio.gather(*pending)
        assert set(statuses) == {200}


async def test_it_is_ready_when_engines_have_sent_their_prompt_assets() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        fleet = gateway.app.fleet
        await until(lambda: fleet.is_ready)
        assert fleet.endpoints["a"].subscriber.assets_revision
        assert await status_of(gateway, gateway.url + "/readyz") == 200
        fleet.endpoints["a"].subscriber.tokenizer_queried = False
        assert not fleet.is_ready
        fleet._synced_s -= 10.0
        assert fleet.is_ready, "an engine that never tells holds nobody up for long"


async def test_shutdown_does_not_wait_when_there_are_no_connections() -> None:
    async with running_gateway(drain_s=600.0) as gateway:
        gateway.server.begin_drain()
        await until(lambda: gateway.server.should_exit, timeout_s=30.0)


async def test_vllm_health_and_ping_paths_answer() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        for method, page in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
            async with gateway.client.request(method, gateway.url + page) as response:
                assert (response.status, await response.read()) == (200, b"")
        async with gateway.client.get(gateway.url + "/version") as response:
            assert await response.json() == {"version": __version__}
        async with gateway.client.get(gateway.url + "/load") as response:
            assert await response.json() == {"server_load": 0}
        async with gateway.client.get(gateway.url + "/tokenizer_info?model=m") as response:
            assert (response.status, await response.json()) == (200, {"asked": "/tokenizer_info?model=m"})
        async with gateway.client.get(gateway.url + "/tokenizer_info") as response:
            assert response.status == 200
        gateway.app.stop_gently()
        assert await status_of(gateway, gateway.url + "/health") == 503


async def test_openapi_is_forwarded_from_any_engine() -> None:
    async with (
        FakeEngine("a") as one,
        FakeEngine("b", model="other") as other,
        running_gateway(one.endpoint, other.endpoint) as gateway,
    ):
        await gateway.settled()
        async with gateway.client.get(gateway.url + "/openapi.json") as response:
            assert (response.status, await response.json()) == (200, {"asked": "/openapi.json"})
        async with gateway.client.get(gateway.url + "/docs") as response:
            assert (response.status, response.content_type) == (200, "text/html")
    async with running_gateway() as gateway:
        assert await status_of(gateway, gateway.url + "/openapi.json") == 503


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/tokenizer_info", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/healthz", 405, "method_not_allowed"),
        ("POST", "/v1/files", 404, "unknown_path"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
async def test_every_answer_has_a_request_id_and_every_error_a_code(
    method: str, path: str, status: int, code: str
) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        headers = {"x-request-id": "mine"}
        async with gateway.client.request(method, gateway.url + path, headers=headers) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (status, code)
            assert response.headers.getall("x-request-id") == ["mine"]
        async with gateway.client.get(gateway.url + "/healthz") as response:
            assert len(response.headers["x-request-id"]) == 32


def test_version_equals_the_wheels() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert __version__ == project["project"]["version"]


async def test_clients_need_a_key_and_engines_get_the_gateways_key() -> None:
    async with (
        FakeEngine("a") as engine,
        running_gateway(engine.endpoint, keys=ApiKeys(["sk-1"]), engine_api_key="sk-engine", admin_port=1) as gateway,
    ):
        async with gateway.chat("hi") as response:
            assert response.status == 401
            assert (await response.json())["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            assert "x-request-id" in response.headers
        for page in ("/v1/models", "/v1/models/m", "/nothing"):
            assert await status_of(gateway, gateway.url + page) == 401
        await until(lambda: gateway.app.fleet.is_ready)
        for page in ("/healthz", "/health", "/version"):
            assert await status_of(gateway, gateway.url + page) == 200
        assert await status_of(gateway, gateway.admin_url + "/metrics") == 200
        debug = gateway.admin_url + "/debug/endpoints"  # it names every tenant's engines
        assert await status_of(gateway, debug) == 401
        async with gateway.client.get(debug, headers={"x-api-key": "sk-1"}) as response:
            assert response.status == 200
        assert engine.bodies == []
        body = {"model": "m", "prompt": "hi"}
        for headers in ({"authorization": "Bearer sk-1"}, {"x-api-key": "sk-1"}):
            async with gateway.client.post(gateway.url + "/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200
        for seen in engine.headers:
            assert (seen["authorization"], "x-api-key" in seen) == ("Bearer sk-engine", False)


async def test_cross_origin_requests_are_allowed_when_origins_are_configured() -> None:
    browser = {"origin": "https://chat.example.com", "access-control-request-method": "POST"}
    keys, cors = ApiKeys(["sk-1"]), CorsPolicy(allowed_origins=("https://chat.example.com",))
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, keys=keys, cors=cors) as gateway:
        for path in ("/v1/chat/completions", "/v1/models", "/healthz", "/nothing"):
            async with gateway.client.options(gateway.url + path, headers=browser) as response:
                assert (response.status, await response.read()) == (204, b"")
                assert response.headers["access-control-allow-origin"] == "https://chat.example.com"
                assert response.headers["access-control-allow-methods"] == "POST"
        for path, allowed in (
            ("/v1/completions", "OPTIONS, POST"),
            ("/v1/models/m", "GET, HEAD, OPTIONS"),
            ("/v1/responses", "OPTIONS, POST"),
            ("/v1/responses/r", "DELETE, GET, OPTIONS"),
            ("/v1/responses/r/cancel", "OPTIONS, POST"),
            ("/v1/responses/r/input_items", "GET, OPTIONS"),
            ("/nothing", "OPTIONS"),
        ):
            async with gateway.client.options(gateway.url + path) as response:
                assert (response.status, response.headers["allow"]) == (204, allowed)
            assert "access-control-allow-origin" not in response.headers
        async with gateway.client.get(gateway.url + "/v1/models", headers=browser) as response:
            assert response.status == 401
            assert response.headers["access-control-allow-origin"] == "https://chat.example.com"
    async with (
        FakeEngine("a") as engine,
        running_gateway(engine.endpoint) as gateway,
        gateway.client.options(gateway.url + "/v1/models", headers=browser) as response,
    ):
        assert (response.status, "access-control-allow-origin" in response.headers) == (204, False)


@needs_openssl
async def test_tls_is_used_to_clients_and_to_engines(tmp_path: Path) -> None:
    ca = make_ca(tmp_path)
    cert, key = make_certificate(tmp_path, "gateway")
    mine, my_key = make_certificate(tmp_path, "towards-engines")
    make_certificate(tmp_path, "engine", host="DNS:engine.svc")
    client = client_context(str(ca))
    engine = FakeEngine("a")
    engine.tls = ServerTls(
        TlsFiles(
            ssl_certfile=str(tmp_path / "engine.pem"),
            ssl_keyfile=str(tmp_path / "engine.key"),
            ssl_ca_certs=str(ca),
            ssl_cert_reqs=2,
        )
    ).context
    async with (
        engine,
        running_gateway(
            engine.endpoint,
            upstream_tls=client_context(str(ca), str(mine), str(my_key)),
            engine_server_name="engine.svc",
            tls=TlsFiles(ssl_certfile=str(cert), ssl_keyfile=str(key)),
            admin_port=1,
        ) as gateway,
    ):
        await gateway.settled()
        await until(lambda: gateway.app.fleet.is_ready)
        assert gateway.url.startswith("https")
        body = {"model": "m", "prompt": "hi", "stream": True}
        async with gateway.client.post(gateway.url + "/v1/completions", json=body, ssl=client) as response:
            assert (response.status, (await response.read()).endswith(b"data: [DONE]\n\n")) == (200, True)
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await gateway.client.get(gateway.url + "/v1/models")
        assert await status_of(gateway, gateway.admin_url + "/readyz") == 200, "probes and Prometheus speak plain HTTP"
    async with FakeEngine("a") as plain, running_gateway(plain.endpoint) as gateway:
        assert await status_of(gateway, gateway.url + "/v1/models") == 200


@needs_openssl
async def test_an_engine_gets_no_request_when_its_certificate_is_of_another_ca(tmp_path: Path) -> None:
    make_ca(tmp_path)
    cert, key = make_certificate(tmp_path, "engine")
    other = client_context(str(make_ca(tmp_path, "other")))
    engine = FakeEngine("a", events=False, assets=False)
    engine.tls = ServerTls(TlsFiles(ssl_certfile=str(cert), ssl_keyfile=str(key))).context
    async with engine, running_gateway(engine.endpoint, upstream_tls=other) as gateway, gateway.chat("hi") as response:
        assert response.status == 503
        assert engine.bodies == []


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "deflate"])
async def test_a_body_is_forwarded_decompressed_when_it_is_compressed(encoding: str) -> None:
    pack = {"gzip": gzip.compress, "zstd": zstandard.compress, "deflate": zlib.compress}[encoding]
    body = b'{"model": "m", "prompt": "hi"}'
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, max_body_bytes=1 << 16) as gateway:
        headers, url = {"content-encoding": encoding}, gateway.url + "/v1/completions"
        async with gateway.client.post(url, data=pack(body), headers=headers) as response:
            assert response.status == 200
        assert engine.bodies == [body]
        assert "content-encoding" not in engine.headers[0]
        async with gateway.client.post(url, data=pack(b" " * (1 << 17)), headers=headers) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (413, "body_too_large")
        async with gateway.client.post(url, data=b"no " + pack(body), headers=headers) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (400, "invalid_encoding")


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "application/octet-stream"]
)
async def test_a_request_is_refused_when_its_content_type_is_not_json(content_type: str) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        for path in ("/v1/completions", "/v1/messages", "/tokenize"):
            headers = {"content-type": content_type}
            async with gateway.client.post(gateway.url + path, data=b"{}", headers=headers) as response:
                assert response.status == 415
        assert engine.bodies == []


async def test_access_log_has_a_line_a_request_and_warnings_for_failures(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "mini_infer_gateway.access_log")
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()  # only then prompts are counted
        async with gateway.chat("hi", stream=True) as response:
            await response.read()
        async with gateway.client.post(gateway.url + "/v1/completions", data=b"{}") as response:
            assert response.status == 400
        assert await status_of(gateway, gateway.url + "/nothing") == 404
        assert await status_of(gateway, gateway.url + "/healthz") == 200
    lines = [record for record in caplog.records if record.name == "mini_infer_gateway.access_log"]
    streamed, refused, missing, probe = lines
    levels = ["INFO", "WARNING", "WARNING", "DEBUG"]
    assert [record.levelname for record in lines] == levels
    fields = streamed.__dict__["fields"]
    assert {"method": "POST", "path": "/v1/chat/completions", "status": 200, "model": "m", "outcome": "ok"}.items() <= (
        fields.items()
    )
    assert (fields["endpoint"], fields["prompt_tokens"]) == ("a", len("<user>hi<assistant>"))
    assert 0 < fields["first_token_s"] <= fields["duration_s"]
    assert refused.__dict__["fields"]["error"].startswith("model must name")
    assert "404" in missing.getMessage()
    assert "/healthz 200" in probe.getMessage()


async def test_access_log_is_silent_when_it_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "mini_infer_gateway.access_log")
    async with (
        FakeEngine("a") as engine,
        running_gateway(engine.endpoint, access_log=False) as gateway,
        gateway.chat("hi") as response,
    ):
        assert response.status == 200
    assert not [record for record in caplog.records if record.name == "mini_infer_gateway.access_log"]


async def test_models_report_the_least_max_model_len_of_their_engines() -> None:
    async with FakeEngine("a") as a, FakeEngine("b") as b:
        a.max_model_len, b.max_model_len = 4096, 8192
        service = {"service": "ns/svc", "service_created": "2026-01-02T03:04:05Z"}
        endpoints = [msgspec.structs.replace(engine.endpoint, **service) for engine in (a, b)]
        async with running_gateway(*endpoints) as gateway:
            await gateway.settled()
            for path in ("/v1/models/m", "/v1/models/ns/svc"):
                async with gateway.client.get(gateway.url + path) as response:
                    model = await response.json()
                assert (model["root"], model["max_model_len"], model["owned_by"]) == ("m", 8192, "ns/svc")
                assert model["created"] == 1767323045
    async with FakeEngine("a") as a, running_gateway(a.endpoint) as gateway:
        async with gateway.client.get(gateway.url + "/v1/models") as response:
            (model,) = (await response.json())["data"]
        assert (model["id"], model["max_model_len"], model["owned_by"]) == ("m", None, "mini-infer")
        assert model["created"] <= time.time()


async def test_the_context_length_is_known_soon_when_a_model_is_loaded_late() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        assert gateway.app.fleet.max_prompt_tokens(["a"]) is None
        engine.max_model_len = 4096
        await until(lambda: gateway.app.fleet.max_prompt_tokens(["a"]) == 4096)


@pytest.mark.parametrize(
    ("ones", "others", "reported"),
    [
        ({"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}, {}, ("hermes", "qwen3")),
        ({"tool_call_parser": "hermes"}, {"tool_call_parser": "hermes", "reasoning_parser": None}, ("hermes", None)),
        ({"tool_call_parser": "hermes"}, {"tool_call_parser": "llama3_json"}, (None, None)),
        ({}, {}, (None, None)),
    ],
)
async def test_models_report_parsers_and_implementation_when_their_engines_agree(
    ones: dict[str, str | None], others: dict[str, str | None], reported: tuple[str | None, str | None]
) -> None:
    async with FakeEngine("a") as a, FakeEngine("b") as b:
        a.parsers, b.parsers = ones | {"model_impl": "transformers"}, others | {"model_impl": "transformers"}
        async with running_gateway(a.endpoint, b.endpoint) as gateway:
            await gateway.settled()
            async with gateway.client.get(gateway.url + "/v1/models/m") as response:
                model = await response.json()
            assert (model["tool_call_parser"], model["reasoning_parser"]) == reported
            assert model["model_impl"] == "transformers"


async def test_models_report_no_implementation_when_their_engines_disagree() -> None:
    async with FakeEngine("a") as a, FakeEngine("b") as b:
        a.parsers, b.parsers = {"model_impl": "transformers"}, {"model_impl": "native"}
        async with running_gateway(a.endpoint, b.endpoint) as gateway:
            await gateway.settled()
            async with gateway.client.get(gateway.url + "/v1/models/m") as response:
                assert (await response.json())["model_impl"] is None


def parts_of_requests() -> list[Call | Exchange | Attempt]:
    return [one for one in gc.get_objects() if isinstance(one, Call | Exchange | Attempt)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "status"),
    [("hello", 200), ("é" * 20_000, 400), ("a" * (INLINE_BYTES + 1), 400), ("\ud800" * 20_000, 400)],
    ids=["answered", "tokens_on_a_thread", "characters_on_a_thread", "no_text"],
)
async def test_a_request_leaves_no_reference_cycles(text: str, status: int, stream: bool) -> None:
    """What refers to itself costs as much to be found as half of what the gateway does for a request."""
    async with FakeEngine("a") as engine:
        engine.max_model_len = 30_000
        async with running_gateway(engine.endpoint) as gateway:
            await gateway.settled()
            gc.collect()
            others = parts_of_requests()
            gc.disable()
            try:
                for _ in range(3):
                    async with gateway.chat(text, stream=stream) as response:
                        await response.read()
                    assert response.status == status
                await until(lambda: len(parts_of_requests()) <= len(others))
            finally:
                gc.enable()


async def test_a_gateway_is_not_ready_and_starts_its_source_again_when_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "FIRST_SOURCE_PAUSE_S", 0.2)
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        runs, fail, again = 0, asyncio.Event(), asyncio.Event()
        run = gateway.source.run

        async def failing(publish: Publish) -> None:
            nonlocal runs
            runs += 1
            if runs == 1:
                publish([Listed(engine.endpoint)])
                await fail.wait()
                raise RuntimeError("the source broke")
            await again.wait()
            await run(publish)

        monkeypatch.setattr(gateway.source, "run", failing)
        source = next(task for task in gateway.app._tasks if task.get_name() == "endpoint source")
        source.cancel()
        gateway.app._tasks.append(asyncio.create_task(gateway.app._follow_source()))
        await until(lambda: runs == 1)
        fail.set()
        await until(lambda: bool(gateway.app._source_failure))
        async with gateway.client.get(gateway.url + "/readyz") as response:
            assert response.status == 503
            assert "the source broke" in (await response.json())["status"]
        async with gateway.chat("hi") as response:
            assert response.status == 200, "the last list stays"
        again.set()
        await until(lambda: runs == 2 and not gateway.app._source_failure)
        async with gateway.client.get(gateway.url + "/readyz") as response:
            assert response.status == 200
        assert "mini_infer_gateway_endpoint_source_failures_total 1.0" in gateway.app.metrics.text().decode()
