"""Which API server is found and with which credentials, what is sent to it, and what becomes of its answers."""

import asyncio
import base64
import json
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import incluster_config

from mini_infer_web import kubernetes_api
from mini_infer_web.kubernetes_api import AccessError, ApiError, ApiServer, current_namespace, load_configuration
from tests.support.api_servers import server_at
from tests.support.running_gateway import until


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificate")
    subject = ("-subj", "/CN=test", "-addext", "basicConstraints=critical,CA:TRUE")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject]
    files = ["-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    subprocess.run([*command, *files], check=True, capture_output=True)
    return folder


def kubeconfig(folder: Path, cluster: dict[str, Any], user: dict[str, Any], name: str = "config") -> str:
    path = folder / name
    document = {
        "clusters": [{"name": "other", "cluster": {"server": "https://wrong"}}, {"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(document))
    return str(path)


def data(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


async def authorization(configuration: Configuration) -> str | None:
    return await configuration.get_api_key_with_prefix("BearerToken")


async def test_the_current_context_and_its_token_are_taken_when_a_kubeconfig_is_named(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path, {"server": "http://127.0.0.1:8001/"}, {"token": "secret"})
    configuration = await load_configuration(path)
    assert (configuration.host, await authorization(configuration)) == ("http://127.0.0.1:8001", "Bearer secret")


async def test_files_are_merged_when_kubeconfig_names_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clusters, users = tmp_path / "clusters", tmp_path / "users"
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    clusters.write_text(json.dumps({"clusters": [{"name": "c", "cluster": {"server": "http://k:1"}}]}))
    users.write_text(
        json.dumps({"users": [{"name": "u", "user": {"token": "t"}}], "contexts": [context], "current-context": "x"})
    )
    monkeypatch.setenv("KUBECONFIG", f"{clusters}:{users}")
    configuration = await load_configuration()
    assert (configuration.host, await authorization(configuration)) == ("http://k:1", "Bearer t")


def test_the_namespace_is_that_of_the_current_context_when_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = [
        {"name": "x", "context": {"cluster": "c", "user": "u"}},
        {"name": "y", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
    ]
    path = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(path))
    for current, namespace in (("y", "team"), ("x", "default"), ("z", "default")):
        path.write_text(json.dumps({"contexts": contexts, "current-context": current}))
        assert current_namespace() == namespace


@pytest.mark.parametrize("content", [None, "", "a: [1", "[]", "contexts: 1", "\0"])
def test_the_namespace_is_default_when_no_kubeconfig_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(path))
    assert current_namespace() == "default"
    assert not caplog.records


def test_the_namespace_is_the_pods_when_it_runs_in_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("t")
    (tmp_path / "namespace").write_text("team")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setattr(kubernetes_api, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    assert current_namespace() == "team"


@pytest.mark.parametrize(("excepted", "proxy"), [("", "http://p:3128"), ("10.0.0.1,k", None)])
async def test_the_environments_proxy_is_taken_unless_it_is_excepted_when_the_kubeconfig_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, excepted: str, proxy: str | None
) -> None:
    monkeypatch.setenv("https_proxy", "http://p:3128")
    monkeypatch.setenv("no_proxy", excepted)
    configuration = await load_configuration(kubeconfig(tmp_path, {"server": "https://k:6443"}, {"token": "t"}))
    assert configuration.proxy == proxy
    named = kubeconfig(tmp_path, {"server": "https://k:6443", "proxy-url": "http://q:1"}, {"token": "t"})
    assert (await load_configuration(named)).proxy == "http://q:1"


async def test_kubeconfig_certificates_are_read_as_data_and_as_files(tmp_path: Path, certificate: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_bytes((certificate / name).read_bytes())
    as_files = {"client-certificate": "cert.pem", "client-key": "key.pem"}
    as_data = {f"{name}-data": data(certificate / file) for name, file in as_files.items()}
    authorities = (
        {"certificate-authority": "cert.pem"},
        {"certificate-authority-data": data(certificate / "cert.pem")},
    )
    for user, authority in zip((as_files, as_data), authorities, strict=True):
        configuration = await load_configuration(kubeconfig(tmp_path, {"server": "https://k:1", **authority}, user))
        tls = ApiClient(configuration).rest_client.ssl_context
        assert tls.check_hostname
        assert tls.get_ca_certs()[0]["subject"] == ((("commonName", "test"),),)
        assert await authorization(configuration) is None


async def test_a_certificate_is_not_checked_when_the_kubeconfig_says_so(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path, {"server": "https://k", "insecure-skip-tls-verify": True}, {})
    assert ApiClient(await load_configuration(path)).rest_client.ssl_context.verify_mode is ssl.CERT_NONE


async def test_a_pods_token_is_read_again_when_it_is_replaced_on_disk(
    tmp_path: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ca.crt").write_bytes((certificate / "cert.pem").read_bytes())
    (tmp_path / "token").write_text("old")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr(kubernetes_api, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    configuration = await load_configuration()
    assert configuration.host == "https://[fd00::1]:6443"
    assert str(await authorization(configuration)).lower() == "bearer old"
    (tmp_path / "token").write_text("new")
    assert str(await authorization(configuration)).lower() == "bearer old"

    class Later(incluster_config.datetime.datetime):  # type: ignore[misc]  # a class of a module without annotations
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return super().now(tz) + incluster_config.datetime.timedelta(seconds=61)

    monkeypatch.setattr(incluster_config.datetime, "datetime", Later)
    assert str(await authorization(configuration)).lower() == "bearer new"


PLUGIN = """#!/bin/sh
cd "$(dirname "$0")"
echo "$1 $ASKED $KUBERNETES_EXEC_INFO" >>calls
echo '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
       "status": {"token": "t'$(wc -l <calls)'"}}'
"""


def exec_user(folder: Path, script: str) -> dict[str, Any]:
    (folder / "plugin").write_text(script)
    (folder / "plugin").chmod(0o755)
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin", "args": ["login"]}
    return {"exec": {**plugin, "env": [{"name": "ASKED", "value": "yes"}]}}


async def test_a_credential_plugin_gives_the_token_when_the_kubeconfig_names_one(tmp_path: Path) -> None:
    configuration = await load_configuration(kubeconfig(tmp_path, {"server": "http://k"}, exec_user(tmp_path, PLUGIN)))
    assert await authorization(configuration) == "Bearer t1"
    requested = (tmp_path / "calls").read_text()
    assert "login yes" in requested
    assert '"kind": "ExecCredential"' in requested


@pytest.mark.parametrize(
    "script",
    [
        "echo no session >&2; exit 1",
        "echo",
        "echo no json",
        "echo []",
        "echo {}",
        """echo '{"status": {"token": 5}}'""",
    ],
)
async def test_a_plugin_is_an_access_error_when_it_gives_no_credentials(tmp_path: Path, script: str) -> None:
    path = kubeconfig(tmp_path, {"server": "http://k"}, exec_user(tmp_path, f"#!/bin/sh\n{script}\n"))
    with pytest.raises(AccessError, match="credential plugin"):
        await load_configuration(path)


def is_running(pid: str) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().split()[2] != "Z"


async def test_a_plugin_is_killed_with_its_children_and_other_work_goes_on_when_it_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "CREDENTIALS_LIMIT_S", 0.5)
    script = '#!/bin/sh\nsleep 60 & echo $! >"$(dirname "$0")/child"; wait\n'
    path = kubeconfig(tmp_path, {"server": "http://k"}, exec_user(tmp_path, script))
    loading = asyncio.create_task(load_configuration(path))
    await asyncio.sleep(0.01)  # a loop that the plugin blocks never gets here before its end
    assert not loading.done()
    with pytest.raises(AccessError, match="plugin"):
        await loading
    child = tmp_path / "child"  # not there where the shell had no turn in half a second
    await until(lambda: not child.exists() or not is_running(child.read_text().strip()))


@pytest.mark.parametrize("content", [None, b"\xff\xfe", "t\u00e9".encode()])
async def test_a_token_file_is_an_access_error_when_it_cannot_be_used(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    path = kubeconfig(tmp_path, {"server": "http://k"}, {"tokenFile": "token"})
    with pytest.raises(AccessError, match=r"token|decode"):
        await load_configuration(path)


async def test_a_token_file_is_read_without_its_line_break(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    configuration = await load_configuration(kubeconfig(tmp_path, {"server": "http://k"}, {"tokenFile": "token"}))
    assert await authorization(configuration) == "Bearer secret"


@pytest.mark.parametrize(
    "content", ["[]", "contexts: 5", "- a", "users: [{}]\ncontexts: [{}]\ncurrent-context: x", "\x00", ": ["]
)
async def test_a_kubeconfig_is_an_access_error_when_it_is_malformed(tmp_path: Path, content: str) -> None:
    (tmp_path / "config").write_text(content)
    with pytest.raises(AccessError, match="kubeconfig"):
        await load_configuration(str(tmp_path / "config"))


async def test_access_error_names_the_missing_kubeconfig_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").write_text("current-context: x\n")
    with pytest.raises(AccessError, match="contexts"):
        await load_configuration(str(tmp_path / "empty"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    with pytest.raises(AccessError, match="KUBECONFIG"):
        await load_configuration()


class Server:
    """Answers with `responses` in turn and remembers what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.responses: list[web.Response] = []
        self.requests: list[tuple[str, str, str, str]] = []

    async def handle(self, request: web.Request) -> web.Response:
        requested = (request.method, request.path_qs, request.headers.get("Authorization", ""), request.content_type)
        self.requests.append(requested)
        return self.responses.pop(0)


async def _served() -> AsyncIterator[Server]:
    server, app = Server(), web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


served, elsewhere = pytest.fixture(_served, name="served"), pytest.fixture(_served, name="elsewhere")


@pytest.fixture
async def connected(served: Server) -> AsyncIterator[tuple[Server, ApiServer]]:
    async with server_at(served.url) as client:
        yield served, client


async def test_a_kubernetes_request_has_token_query_and_content_type(connected: tuple[Server, ApiServer]) -> None:
    server, client = connected
    server.responses += [web.json_response({"kind": "Pod"}), web.json_response({})]
    assert await client.request("GET", "/api/v1/pods", query={"labelSelector": "a in (b,c)"}) == {"kind": "Pod"}
    await client.request("PATCH", "/x", body={"a": 1}, content_type="application/apply-patch+yaml")
    assert server.requests[0][:3] == ("GET", "/api/v1/pods?labelSelector=a%20in%20(b,c)", "Bearer t")
    assert server.requests[1][3] == "application/apply-patch+yaml"


async def test_a_kubernetes_error_has_the_servers_message(connected: tuple[Server, ApiServer]) -> None:
    server, client = connected
    status = {"kind": "Status", "reason": "Forbidden", "message": "exceeded quota: q"}
    server.responses += [web.json_response(status, status=403), web.Response(text="upstream is away\n", status=502)]
    with pytest.raises(ApiError) as refused:
        await client.request("GET", "/x")
    assert (refused.value.status, refused.value.reason, refused.value.message) == (
        403,
        "Forbidden",
        "exceeded quota: q",
    )
    with pytest.raises(ApiError, match=r"^502: upstream is away$"):
        await client.request("GET", "/x")


async def test_the_token_is_not_sent_when_the_api_server_redirects(
    connected: tuple[Server, ApiServer], elsewhere: Server
) -> None:
    server, client = connected
    server.responses.append(web.Response(status=307, headers={"Location": f"{elsewhere.url}/y"}, text="{}"))
    elsewhere.responses.append(web.json_response({}))
    await client.request("GET", "/x")
    assert [request[1:3] for request in elsewhere.requests] == [("/y", "")]


async def test_each_kubernetes_request_is_counted_with_its_status(served: Server) -> None:
    seen: list[tuple[str, str, dict[str, str], int | None]] = []

    def count(method: str, path: str, query: Any, status: int | None) -> None:
        seen.append((method, path, dict(query), status))

    served.responses += [web.json_response({}), web.json_response({"message": "no"}, status=403)]
    async with server_at(served.url, seen=count) as client:
        await client.request("GET", "/a", query={"watch": "true"})
        with pytest.raises(ApiError):
            await client.request("POST", "/b", body={})
    async with server_at("http://127.0.0.1:9", seen=count) as gone:
        with pytest.raises(OSError, match=r"127\.0\.0\.1"):
            await gone.request("GET", "/c")
    assert seen == [("GET", "/a", {"watch": "true"}, 200), ("POST", "/b", {}, 403), ("GET", "/c", {}, None)]


async def test_credentials_are_loaded_again_when_the_api_server_refuses_them(served: Server) -> None:
    served.responses += [web.json_response({"message": "no"}, status=401), web.json_response({"kind": "Pod"})]
    tokens = ["old", "new"]
    async with server_at(served.url, lambda: tokens.pop(0)) as client:
        assert await client.request("GET", "/x") == {"kind": "Pod"}
    assert [request[2] for request in served.requests] == ["Bearer old", "Bearer new"]


async def test_a_request_is_an_error_when_fresh_credentials_are_refused_too(
    connected: tuple[Server, ApiServer],
) -> None:
    server, client = connected
    server.responses += [web.json_response({"message": "no"}, status=401) for _ in range(2)]
    with pytest.raises(ApiError, match="401"):
        await client.request("GET", "/x")


async def test_the_next_request_tries_again_when_credentials_could_not_be_loaded(served: Server) -> None:
    served.responses.append(web.json_response({}))
    failures = [AccessError("plugin: no session")]

    def token() -> str:
        if failures:
            raise failures.pop()
        return "t"

    async with server_at(served.url, token) as client:
        with pytest.raises(AccessError, match="no session"):
            await client.request("GET", "/x")
        await client.request("GET", "/x")


@pytest.mark.parametrize("body", ["<html>", "[1]", "5", ""])
async def test_an_answer_is_an_api_error_when_it_is_no_json_object(
    connected: tuple[Server, ApiServer], body: str
) -> None:
    server, client = connected
    server.responses.append(web.Response(text=body))
    with pytest.raises(ApiError, match="no JSON object"):
        await client.request("GET", "/x")
