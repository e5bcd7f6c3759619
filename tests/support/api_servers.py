"""Connections to API servers of tests: small false ones by their URL, real ones by a kubeconfig."""

from collections.abc import Callable
from pathlib import Path

from kubernetes.aio.client import Configuration

from mini_infer_web.kubernetes_api import ApiServer, RequestSeen, load_configuration


def server_at(url: str, token: Callable[[], str] = lambda: "t", seen: RequestSeen | None = None) -> ApiServer:
    """Asks `token` whenever credentials are loaded."""

    async def load() -> Configuration:
        configuration = Configuration()
        configuration.host = url
        configuration.api_key["BearerToken"] = f"Bearer {token()}"
        return configuration

    return ApiServer(load, seen)


def server_of(kubeconfig: Path | str) -> ApiServer:
    return ApiServer(lambda: load_configuration(str(kubeconfig)))
