"""A proxy before a test's API server whose answers to writes arrive late; lists and watches pass at once."""

import asyncio
import ssl
import threading
from pathlib import Path
from typing import Any, Self

import yaml
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

HOP_BY_HOP = {"host", "connection", "transfer-encoding", "content-length", "content-encoding", "keep-alive"}
_WRITES = {"POST", "PATCH", "PUT", "DELETE"}


class LateAnswers:
    """Runs in a thread of its own between `with` and its end; `url` is for a kubeconfig's `server`."""

    def __init__(self, kubeconfig: Path, late_s: float, *, except_for: str = "/leases") -> None:
        """`except_for`: writes to paths that hold this are answered at once."""
        cluster: dict[str, Any] = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]
        self.url = ""
        self._server = str(cluster["server"])
        self._late_s = late_s
        self._except_for = except_for
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="late answers")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        app = web.Application(client_max_size=16 << 20)
        app.router.add_route("*", "/{path:.*}", self._forward)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        async with ClientSession(connector=TCPConnector(ssl=context, limit=0), auto_decompress=False) as self._session:
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._started.set()
            await self._stop.wait()
            await runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        headers["Accept-Encoding"] = "identity"
        url, body = self._server + request.path_qs, await request.read()
        async with self._session.request(
            request.method, url, data=body or None, headers=headers, timeout=ClientTimeout(total=None)
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            if request.method in _WRITES and self._except_for not in request.path:
                content = await answer.read()
                await asyncio.sleep(self._late_s)  # what this proxy is for
                await response.prepare(request)
                await response.write(content)
                return response
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            return response
