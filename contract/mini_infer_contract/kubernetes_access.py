"""How to reach an API server: its address, whom to trust, and how we prove who we are. Sends no requests.

Inside a cluster these come from the pod's service account, outside from a kubeconfig file. Of a kubeconfig it reads
certificates, tokens, token files and `exec` credential plugins; `auth-provider`, which Kubernetes 1.26 dropped, and
basic authentication, which 1.19 dropped, are not read.
"""

import base64
import contextlib
import json
import os
import signal
import ssl
import subprocess
import tempfile
import threading
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
"""Returns the Authorization header's value of now, or None. Raises AccessError if there is no usable one."""


class AccessError(ConnectionError):
    """There is no usable way to an API server; the message says what is missing and what to write.

    It is a ConnectionError because credentials come and go as networks do: what retries on one retries on the other.
    """


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """Everything that a client needs to begin."""

    server: str
    """Such as https://10.96.0.1:443, without a slash at the end."""
    authorization: Authorization
    tls: ssl.SSLContext | None
    """None for http://, such as `kubectl proxy`."""
    plugin: "ExecPlugin | None" = None
    """Runs a program for `authorization`, which then may take PLUGIN_LIMIT_S: call it in a thread."""
    forget: Callable[[], None] = lambda: None
    """Drops what is remembered for `authorization`, because the API server refused it."""


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
            f"no cluster found (not in a pod, and there is no {path}): set KUBECONFIG to a kubeconfig file"
        )
    return from_kubeconfig(path)


def from_service_account(environment: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> ClusterAccess:
    """What Kubernetes mounts into a pod."""
    host, port = environment["KUBERNETES_SERVICE_HOST"], environment.get("KUBERNETES_SERVICE_PORT", "443")
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    token = _TokenFile(folder / "token")
    try:
        tls = ssl.create_default_context(cafile=folder / "ca.crt")
    except OSError as error:  # ssl.SSLError is one
        raise AccessError(f"the service account's {folder / 'ca.crt'} cannot be used: {error}") from None
    return ClusterAccess(server, token.authorization, tls, forget=token.forget)


def from_kubeconfig(path: Path) -> ClusterAccess:
    """The current context of a kubeconfig file. Runs its credential plugin, which blocks: call it in a thread."""
    try:
        return _from_document(yaml.safe_load(path.read_text()) or {}, path)
    except AccessError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise AccessError(f"kubeconfig {path} cannot be read: {type(error).__name__}: {error}") from None


def _from_document(document: Mapping[str, Any], path: Path) -> ClusterAccess:
    context = _entry(document, "contexts", document.get("current-context"), path)["context"]
    cluster = _entry(document, "clusters", context.get("cluster"), path)["cluster"]
    user = _entry(document, "users", context["user"], path)["user"] if context.get("user") else {}
    server = str(cluster["server"]).rstrip("/")
    plugin = ExecPlugin(user["exec"], path.parent) if "exec" in user else None
    tls = _tls_of(cluster, user | (plugin.certificates() if plugin else {}), path) if server[:8] == "https://" else None
    if plugin is not None:
        return ClusterAccess(server, plugin.authorization, tls, plugin, plugin.forget)
    if "tokenFile" in user:
        token = _TokenFile(path.parent / user["tokenFile"])
        return ClusterAccess(server, token.authorization, tls, forget=token.forget)
    header = _header(user["token"], f"kubeconfig {path}") if user.get("token") else None
    return ClusterAccess(server, lambda: header, tls)


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


def _header(token: object, source: str) -> str:
    if not isinstance(token, str) or not token.strip().isascii() or not token.strip().isprintable():
        raise AccessError(f"{source}: the token must be one line of printable ASCII")
    return f"Bearer {token.strip()}"


class _TokenFile:
    """A token that somebody else replaces on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header = ""
        self._read_at_s = -TOKEN_REREAD_S

    def authorization(self) -> str:
        """Reads the file at most every TOKEN_REREAD_S."""
        now_s = time.monotonic()
        if now_s - self._read_at_s >= TOKEN_REREAD_S:
            try:
                self._header = _header(self._path.read_text(), f"token file {self._path}")
            except (OSError, UnicodeDecodeError) as error:
                raise AccessError(f"token file {self._path} cannot be read: {error}") from None
            self._read_at_s = now_s
        return self._header

    def forget(self) -> None:
        """The next request reads the file."""
        self._read_at_s = -TOKEN_REREAD_S


class ExecPlugin:
    """A credential plugin: a program that prints a token or a client certificate. Its methods block while it runs.

    https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins
    """

    def __init__(self, plugin: Mapping[str, Any], folder: Path) -> None:
        command = str(plugin["command"])
        self._command = [str(folder / command) if "/" in command else command, *map(str, plugin.get("args") or ())]
        self._hint = str(plugin.get("installHint") or "run it by hand to see why")
        question = {"apiVersion": plugin["apiVersion"], "kind": "ExecCredential", "spec": {"interactive": False}}
        extra = {str(item["name"]): str(item["value"]) for item in plugin.get("env") or ()}
        self._environment = {**os.environ, **extra, "KUBERNETES_EXEC_INFO": json.dumps(question)}
        self._process: subprocess.Popen[str] | None = None
        self._starting = threading.Lock()
        self._status: dict[str, Any] = {}
        self._expires_s = 0.0

    def authorization(self) -> str | None:
        """The token of now. Raises AccessError if the plugin fails, or takes longer than PLUGIN_LIMIT_S."""
        self._renew()
        token = self._status.get("token")
        return _header(token, f"credential plugin {self._command[0]}") if token else None

    def certificates(self) -> dict[str, str]:
        """A client certificate, in the words of a kubeconfig's user, where the plugin gives one."""
        self._renew()
        pairs = {"client-certificate-data": "clientCertificateData", "client-key-data": "clientKeyData"}
        return {
            ours: base64.b64encode(self._status[theirs].encode()).decode()
            for ours, theirs in pairs.items()
            if theirs in self._status
        }

    def forget(self) -> None:
        """The next request runs the plugin."""
        self._expires_s = 0.0

    def stop(self) -> None:
        """Kills the plugin if it runs, with all that it started. May be called from any thread."""
        with self._starting:  # a plugin whose start has begun is killed too
            process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _renew(self) -> None:
        if self._status and time.time() < self._expires_s - EXPIRY_MARGIN_S:
            return
        try:
            status = json.loads(self._run())["status"]
            expiry = status.get("expirationTimestamp")
            self._expires_s = datetime.fromisoformat(expiry).timestamp() if expiry else float("inf")
            self._status = dict(status)
        except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError, AttributeError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()
            raise AccessError(f"credential plugin {self._command[0]}: {said}; {self._hint}") from None

    def _run(self) -> str:
        """What the plugin prints. It gets a process group of its own, so that a time-out ends what it started, too."""
        with self._starting:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        with self._process as process:
            try:
                printed, errors = process.communicate(timeout=PLUGIN_LIMIT_S)
            except BaseException:
                self.stop()
                raise
            finally:
                self._process = None
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, self._command, printed, errors)
        return printed
