"""The parts of one gateway that serve its requests, in one object that `app` builds and every stage receives."""

from collections.abc import Callable
from dataclasses import dataclass, field

from mini_infer_gateway.fleet.pin_budget import PinBudget
from mini_infer_gateway.fleet.registry import Fleet
from mini_infer_gateway.fleet.return_times import ReturnTimes
from mini_infer_gateway.flow_control.controller import FlowController
from mini_infer_gateway.flow_control.held_requests import HeldRequests
from mini_infer_gateway.http.upstream import Upstream
from mini_infer_gateway.memory import BodyBudget
from mini_infer_gateway.metrics import Metrics
from mini_infer_gateway.pipeline.clients import Clients
from mini_infer_gateway.pipeline.continuation.retention import BodyRetention
from mini_infer_gateway.pipeline.observer import NOBODY, RequestObserver
from mini_infer_gateway.pipeline.poison_requests import PoisonRequests
from mini_infer_gateway.pipeline.prefetches import Prefetches
from mini_infer_gateway.pipeline.retries import RetryBudget
from mini_infer_gateway.prompts.tokenizers import Tokenizers
from mini_infer_gateway.routing.router import Router
from mini_infer_gateway.settings import GatewaySettings
from mini_infer_web.asgi import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The parts that all requests of a gateway share; each outlives every request."""

    settings: GatewaySettings
    clock: Callable[[], float]
    """Returns seconds on the monotonic clock."""
    clients: Clients
    fleet: Fleet
    tokenizers: Tokenizers
    router: Router
    flow: FlowController
    held: HeldRequests
    upstream: Upstream
    metrics: Metrics
    bodies: BodyBudget
    retention: BodyRetention
    retry_budget: RetryBudget
    pins: PinBudget
    prefetches: Prefetches
    returns: ReturnTimes = field(default_factory=ReturnTimes)
    poison: PoisonRequests = field(default_factory=PoisonRequests)
    observer: RequestObserver = NOBODY
    may_pin: Callable[[Scope], bool] = lambda scope: False
    """Returns True if the client of a request may name the engine that is to answer."""
