"""What is read anew at each scrape of `/metrics`: services, queue, watches, the CRD."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mini_infer_contract import metrics as names
from mini_infer_operator import __version__
from mini_infer_operator.controller.feed import Feed
from mini_infer_operator.controller.metrics import Gauge
from mini_infer_operator.objects.cache import ObjectCache, ServiceKey
from mini_infer_operator.resource import KIND

Values = dict[tuple[str, ...], float]


class Queue(Protocol):
    """What a queue tells of itself."""

    def depth(self) -> int:
        """See WorkQueue."""

    def oldest_unsynced_s(self) -> float:
        """See WorkQueue."""


def stored_status(cache: ObjectCache, key: ServiceKey) -> Mapping[str, Any]:
    """The status of a service as last seen; empty if there is none."""
    return (cache.get(KIND, *key) or {}).get("status") or {}


def services(cache: ObjectCache) -> Gauge:
    """InferenceServices by the reason of their Ready condition."""

    def read() -> Values:
        statuses = (stored_status(cache, key) for key in cache.keys(KIND))
        ready = ({c["type"]: c for c in status.get("conditions", ())}.get("Ready", {}) for status in statuses)
        return {(reason,): count for reason, count in Counter(c.get("reason", "") for c in ready).items()}

    return names.OPERATOR_SERVICES, "InferenceServices, by Ready's reason.", (names.LABEL_REASON,), read


def queue_depth(queue: Callable[[], Queue | None]) -> Gauge:
    """Services that wait; 0 where another replica leads."""

    def read() -> Values:
        now = queue()
        return {(): now.depth() if now is not None else 0.0}

    return names.OPERATOR_QUEUE_DEPTH, "Services not reconciled since they changed.", (), read


def oldest_unsynced(queue: Callable[[], Queue | None]) -> Gauge:
    """How long the first of them waits."""

    def read() -> Values:
        now = queue()
        return {(): now.oldest_unsynced_s() if now is not None else 0.0}

    return names.OPERATOR_OLDEST_UNSYNCED, "How long the first of those waits.", (), read


def watch_age(feeds: Sequence[Feed]) -> Gauge:
    """The age of each kind's oldest watch."""

    def read() -> Values:
        ages: Values = {}
        for feed in feeds:
            key = (feed.kind.plural,)
            ages[key] = max(ages.get(key, 0.0), time.monotonic() - feed.heard_s)
        return ages

    return names.OPERATOR_WATCH_AGE, "Since a watch last heard something.", (names.LABEL_KIND,), read


def info(crd_state: Callable[[], str]) -> Gauge:
    """Version of the operator, and what its CRD is beside it."""
    labels = (names.LABEL_VERSION, names.LABEL_CRD)
    return names.OPERATOR_INFO, "This operator and its CRD.", labels, lambda: {(__version__, crd_state()): 1.0}
