"""Serves the console: the page at `/` and its data under /console/api, to viewers who may see more or less of it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_contract.launch import HEALTH_PATH, MODELS_PATH, READY_PATH
from mini_infer_gateway import __version__
from mini_infer_gateway.console.events import MAX_NEW_REQUESTS, EventStreams, event
from mini_infer_gateway.console.explanation import MAX_BODY_BYTES, ExplainedPrompt, Explainer
from mini_infer_gateway.console.files import FILES, PAGE_PATH, console_file
from mini_infer_gateway.console.fleet_view import FleetView, Sources, fleet_view
from mini_infer_gateway.console.history import SAMPLE_EVERY_S
from mini_infer_gateway.console.prefix_map import MAX_CONVERSATIONS, MAX_FORKS, EngineCache, PrefixMap, prefix_map
from mini_infer_gateway.console.request_log import MAX_REQUESTS, RequestLog
from mini_infer_gateway.console.request_view import RequestRow, request_detail, request_row
from mini_infer_gateway.console.viewer import Viewer, viewer_of
from mini_infer_gateway.endpoints.base import NO_REPORTS, EndpointSource, Reporting, Reports
from mini_infer_gateway.http.asgi import ClientDisconnectedError, read_body, send_bytes, send_whole
from mini_infer_gateway.memory import BodyBudget, BodyReservation
from mini_infer_gateway.paths import CHAT_PATH, COMPLETIONS_PATH
from mini_infer_gateway.pipeline.clients import GRANT, Clients
from mini_infer_gateway.settings import GatewaySettings
from mini_infer_web.api_docs import DOCS_PATH, OPENAPI_PATH
from mini_infer_web.api_errors import ApiError
from mini_infer_web.api_keys import ApiKeys
from mini_infer_web.asgi import Receive, Scope, Send

CONSOLE_API_PATH: Final = "/console/api/"
MAP_EVERY_S: Final = 2.0
"""Seconds for which a prefix map is shown again instead of made again."""
_GET: Final = frozenset(("GET", "HEAD"))
_POST: Final = frozenset(("POST",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Tells a console about the gateway and its viewer when it begins."""

    version: str
    everything: bool
    key: str
    can_chat: bool
    """True at the clients' port, where the API is."""
    sees_requests: bool
    """False if no list will show the viewer its own requests, so that it need not ask for one."""
    keeps_texts: bool
    needs_key: bool
    docs: str
    grafana: str
    policy: str
    sample_every_s: float


class Console:
    """The console of one gateway. Everything in it reads; nothing writes."""

    def __init__(
        self,
        settings: GatewaySettings,
        keys: ApiKeys,
        source: EndpointSource,
        log: RequestLog,
        sources: Sources,
        explainer: Explainer,
        bodies: BodyBudget,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._keys, self._clock = settings, keys, clock
        self._reports: Callable[[], Reports] = source.reports if isinstance(source, Reporting) else lambda: NO_REPORTS
        self._log, self._sources, self._explainer, self._bodies = log, sources, explainer, bodies
        self._clients = Clients(settings, keys)
        self.streams = EventStreams(self._events)
        self._map: tuple[float, PrefixMap] | None = None
        self._mapping = asyncio.Lock()

    @staticmethod
    def answers(scope: Scope) -> bool:
        """True if the console answers a request: of its own paths, all but a `/` whose client wants no page."""
        path: str = scope["path"]
        if path == PAGE_PATH:
            return b"text/html" in next((value for name, value in scope["headers"] if name == b"accept"), b"")
        return path in FILES or bool(path.startswith(CONSOLE_API_PATH) and Console.methods_of(path))

    @staticmethod
    def methods_of(path: str) -> frozenset[str]:
        """Returns the methods of a path; empty if the console does not answer it."""
        if path in FILES:
            return _GET
        name = path.removeprefix(CONSOLE_API_PATH) if path.startswith(CONSOLE_API_PATH) else ""
        if name in ("explain", "events"):
            return _POST if name == "explain" else frozenset(("GET",))
        return _GET if name in ("session", "fleet", "requests", "prefixes") or _request_id(name) else frozenset()

    def may_pin(self, scope: Scope) -> bool:
        """True if the client of a request to the API may name the engine that is to answer."""
        return self._viewer(scope, on_admin_port=False).everything

    async def __call__(self, scope: Scope, receive: Receive, send: Send, *, on_admin_port: bool) -> None:
        """Answers one request on one of its paths. Raises ApiError."""
        path = scope["path"]
        if path in FILES:
            status, headers, body = console_file(path).answer(scope["headers"])
            await send_whole(send, status, [*headers, (b"content-length", b"%d" % len(body))], body)
            return
        _refuse_other_pages(scope)
        viewer, name = self._viewer(scope, on_admin_port=on_admin_port), path.removeprefix(CONSOLE_API_PATH)
        if name == "events":
            await self.streams.serve(
                viewer, receive, send, lambda: self._viewer_now(scope, on_admin_port=on_admin_port) == viewer
            )
            return
        try:
            answer = await self._answer(name, viewer, scope, receive, on_admin_port=on_admin_port)
        except ClientDisconnectedError:
            return  # In the middle of its body.
        await send_bytes(send, 200, msgspec.json.encode(answer), headers=[(b"cache-control", b"no-store")])

    async def run(self) -> None:
        """Samples the fleet, and lets open consoles know, until cancelled."""
        history, ledger, fleet = self._sources.history, self._sources.ledger, self._sources.fleet
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            loads = {name: ledger.load(name) for name in fleet.endpoints}
            history.sample(loads, self._log.take_counts(), self._clock())
            if self.streams.open:
                self.streams.tick()

    def end(self) -> None:
        """Ends the streams of open consoles."""
        self.streams.end()

    def _viewer(self, scope: Scope, *, on_admin_port: bool) -> Viewer:
        grant = scope.get(GRANT) or self._keys.grant(scope["headers"])
        return viewer_of(self._keys, grant, on_admin_port=on_admin_port, is_loopback=self._settings.is_loopback)

    def _viewer_now(self, scope: Scope, *, on_admin_port: bool) -> Viewer:
        """Returns the viewer by the keys that are valid now, and not by those of the request's beginning."""
        grant = self._keys.grant(scope["headers"])
        return viewer_of(self._keys, grant, on_admin_port=on_admin_port, is_loopback=self._settings.is_loopback)

    async def _answer(
        self, name: str, viewer: Viewer, scope: Scope, receive: Receive, *, on_admin_port: bool
    ) -> object:
        if name == "session":
            return self._session(viewer, on_admin_port=on_admin_port)
        if name == "fleet":
            return self._fleet(viewer, with_history=True)
        if name == "requests":
            return {"requests": self._rows(viewer), "most": MAX_REQUESTS}
        if name == "explain":
            return await self._explain(viewer, scope, receive)
        if name == "prefixes":
            if not viewer.everything:
                raise ApiError(403, "prefixes of all keys are for an administrator's key", code="needs_admin")
            return await self._prefixes()
        request_id = _request_id(name)
        for record in self._log.records(viewer):
            if record.request_id == request_id:
                return request_detail(record, self._log.clock_offset_s, everything=viewer.everything)
        raise ApiError(404, "there is no such request among the latest ones of this key", code="unknown_request")

    async def _explain(self, viewer: Viewer, scope: Scope, receive: Receive) -> ExplainedPrompt:
        client = self._clients.of(scope)
        reservation = BodyReservation(self._bodies, client.pays_as(scope))
        try:
            body = await read_body(scope, receive, MAX_BODY_BYTES, reservation.grow)
            return await self._explainer.explain(body, client, reservation, everything=viewer.everything)
        finally:
            reservation.release()

    def _session(self, viewer: Viewer, *, on_admin_port: bool) -> Session:
        settings = self._settings
        return Session(
            version=__version__,
            everything=viewer.everything,
            key=viewer.key,
            can_chat=not on_admin_port,
            sees_requests=viewer.everything or viewer.owns(viewer.key),
            keeps_texts=settings.console_texts,
            needs_key=bool(self._keys),
            docs=DOCS_PATH if not on_admin_port else "",
            grafana=(settings.grafana_url or "") if viewer.everything else "",
            policy=settings.routing if viewer.everything else "",
            sample_every_s=SAMPLE_EVERY_S,
        )

    def _fleet(self, viewer: Viewer, *, with_history: bool) -> FleetView:
        return fleet_view(self._sources, self._reports(), viewer, self._clock(), with_history=with_history)

    def _events(self, viewer: Viewer, seen: int, first: bool) -> tuple[bytes, int]:
        latest = self._log.latest
        events = event("fleet", self._fleet(viewer, with_history=first))
        most = MAX_REQUESTS if first else MAX_NEW_REQUESTS
        if latest > seen and (rows := self._rows(viewer, seen, most)):
            events += event("requests", rows)
        return events, latest

    def _rows(self, viewer: Viewer, after: int = 0, most: int = MAX_REQUESTS) -> list[RequestRow]:
        """Returns at most `most` requests that the viewer may see, with serials above `after`, newest first."""
        records = islice(self._log.records(viewer, after), most)
        return [request_row(one, self._log.clock_offset_s, everything=viewer.everything) for one in records]

    async def _prefixes(self) -> PrefixMap:
        """Returns the map, at most `MAP_EVERY_S` old: the walk of one engine's conversations takes a millisecond."""
        async with self._mapping:
            now_s = self._clock()
            if self._map is None or now_s - self._map[0] > MAP_EVERY_S:
                self._map = now_s, await self._make_map(now_s)
            return self._map[1]

    async def _make_map(self, now_s: float) -> PrefixMap:
        index, conversations, caches = self._sources.index, {}, []
        most_forks = max(MAX_CONVERSATIONS, MAX_FORKS // max(1, len(self._sources.fleet.endpoints)))
        for name, state in sorted(self._sources.fleet.endpoints.items()):
            conversations[name] = index.conversations(name, MAX_CONVERSATIONS, most_forks)
            guessed = index.guessed_blocks(name)
            caches.append(
                EngineCache(
                    name=name,
                    model=state.endpoint.model,
                    index=state.index_kind(now_s),
                    cached_tokens=index.cached_blocks(name) * BLOCK_SIZE_TOKENS,
                    guessed_tokens=guessed * BLOCK_SIZE_TOKENS,
                    conversations=len(conversations[name]),
                )
            )
            await asyncio.sleep(0)
        return prefix_map(caches, conversations, index.run_end, now_s)


def _request_id(name: str) -> str:
    """Returns the id in `requests/ID`; "" if the name is of another form."""
    return unquote(name.removeprefix("requests/")) if name.startswith("requests/") else ""


def _refuse_other_pages(scope: Scope) -> None:
    """Raises ApiError 403 for a request from a page of another origin, also where CORS lets pages use the API."""
    headers = dict(scope["headers"])
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    same = origin is None or origin.partition(b"://")[2] == headers.get(b"host")
    if site not in (b"same-origin", b"none") if site else not same:
        raise ApiError(403, "the console's data is for its own page", code="other_origin")


def index(*, has_console: bool) -> dict[str, Any]:
    """Returns the JSON at `/`: what this server is, and where to go on."""
    return {
        "name": "mini-infer gateway",
        "version": __version__,
        "console": "open this address in a browser" if has_console else None,
        "paths": {
            "chat": CHAT_PATH,
            "completions": COMPLETIONS_PATH,
            "models": MODELS_PATH,
            "docs": DOCS_PATH,
            "openapi": OPENAPI_PATH,
            "health": HEALTH_PATH,
            "ready": READY_PATH,
        },
    }
