"""A service's backend in a cluster: reads its objects, writes those that differ, deletes those no longer planned."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from mini_infer_contract.launch import HTTP_PORT
from mini_infer_operator.images import gpus_of_one_engine
from mini_infer_operator.objects.api import KubernetesApi, RefusedError
from mini_infer_operator.objects.cache import ObjectCache, ServiceKey
from mini_infer_operator.objects.copied_bytes import CopiedBytes, JobsCopy
from mini_infer_operator.objects.current_roles import by_deployment, past_switches, switchable_engines
from mini_infer_operator.objects.drift import SOMEBODY, Drift, additions, changes
from mini_infer_operator.objects.engine_answers import pod_url
from mini_infer_operator.objects.engine_roles import RETRY_S, EngineRoles
from mini_infer_operator.objects.engine_starts import EngineStarts
from mini_infer_operator.objects.events import EventRecorder
from mini_infer_operator.objects.failures import MAX_REPORTED
from mini_infer_operator.objects.history import retained_revisions, running_spec, with_history
from mini_infer_operator.objects.image_volumes import image_volume_remedy
from mini_infer_operator.objects.kinds import CHILD_KINDS
from mini_infer_operator.objects.model_cache import (
    LOOK_AGAIN_S,
    copying_pods,
    is_complete,
    model_cache_failure,
    model_cache_job,
    model_cache_job_name,
    model_cache_status,
    models_in_use,
    node_copy_status,
)
from mini_infer_operator.objects.model_implementations import ModelImplementations
from mini_infer_operator.objects.names import engines_service_name
from mini_infer_operator.objects.observed_objects import frozen_templates, is_applied, observed_of, running_images
from mini_infer_operator.objects.observed_workloads import newest_ready
from mini_infer_operator.objects.ownership import belongs
from mini_infer_operator.objects.peer_secrets import PeerSecrets
from mini_infer_operator.objects.peers import needs_peers_secret, peers_secret_name
from mini_infer_operator.objects.render import render
from mini_infer_operator.objects.running_requests import RunningRequests
from mini_infer_operator.objects.scalers import initial_replicas, lost_scaler_status, scaled_spec, scaler_status
from mini_infer_operator.observe import Observed, ObservedCanary, ObservedWorkload
from mini_infer_operator.plan.default_image import Change, image_change
from mini_infer_operator.plan.limits import times_of
from mini_infer_operator.plan.model_names import ModelNames
from mini_infer_operator.plan.plan import Plan
from mini_infer_operator.plan.role_switches import RoleSwitch, roles_are_interchangeable, with_switches
from mini_infer_operator.plan.rollout_throttle import RolloutThrottle
from mini_infer_operator.resource import (
    ANNOTATION_DRAINING_SINCE,
    ANNOTATION_IGNORE_MANAGERS,
    GROUP,
    KIND,
    LABEL_CURRENT_ROLE,
    LABEL_DRAINING,
    SCALER_KIND,
    VERSION,
    InferenceService,
    Reason,
)
from mini_infer_operator.scaling.spec import planned_spec
from mini_infer_operator.settings import OperatorSettings
from mini_infer_operator.status import EventType, PermanentFailure
from mini_infer_web.kubernetes_api import ApiError

Object = dict[str, Any]

_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_FORMER_STATUS_FIELDS = {"operator", "challenger"}
"""Fields that earlier operators wrote; a CRD that was not upgraded still stores them."""
_NEVER_CHANGED = {"Job"}
"""Kinds whose objects are created and deleted, and never written again: their pod templates are immutable."""
_APPLIED_TO_CREATE = {"ControllerRevision"}
"""Kinds that are created by server-side apply. A POST stores a ControllerRevision's `data` with its keys in their
order; every later apply sorts them, and is then refused as a change of an immutable field. Other kinds are created by
POST, which fails if the name is taken; no other software has ControllerRevisions of our names.
"""


class ClusterBackend:
    """One InferenceService of a cluster, for one run of `reconcile`: objects are read once for the whole run."""

    def __init__(
        self,
        api: KubernetesApi,
        cache: ObjectCache,
        settings: OperatorSettings,
        namespace: str,
        name: str,
        events: EventRecorder | None = None,
        throttle: RolloutThrottle[ServiceKey] | None = None,
        running: RunningRequests | None = None,
        names: ModelNames | None = None,
        peers: PeerSecrets | None = None,
        implementations: ModelImplementations | None = None,
        copied: CopiedBytes | None = None,
        decided: Callable[[ServiceKey], Mapping[str, int]] = lambda key: {},
        starts: EngineStarts | None = None,
        canary: Callable[[ServiceKey], ObservedCanary] = lambda key: ObservedCanary(),
        roles: EngineRoles | None = None,
        loads: Callable[[ServiceKey], Mapping[str, float]] = lambda key: {},
    ) -> None:
        """`throttle` None: a new default image rolls out at once. `names` None: no other service claims a name.
        `roles` None: no engine switches its role.

        `decided` returns the planner's numbers of engines by role, for roles with `scaling`; `loads` returns the load
        of engines by their pods' names. `canary` returns what gateways report of a service's canary.
        """
        self._canary = canary
        self._decided, self._loads, self._roles = decided, loads, roles
        self._peers = peers or PeerSecrets(api, settings.identity)
        self._api = api
        self._cache = cache
        self._events = events or EventRecorder(lambda *_: None)
        self._settings = settings
        self._namespace = namespace
        self._name = name
        self._throttle = throttle
        self._running = running
        self._implementations = implementations
        self._copied = copied
        self._starts = starts
        self._names = names or ModelNames()
        self._children: dict[str, dict[str, Object]] = {}  # kind -> name -> object, filled by observe
        self._pods: list[Object] = []  # as well
        self._deployed: list[ObservedWorkload] = []  # by the role that engines started with; as well

    async def read(self) -> Mapping[str, Any] | None:
        """Returns the service as stored, with the replicas of its scalers and of the planner. None once it is gone or
        being deleted: then scalers that name it say so.
        """
        stored = self._cache.get(KIND, self._namespace, self._name)
        for scaler in self._scalers() if stored is None else ():
            await self._report_scaler(scaler, lost_scaler_status(scaler))
        if stored is None or "deletionTimestamp" in stored["metadata"]:
            return None
        spec = self._pinned(stored) if _is_paused(stored) else stored["spec"]
        status = {key: value for key, value in (stored.get("status") or {}).items() if key not in _FORMER_STATUS_FIELDS}
        scaled = scaled_spec(spec, self._scalers())
        decided = self._decided((self._namespace, self._name))
        return {**stored, "spec": planned_spec(scaled, status, decided), "status": status}

    def presets(self) -> list[Object] | None:
        """Returns all InferencePresets of the cluster; None if they are not served, or not watched."""
        return self._cache.presets()

    def running_spec(self, stored: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the spec of the service's last revision; None if it was not kept."""
        return running_spec(stored, self._cache.of_service("ControllerRevision", self._namespace, self._name))

    async def observe(self, service: InferenceService) -> Observed:
        """Returns counts and times of the service's workloads and pods, and the reasons why engines are not ready."""
        for kind in CHILD_KINDS:
            found = self._cache.of_service(kind.name, self._namespace, self._name)
            self._children[kind.name] = {child["metadata"]["name"]: child for child in found}
        self._pods = self._cache.of_service("Pod", self._namespace, self._name)
        self._report_starts()
        workloads = self._workloads(service)
        image, look_again_s = self._default_image(service, workloads)
        draining = [pod for pod in self._pods if LABEL_DRAINING in pod["metadata"].get("labels", {})]
        running = await self._running.query(draining) if self._running and draining else {}
        claimants = self._names.claimants(service.model_name)
        min_ready = times_of(service).min_ready
        observed = observed_of(workloads, self._pods, image, running, min_ready=min_ready, now=datetime.now(UTC))
        implementation = self._model_implementation()
        canary = self._canary((self._namespace, self._name))
        seen = replace(
            observed, claimants=claimants, look_again_s=look_again_s, model_impl=implementation, canary=canary
        )
        return await self._with_model_cache(service, await self._with_roles(service, seen))

    async def _with_roles(self, service: InferenceService, observed: Observed) -> Observed:
        """Counts engines by the role that they have now, after sending it to those that may not have it yet."""
        self._deployed = list(observed.workloads)
        is_sent = await self._send_roles()
        seen = replace(observed, workloads=with_switches(observed.workloads, past_switches(self._pods)))
        if not is_sent:
            seen = replace(seen, look_again_s=min(seen.look_again_s, RETRY_S))
        if self._roles is None or not roles_are_interchangeable(service):
            return seen
        key = self._namespace, self._name
        return replace(seen, switchable=switchable_engines(self._pods, self._loads(key), self._roles.refused(key)))

    async def _send_roles(self) -> bool:
        """Sends roles to engines that switched. One that refuses has its first role again. Returns False if some did
        not answer.
        """
        if self._roles is None:
            return True
        sent = await self._roles.send((self._namespace, self._name), self._pods)
        stored = self._cache.get(KIND, self._namespace, self._name)
        for name, answer in sent.refused.items():
            await self._merge_pod(name, {"labels": {LABEL_CURRENT_ROLE: None}})
            if stored is not None:
                self.record_event(stored, "RoleSwitchRefused", f"engine {name} keeps its role: {answer}", "Warning")
        return not sent.unanswered

    async def _switch_roles(self, switches: Sequence[RoleSwitch]) -> None:
        """Labels the pods first, so that a switch is known whatever happens next, and then sends the roles."""
        for switch in switches:
            await self._merge_pod(switch.name, {"labels": {LABEL_CURRENT_ROLE: switch.after}})
        if switches:
            await self._send_roles()  # to one that did not answer the pass after the label's event sends it again

    async def _merge_pod(self, name: str, metadata: Mapping[str, Any]) -> None:
        written = await self._api.merge("Pod", self._namespace, name, {"metadata": metadata})
        if written is not None:
            self._cache.written("Pod", written)
            self._pods = self._cache.of_service("Pod", self._namespace, self._name)

    def _report_starts(self) -> None:
        """Reports engines that have become ready: how long each stage of their start took."""
        if self._starts is None or not (sentences := self._starts.observe((self._namespace, self._name), self._pods)):
            return
        if (stored := self._cache.get(KIND, self._namespace, self._name)) is not None:
            for sentence in sentences:
                self.record_event(stored, "EngineStarted", sentence)

    async def _with_model_cache(self, service: InferenceService, observed: Observed) -> Observed:
        """Adds how far the copy of the model is, if the spec asks for one."""
        if service.spec.model.cache is None:
            return observed
        if service.spec.model.cache.claim is None:
            return await self._with_node_copies(service, observed)
        name = model_cache_job_name(service)
        job = self._children["Job"].get(name)
        goes_on = job is not None and not is_complete(job) and model_cache_failure(job) is None
        copy = JobsCopy()
        if self._copied is not None and job is not None and goes_on:
            copy = await self._copied.query(job, datetime.now(UTC))
        stored = self._cache.get(KIND, self._namespace, self._name) or {}
        status = model_cache_status(service, job, copy.progress, stored.get("status") or {})
        look_again_s = min(observed.look_again_s, LOOK_AGAIN_S) if goes_on else observed.look_again_s
        failures = [*copy.failures, *observed.failures][:MAX_REPORTED]
        return replace(observed, model_cache=status, look_again_s=look_again_s, failures=failures)

    async def _with_node_copies(self, service: InferenceService, observed: Observed) -> Observed:
        """Adds how far copies onto nodes are."""
        urls = [url for pod in copying_pods(self._pods) if (url := pod_url(pod, HTTP_PORT)) is not None]
        progress = await self._copied.query_urls(urls) if self._copied is not None else None
        status = node_copy_status(service, self._pods, progress)
        goes_on = status is not None and status.state == "Copying"
        look_again_s = min(observed.look_again_s, LOOK_AGAIN_S) if goes_on else observed.look_again_s
        return replace(observed, model_cache=status, look_again_s=look_again_s)

    def _model_implementation(self) -> str | None:
        """Returns the code by which the newest ready engine computes, or None if none reports it."""
        newest = newest_ready(self._pods)
        url = None if newest is None else pod_url(newest, HTTP_PORT)
        if self._implementations is None or newest is None or url is None:
            return None
        return self._implementations.of_service((self._namespace, self._name), newest["metadata"]["uid"], url)

    async def apply(self, service: InferenceService, plan: Plan) -> PermanentFailure | None:
        """Writes objects that differ, then deletes those no longer planned.

        A refused write ends it before the deletions, so that no old engine goes without a successor. Returns that
        failure.
        """
        failure = self._settings.images.failure(service) or self._unserved(plan)
        if failure is not None:
            return failure
        seen = with_switches(with_switches(self._deployed, past_switches(self._pods)), plan.switches)
        plan = replace(plan, workloads=by_deployment(plan.workloads, self._deployed, seen))
        revisions, settings = self._ours("ControllerRevision", service), self._settings
        frozen = frozen_templates(self._workloads(service), revisions)
        new = {w.role for w in plan.workloads if w.launch is not None and (w.role, w.revision) not in frozen}
        cache = service.spec.model.cache
        by_job = cache is not None and cache.claim is not None
        copies = model_cache_job_name(service) not in self._children["Job"] if by_job else bool(new)
        failure = settings.pod_security.failure(service, new, copies=copies)
        if failure is not None:
            return failure
        has_switched = bool(past_switches(self._pods))
        policy, peers = settings.engine_image_pull_policy, settings.engine_peers
        manifests = render(service, plan, frozen, policy, peers, has_switched=has_switched)
        manifests += self._model_cache_job(service, plan)
        current = next((workload.revision for workload in plan.workloads if workload.launch is not None), None)
        manifests = with_history(manifests, revisions, current, service.written_spec)
        await self._switch_roles(plan.switches)
        await self._label_draining(plan.draining)
        if needs_peers_secret(manifests):
            try:
                await self._peers.ensure(service, self._pods)
            except RefusedError as error:
                name = peers_secret_name(service.metadata.name)
                return PermanentFailure(Reason.REFUSED, f"Secret {name} with the keys of its peers: {error}")
        for manifest in manifests:
            failure = await self._write(service, manifest)
            if failure is not None:
                return failure
        job = self._children["Job"].get(model_cache_job_name(service))
        if job is not None and (failure := model_cache_failure(job)) is not None:
            return failure
        kept = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
        kept |= {("ControllerRevision", name) for name in retained_revisions(revisions, service.metadata.uid)}
        for kind in reversed(CHILD_KINDS):
            for child in self._ours(kind.name, service):
                name = child["metadata"]["name"]
                if (kind.name, name) not in kept and "deletionTimestamp" not in child["metadata"]:
                    await self._api.delete(kind.name, child)
                    self._cache.drop(kind.name, self._namespace, name)
        return None

    def _model_cache_job(self, service: InferenceService, plan: Plan) -> list[Object]:
        """Returns the Job that copies the model, or [] if the spec asks for no cache."""
        cache = service.spec.model.cache
        launch = next((workload.launch for workload in plan.workloads if workload.launch is not None), None)
        if cache is None or cache.claim is None or launch is None:
            return []
        if (made := self._children["Job"].get(model_cache_job_name(service))) is not None:
            return [{"kind": "Job", "metadata": made["metadata"]}]
        keys = [key for key in self._cache.keys(KIND) if key[0] == self._namespace]
        specs = [stored["spec"] for key in keys if (stored := self._cache.get(KIND, *key)) is not None]
        workloads = [
            workload
            for key in keys
            for kind in ("Deployment", "LeaderWorkerSet")
            for workload in self._cache.of_service(kind, *key)
        ]
        kept = models_in_use(specs, workloads, cache.claim)
        job = model_cache_job(service, launch, self._settings.engine_image_pull_policy, kept)
        return [job] if job is not None else []

    def url(self, service: InferenceService) -> str:
        """Returns the gateway's URL if the operator's settings name one, or else that of the engines' Service."""
        name, namespace = service.metadata.name, service.metadata.namespace
        return self._settings.gateway_url or f"http://{engines_service_name(name)}.{namespace}.svc:{HTTP_PORT}"

    async def report(self, stored: Mapping[str, Any], status: Object) -> None:
        """Writes the status if it differs from the stored one, and the status of the service's scalers."""
        await self._report_scalers(stored["spec"], status)
        status = self._api.fit_status(status)
        if stored.get("status") == status:
            return
        identity = {"name": self._name, "namespace": self._namespace, "uid": stored["metadata"]["uid"]}
        written = await self._api.apply_status(
            {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": identity, "status": status}
        )
        self._cache.written(KIND, written)

    def _scalers(self) -> list[Object]:
        return self._cache.of_service(SCALER_KIND, self._namespace, self._name)

    async def _report_scalers(self, spec: Mapping[str, Any], status: Object) -> None:
        scalers = self._scalers()
        for scaler in scalers:
            name = scaler["metadata"]["name"]
            replicas = initial_replicas(scaler, spec)
            if replicas is not None:
                change = {"spec": {"replicas": replicas}}
                written = await self._api.merge(SCALER_KIND, self._namespace, name, change)
                self._cache.written(SCALER_KIND, written or scaler)
            await self._report_scaler(scaler, scaler_status(scaler, scalers, spec, status))

    async def _report_scaler(self, scaler: Object, status: Mapping[str, Any]) -> None:
        if status != scaler.get("status"):
            identity = {key: scaler["metadata"][key] for key in ("name", "namespace", "uid")}
            manifest = {"apiVersion": f"{GROUP}/{VERSION}", "kind": SCALER_KIND, "metadata": identity}
            self._cache.written(SCALER_KIND, await self._api.apply_status({**manifest, "status": status}))

    def record_event(
        self, about: Mapping[str, Any], reason: str, message: str, event_type: EventType = "Normal"
    ) -> None:
        """Records an Event about an object by the operator's recorder."""
        about = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, **about}  # items of a list do not say what they are
        self._events.record_event(about, reason, message, event_type)

    def _workloads(self, service: InferenceService) -> list[Object]:
        return [*self._ours("Deployment", service), *self._ours("LeaderWorkerSet", service)]

    def _unserved(self, plan: Plan) -> PermanentFailure | None:
        """Returns a failure if engines span nodes and the cluster does not serve LeaderWorkerSet, or else None."""
        spanning = sorted({w.role for w in plan.workloads if w.launch is not None and w.launch.nodes > 1})
        if not spanning or "LeaderWorkerSet" not in self._cache.unserved:
            return None
        self._cache.missed.add("LeaderWorkerSet")
        message = (
            f"{' and '.join(spanning)} engines span several nodes, and this cluster does not serve LeaderWorkerSet, "
            "which would run them: install it (https://lws.sigs.k8s.io/docs/installation/), or leave out "
            "parallelism.nodes"
        )
        return PermanentFailure(Reason.NO_LEADER_WORKER_SET, message)

    def _default_image(self, service: InferenceService, workloads: Sequence[Object]) -> tuple[str, float]:
        """Returns the image in force for a service that names none, and the seconds after which to check again."""
        default, throttle = self._settings.images.default_for(service), self._throttle
        change = image_change(service, default, running_images(workloads))
        if throttle is None:
            return default, float("inf")
        key, gpus = (self._namespace, self._name), gpus_of_one_engine(service)
        rollout = service.spec.rollout
        if change.change == Change.NONE or change.running == default:
            throttle.release(key)
            return default, float("inf")
        if change.change == Change.ROLLING:
            throttle.occupy(key, gpus)
            return default, float("inf")
        running = change.running or default
        if rollout is not None and rollout.on_default_image == "Keep":
            throttle.release(key)
            return running, float("inf")
        if throttle.may_start(key, gpus):
            return default, float("inf")
        stored = self._cache.get(KIND, *key)
        if stored is not None:
            message = f"the default image is now {default}; engines go on with {running} until it is their turn"
            self.record_event(stored, "ImageUpdateWaits", message)
        return running, throttle.look_again_s() or float("inf")

    def _pinned(self, stored: Object) -> Object:
        """Returns the spec of a paused service's last revision, or the stored one if that revision's was not kept."""
        return self.running_spec(stored) or dict(stored["spec"])

    def _ours(self, kind: str, service: InferenceService) -> list[Object]:
        return [child for child in self._children[kind].values() if belongs(child, service)]

    async def _label_draining(self, draining: frozenset[str]) -> None:
        """Sets the draining label and the lowest deletion cost on engines that are to go; removes both from others."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for pod in self._pods:
            metadata = pod["metadata"]
            chosen, labelled = metadata["name"] in draining, ANNOTATION_DRAINING_SINCE in metadata["annotations"]
            if chosen == labelled or "deletionTimestamp" in metadata:  # a label that somebody else set is his to take
                continue
            annotations = {ANNOTATION_DRAINING_SINCE: now if chosen else None, _DELETION_COST: "-1" if chosen else None}
            change = {"metadata": {"labels": {LABEL_DRAINING: "true" if chosen else None}, "annotations": annotations}}
            await self._merge_pod(metadata["name"], change["metadata"])

    async def _write(self, service: InferenceService, manifest: Object) -> PermanentFailure | None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        live = self._children[kind].get(name)
        try:
            if live is None and kind not in _APPLIED_TO_CREATE:
                try:
                    self._cache.written(kind, await self._api.create(manifest))
                    return None
                except ApiError as error:
                    if error.status != 409:
                        raise
                live = await self._api.get(kind, self._namespace, name)  # it exists, perhaps without our labels
            if live is not None and not belongs(live, service):
                return PermanentFailure(
                    Reason.NAME_TAKEN,
                    f"{kind} {name} exists and does not belong to this service: delete it, or rename the service",
                )
            if kind in _NEVER_CHANGED:
                return None
            if live is None or not self._is_applied(live, manifest):
                cached = self._children[kind].get(name)
                drifts = changes(cached, manifest) if cached is not None and "spec" in manifest else []
                written = await self._api.apply(manifest)
                self._cache.written(kind, written)
                if is_applied(written, manifest):
                    self._report_drift(manifest, drifts, "it was put back")
            elif kind == "Deployment":
                await self._repair(service, live, manifest)
        except RefusedError as error:
            remedy = image_volume_remedy(service.spec.model.uri, str(error))
            return PermanentFailure(Reason.REFUSED, f"{kind} {name}: {remedy or error}")
        return None

    def _is_applied(self, live: Object, manifest: Object) -> bool:
        """Returns what `is_applied` does, without comparing one version of an object with one manifest again: most
        passes change nothing of most objects.
        """
        kind, digest = manifest["kind"], hashlib.blake2b(msgspec.json.encode(manifest), digest_size=16).digest()
        if self._cache.is_applied(kind, live, digest):
            return True
        if not is_applied(live, manifest):
            return False
        self._cache.set_applied(kind, live, digest)
        return True

    async def _repair(self, service: InferenceService, live: Object, manifest: Object) -> None:
        """Removes fields that others added. A write that changes nothing (a default has an owner) is not repeated."""
        ignored = service.metadata.annotations.get(ANNOTATION_IGNORE_MANAGERS, "").replace(" ", "").split(",")
        drifts = additions(live, manifest, ignored)
        version = live["metadata"]["resourceVersion"]
        if not drifts or self._cache.is_unrepairable("Deployment", self._namespace, live["metadata"]["name"]):
            return
        written = await self._api.replace_spec(manifest)
        if written["metadata"]["resourceVersion"] == version:
            self._cache.set_unrepairable("Deployment", self._namespace, live["metadata"]["name"])
            return
        self._cache.written("Deployment", written)
        self._report_drift(manifest, drifts, "it was removed")

    def _report_drift(self, manifest: Object, drifts: Sequence[Drift], repair: str) -> None:
        stored = self._cache.get(KIND, self._namespace, self._name)
        for drift in drifts if stored is not None else ():
            verb = "removed" if drift.manager == SOMEBODY else "set"
            child = f"{manifest['kind']} {manifest['metadata']['name']}"
            message = f"{child}: {drift.manager} had {verb} {drift.path}; {repair}"
            self.record_event(stored or {}, "DriftRepaired", message, "Warning")


def _is_paused(stored: Object) -> bool:
    rollout = stored["spec"].get("rollout")
    return isinstance(rollout, dict) and rollout.get("paused") is True
