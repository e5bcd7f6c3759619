"""Watches the pods that our operator labels for endpoints, and its InferenceServices for model names.

Pods say where engines are. Only InferenceServices say which service owns a model name: any user who may create a pod
may write any annotation on it. Nothing is published before both are known.
"""

import asyncio

from mini_infer_contract.resource_names import GROUP, LABEL_SERVICE, PLURAL, VERSION
from mini_infer_gateway.endpoints.base import NO_REPORTS, Publish, Reports
from mini_infer_gateway.endpoints.list_watch import ListWatch
from mini_infer_gateway.endpoints.pods import seen_pod
from mini_infer_gateway.endpoints.services import seen_service
from mini_infer_web.kubernetes_api import ApiServer, load_configuration


class KubernetesWatch:
    """An `EndpointSource` that watches pods and InferenceServices of a namespace, or of all namespaces."""

    def __init__(self, namespace: str | None, kubeconfig: str | None) -> None:
        self._scope = f"/namespaces/{namespace}" if namespace else ""
        self._kubeconfig = kubeconfig
        self._reports = NO_REPORTS

    def reports(self) -> Reports:
        """Returns the status of services, and the reasons of pods that are not ready."""
        return self._reports

    async def run(self, publish: Publish) -> None:
        """Lists and watches until cancelled; errors only delay."""
        async with ApiServer(lambda: load_configuration(self._kubeconfig)) as api:

            def changed() -> None:
                if pods.synced and services.synced:
                    seen, known = list(pods.objects.values()), list(services.objects.values())
                    self._reports = Reports(
                        {one.service.name: one.status for one in known},
                        [pod.pending for pod in seen if pod.pending is not None],
                    )
                    publish([pod.listed for pod in seen if pod.listed is not None], [one.service for one in known])

            pods = ListWatch(api, f"/api/v1{self._scope}/pods", seen_pod, changed, LABEL_SERVICE)
            services_path = f"/apis/{GROUP}/{VERSION}{self._scope}/{PLURAL}"
            services = ListWatch(api, services_path, seen_service, changed)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(pods.run())
                tasks.create_task(services.run())
