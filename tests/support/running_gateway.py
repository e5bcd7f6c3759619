"""A gateway on a real socket inside the test's event loop, with a source that the test feeds by hand."""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.app import Gateway
from mini_infer_gateway.endpoints.base import Listed, Publish
from mini_infer_gateway.http.server import DrainingServer
from mini_infer_gateway.settings import GatewaySettings
from mini_infer_web.api_keys import ApiKeys
from mini_infer_web.http_server.connection import limited
from mini_infer_web.http_server.server import server_config
from mini_infer_web.tls import server_tls


class HandSource:
    """Publishes what it is given."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._listed = [Listed(endpoint) for endpoint in endpoints]
        self.publish: Publish

    def publish_endpoints(self, *endpoints: Endpoint, draining: Collection[str] = ()) -> None:
        self.publish(
            [
                Listed(msgspec.structs.replace(endpoint, draining=True), ready=False)
                if endpoint.name in draining
                else Listed(endpoint)
                for endpoint in endpoints
            ]
        )

    async def run(self, publish: Publish) -> None:
        self.publish = publish
        publish(self._listed)
        await asyncio.Event().wait()


class RunningGateway:
    """The application, its address and a client."""

    def __init__(
        self, app: Gateway, source: HandSource, url: str, client: aiohttp.ClientSession, server: DrainingServer
    ) -> None:
        self.app, self.source, self.url, self.client, self.server = app, source, url, client, server

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.app.settings.admin_port}"

    def chat(
        self, text: str, stream: bool = False, **fields: object
    ) -> "contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]":
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "stream": stream, **fields}
        return self.client.post(self.url + "/v1/chat/completions", json=body)

    async def settled(self, index: str = "exact") -> None:
        """Waits until every endpoint's cache is known in this way."""
        states = self.app.fleet.endpoints
        await until(
            lambda: bool(states) and all(state.index_kind(self.app._clock()) == index for state in states.values())
        )


@asynccontextmanager
async def running_gateway(
    *endpoints: Endpoint, keys: ApiKeys | None = None, upstream_tls: ssl.SSLContext | None = None, **settings: Any
) -> AsyncIterator[RunningGateway]:
    """Started, synced, and stopped at the end."""
    source = HandSource(endpoints)
    app = Gateway(
        replace(GatewaySettings(seed=1, log_level="debug", routing_headers=True), **settings),
        source,
        keys,
        upstream_tls,
    )
    listener, admin_listener = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    if app.settings.admin_port is not None:
        app.settings = replace(app.settings, admin_port=admin_listener.getsockname()[1])
    config = server_config(
        app,
        limited(app.settings.connections, has_direct_writes=True),
        app.settings.max_body_bytes,
        lifespan="on",
        timeout_graceful_shutdown=1,
    )
    server = DrainingServer(config, app.settings.drain_s, app.stop_gently, server_tls(app.settings.tls))
    serving = asyncio.create_task(server._serve(sockets=[listener, admin_listener]))
    await until(lambda: server.started)
    scheme = "https" if app.settings.tls.ssl_certfile else "http"
    url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
    async with aiohttp.ClientSession(headers={"content-type": "application/json"}) as client:
        try:
            yield RunningGateway(app, source, url, client, server)
        finally:
            server.should_exit = True
            await serving


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits for a condition of the same event loop; the limit only ends a test that hangs."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not come true")
        await asyncio.sleep(0.005)
