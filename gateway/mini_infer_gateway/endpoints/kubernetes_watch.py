"""Endpoints from the pods that our operator labels, and their names from its InferenceServices.

Pods say where engines are; which service owns a model name only the InferenceServices say, since whoever may create a
pod may write any annotation on it. Nothing is published before both are known.
"""

import asyncio
import logging

from mini_infer_contract.kubernetes_access import AccessError, ClusterAccess, find_access
from mini_infer_contract.kubernetes_client import KubernetesClient
from mini_infer_contract.resource_names import GROUP, LABEL_SERVICE, PLURAL, VERSION
from mini_infer_gateway.endpoints.base import Publish
from mini_infer_gateway.endpoints.list_watch import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, ListWatch
from mini_infer_gateway.endpoints.pods import listed_from_manifest
from mini_infer_gateway.endpoints.services import service_of

log = logging.getLogger(__name__)


class KubernetesWatch:
    """See base.EndpointSource."""

    def __init__(self, namespace: str | None, kubeconfig: str | None) -> None:
        self._scope = f"/namespaces/{namespace}" if namespace else ""
        self._kubeconfig = kubeconfig

    async def run(self, publish: Publish) -> None:
        """Lists and watches until cancelled; errors only delay."""
        async with KubernetesClient(await self._access()) as api:

            def changed() -> None:
                if pods.synced and services.synced:
                    publish(list(pods.objects.values()), list(services.objects.values()))

            pods = ListWatch(api, f"/api/v1{self._scope}/pods", listed_from_manifest, changed, LABEL_SERVICE)
            services_path = f"/apis/{GROUP}/{VERSION}{self._scope}/{PLURAL}"
            services = ListWatch(api, services_path, service_of, changed)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(pods.run())
                tasks.create_task(services.run())

    async def _access(self) -> ClusterAccess:
        """How to reach the API server, in a thread: it may run a credential plugin. A failure is tried again."""
        pause_s = FIRST_BACKOFF_S
        while True:
            try:
                return await asyncio.to_thread(find_access, self._kubeconfig)
            except AccessError as error:
                log.warning("no way to the API server: %s; trying again in %.1f s", error, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_BACKOFF_S)
