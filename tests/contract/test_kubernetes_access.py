"""Where an API server is and who we are, read from the files and plugins that clusters in use have."""

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mini_infer_contract import kubernetes_access
from mini_infer_contract.kubernetes_access import AccessError, find_access, from_service_account


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificate")
    subject = ("-subj", "/CN=test", "-addext", "basicConstraints=critical,CA:TRUE")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject]
    files = ["-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    subprocess.run([*command, *files], check=True, capture_output=True)
    return folder


def kubeconfig(folder: Path, cluster: dict[str, Any], user: dict[str, Any]) -> str:
    path = folder / "config"
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


def test_a_kubeconfigs_current_context_and_token(tmp_path: Path) -> None:
    access = find_access(kubeconfig(tmp_path, {"server": "http://127.0.0.1:8001/"}, {"token": "secret"}))
    assert (access.server, access.authorization(), access.tls) == ("http://127.0.0.1:8001", "Bearer secret", None)


def test_certificates_as_data_and_as_files_beside_the_kubeconfig(tmp_path: Path, certificate: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_bytes((certificate / name).read_bytes())
    as_files = {"client-certificate": "cert.pem", "client-key": "key.pem"}
    as_data = {f"{name}-data": data(certificate / file) for name, file in as_files.items()}
    authorities = (
        {"certificate-authority": "cert.pem"},
        {"certificate-authority-data": data(certificate / "cert.pem")},
    )
    for user, authority in zip((as_files, as_data), authorities, strict=True):
        access = find_access(kubeconfig(tmp_path, {"server": "https://k:1", **authority}, user))
        assert access.tls is not None
        assert access.tls.check_hostname
        assert access.tls.get_ca_certs()[0]["subject"] == ((("commonName", "test"),),)
        assert access.authorization() is None


def test_a_certificate_that_must_not_be_checked(tmp_path: Path) -> None:
    access = find_access(kubeconfig(tmp_path, {"server": "https://k", "insecure-skip-tls-verify": True}, {}))
    assert access.tls is not None
    assert not access.tls.check_hostname


def test_a_pods_service_account_whose_token_is_replaced_on_disk(
    tmp_path: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ca.crt").write_bytes((certificate / "cert.pem").read_bytes())
    (tmp_path / "token").write_text("old\n")
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    access = from_service_account(environment, tmp_path)
    assert access.server == "https://[fd00::1]:6443"
    assert access.authorization() == "Bearer old"
    (tmp_path / "token").write_text("new\n")
    assert access.authorization() == "Bearer old"
    now += 61
    assert access.authorization() == "Bearer new"


PLUGIN = """#!/bin/sh
echo "$0 $1 $ASKED $KUBERNETES_EXEC_INFO" >>"$(dirname "$0")/calls"
echo '{"status": {"token": "t'$(wc -l <"$(dirname "$0")/calls")'", "expirationTimestamp": "%s"}}'
"""


def exec_user(folder: Path, script: str) -> dict[str, Any]:
    (folder / "plugin").write_text(script)
    (folder / "plugin").chmod(0o755)
    variables = [{"name": "ASKED", "value": "yes"}]
    hint = "install the plugin"
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin", "args": ["login"]}
    return {"exec": {**plugin, "env": variables, "installHint": hint}}


@pytest.mark.parametrize(("expiry", "tokens"), [("2999-01-01T00:00:00Z", "t1 t1"), ("2020-01-01T00:00:00Z", "t2 t3")])
def test_a_credential_plugin_runs_again_when_its_token_expires(tmp_path: Path, expiry: str, tokens: str) -> None:
    access = find_access(kubeconfig(tmp_path, {"server": "https://k"}, exec_user(tmp_path, PLUGIN % expiry)))
    assert f"{access.authorization()} {access.authorization()}".replace("Bearer ", "") == tokens
    first = (tmp_path / "calls").read_text().splitlines()[0]
    assert "login yes" in first
    assert '"kind": "ExecCredential"' in first


def test_a_plugin_that_fails_says_what_it_said(tmp_path: Path) -> None:
    path = kubeconfig(
        tmp_path, {"server": "https://k"}, exec_user(tmp_path, "#!/bin/sh\necho no session >&2; exit 1\n")
    )
    with pytest.raises(AccessError, match="plugin: no session; install the plugin"):
        find_access(path)


@pytest.mark.parametrize(
    "printed",
    [
        *("", "no json", "[]", "{}", '{"status": []}', '{"status": {"token": 5}}', '{"status": {"token": "a\\nb"}}'),
        *('{"status": {"token": "t", "expirationTimestamp": "soon"}}', '{"status": {"token": "t\\u00e9"}}'),
    ],
)
def test_a_plugin_is_an_access_error_when_it_prints_something_else(tmp_path: Path, printed: str) -> None:
    path = kubeconfig(tmp_path, {"server": "http://k"}, exec_user(tmp_path, f"#!/bin/sh\necho '{printed}'\n"))
    with pytest.raises(AccessError, match="credential plugin"):
        find_access(path).authorization()


def test_a_plugin_is_killed_with_its_children_when_it_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_access, "PLUGIN_LIMIT_S", 0.2)
    script = '#!/bin/sh\nsleep 60 & echo $! >"$(dirname "$0")/child"; wait\n'
    access = find_access(kubeconfig(tmp_path, {"server": "http://k"}, exec_user(tmp_path, script)))
    with pytest.raises(AccessError, match="timed out"):
        access.authorization()
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    assert not child.exists() or child.read_text().split()[2] == "Z"


@pytest.mark.parametrize("content", [None, b"\xff\xfe", "t\u00e9".encode()])
def test_a_token_file_is_an_access_error_when_it_cannot_be_used(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    access = find_access(kubeconfig(tmp_path, {"server": "http://k"}, {"tokenFile": "token"}))
    with pytest.raises(AccessError, match="token file"):
        access.authorization()


@pytest.mark.parametrize(
    "content", ["[]", "contexts: 5", "- a", "users: [{}]\ncontexts: [{}]\ncurrent-context: x", "\x00", ": ["]
)
def test_a_kubeconfig_is_an_access_error_when_it_is_malformed(tmp_path: Path, content: str) -> None:
    (tmp_path / "config").write_text(content)
    with pytest.raises(AccessError, match="kubeconfig"):
        find_access(str(tmp_path / "config"))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("current-context: x\n")
    with pytest.raises(AccessError, match="there is no 'x' among its contexts"):
        find_access(str(tmp_path / "empty"))
    with pytest.raises(AccessError, match="set KUBECONFIG"):
        find_access(None, {"KUBECONFIG": str(tmp_path / "nowhere")})
