"""Claims services for this installation: sends the requests that claims.py decides on. Decides nothing itself."""

import logging
import time

from mini_infer_operator.controller.claims import Claims, Step
from mini_infer_operator.controller.events import EventRecorder
from mini_infer_operator.controller.settings import OperatorSettings
from mini_infer_operator.objects.api import KubernetesApi, RefusedError
from mini_infer_operator.objects.cache import Object, ObjectCache, ServiceKey
from mini_infer_operator.resource import GROUP, KIND, VERSION
from mini_infer_web.kubernetes_api import ApiError

log = logging.getLogger(__name__)

CLAIM_MANAGER = "mini-infer-operator-claim"
"""Prefix of the field manager of `status.operator`; the installation's name follows. With a manager for each
installation the API server refuses the second of two that claim at once.
"""


class ServiceOwnership:
    """Claims services, answers challenges and takes services over when due."""

    def __init__(
        self, api: KubernetesApi, cache: ObjectCache, settings: OperatorSettings, events: EventRecorder
    ) -> None:
        self._api = api
        self._cache = cache
        self._class = settings.operator_class
        self._events = events
        self._claims = Claims(settings.identity)
        self._manager = f"{CLAIM_MANAGER}:{settings.identity}"[:128]

    async def wait_s(self, key: ServiceKey) -> float | None:
        """Returns None if this installation may work on the service, else the seconds after which to check again."""
        stored = self._cache.get(KIND, *key)
        if stored is None:
            return None
        if (stored["spec"].get("operatorClass") or "") != self._class:
            return float("inf")
        step, wait_s = self._claims.step(key, stored.get("status") or {}, time.monotonic())
        owner = (stored.get("status") or {}).get("operator", "")
        if step == Step.WAIT:
            return wait_s
        if step == Step.ASK:
            self._events.record_event(
                stored,
                "OtherOperator",
                f"{self._claims.me} leaves this service alone as long as {owner} looks after it",
                "Warning",
            )
            try:
                await self._write(stored, {"challenger": self._claims.me}, force=True)
            except Exception:
                self._claims.forget(owner)
                raise
            return wait_s
        if step != Step.WORK and not await self._claim(stored, step):
            return 1.0  # somebody was quicker: his name will be seen
        return None

    async def _claim(self, stored: Object, step: Step) -> bool:
        ours = {"operator": self._claims.me, **({} if step == Step.CLAIM else {"challenger": ""})}
        if step == Step.TAKE:
            log.warning("%s/%s: taken over", stored["metadata"]["namespace"], stored["metadata"]["name"])
        try:
            await self._write(stored, ours, force=step != Step.CLAIM)
        except ApiError as error:
            if error.status == 409:
                return False
            raise
        except RefusedError as error:
            log.warning("status.operator cannot be written: %s", error)
        return True

    async def _write(self, stored: Object, status: Object, *, force: bool) -> None:
        status = self._api.fit_status(status)
        if not status:
            return  # a CRD older than these fields; readyz says so
        metadata = stored["metadata"]
        identity = {"name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"]}
        manifest = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": identity, "status": status}
        written = await self._api.apply_status(manifest, manager=self._manager, force=force)
        self._cache.written(KIND, written)
