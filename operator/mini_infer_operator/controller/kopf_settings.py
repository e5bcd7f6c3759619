"""Configures kopf: how it watches. It keeps no progress, compares no objects, posts no log lines and has no peers."""

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any

import kopf

from mini_infer_operator.objects.api import PAGE
from mini_infer_operator.objects.kinds import KINDS, Kind
from mini_infer_operator.resource import FIELD_MANAGER, LABEL_SERVICE

WATCH_S = 1800  # whole seconds: kopf writes it into the query as it is
"""Seconds after which the API server ends a watch; kopf begins the next one where it ended. An idle cluster costs no
more requests than these.
"""
SILENCE_S = 100.0
"""Seconds of silence after which a watch counts as dead: the API server sends a bookmark about once a minute."""
REQUEST_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 10.0
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 10.0
EVENT_BACKOFFS_S = (1.0, 5.0)
"""Pauses between attempts to post an Event. It is worth no more of them: the status says the same."""


class Backoffs(Iterable[float]):
    """An endless sequence of pauses: kopf ends the operator when they run out, which no restart would solve."""

    def __iter__(self) -> Iterator[float]:
        for failures in itertools.count():
            yield min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures, 16)) * random.uniform(0.8, 1.2)


class NoDiffBase(kopf.DiffBaseStorage):
    """Keeps no last-seen state, as there are no change handlers. kopf's own would copy each object at every event."""

    def build(self, **_: Any) -> Any:
        """Returns nothing to compare."""
        return {}

    def fetch(self, **_: Any) -> None:
        """Returns None: there is no last-seen state."""

    def store(self, **_: Any) -> None:
        """Writes nothing."""


class NoProgress(kopf.ProgressStorage):
    """Keeps no progress of handlers: `kopf.on.event` has none."""

    def fetch(self, **_: Any) -> None:
        """Returns None: there is no progress."""

    def store(self, **_: Any) -> None:
        """Writes nothing."""

    def purge(self, **_: Any) -> None:
        """Has nothing to remove."""

    def touch(self, **_: Any) -> None:
        """Writes nothing."""

    def clear(self, *, essence: Any) -> Any:
        """Returns the essence unchanged, as it contains no progress."""
        return essence


def watched(*, clusterwide: bool = True) -> tuple[Kind, ...]:
    """Returns the kinds that kopf watches; without `clusterwide`, those of single namespaces."""
    return tuple(kind for kind in KINDS if "watch" in kind.verbs and (clusterwide or kind.namespaced))


def configure(settings: kopf.OperatorSettings, *, scans: bool) -> None:
    """Sets what differs from kopf's defaults.

    `scans`: True if kopf looks for new resources and namespaces, which takes rights on all CRDs and namespaces.
    """
    settings.peering.standalone = True  # a Lease elects the leader: peers of one priority would all go on
    settings.scanning.disabled = not scans
    settings.posting.reporting_component = FIELD_MANAGER
    settings.posting.event_name_prefix = "mini-infer-"
    settings.posting.default_backoffs = EVENT_BACKOFFS_S
    settings.networking.error_backoffs = Backoffs()
    settings.networking.request_timeout = REQUEST_TIMEOUT_S
    settings.networking.connect_timeout = CONNECT_TIMEOUT_S
    settings.watching.server_timeout = WATCH_S
    settings.watching.inactivity_timeout = SILENCE_S
    settings.watching.chunk_size = PAGE
    for kind in watched():
        if kind.is_labelled:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = LABEL_SERVICE
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.persistence.progress_storage = NoProgress()
    settings.process.ultimate_exiting_timeout = None  # its timer would outlive one kopf in the process of the next
