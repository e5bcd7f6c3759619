"""Gauges that are computed at each scrape of `/metrics`: services, queue, watches and the CRD."""

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
    """The measures of a work queue that gauges export."""

    def depth(self) -> int:
        """Returns the number of keys that changed and were not worked on successfully since."""

    def oldest_unsynced_s(self) -> float:
        """Returns the seconds that the first of those keys has waited; 0 if there are none."""


def stored_status(cache: ObjectCache, key: ServiceKey) -> Mapping[str, Any]:
    """Returns the status of a service as last seen; empty if there is none."""
    return (cache.get(KIND, *key) or {}).get("status") or {}


def services(cache: ObjectCache) -> Gauge:
    """Counts InferenceServices by the reason of their Ready condition."""

    def read() -> Values:
        statuses = (stored_status(cache, key) for key in cache.keys(KIND))
        ready = ({c["type"]: c for c in status.get("conditions", ())}.get("Ready", {}) for status in statuses)
        return {(reason,): count for reason, count in Counter(c.get("reason", "") for c in ready).items()}

    return names.OPERATOR_SERVICES, "InferenceServices, by Ready's reason.", (names.LABEL_REASON,), read


def queue_depth(queue: Callable[[], Queue | None]) -> Gauge:
    """Counts the services that changed and were not reconciled since; 0 while another replica leads."""

    def read() -> Values:
        now = queue()
        return {(): now.depth() if now is not None else 0.0}

    return names.OPERATOR_QUEUE_DEPTH, "Services not reconciled since they changed.", (), read


def oldest_unsynced(queue: Callable[[], Queue | None]) -> Gauge:
    """Measures the seconds that the oldest unreconciled service has waited; 0 while another replica leads."""

    def read() -> Values:
        now = queue()
        return {(): now.oldest_unsynced_s() if now is not None else 0.0}

    return names.OPERATOR_OLDEST_UNSYNCED, "How long the first of those waits.", (), read


def watch_age(feeds: Sequence[Feed]) -> Gauge:
    """Measures, for each kind, the seconds since its most silent watch last received something."""

    def read() -> Values:
        ages: Values = {}
        for feed in feeds:
            key = (feed.kind.plural,)
            ages[key] = max(ages.get(key, 0.0), time.monotonic() - feed.last_seen_s)
        return ages

    return names.OPERATOR_WATCH_AGE, "Since a watch last heard something.", (names.LABEL_KIND,), read


def info(crd_state: Callable[[], str]) -> Gauge:
    """Exports the operator's version and the state of the served CRD as labels."""
    labels = (names.LABEL_VERSION, names.LABEL_CRD)
    return names.OPERATOR_INFO, "This operator and its CRD.", labels, lambda: {(__version__, crd_state()): 1.0}
