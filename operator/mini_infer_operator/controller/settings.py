"""Reads the flags and environment of `mini-infer-operator` once, into a frozen object. Imports no Kubernetes client."""

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mini_infer_operator import __version__
from mini_infer_operator.images import EngineImages
from mini_infer_operator.objects.network_policy import EnginePeers
from mini_infer_operator.pod_security import DEFAULT_SECRETS, PROFILES, PodSecurity
from mini_infer_process.command_line import parse_flags, port_number, seconds, whole_number

ENVIRONMENT_PREFIX = "MINI_INFER_"
"""Prefix of environment variables: MINI_INFER_ENGINE_IMAGE replaces --engine-image, and so on; a flag wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """The operator's settings."""

    engine_image: str
    """Image of engines whose service names none. It is part of a revision: changing it rolls those services."""
    engine_cuda_image: str | None = None
    """Image of engines that use a GPU and whose service names none. None: such services must name an image."""
    engine_image_pull_policy: str | None = None
    """Always, IfNotPresent or Never. None: Kubernetes chooses by the tag."""
    gateway_url: str | None = None
    """URL that is written to status.url. None: the address of the engines' own Service."""
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch. Empty: all."""
    identity: str = "default/mini-infer"
    """This installation, as namespace/name: its pods share a Lease there, and `status.operator` shows it."""
    operator_class: str = ""
    """Reconciles only services with this spec.operatorClass. Empty: only those without one."""
    allow_ingress_from: tuple[Mapping[str, Any], ...] = ()
    """NetworkPolicyPeers of gateways, which may reach engines' HTTP, event and replay ports. Empty: no NetworkPolicies
    are created.
    """
    allow_http_from: tuple[Mapping[str, Any], ...] = ()
    """NetworkPolicyPeers that may reach engines' HTTP port alone: the operator, and scrapers of metrics."""
    max_rolling_services: int = 3
    """Services that may roll to a new default image at once. 0: none does, and only an edit brings the image to a
    service.
    """
    max_rolling_gpus: float = float("inf")
    """GPUs that these rollouts may use at once beside those that the services have."""
    pod_security: PodSecurity = field(default_factory=PodSecurity)
    """Limits on new pods: their rights, and the Secrets and ServiceAccounts that they may use."""
    health_port: int = 8081
    """Port of /healthz (fails if watches are silent or the queue is stuck), /readyz and /metrics."""
    resync_s: float = 300.0
    """Longest time in seconds between two reconciles of a service."""
    log_level: str = "INFO"

    @property
    def engine_peers(self) -> EnginePeers:
        """Peers that may reach engines over the network."""
        return EnginePeers(self.allow_ingress_from, self.allow_http_from)

    @property
    def images(self) -> EngineImages:
        """Default images of engines, with and without GPUs."""
        return EngineImages(self.engine_image, self.engine_cuda_image)


def parse_settings(
    arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ
) -> OperatorSettings:
    """Reads the command line. Exits with a message if it is wrong."""
    parser = argparse.ArgumentParser(
        usage="mini-infer-operator --engine-image IMAGE [--flag value ...]   (--help: all flags)",
        allow_abbrev=False,
        prog="mini-infer-operator",
        description="Turns InferenceServices into engine pods. Needs the CRD (crds/) and the rights in permissions.py; "
        "uses the pod's service account, or KUBECONFIG outside a cluster.",
        epilog="`mini-infer-operator --apply-crd` alone brings the cluster's CRD to this version and ends. "
        f"Each flag can be given as {ENVIRONMENT_PREFIX}<FLAG>, such as {ENVIRONMENT_PREFIX}ENGINE_IMAGE.",
    )

    def default(flag: str, otherwise: str | None = None) -> str | None:
        return environment.get(ENVIRONMENT_PREFIX + flag.upper().replace("-", "_")) or otherwise

    parser.add_argument("--version", action="version", version=f"mini-infer-operator {__version__}")
    image = default("engine-image")
    parser.add_argument(
        "--engine-image", metavar="IMAGE", default=image, required=image is None, help="for services that name no image"
    )
    parser.add_argument(
        "--engine-cuda-image",
        metavar="IMAGE",
        default=default("engine-cuda-image"),
        help="for services that name no image and ask for a GPU; without it they must name one",
    )
    parser.add_argument(
        "--engine-image-pull-policy",
        default=default("engine-image-pull-policy"),
        choices=("Always", "IfNotPresent", "Never"),
        help="of engine pods; left out: what Kubernetes chooses by the tag",
    )
    parser.add_argument(
        "--gateway-url", metavar="URL", default=default("gateway-url"), help="shown to users as status.url"
    )
    parser.add_argument(
        "--namespaces",
        metavar="A,B",
        default=default("namespaces", ""),
        help="comma-separated namespaces to look after (default: all)",
    )
    parser.add_argument(
        "--identity",
        type=_identity,
        metavar="NAMESPACE/NAME",
        default=default("identity", "default/mini-infer"),
        help="of this installation: its pods share the Lease NAME-operator in NAMESPACE, and it leaves services alone "
        "that another living installation looks after (default: default/mini-infer)",
    )
    parser.add_argument(
        "--operator-class",
        metavar="CLASS",
        default=default("operator-class", ""),
        help="look after services with this spec.operatorClass (default: those without one)",
    )
    parser.add_argument(
        "--allow-ingress-from",
        type=_peers,
        metavar="JSON",
        default=default("allow-ingress-from", "[]"),
        help="make a NetworkPolicy for each service's engines that lets in these to HTTP, events and replays, a list "
        "of NetworkPolicyPeers: the gateways' pods (default: [], make none)",
    )
    parser.add_argument(
        "--allow-http-from",
        type=_peers,
        metavar="JSON",
        default=default("allow-http-from", "[]"),
        help="with --allow-ingress-from: let in these too, to engines' HTTP port alone: the operator's pods, and "
        "Prometheus' (default: [])",
    )
    parser.add_argument(
        "--max-rolling-services",
        type=whole_number(0),
        metavar="N",
        default=default("max-rolling-services", "3"),
        help="services that may roll to a new default image at a time; one that gets stuck keeps its turn. 0: only an "
        "edit brings a service the new image (default: 3)",
    )
    parser.add_argument(
        "--max-rolling-gpus",
        type=float,
        metavar="N",
        default=default("max-rolling-gpus", "inf"),
        help="GPUs that these rollouts may take beside those that their services have (default: no limit)",
    )
    parser.add_argument(
        "--pod-security",
        default=default("pod-security", "restricted"),
        choices=PROFILES,
        help="the Pod Security Standard that templates of services must keep: hostPath, privileged containers, host "
        "namespaces and added capabilities need privileged, user 0 baseline (default: restricted)",
    )
    parser.add_argument(
        "--allow-secrets",
        metavar="A,B*",
        type=_patterns,
        default=default("allow-secrets", ",".join(DEFAULT_SECRETS)),
        help="Secrets that services may give their pods, as shell patterns of NAME or NAMESPACE/NAME; * for all "
        f"(default: {','.join(DEFAULT_SECRETS)})",
    )
    parser.add_argument(
        "--allow-service-accounts",
        metavar="A,B*",
        type=_patterns,
        default=default("allow-service-accounts", ""),
        help="ServiceAccounts that services may give their pods, and whose tokens, in the same form (default: none)",
    )
    parser.add_argument(
        "--health-port",
        type=port_number,
        metavar="PORT",
        default=default("health-port", "8081"),
        help="of /healthz and /readyz (default: 8081)",
    )
    parser.add_argument(
        "--resync-seconds",
        type=seconds,
        metavar="S",
        default=default("resync-seconds", "300"),
        help="look at every service at least this often (default: 300)",
    )
    parser.add_argument(
        "--log-level",
        default=default("log-level", "INFO"),
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        help="(default: INFO)",
    )
    given = parse_flags(parser, arguments)
    return OperatorSettings(
        engine_image=given.engine_image,
        engine_cuda_image=given.engine_cuda_image or None,
        engine_image_pull_policy=given.engine_image_pull_policy,
        gateway_url=given.gateway_url,
        namespaces=tuple(name for name in given.namespaces.split(",") if name),
        identity=given.identity,
        operator_class=given.operator_class,
        allow_ingress_from=given.allow_ingress_from,
        allow_http_from=given.allow_http_from,
        max_rolling_services=given.max_rolling_services,
        max_rolling_gpus=given.max_rolling_gpus,
        pod_security=PodSecurity(
            profile=given.pod_security, secrets=given.allow_secrets, service_accounts=given.allow_service_accounts
        ),
        health_port=given.health_port,
        resync_s=given.resync_seconds,
        log_level=given.log_level,
    )


def _patterns(text: str) -> tuple[str, ...]:
    return tuple(part for piece in text.split(",") if (part := piece.strip()))


def _identity(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-a-z0-9.]*[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text} is no NAMESPACE/NAME, such as mini-infer-system/mini-infer")
    return text


def _peers(text: str) -> tuple[Mapping[str, Any], ...]:
    """Reads NetworkPolicyPeers from JSON. The API server validates each peer's content."""
    try:
        peers = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(peers, list) or not all(isinstance(peer, dict) for peer in peers):
        raise argparse.ArgumentTypeError(f'{text!r} is not a list of peers: write [{{"podSelector": {{...}}}}]')
    return tuple(peers)
