"""A proxy before a test's API server that does what networks, load balancers and busy API servers do."""

import asyncio
import json
from pathlib import Path

from aiohttp import ClientError, ClientTimeout, web

from tests.support.late_answers import HOP_BY_HOP, LateAnswers


class FaultyApiServer(LateAnswers):
    """The flags may be set from any thread; they hold for requests that begin from then on, `is_blind` for watches."""

    def __init__(self, kubeconfig: Path) -> None:
        super().__init__(kubeconfig, 0.0)
        self.is_away = False
        """Every request finds its connection reset."""
        self.is_busy = False
        """Every request is put off for a second, with status 429 and Retry-After."""
        self.is_blind = False
        """What happens is left out of watches, and comes in none that begin later where these are told 410."""
        self.delay_s = 0.0
        self._watches: set[asyncio.Future[bytes]] = set()

    def end_watches(self, code: int | None = None) -> None:
        """Ends every watch: with an ERROR event of this code, or, without one, as a cut connection."""
        status = {"kind": "Status", "apiVersion": "v1", "code": code, "reason": "Expired", "message": "of the test"}
        line = b"" if code is None else json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"
        self._loop.call_soon_threadsafe(self._end, line)

    def _end(self, line: bytes) -> None:
        for watch in self._watches:
            watch.set_result(line)
        self._watches.clear()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if self.is_away:
            return _reset(request)
        if self.is_busy:
            status = {"kind": "Status", "apiVersion": "v1", "code": 429, "message": "too many requests"}
            return web.json_response(status, status=429, headers={"Retry-After": "1"})
        await asyncio.sleep(self.delay_s)
        try:
            return await (self._watch(request) if "watch" in request.query else super()._forward(request))
        except ClientError:  # the API server is being restarted
            return _reset(request)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        headers["Accept-Encoding"] = "identity"
        ended = asyncio.get_running_loop().create_future()
        self._watches.add(ended)
        try:
            async with self._session.get(
                self._server + request.path_qs, headers=headers, timeout=ClientTimeout(total=None)
            ) as answer:
                response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
                await response.prepare(request)
                while not ended.done():
                    read = asyncio.ensure_future(answer.content.readany())
                    await asyncio.wait({read, ended}, return_when=asyncio.FIRST_COMPLETED)
                    if not read.done():
                        read.cancel()
                        break
                    piece = read.result()
                    if not piece:
                        return response
                    await asyncio.sleep(self.delay_s)
                    if not self.is_blind:
                        await response.write(piece)
            if not ended.result():
                return _reset(request)
            await response.write(ended.result())
            return response
        finally:
            self._watches.discard(ended)


def _reset(request: web.Request) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
