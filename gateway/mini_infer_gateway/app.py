"""The gateway as one ASGI application: dispatches paths, starts and stops all parts.

Plain ASGI rather than a framework, since every token pays for every layer on a request's path.
"""

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from urllib.parse import unquote

import msgspec

from mini_infer_apis.dialects.anthropic_errors import errors_of
from mini_infer_apis.dialects.responses import RESPONSES_PATH
from mini_infer_apis.stored_responses.service import is_responses_path, methods_of
from mini_infer_contract.launch import HEALTH_PATH, METRICS_PATH, MODELS_PATH, READY_PATH, REQUEST_ID_HEADER
from mini_infer_contract.rollouts import ROLLOUTS_PATH
from mini_infer_contract.scaling import SCALING_PATH
from mini_infer_gateway import __version__
from mini_infer_gateway.api import operations
from mini_infer_gateway.console.app import CONSOLE_API_PATH, Console, index
from mini_infer_gateway.console.explanation import Explainer
from mini_infer_gateway.console.files import FILES, PAGE_PATH
from mini_infer_gateway.console.fleet_view import Sources
from mini_infer_gateway.console.history import History
from mini_infer_gateway.console.request_log import RequestLog
from mini_infer_gateway.endpoints.base import EndpointSource, Listed, Service
from mini_infer_gateway.fleet.backlog import Backlog
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.fleet.pin_budget import PinBudget
from mini_infer_gateway.fleet.prefill_rates import PrefillRates
from mini_infer_gateway.fleet.registry import Fleet
from mini_infer_gateway.fleet.tier_rates import TierRates
from mini_infer_gateway.fleet.transfer_rates import TransferRates
from mini_infer_gateway.flow_control.cached_guesses import CachedGuesses
from mini_infer_gateway.flow_control.controller import FlowController
from mini_infer_gateway.flow_control.held_requests import MAX_HELD, HeldRequests
from mini_infer_gateway.http.asgi import Sender, send_bytes, send_error, send_json, websocket_denial
from mini_infer_gateway.http.upstream import Upstream
from mini_infer_gateway.index.prefix_index import PrefixIndex
from mini_infer_gateway.loop_lag import LoopLag
from mini_infer_gateway.memory import BodyBudget, share_out
from mini_infer_gateway.metrics import EndpointFigures, Metrics, StateCollector
from mini_infer_gateway.paths import CHAT_PATH, ENGINE_PATHS
from mini_infer_gateway.pipeline.call import ACCESS_LOG_FIELDS
from mini_infer_gateway.pipeline.canary.copies import CanaryCopies
from mini_infer_gateway.pipeline.canary.figures import CanaryFigures
from mini_infer_gateway.pipeline.clients import GRANT, Clients
from mini_infer_gateway.pipeline.continuation.retention import BodyRetention
from mini_infer_gateway.pipeline.errors import INTERNAL_ERROR
from mini_infer_gateway.pipeline.generate import Generate
from mini_infer_gateway.pipeline.observer import Observers
from mini_infer_gateway.pipeline.prefetches import Prefetches
from mini_infer_gateway.pipeline.responses.replicas import Replicas
from mini_infer_gateway.pipeline.responses.service import Responses
from mini_infer_gateway.pipeline.retries import RetryBudget
from mini_infer_gateway.pipeline.service_loads import ServiceLoads
from mini_infer_gateway.pipeline.serving import Serving
from mini_infer_gateway.prompts.tokenizers import Tokenizers, read_tokenizers
from mini_infer_gateway.routing.pairing import Pairing
from mini_infer_gateway.routing.policies import build_router
from mini_infer_gateway.settings import GatewaySettings
from mini_infer_web.access_log import CLIENT_LEFT, log_request
from mini_infer_web.api_docs import DOCS_PATHS, FAVICON_PATH, docs_file
from mini_infer_web.api_errors import ApiError
from mini_infer_web.api_keys import ApiKeys
from mini_infer_web.asgi import Receive, Scope, Send
from mini_infer_web.http_server.connection import RESPONSE_WRITER
from mini_infer_web.request_ids import request_id_in

FIRST_SOURCE_PAUSE_S, LONGEST_SOURCE_PAUSE_S = 1.0, 30.0
"""Seconds until a source of endpoints that ended is started again: the first pause, and the longest."""
EXPIRE_EVERY_S = 5.0
EXPIRE_PAUSE_S = 0.002
"""Seconds between two parts of an expiry run, in which requests proceed."""

DEBUG_PATH = "/debug/endpoints"
_GET = frozenset(("GET", "HEAD"))

log = logging.getLogger(__name__)
access = logging.getLogger("mini_infer_gateway.access_log")


@dataclass(frozen=True, slots=True)
class Page:
    """A page that the gateway answers itself."""

    show: Callable[[Send], Awaitable[None]]
    methods: frozenset[str] = _GET


class Gateway:
    """An ASGI application; `start` and `stop` follow its lifespan."""

    def __init__(
        self,
        settings: GatewaySettings,
        source: EndpointSource,
        keys: ApiKeys | None = None,
        upstream_tls: ssl.SSLContext | None = None,
    ) -> None:
        """`keys` are those of clients; None if no key is required. `upstream_tls` is for engines at https addresses."""
        self.settings = settings
        self._keys = keys or ApiKeys()
        self._source = source
        self._clock = time.monotonic
        shares = share_out(settings.memory_limit_bytes, 0, settings.responses_memory_bytes)
        self.index = PrefixIndex(settings.index_max_blocks or shares.index_blocks)
        self.ledger = LoadLedger()
        self.metrics = Metrics()
        self.upstream = Upstream(
            settings.connect_timeout_s, settings.engine_api_key, upstream_tls, settings.engine_server_name
        )
        self.tokenizers = Tokenizers(
            self.upstream,
            prompt_cache_bytes=shares.prompt_cache_bytes,
            segments_bytes=shares.segments_bytes,
            named=read_tokenizers(settings.tokenizers),
            on_change=self._share_out,
            on_template_failure=self.metrics.template_failed,
            clock=self._clock,
            limit_bytes=shares.tokenizers_bytes,
        )
        self.rates, self.transfers, self.backlog = PrefillRates(), TransferRates(), Backlog()
        self.tier_rates = TierRates()
        self.router = build_router(
            settings.routing,
            self.index,
            self.ledger,
            Random(settings.seed),
            rates=self.rates,
            tier_rates=self.tier_rates,
            backlog=self.backlog,
            pairing=Pairing(self.transfers, settings.max_local_prefill_tokens),
        )
        self.fleet = Fleet(settings, self.index, self.ledger, self.tokenizers, self.upstream, self.metrics, self._clock)
        self.bodies = BodyBudget(shares.bodies_bytes)
        request_log = RequestLog(keeps_texts=settings.console_texts)
        console = Console(
            settings,
            self._keys,
            source,
            request_log,
            Sources(self.fleet, self.ledger, self.index, self.backlog, History()),
            Explainer(settings.routing, self.fleet, self.router, self.tokenizers, self._clock),
            self.bodies,
            self._clock,
        )
        self.console = console if settings.console else None
        self.flow = FlowController(
            settings,
            self.fleet,
            self.router,
            self.ledger,
            self.backlog,
            self.rates,
            self.transfers,
            self.tier_rates,
            self.metrics,
            CachedGuesses(settings, self.fleet, self.index).add,
            self._clock,
        )
        self.service_loads = ServiceLoads(self.fleet, self.backlog, self.ledger, self.rates, self._clock)
        self.held = HeldRequests(
            self.fleet, self.metrics, settings.max_queue or MAX_HELD, settings.start_timeout_s, self._clock
        )
        self.service_loads.held = self.held.counts
        self.canary_figures = CanaryFigures(self.fleet, self.ledger)
        self._copies = CanaryCopies(
            self.fleet, self.router, self.ledger, self.backlog, self.upstream, self.canary_figures, self._clock
        )
        observers = (self.service_loads, self.canary_figures, *((request_log,) if self.console else ()))
        self.prefetches = Prefetches(self.upstream, self.metrics.prefetched, self._clock)
        serving = Serving(
            settings=settings,
            clock=self._clock,
            clients=Clients(settings, self._keys),
            fleet=self.fleet,
            tokenizers=self.tokenizers,
            router=self.router,
            flow=self.flow,
            held=self.held,
            upstream=self.upstream,
            metrics=self.metrics,
            bodies=self.bodies,
            retention=BodyRetention(self.bodies, self.metrics, self._clock),
            retry_budget=RetryBudget(refilled_s=self._clock()),
            pins=PinBudget(settings.max_pinned_tokens),
            prefetches=self.prefetches,
            observer=Observers(*observers),
            may_pin=self.console.may_pin if self.console else lambda scope: False,
        )
        self._generate = Generate(serving, self._copies)
        self._replicas = Replicas(
            settings.replica_host,
            settings.replicas,
            settings.port,
            settings.connect_timeout_s,
            settings.tls,
            self._clock,
            self.metrics.forwarded,
        )
        self.responses = Responses(
            settings,
            self.fleet,
            self._generate,
            self.bodies,
            shares.responses_bytes,
            self._replicas,
            serving.clients,
            self._keys,
        )
        self.loop_lag = LoopLag()
        self.metrics.registry.register(self.loop_lag)
        self.metrics.registry.register(
            StateCollector(
                self._figures,
                self._plugins,
                lambda: serving.retry_budget.tokens,
                self.backlog.depths,
                lambda: (len(self.responses.store), self.responses.store.used_bytes),
            )
        )
        self._admin_pages, self._client_pages = self._make_admin_pages(), self._make_client_pages()
        self._tasks: list[asyncio.Task[None]] = []
        self._source_failure = ""
        """The reason why the list of endpoints is out of date; empty if it is not."""
        self.stopping = False
        """True once a shutdown has begun: the gateway is not ready, and each connection closes after its next
        answer.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI scope: an HTTP request, a WebSocket, or the lifespan."""
        if scope["type"] == "http":
            request_id, refusal = request_id_in(scope["headers"])
            scope["request_id"] = request_id
            errors = errors_of(scope["path"])
            ids = [(name.encode(), request_id.encode()) for name in (REQUEST_ID_HEADER, errors.id_header) if name]
            own = ids + self.settings.cors.answer_headers(scope["headers"])
            sender = Sender(send, own, lambda: self.stopping, scope.pop(RESPONSE_WRITER, None))
            began_s, log_fields = self._clock(), scope.setdefault(ACCESS_LOG_FIELDS, {})
            try:
                if refusal := refusal or self._key_refusal(scope):
                    raise refusal
                await self._http(scope, receive, sender)
            except ApiError as error:
                log_fields["error"] = error.message
                await send_error(sender, error, request_id, errors)
            except Exception:
                log.exception("an error of the gateway's own on %s", scope["path"])
                if sender.status:
                    raise  # The connection is cut: the client must not take half an answer for a whole one.
                await send_error(sender, INTERNAL_ERROR, request_id, errors)
            finally:
                if self.settings.access_log:
                    error_detail = log_fields.pop("error", "")
                    status = log_fields.pop("status", 0) or sender.status or CLIENT_LEFT
                    took_s, method, path = self._clock() - began_s, scope["method"], scope["path"]
                    log_request(access, method, path, status, took_s, request_id, log_fields, error_detail)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await self._websocket(scope, receive, send)

    async def start(self) -> None:
        """Starts all background tasks, among them the search for endpoints."""
        self._tasks = [
            asyncio.create_task(self._follow_source(), name="endpoint source"),
            asyncio.create_task(self.fleet.watch(), name="watchdog"),
            asyncio.create_task(self._expire(), name="expire guesses"),
            asyncio.create_task(self.flow.look(lambda: list(self.fleet.endpoints)), name="look at the queue"),
            asyncio.create_task(self.held.run(), name="release held requests"),
            asyncio.create_task(self.loop_lag.run(), name="event loop lag"),
        ]
        if self.console:
            self._tasks.append(asyncio.create_task(self.console.run(), name="sample for the console"))

    def stop_gently(self) -> None:
        """Begins the shutdown: the gateway is not ready from now on, and connections close after their next answer."""
        self.stopping = True
        if self.console:
            self.console.end()
        self._tasks.append(asyncio.create_task(self.responses.stop_gently(), name="end WebSockets"))

    async def stop(self) -> None:
        """Ends every task and connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.responses.service.close()
        await self._copies.close()
        await self.prefetches.close()
        await self.fleet.close()
        await self.tokenizers.close()
        self.upstream.close()
        self._replicas.close()

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a WebSocket: its handshake is rejected by the rules for requests."""
        scope["request_id"], refusal = request_id_in(scope["headers"])
        path = scope["path"]
        if _port(scope) == self.settings.admin_port or path != RESPONSES_PATH:
            refusal = refusal or _not_found(path)
        if refusal := refusal or self._key_refusal(scope):
            await receive()
            await send_error(websocket_denial(send), refusal, scope["request_id"])
        else:
            await self.responses.websocket(scope, receive, send)

    def _key_refusal(self, scope: Scope) -> ApiError | None:
        """Returns the error if an API key is missing.

        The admin port requires a key only for the debug page and the console, which name tenants' engines, and not for
        probes and metrics.
        """
        path: str = scope["path"]
        if path in FILES and (self.console or path == PAGE_PATH):
            return None
        if _port(scope) == self.settings.admin_port and path != DEBUG_PATH and not path.startswith(CONSOLE_API_PATH):
            return None
        if (grant := self._keys.grant(scope["headers"])) is not None:
            scope[GRANT] = grant
            return None
        return self._keys.refusal(scope.get("method", "GET"), scope["path"], scope["headers"])

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        row = ENGINE_PATHS.get(path)
        if method == "OPTIONS":
            await self._send_options(scope, send)
        elif row is None and self.console and self.console.answers(scope):
            _require(method, self.console.methods_of(path), path)
            on_admin_port = _port(scope) == self.settings.admin_port
            await self.console(scope, receive, send, on_admin_port=on_admin_port)
        elif _port(scope) == self.settings.admin_port:
            await self._show(self._admin_pages, method, path, send)
        elif is_responses_path(path):
            await self.responses(scope, receive, send)
        elif row:
            _require(method, row.methods, path)
            await self._generate(row, scope, receive, send)
        elif path.startswith(MODELS_PATH + "/"):
            _require(method, _GET, path)
            name = unquote(path.removeprefix(MODELS_PATH + "/"))
            await send_json(send, 200, operations.model(self.fleet, name))
        else:
            await self._show(self._client_pages, method, path, send)

    async def _send_options(self, scope: Scope, send: Send) -> None:
        """Answers OPTIONS: the methods of a path, and the CORS preflight of a browser."""
        methods = self._methods_of(scope["path"]) | {"OPTIONS"}
        allow = (b"allow", ", ".join(sorted(methods)).encode())
        headers = [allow, *self.settings.cors.preflight_headers(scope["headers"])]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def _methods_of(self, path: str) -> frozenset[str]:
        """Returns the methods of a path; empty if the path is unknown."""
        if is_responses_path(path):
            return methods_of(path)
        if path.startswith(MODELS_PATH + "/"):
            return _GET
        if self.console and (methods := self.console.methods_of(path)):
            return methods
        page = ENGINE_PATHS.get(path) or self._client_pages.get(path)
        return page.methods if page else frozenset()

    async def _show(self, pages: Mapping[str, Page], method: str, path: str, send: Send) -> None:
        if (page := pages.get(path)) is None:
            raise _not_found(path)
        _require(method, page.methods, path)
        await page.show(send)

    def _probe_pages(self) -> dict[str, Page]:
        return {
            HEALTH_PATH: Page(lambda send: send_json(send, 200, {"status": "ok"})),
            READY_PATH: Page(self._send_ready),
            PAGE_PATH: Page(lambda send: send_json(send, 200, index(has_console=self.console is not None))),
        }

    def _make_admin_pages(self) -> dict[str, Page]:
        """Returns the pages for operators, which clients may not request."""
        return self._probe_pages() | {
            METRICS_PATH: Page(
                lambda send: send_bytes(send, 200, self.metrics.text(), b"text/plain; version=0.0.4; charset=utf-8")
            ),
            SCALING_PATH: Page(
                lambda send: send_bytes(
                    send, 200, msgspec.json.encode(self.service_loads.report()), b"application/json"
                )
            ),
            ROLLOUTS_PATH: Page(
                lambda send: send_bytes(
                    send, 200, msgspec.json.encode(self.canary_figures.report()), b"application/json"
                )
            ),
            DEBUG_PATH: Page(
                lambda send: send_json(
                    send, 200, operations.endpoints(self.fleet, self.index, self.ledger, self._clock())
                )
            ),
        }

    def _make_client_pages(self) -> dict[str, Page]:
        """Returns the pages for all clients; without an admin port, a loopback address has the operators' pages too."""
        as_vllm = Page(self._send_vllm_health, _GET | {"POST"})
        pages = self._probe_pages() | {
            MODELS_PATH: Page(lambda send: send_json(send, 200, operations.models(self.fleet))),
            "/health": Page(self._send_vllm_health),
            "/ping": as_vllm,
            FAVICON_PATH: Page(_send_nothing),
            **{path: Page(partial(_send_docs, path)) for path in DOCS_PATHS},
            "/version": Page(lambda send: send_json(send, 200, {"version": __version__})),
            "/load": Page(lambda send: send_json(send, 200, {"server_load": self._generate.in_flight})),
        }
        on_loopback = self.settings.admin_port is None and self.settings.is_loopback
        return pages | self._make_admin_pages() if on_loopback else pages

    async def _send_vllm_health(self, send: Send) -> None:
        """Answers as vLLM's /health and /ping do: no body, and 200 once requests are answered."""
        await send_bytes(send, 200 if self._is_ready else 503, b"")

    @property
    def _is_ready(self) -> bool:
        return self.fleet.is_ready and not self.stopping and not self._source_failure

    async def _send_ready(self, send: Send) -> None:
        ready = self._is_ready
        waits = self._source_failure or "waiting for endpoints"
        status = "ready" if ready else "stopping" if self.stopping else waits
        await send_json(send, 200 if ready else 503, {"status": status})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _expire(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                more = self.index.expire(self._clock())
                await asyncio.sleep(EXPIRE_PAUSE_S if more else EXPIRE_EVERY_S)

    def _share_out(self, tokenizer_bytes: int) -> None:
        """Resizes the index to what tokenizers leave, after one was added or removed."""
        shares = share_out(self.settings.memory_limit_bytes, tokenizer_bytes, self.settings.responses_memory_bytes)
        if shares.short_bytes:
            log.warning(
                "--memory-limit of %d MiB is %d MiB short of what tokenizers (%d MiB) and all else need: raise it",
                self.settings.memory_limit_bytes >> 20,
                shares.short_bytes >> 20,
                tokenizer_bytes >> 20,
            )
        self.index.limit(self.settings.index_max_blocks or shares.index_blocks)

    async def _follow_source(self) -> None:
        """Runs the source until cancelled, and starts it again if it ends.

        Meanwhile the last list stays, and the gateway is not ready.
        """
        pause_s = FIRST_SOURCE_PAUSE_S
        while True:
            try:
                await self._source.run(self._published)
                self._source_failure = "the source of endpoints ended"
            except Exception as error:
                self._source_failure = f"the source of endpoints failed: {type(error).__name__}: {error}"[:500]
                log.critical("the endpoint source failed, the last list stays: %s", error, exc_info=error)
            self.metrics.source_failed()
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_SOURCE_PAUSE_S, 2 * pause_s)

    def _published(self, listed: Sequence[Listed], services: Sequence[Service] | None = None) -> None:
        self.fleet.update(listed, services)
        self._source_failure = ""

    def _figures(self) -> Iterator[EndpointFigures]:
        now_s = self._clock()
        for name, state in self.fleet.endpoints.items():
            yield EndpointFigures(
                name,
                state.endpoint.model,
                state.phase(now_s),
                self.ledger.in_flight(name),
                state.breaker.cause.value if state.breaker.cause else "",
                state.subscriber.lag_s,
                self.index.cached_blocks(name),
            )

    def _plugins(self) -> list[tuple[str, int, float]]:
        return [(name, time.calls, time.seconds) for name, time in self.router.times.items()]


def _port(scope: Scope) -> int:
    """Returns the port of ours to which the client has connected."""
    port: int = scope["server"][1]
    return port


async def _send_docs(path: str, send: Send) -> None:
    file = docs_file(path)
    await send_bytes(send, 200, file.body, file.media_type.encode(), file.headers)


async def _send_nothing(send: Send) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def _not_found(path: str) -> ApiError:
    return ApiError(404, f"there is no {path} here; clients want {CHAT_PATH}", code="unknown_path")


def _require(method: str, methods: frozenset[str], path: str) -> None:
    if method not in methods:
        allowed = ", ".join(sorted(methods))
        raise ApiError(
            405, f"{path} takes {allowed}, not {method}", code="method_not_allowed", headers={"allow": allowed}
        )
