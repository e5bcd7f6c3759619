"""A service's backend in a cluster: reads its objects, writes those that differ, deletes those that are over."""

from collections.abc import Mapping
from typing import Any

from mini_infer_contract.launch import HTTP_PORT
from mini_infer_contract.resources import GROUP, KIND, LABEL_SERVICE, VERSION, InferenceService, Reason
from mini_infer_operator.controller.events import EventRecorder
from mini_infer_operator.controller.settings import OperatorSettings
from mini_infer_operator.objects.api import KubernetesApi, RefusedError
from mini_infer_operator.objects.kinds import CHILD_KINDS
from mini_infer_operator.objects.names import engines_service_name
from mini_infer_operator.objects.observed_objects import contains, frozen_templates, is_owned, observed_of
from mini_infer_operator.objects.render import render
from mini_infer_operator.observe import Observed
from mini_infer_operator.plan.plan import Plan
from mini_infer_operator.status import EventType, PermanentFailure

Object = dict[str, Any]


class ClusterBackend:
    """One InferenceService of a cluster, for one run of `reconcile`: what is read stands for the whole run."""

    def __init__(
        self,
        api: KubernetesApi,
        settings: OperatorSettings,
        namespace: str,
        name: str,
        events: EventRecorder | None = None,
    ) -> None:
        self._api = api
        self._events = events or EventRecorder(api)
        self._settings = settings
        self._namespace = namespace
        self._name = name
        self._children: dict[str, dict[str, Object]] = {}  # kind -> name -> object, filled by observe

    async def read(self) -> Mapping[str, Any] | None:
        """The service as stored; None once it is gone or being deleted."""
        stored = await self._api.get(KIND, self._namespace, self._name)
        return None if stored is None or "deletionTimestamp" in stored["metadata"] else stored

    async def observe(self, service: InferenceService) -> Observed:
        """Read the children; counts from the Deployments, reasons for failure from the pods."""
        selector = f"{LABEL_SERVICE}={self._name}"
        for kind in CHILD_KINDS:
            found = await self._api.list(kind.name, self._namespace, selector)
            self._children[kind.name] = {child["metadata"]["name"]: child for child in found}
        owned = [child for child in self._children["Deployment"].values() if is_owned(child, service.metadata.uid)]
        waiting = any(d["spec"].get("replicas", 1) > d.get("status", {}).get("availableReplicas", 0) for d in owned)
        pods = await self._api.list("Pod", self._namespace, selector) if waiting else []
        return observed_of(owned, pods, self._settings.engine_image)

    async def apply(self, service: InferenceService, plan: Plan) -> PermanentFailure | None:
        """Write what differs, then delete what is over. A refusal stops it: no old engine goes without a successor."""
        frozen = frozen_templates(self._owned("Deployment", service), self._owned("ControllerRevision", service))
        manifests = render(service, plan, frozen, self._settings.engine_image_pull_policy)
        for manifest in manifests:
            failure = await self._write(service, manifest)
            if failure is not None:
                return failure
        kept = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
        for kind in reversed(CHILD_KINDS):
            for child in self._owned(kind.name, service):
                name = child["metadata"]["name"]
                if (kind.name, name) not in kept and "deletionTimestamp" not in child["metadata"]:
                    await self._api.delete(kind.name, child)
        return None

    def url(self, service: InferenceService) -> str:
        """The gateway, where the operator was told of one; else the Service of the engines."""
        name, namespace = service.metadata.name, service.metadata.namespace
        return self._settings.gateway_url or f"http://{engines_service_name(name)}.{namespace}.svc:{HTTP_PORT}"

    async def report(self, stored: Mapping[str, Any], status: Object) -> None:
        """Write the status, if it says something else than the stored one."""
        if stored.get("status") == status:
            return
        identity = {"name": self._name, "namespace": self._namespace, "uid": stored["metadata"]["uid"]}
        await self._api.apply_status(
            {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": identity, "status": status}
        )

    def record_event(
        self, about: Mapping[str, Any], reason: str, message: str, event_type: EventType = "Normal"
    ) -> None:
        """By the operator's recorder."""
        self._events.record_event(about, reason, message, event_type)

    def _owned(self, kind: str, service: InferenceService) -> list[Object]:
        return [child for child in self._children[kind].values() if is_owned(child, service.metadata.uid)]

    async def _write(self, service: InferenceService, manifest: Object) -> PermanentFailure | None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        live = self._children[kind].get(name)
        if live is None:  # it may exist without our labels: then it is somebody else's
            live = await self._api.get(kind, self._namespace, name)
        if live is not None and not is_owned(live, service.metadata.uid):
            return PermanentFailure(
                Reason.NAME_TAKEN,
                f"{kind} {name} exists and does not belong to this service: delete it, or rename the service",
            )
        if live is not None and contains(live, manifest):
            return None
        try:
            await self._api.apply(manifest)
        except RefusedError as error:
            return PermanentFailure(Reason.REFUSED, f"{kind} {name}: {error}")
        return None
