"""Renders the NetworkPolicy of a service's engines: only the allowed peers and the service's own engines reach them."""

from typing import Any

from mini_infer_contract.launch import WEIGHTS_PORT
from mini_infer_operator.launch import moves_cache
from mini_infer_operator.objects.metadata import Manifest, child_metadata
from mini_infer_operator.objects.names import engines_service_name
from mini_infer_operator.resource import LABEL_SERVICE, InferenceService
from mini_infer_operator.settings import EnginePeers

PORTS = ("http", "events", "replay")
_WEIGHTS_PORTS = 128
"""Ports of the weights of all ranks of an engine, two for each."""


NOBODY = EnginePeers()


def network_policy(service: InferenceService, allowed: EnginePeers) -> Manifest | None:
    """Returns the policy over all roles and revisions, or None without gateways.

    Probes come from the node's kubelet, which no policy blocks. The cluster's network plug-in must enforce policies.
    """
    if not allowed.gateways:
        return None
    engines = {"matchLabels": {LABEL_SERVICE: service.metadata.name}}
    ingress: list[dict[str, Any]] = [{"ports": _ports(*PORTS), "from": list(map(dict, allowed.gateways))}]
    if allowed.http:
        ingress.append({"ports": _ports("http"), "from": list(map(dict, allowed.http))})
    ours = [{"podSelector": engines}]
    if _engines_talk(service):
        ingress.append({"from": ours})
    else:
        last = WEIGHTS_PORT + _WEIGHTS_PORTS - 1
        ingress.append({"ports": [{"port": WEIGHTS_PORT, "endPort": last, "protocol": "TCP"}], "from": ours})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": child_metadata(service, engines_service_name(service.metadata.name), {}),
        "spec": {
            "podSelector": engines,
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def _ports(*names: str) -> list[dict[str, Any]]:
    return [{"port": name, "protocol": "TCP"} for name in names]


def _engines_talk(service: InferenceService) -> bool:
    """Returns True if engines of the service, or pods of one engine, exchange data; NCCL, gloo and UCX choose ports."""
    spans = any(role.parallelism is not None and (role.parallelism.nodes or 1) > 1 for role in service.roles.values())
    return spans or any(moves_cache(name, role) for name, role in service.roles.items())
