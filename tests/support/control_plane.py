"""A real Kubernetes control plane for tests, from the programs in KUBEBUILDER_ASSETS, on loopback and free ports.

etcd, kube-apiserver, and where the folder has them kube-controller-manager, kube-scheduler and kwok with fake nodes
(setup-envtest's folder has the first two only). Everything runs as child processes and ends with `stop`.
"""

import base64
import http.client
import json
import os
import secrets
import shutil
import ssl
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mini_infer_operator.local.ports import free_ports

STAGES = Path(__file__).with_name("kwok-stages.yaml")
START_LIMIT_S = 120.0
SPARING = {"GOGC": "400", "GOMAXPROCS": "1"}
"""Environment of the programs, which are all written in Go: with few objects in the cluster their garbage collection
takes a third of their processor time, and they take it from what runs beside them. It costs half a gigabyte."""


class ControlPlane:
    """Started by `start`; `kubeconfig` is cluster-admin."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.programs = programs
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"
        self.audit_log = folder / "audit.log"
        self._children: list[subprocess.Popen[bytes]] = []
        self._api_server_flags: list[str] = []
        self._reader: tuple[str, dict[str, str], ssl.SSLContext] | None = None
        self._kinds: dict[tuple[str, str], tuple[str, bool]] = {}
        """Plural, and whether objects have a namespace, by version and kind."""
        self._kept = threading.local()
        """Each thread's connection to the API server: to greet it anew takes both sides longer than a list."""

    @property
    def runs_deployments(self) -> bool:
        """Whether Deployments get pods here."""
        return (self.programs / "kube-controller-manager").exists() and (self.programs / "kube-scheduler").exists()

    @property
    def runs_pods(self) -> bool:
        """Whether pods get Ready here."""
        return self.runs_deployments and (self.programs / "kwok").exists()

    def start(self) -> None:
        """Starts all programs, and once more on other ports where they do not come up: somebody may take one first."""
        try:
            self._start()
        except AssertionError as error:
            print(f"the control plane did not come up, and is started once more: {error}")
            self.stop()
            shutil.rmtree(self.folder / "etcd", ignore_errors=True)
            self._start()

    def _start(self) -> None:
        etcd_port, peer_port, api_port = free_ports(3)
        etcd = f"http://127.0.0.1:{etcd_port}"
        self._spawn(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            "--unsafe-no-fsync",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
            "--log-level=warn",
        )
        key, public, tokens = (self.folder / name for name in ("sa.key", "sa.pub", "tokens.csv"))
        _quiet("openssl", "genrsa", "-out", str(key), "2048")
        _quiet("openssl", "rsa", "-in", str(key), "-pubout", "-out", str(public))
        token = secrets.token_hex(16)
        tokens.touch(mode=0o600)
        tokens.write_text(f'{token},admin,admin,"system:masters"\n')
        self._api_server_flags = [
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={api_port}",
            f"--cert-dir={self.folder / 'certs'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={public}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=Node,RBAC",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--endpoint-reconciler-type=none",
            "--enable-aggregator-routing=true",  # APIServices of tests are reached at their endpoints: nothing proxies
            f"--audit-policy-file={self._write_audit_policy()}",
            f"--audit-log-path={self.audit_log}",
        ]
        server = self._spawn("kube-apiserver", *self._api_server_flags)
        url = f"https://127.0.0.1:{api_port}"
        self._wait_until_ready(url, token, server)
        context = ssl.create_default_context(cafile=str(self.folder / "certs" / "apiserver.crt"))
        headers = {"authorization": f"Bearer {token}", "accept": "application/json"}
        self._reader = f"127.0.0.1:{api_port}", headers, context
        self._write_kubeconfig(url, token)
        self._start_controllers(key)

    def restart_api_server(self) -> None:
        """Ends it as a crash does, for it drains watches for a minute else, and returns when the next one is ready."""
        (old,) = [child for child in self._children if str(child.args[0]).endswith("kube-apiserver")]  # type: ignore[index]
        place = self._children.index(old)
        old.kill()
        old.wait()
        server = self._spawn("kube-apiserver", *self._api_server_flags)
        self._children[place] = self._children.pop()
        assert self._reader is not None
        address, headers, _ = self._reader
        self._wait_until_ready(f"https://{address}", headers["authorization"].removeprefix("Bearer "), server)

    def stop(self) -> None:
        """End everything, in the order that lets nobody wait for another."""
        for child in reversed(self._children):
            child.terminate()
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._children.clear()

    def kubectl(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl; the caller looks at returncode, stdout and stderr."""
        command = [str(self.programs / "kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments]
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=200, check=False, env=os.environ | SPARING
        )

    def read(self, path: str, **query: str) -> Any:
        """An object or a list, without a process: tests ask ten times a second."""
        status, body = self._send("GET", path, query)
        assert status == 200, f"{path}: {status} {body.decode()}"
        return json.loads(body)

    def apply(self, *manifests: dict[str, Any]) -> None:
        """Create or update as `kubectl apply --server-side` does, without its quarter of a second, and fail on a
        refusal.
        """
        query = {"fieldManager": "kubectl", "fieldValidation": "Strict"}
        for manifest in manifests:
            path = self._path_of(manifest)
            status, body = self._send("PATCH", path, query, json.dumps(manifest).encode())
            assert status in (200, 201), f"{path}: {status} {body.decode()}"

    def _path_of(self, manifest: dict[str, Any]) -> str:
        version, kind, metadata = manifest["apiVersion"], manifest["kind"], manifest["metadata"]
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        if (version, kind) not in self._kinds:
            served = [row for row in self.read(root)["resources"] if "/" not in row["name"]]
            self._kinds |= {(version, row["kind"]): (row["name"], row["namespaced"]) for row in served}
        plural, is_namespaced = self._kinds[version, kind]
        namespace = f"/namespaces/{metadata.get('namespace', 'default')}" if is_namespaced else ""
        return f"{root}{namespace}/{plural}/{metadata['name']}"

    def _send(self, method: str, path: str, query: Mapping[str, str], patch: bytes | None = None) -> tuple[int, bytes]:
        """Returns status and body; a server that is too busy is asked again for half a minute."""
        for _ in range(30):
            status, body = self._send_once(method, path, query, patch)
            if status not in (429, 503, 504):
                break
            time.sleep(1)
        return status, body

    def _send_once(self, method: str, path: str, query: Mapping[str, str], patch: bytes | None) -> tuple[int, bytes]:
        assert self._reader is not None
        address, headers, context = self._reader
        if not hasattr(self._kept, "connection"):
            self._kept.connection = http.client.HTTPSConnection(address, context=context, timeout=120)
        target = f"{path}?{urllib.parse.urlencode(query)}"
        sent = headers if patch is None else headers | {"content-type": "application/apply-patch+yaml"}
        try:
            return _exchange(self._kept.connection, method, target, sent, patch)
        except (ConnectionError, ssl.SSLEOFError):  # the API server ends connections that nobody has used for a while
            return _exchange(self._kept.connection, method, target, sent, patch)

    def add_node(self, name: str, **room: object) -> None:
        """A fake node with this much room, by Kubernetes' names of resources."""
        amounts = {resource: str(amount) for resource, amount in room.items()}
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": name, "annotations": {"kwok.x-k8s.io/node": "fake"}},
                "status": {"allocatable": amounts, "capacity": amounts},
            }
        )

    def requests_of(self, user: str, since: int = 0) -> list[dict[str, Any]]:
        """What a user asked of the API server, from byte `since` of the audit log on: verb, resource and name of each.

        Watches are logged when they begin, the rest when they are answered.
        """
        with self.audit_log.open("rb") as log:
            log.seek(since)
            events = [json.loads(line) for line in log if line.endswith(b"\n")]
        mine = [event for event in events if event["user"]["username"] == user]
        ended = {"watch": "ResponseStarted"}
        return [
            {"verb": event["verb"], **event.get("objectRef", {})}
            for event in mine
            if event["stage"] == ended.get(event["verb"], "ResponseComplete")
        ]

    def _write_audit_policy(self) -> Path:
        path = self.folder / "audit-policy.yaml"
        policy = {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "omitManagedFields": True,
            "rules": [
                {"level": "Metadata", "userGroups": ["system:serviceaccounts:default"]},
                {"level": "None"},
            ],
        }
        path.write_text(yaml.safe_dump(policy))
        return path

    def _start_controllers(self, key: Path) -> None:
        config = f"--kubeconfig={self.kubeconfig}"
        common = [
            config,
            f"--authentication-kubeconfig={self.kubeconfig}",
            f"--authorization-kubeconfig={self.kubeconfig}",
            "--bind-address=127.0.0.1",
            "--secure-port=0",
            "--leader-elect=false",
        ]
        if self.runs_deployments:
            certificate = self.folder / "certs" / "apiserver.crt"
            self._spawn(
                "kube-controller-manager",
                *common,
                f"--service-account-private-key-file={key}",
                f"--root-ca-file={certificate}",
                "--use-service-account-credentials=true",
                "--horizontal-pod-autoscaler-sync-period=2s",  # 15 s otherwise
            )
            self._spawn("kube-scheduler", *common)
        if self.runs_pods:
            self._spawn(
                "kwok",
                f"--config={STAGES}",
                config,
                "--manage-all-nodes=true",
                "--node-ip=127.0.0.1",
                "--cidr=10.200.0.0/16",
                "--server-address=127.0.0.1:0",
                "--node-lease-duration-seconds=40",
            )
            self.add_node("node-1", cpu=64, memory="512Gi", pods=250, **{"nvidia.com/gpu": 8})

    def _spawn(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{program}.log").open("wb") as log:
            child = subprocess.Popen(
                [str(self.programs / program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=os.environ | SPARING,
                start_new_session=True,
            )
        self._children.append(child)
        return child

    def _wait_until_ready(self, url: str, token: str, server: subprocess.Popen[bytes]) -> None:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        request = urllib.request.Request(f"{url}/readyz", headers={"authorization": f"Bearer {token}"})
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            assert server.poll() is None, (self.folder / "kube-apiserver.log").read_text()[-2000:]
            try:
                urllib.request.urlopen(request, context=context, timeout=2).close()
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError(f"the API server did not get ready in {START_LIMIT_S:g} s")

    def _write_kubeconfig(self, url: str, token: str) -> None:
        certificate = base64.b64encode((self.folder / "certs" / "apiserver.crt").read_bytes()).decode()
        cluster = {"server": url, "certificate-authority-data": certificate}
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "test", "cluster": cluster}],
                    "users": [{"name": "admin", "user": {"token": token}}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
                    "current-context": "test",
                }
            )
        )


def find_programs() -> Path | None:
    """The folder in KUBEBUILDER_ASSETS, if it has what a control plane needs."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    if not folder:
        return None
    needed = ("etcd", "kube-apiserver", "kubectl")
    return Path(folder) if all((Path(folder) / name).exists() for name in needed) else None


def _exchange(
    connection: http.client.HTTPSConnection, method: str, target: str, headers: dict[str, str], body: bytes | None
) -> tuple[int, bytes]:
    """Status and body; the connection is made where there is none, and closed where no whole answer came."""
    try:
        connection.request(method, target, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    except BaseException:
        connection.close()
        raise


def _quiet(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
