"""Reports how long engines take to start: each start to metrics, and the first of a revision as an Event."""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from mini_infer_contract.launch import HTTP_PORT
from mini_infer_operator.objects.engine_answers import pod_url
from mini_infer_operator.objects.loading_reports import LoadingReports
from mini_infer_operator.objects.observed_workloads import is_ready, time_of
from mini_infer_operator.objects.start_stages import StartStages, start_stages
from mini_infer_operator.resource import LABEL_REVISION, LABEL_ROLE

Service = tuple[str, str]
"""A namespace and a name."""


class EngineStarts:
    """Counts each start once, of pods that were created since this operator began to work."""

    def __init__(self, seen: Callable[[StartStages], None], loading: LoadingReports | None = None) -> None:
        """Calls `seen` for each start. `loading` asks engines for their own stages; None: they are not asked."""
        self._seen, self._loading = seen, loading
        self._since = datetime.now(UTC)
        self._reported: dict[Service, set[str]] = {}
        self._announced: dict[Service, set[tuple[str, str]]] = {}

    def restart(self, now: datetime) -> None:
        """Leaves out pods that were created before `now`: another operator led then, and may have reported them."""
        self._since = now

    def observe(self, service: Service, pods: Iterable[Mapping[str, Any]]) -> list[str]:
        """Reports starts that are new. Returns a sentence for the first of each role's revision, and another one once
        such an engine has reported its own stages.
        """
        known, sentences, present = self._reported.get(service, set()), list[str](), set[str]()
        announced = self._announced.setdefault(service, set())
        for pod in pods:
            uid = pod["metadata"].get("uid", "")
            present.add(uid)
            if uid in known or not is_ready(pod):
                continue
            known.add(uid)
            stages, created = start_stages(pod), time_of(pod["metadata"].get("creationTimestamp"))
            if stages is None or created is None or created < self._since.replace(microsecond=0):  # whole seconds
                continue
            self._seen(stages)
            labels = pod["metadata"].get("labels") or {}
            revision = labels.get(LABEL_ROLE, ""), labels.get(LABEL_REVISION, "")
            if revision not in announced:
                announced.add(revision)
                if self._loading is not None and (url := pod_url(pod, HTTP_PORT)) is not None:
                    self._loading.ask(service, url)
                sentences.append(f"the first engine of {' revision '.join(revision)} is ready after {stages.message}")
        if self._loading is not None and (message := self._loading.take(service)) is not None:
            sentences.append(f"stages of that engine: {message}")
        self._reported[service] = known & present
        return sentences

    def forget(self, service: Service) -> None:
        """Forgets a service that was deleted."""
        self._reported.pop(service, None)
        self._announced.pop(service, None)
        if self._loading is not None:
            self._loading.forget(service)
