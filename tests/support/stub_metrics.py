"""A custom metrics API, as the Prometheus adapter serves it: one number for each pod, told by the test."""

import json
import socket
import ssl
import subprocess
import threading
import urllib.parse
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

GROUP = "custom.metrics.k8s.io"
VERSION = f"{GROUP}/v1beta1"
Values = Callable[[str, str], dict[str, float]]
"""By metric and label selector: the value of each pod of the namespace `default`."""


class StubMetrics:
    """Serves on this machine's address from `start` to `stop`; `manifests` make the API server ask it."""

    def __init__(self, folder: Path, metrics: list[str], values: Values, address: str = "") -> None:
        self._metrics, self._values = metrics, values
        key, certificate = folder / "stub.key", folder / "stub.crt"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=stub"]
        subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
        self._server = ThreadingHTTPServer((address or own_address(), 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def manifests(self) -> list[dict[str, Any]]:
        """An APIService, and a Service whose only endpoint is this server."""
        address, port = self._server.server_address[:2]
        metadata = {"name": "stub-metrics", "namespace": "default"}
        return [
            {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": [{"port": 443}]}},
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {**metadata, "labels": {"kubernetes.io/service-name": "stub-metrics"}},
                "addressType": "IPv4",
                "ports": [{"port": port, "protocol": "TCP"}],
                "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
            },
            {
                "apiVersion": "apiregistration.k8s.io/v1",
                "kind": "APIService",
                "metadata": {"name": f"v1beta1.{GROUP}"},
                "spec": {
                    "group": GROUP,
                    "version": "v1beta1",
                    "groupPriorityMinimum": 100,
                    "versionPriority": 100,
                    "insecureSkipTLSVerify": True,
                    "service": {"name": "stub-metrics", "namespace": "default", "port": 443},
                },
            },
        ]

    def _answer(self, path: str, selector: str) -> dict[str, Any] | None:
        if path == f"/apis/{VERSION}":
            resources = [
                {"name": f"pods/{name}", "singularName": "", "namespaced": True, "kind": "MetricValueList"}
                for name in self._metrics
            ]
            listed = [{**resource, "verbs": ["get"]} for resource in resources]
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": VERSION, "resources": listed}
        prefix = f"/apis/{VERSION}/namespaces/default/pods/*/"
        if not path.startswith(prefix):
            return None
        metric, now = path.removeprefix(prefix), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        items = [
            {
                "describedObject": {"kind": "Pod", "namespace": "default", "name": pod, "apiVersion": "v1"},
                "metric": {"name": metric},
                "timestamp": now,
                "value": f"{round(value * 1000)}m",
            }
            for pod, value in self._values(metric, selector).items()
        ]
        return {"kind": "MetricValueList", "apiVersion": VERSION, "metadata": {}, "items": items}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self._answer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urllib.parse.urlparse(self.path)
                selector = urllib.parse.parse_qs(url.query).get("labelSelector", [""])[0]
                content = answer(urllib.parse.unquote(url.path), selector)
                body = json.dumps(content or {}).encode()
                self.send_response(404 if content is None else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


def own_address() -> str:
    """An address of this machine other than loopback, which cannot be an endpoint; OSError where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # no packet is sent
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
