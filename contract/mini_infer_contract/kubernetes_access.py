"""How to reach an API server: its address, whom to trust, and how we prove who we are. Sends no requests.

Inside a cluster these come from the pod's service account, outside from a kubeconfig file. Of a kubeconfig it reads
certificates, tokens, token files and `exec` credential plugins; `auth-provider`, which Kubernetes 1.26 dropped, and
basic authentication, which 1.19 dropped, are not read.
"""

import base64
import json
import os
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_REREAD_S = 60.0
"""A pod's token is replaced on disk long before it expires (after 80 % of an hour or more)."""
PLUGIN_LIMIT_S = 60.0
EXPIRY_MARGIN_S = 30.0
DEFAULT_KUBECONFIG = Path("~/.kube/config")

Authorization = Callable[[], str | None]
"""The Authorization header's value now, or None. May read a file, or run an `exec` plugin whose token has expired."""


class AccessError(Exception):
    """There is no usable way to an API server; the message says what is missing and what to write."""


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """Everything that a client needs to begin."""

    server: str
    """Such as https://10.96.0.1:443, without a slash at the end."""
    authorization: Authorization
    tls: ssl.SSLContext | None
    """None for http://, such as `kubectl proxy`."""


def find_access(kubeconfig: str | None = None, environment: Mapping[str, str] = os.environ) -> ClusterAccess:
    """By the file that is named, else the pod's service account, else KUBECONFIG, else ~/.kube/config.

    AccessError where none of them is there or the one that is there cannot be used.
    """
    if kubeconfig is not None:
        return from_kubeconfig(Path(kubeconfig))
    if "KUBERNETES_SERVICE_HOST" in environment and (SERVICE_ACCOUNT / "token").exists():
        return from_service_account(environment)
    named = [part for part in environment.get("KUBECONFIG", "").split(os.pathsep) if part]
    path = Path(named[0]) if named else DEFAULT_KUBECONFIG.expanduser()
    if not path.exists():
        raise AccessError(
            f"this is not a pod with a service account and there is no {path}: set KUBECONFIG to a kubeconfig file"
        )
    return from_kubeconfig(path)


def from_service_account(environment: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> ClusterAccess:
    """What Kubernetes mounts into a pod."""
    host, port = environment["KUBERNETES_SERVICE_HOST"], environment.get("KUBERNETES_SERVICE_PORT", "443")
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return ClusterAccess(server, _token_file(folder / "token"), ssl.create_default_context(cafile=folder / "ca.crt"))


def from_kubeconfig(path: Path) -> ClusterAccess:
    """The current context of a kubeconfig file."""
    try:
        document = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise AccessError(f"kubeconfig {path} cannot be read: {error}") from None
    context = _entry(document, "contexts", document.get("current-context"), path)["context"]
    cluster = _entry(document, "clusters", context.get("cluster"), path)["cluster"]
    user = _entry(document, "users", context["user"], path)["user"] if context.get("user") else {}
    server = str(cluster["server"]).rstrip("/")
    plugin = _ExecPlugin(user["exec"], path.parent) if "exec" in user else None
    tls = _tls_of(cluster, user | (plugin.certificates() if plugin else {}), path) if server[:8] == "https://" else None
    return ClusterAccess(server, plugin.authorization if plugin else _authorization_of(user, path), tls)


def _entry(document: Mapping[str, Any], kind: str, name: str | None, path: Path) -> dict[str, Any]:
    for item in document.get(kind) or ():
        if item["name"] == name:
            return dict(item)
    raise AccessError(f"kubeconfig {path}: there is no {name!r} among its {kind}: choose another current-context")


def _tls_of(cluster: Mapping[str, Any], user: Mapping[str, Any], path: Path) -> ssl.SSLContext:
    authority = _content(cluster, "certificate-authority", path)
    tls = ssl.create_default_context(cadata=authority.decode() if authority else None)
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    certificate, key = _content(user, "client-certificate", path), _content(user, "client-key", path)
    if certificate and key:
        with tempfile.TemporaryDirectory() as folder:  # OpenSSL takes a client's key from a file only
            pair = Path(folder) / "pair.pem"
            pair.touch(mode=0o600)
            pair.write_bytes(certificate + b"\n" + key)
            tls.load_cert_chain(pair)
    return tls


def _content(holder: Mapping[str, Any], field: str, path: Path) -> bytes | None:
    """A field that is there as base64 in `FIELD-data` or as a file's name in `FIELD`, relative to the kubeconfig."""
    if f"{field}-data" in holder:
        return base64.b64decode(holder[f"{field}-data"])
    return (path.parent / holder[field]).read_bytes() if field in holder else None


def _authorization_of(user: Mapping[str, Any], path: Path) -> Authorization:
    if "tokenFile" in user:
        return _token_file(path.parent / user["tokenFile"])
    header = f"Bearer {user['token']}" if user.get("token") else None
    return lambda: header


def _token_file(path: Path) -> Authorization:
    read_at, header = -TOKEN_REREAD_S, ""

    def authorization() -> str:
        nonlocal read_at, header
        now = time.monotonic()
        if now - read_at >= TOKEN_REREAD_S:
            header, read_at = f"Bearer {path.read_text().strip()}", now
        return header

    return authorization


class _ExecPlugin:
    """A credential plugin.

    https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins
    """

    def __init__(self, plugin: Mapping[str, Any], folder: Path) -> None:
        self._plugin = plugin
        self._folder = folder
        self._status: dict[str, Any] = {}
        self._expires_s = 0.0

    def authorization(self) -> str | None:
        """The token of now."""
        self._renew()
        token = self._status.get("token")
        return f"Bearer {token}" if token else None

    def certificates(self) -> dict[str, str]:
        """A client certificate, in the words of a kubeconfig's user, where the plugin gives one."""
        self._renew()
        pairs = {"client-certificate-data": "clientCertificateData", "client-key-data": "clientKeyData"}
        return {
            ours: base64.b64encode(self._status[theirs].encode()).decode()
            for ours, theirs in pairs.items()
            if theirs in self._status
        }

    def _renew(self) -> None:
        if self._status and time.time() < self._expires_s - EXPIRY_MARGIN_S:
            return
        command = str(self._plugin["command"])
        if "/" in command:
            command = str(self._folder / command)
        extra = {item["name"]: item["value"] for item in self._plugin.get("env") or ()}
        question = {"apiVersion": self._plugin["apiVersion"], "kind": "ExecCredential", "spec": {"interactive": False}}
        try:
            answer = subprocess.run(
                [command, *(self._plugin.get("args") or ())],
                env={**os.environ, **extra, "KUBERNETES_EXEC_INFO": json.dumps(question)},
                capture_output=True,
                text=True,
                check=True,
                timeout=PLUGIN_LIMIT_S,
            )
            self._status = dict(json.loads(answer.stdout)["status"])
        except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
            hint = self._plugin.get("installHint") or "run it by hand to see why"
            said = (getattr(error, "stderr", None) or str(error)).strip()
            raise AccessError(f"credential plugin {command}: {said}; {hint}") from None
        expiry = self._status.get("expirationTimestamp")
        self._expires_s = datetime.fromisoformat(expiry).timestamp() if expiry else float("inf")
