"""Scales services by their gateways' reports: reads these each second, or sooner, while any service has `scaling`,
plans, and queues services whose numbers change. Decides nothing: the planner does.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mini_infer_contract.scaling import GatewayLoads
from mini_infer_operator.gpus import gpus_of_engine
from mini_infer_operator.objects.cache import ObjectCache, ServiceKey
from mini_infer_operator.objects.current_roles import current_role
from mini_infer_operator.objects.events import EventRecorder
from mini_infer_operator.objects.gateway_loads import GatewayLoadReader
from mini_infer_operator.objects.history import running_spec
from mini_infer_operator.objects.observed_workloads import worker_index
from mini_infer_operator.objects.start_stages import usual_start_s
from mini_infer_operator.parse import InvalidServiceError
from mini_infer_operator.plan.role_switches import roles_are_interchangeable
from mini_infer_operator.presets.resolve import resolve_or_keep
from mini_infer_operator.resource import GROUP, KIND, LABEL_DRAINING, VERSION, InferenceService
from mini_infer_operator.scaling.budget import Claim, shared_out
from mini_infer_operator.scaling.plan_state import DECODE, PAIR, PREFILL, Fleet
from mini_infer_operator.scaling.service_scaler import Change, ServiceScaler
from mini_infer_operator.scaling.spec import planned_spec, policies_of

READ_EVERY_S = 1.0
READ_ASLEEP_S = 0.2
"""Seconds between two readings while a service has no engine: requests may be held, and each second is one of their
wait.
"""
PAUSE_RATIO = 10.0
"""The pause after a reading, as a multiple of the time that it took: many services or gateways are read less often."""
UNHEARD_S = 60.0
"""Seconds without a report after which an Event says so."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Scaled:
    """One service that has `scaling`."""

    scaler: ServiceScaler
    version: str = ""
    service: InferenceService | None = None
    granted: Mapping[str, int] | None = None
    heard_s: float | None = None
    is_pair: bool = False
    """True if its prefill and decode engines can take each other's role."""


class Scaling:
    """The planners of all services that have `scaling`. Without any, it sends no request."""

    def __init__(
        self,
        cache: ObjectCache,
        reader: GatewayLoadReader,
        events: EventRecorder,
        changed: Callable[[ServiceKey], None],
        gpus_per_namespace: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Calls `changed` when a service's numbers change."""
        self._cache, self._reader, self._events, self._changed = cache, reader, events, changed
        self._gpus, self._clock = gpus_per_namespace, clock
        self._scaled: dict[ServiceKey, _Scaled] = {}

    def decided(self, key: ServiceKey) -> Mapping[str, int]:
        """Returns the planner's numbers by role; empty before its first decision."""
        scaled = self._scaled.get(key)
        return (scaled.granted if scaled else None) or {}

    def loads(self, key: ServiceKey) -> Mapping[str, float]:
        """Returns the latest load of the service's engines by their pods' names; empty if no gateway has reported."""
        scaled = self._scaled.get(key)
        return scaled.scaler.engine_loads if scaled else {}

    def update(self, key: ServiceKey, stored: Mapping[str, Any] | None) -> None:
        """Takes a service that may have changed, or None if it is gone."""
        spec = (stored or {}).get("spec")
        roles = spec.values() if isinstance(spec, Mapping) else ()
        has_scaling = any(isinstance(role, Mapping) and role.get("scaling") for role in roles)
        if not has_scaling:
            self._scaled.pop(key, None)
        elif key not in self._scaled:
            self._scaled[key] = _Scaled(ServiceScaler(f"{key[0]}/{key[1]}"))

    async def run(self) -> None:
        """Reads and plans until cancelled."""
        took_s = 0.0
        while True:
            await asyncio.sleep(self.pause_s(took_s))
            begun_s = self._clock()
            if self._scaled:
                self.step(await self._reader.read())
            took_s = self._clock() - begun_s

    def pause_s(self, took_s: float) -> float:
        """Returns the seconds until the next reading, after one that took so long."""
        is_asleep = any(scaled.granted and not any(scaled.granted.values()) for scaled in self._scaled.values())
        return min(READ_EVERY_S, max(READ_ASLEEP_S, PAUSE_RATIO * took_s)) if is_asleep else READ_EVERY_S

    def step(self, reports: Mapping[str, GatewayLoads]) -> None:
        """Plans every service by these reports, within the GPU budget of its namespace."""
        now_s = self._clock()
        changes: dict[ServiceKey, list[Change]] = {}
        for key, scaled in list(self._scaled.items()):
            service = self._service(key, scaled)
            if service is None:
                continue
            policies, pods = policies_of(service), self._cache.of_service("Pod", *key)
            fleets = {role: Fleet(service.roles[role].replicas, _ready(pods, role)) for role in policies}
            scaled.is_pair = roles_are_interchangeable(service)
            start_s = usual_start_s(pods)
            changes[key] = scaled.scaler.take(
                policies, fleets, reports, now_s, start_s, are_roles_interchangeable=scaled.is_pair
            )
            self._tell_if_unheard(key, scaled, now_s, is_heard=bool(reports))
        for namespace in {key[0] for key in changes}:
            self._grant(namespace, changes)

    def _service(self, key: ServiceKey, scaled: _Scaled) -> InferenceService | None:
        """Returns the service with the planner's numbers; None if it is gone, or its spec breaks a rule."""
        stored = self._cache.get(KIND, *key)
        if stored is None or "deletionTimestamp" in stored["metadata"]:
            self._scaled.pop(key, None)
            return None
        version = str(stored["metadata"].get("resourceVersion", ""))
        if version != scaled.version or scaled.service is None:
            spec = planned_spec(stored["spec"], stored.get("status") or {}, scaled.scaler.decided)
            document = {**stored, "spec": spec}
            try:
                resolved = resolve_or_keep(document, self._cache.presets(), lambda: self._running_spec(document))
                scaled.service = resolved.service
            except InvalidServiceError:
                scaled.service = None
            scaled.version = version
        return scaled.service

    def _running_spec(self, document: Mapping[str, Any]) -> dict[str, Any] | None:
        metadata = document["metadata"]
        return running_spec(
            document, self._cache.of_service("ControllerRevision", metadata["namespace"], metadata["name"])
        )

    def _grant(self, namespace: str, changes: Mapping[ServiceKey, list[Change]]) -> None:
        """Shares the namespace's budget out, and queues the services whose numbers change by it."""
        claims: dict[str, Claim] = {}
        for key, scaled in self._scaled.items():
            if key[0] == namespace and scaled.service is not None:
                for role, policy in policies_of(scaled.service).items():
                    desired = scaled.scaler.decided.get(role, scaled.service.roles[role].replicas)
                    gpus, current = gpus_of_engine(scaled.service.roles[role]), self.decided(key).get(role, desired)
                    claim = Claim(policy.min_replicas, desired, gpus, current)
                    name = _claim(key, role, scaled)
                    claims[name] = claims[name] + claim if name in claims else claim
        shared = shared_out(claims, self._gpus)
        for key, scaled in self._scaled.items():
            if key[0] != namespace or scaled.service is None:
                continue
            mine = {role: shared[_claim(key, role, scaled)] for role in policies_of(scaled.service)}
            if scaled.is_pair:
                mine = self._split(key, scaled, shared[_claim(key, PREFILL, scaled)])
            if mine == (scaled.granted or {role: scaled.service.roles[role].replicas for role in mine}):
                scaled.granted = mine
                continue
            scaled.granted = mine
            self._explain(key, changes.get(key, ()), mine)
            self._changed(key)

    def _split(self, key: ServiceKey, scaled: _Scaled, total: int) -> dict[str, int]:
        """Returns what prefill and decode get of the engines that both were granted together."""
        decided = {role: scaled.scaler.decided[role] for role in (PREFILL, DECODE)}
        if total == sum(decided.values()) or not scaled.scaler.latest:
            return decided
        return scaled.scaler.split(total, {**decided, **self.decided(key)}, self._clock())

    def _explain(self, key: ServiceKey, changes: "list[Change] | tuple[()]", granted: Mapping[str, int]) -> None:
        stored = self._cache.get(KIND, *key)
        if stored is None:
            return
        about = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, **stored}
        for change in changes:
            message = change.message
            if granted[change.role] < change.after:
                message += f"; the namespace's GPUs allow {granted[change.role]}"
            self._events.record_event(about, "Planned", message, "Normal")
            log.info("%s/%s: %s", *key, message)

    def _tell_if_unheard(self, key: ServiceKey, scaled: _Scaled, now_s: float, *, is_heard: bool) -> None:
        """Records an Event if no gateway has reported for a while: then numbers stay as they are."""
        if is_heard or scaled.heard_s is None:
            scaled.heard_s = now_s
        elif now_s - scaled.heard_s >= UNHEARD_S:
            scaled.heard_s = now_s + 10 * UNHEARD_S  # not again for a while
            stored = self._cache.get(KIND, *key)
            if stored is not None:
                about = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, **stored}
                message = (
                    f"no gateway has answered {UNHEARD_S:.0f} s long, so numbers of engines stay as they are: check "
                    "the operator's --gateways, and whether it may reach their admin port"
                )
                self._events.record_event(about, "NoGatewayReports", message, "Warning")


def _claim(key: ServiceKey, role: str, scaled: _Scaled) -> str:
    """Returns the name of the claim that has the role: roles that share their engines share a claim."""
    return f"{key[1]}/{PAIR if scaled.is_pair and role in (PREFILL, DECODE) else role}"


def _ready(pods: "list[dict[str, Any]]", role: str) -> int:
    """Returns the number of a role's pods that take requests."""
    return sum(
        current_role(pod) == role
        and worker_index(pod) == 0
        and LABEL_DRAINING not in pod["metadata"].get("labels", {})
        and any(
            c.get("type") == "Ready" and c.get("status") == "True"
            for c in (pod.get("status") or {}).get("conditions") or ()
        )
        for pod in pods
    )
