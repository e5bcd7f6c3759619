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
from mini_infer_operator.pod_security import DEFAULT_SECRETS, PROFILES, PodSecurity
from mini_infer_process.command_line import parse_flags, port_number, seconds, whole_number

ENVIRONMENT_PREFIX = "MINI_INFER_"
"""Prefix of environment variables: MINI_INFER_ENGINE_IMAGE replaces --engine-image, and so on; a flag wins."""


Peer = Mapping[str, Any]
"""A NetworkPolicyPeer: podSelector and namespaceSelector."""


@dataclass(frozen=True, slots=True)
class EnginePeers:
    """Peers that may open connections to engines, beside engines of the same service."""

    gateways: Sequence[Peer] = ()
    """Peers that reach HTTP, events and replays. Empty: no policy is created."""
    http: Sequence[Peer] = ()
    """Peers that reach HTTP alone: the operator counts running requests of draining engines, and Prometheus reads
    metrics.
    """


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
    """This installation, as namespace/name: the root secret of its peers is NAME-peer-root there."""
    operator_class: str = ""
    """Reconciles only services with this spec.operatorClass. Empty: only those without one."""
    leader_election_namespace: str = ""
    """Namespace of the Lease by which the operators of one class elect a leader. Empty: the identity's."""
    allow_ingress_from: tuple[Peer, ...] = ()
    """NetworkPolicyPeers of gateways, which may reach engines' HTTP, event and replay ports. Empty: no NetworkPolicies
    are created.
    """
    allow_http_from: tuple[Peer, ...] = ()
    """NetworkPolicyPeers that may reach engines' HTTP port alone: the operator, and scrapers of metrics."""
    max_rolling_services: int = 3
    """Services that may roll to a new default image at once. 0: none does, and only an edit brings the image to a
    service.
    """
    max_rolling_gpus: float = float("inf")
    """GPUs that these rollouts may use at once beside those that the services have."""
    pod_security: PodSecurity = field(default_factory=PodSecurity)
    """Limits on new pods: their rights, and the Secrets and ServiceAccounts that they may use."""
    gateways: tuple[str, ...] = ()
    """HOST:PORT of the gateways' admin ports, whose load reports decide the number of engines of services with
    `scaling`. Empty: these numbers stay as they are.
    """
    scaling_gpus_per_namespace: float = float("inf")
    """GPUs that engines of services with `scaling` may use in one namespace."""
    health_port: int = 8081
    """Port of /healthz (fails if watches are silent or the queue is stuck), /readyz and /metrics."""
    resync_s: float = 300.0
    """Longest time in seconds between two reconciles of a service."""
    log_level: str = "INFO"

    @property
    def lease(self) -> tuple[str, str]:
        """Namespace and name of the Lease, which all operators of one class share."""
        namespace = self.leader_election_namespace or self.identity.partition("/")[0]
        return namespace, "-".join(["mini-infer-operator", *filter(None, [self.operator_class])])

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

    def add(flag: str, otherwise: str | None = None, **options: Any) -> None:
        found = environment.get(ENVIRONMENT_PREFIX + flag.upper().replace("-", "_")) or otherwise
        options["required"] = options.get("required", False) and found is None
        parser.add_argument(f"--{flag}", default=found, **options)

    parser.add_argument("--version", action="version", version=f"mini-infer-operator {__version__}")
    add("engine-image", metavar="IMAGE", required=True, help="for services that name no image")
    add(
        "engine-cuda-image",
        type=_text_or_none,
        metavar="IMAGE",
        help="for services that name no image and ask for a GPU; without it they must name one",
    )
    add(
        "engine-image-pull-policy",
        choices=("Always", "IfNotPresent", "Never"),
        help="of engine pods; left out: what Kubernetes chooses by the tag",
    )
    add("gateway-url", metavar="URL", help="shown to users as status.url")
    add("namespaces", "", type=_patterns, metavar="A,B", help="comma-separated namespaces to look after (default: all)")
    add(
        "identity",
        "default/mini-infer",
        type=_identity,
        metavar="NAMESPACE/NAME",
        help="of this installation: the root secret of its engines' peers is NAME-peer-root in NAMESPACE (default: "
        "default/mini-infer)",
    )
    add(
        "operator-class",
        "",
        type=_class,
        metavar="CLASS",
        help="look after services with this spec.operatorClass (default: those without one)",
    )
    add(
        "leader-election-namespace",
        "",
        metavar="NAMESPACE",
        help="of the Lease mini-infer-operator[-CLASS], by which the operators of one class elect the one that works: "
        "installations of one class share it (default: the identity's)",
    )
    add(
        "allow-ingress-from",
        "[]",
        type=_peers,
        metavar="JSON",
        help="make a NetworkPolicy for each service's engines that lets in these to HTTP, events and replays, a list "
        "of NetworkPolicyPeers: the gateways' pods (default: [], make none)",
    )
    add(
        "allow-http-from",
        "[]",
        type=_peers,
        metavar="JSON",
        help="with --allow-ingress-from: let in these too, to engines' HTTP port alone: the operator's pods, and "
        "Prometheus' (default: [])",
    )
    add(
        "max-rolling-services",
        "3",
        type=whole_number(0),
        metavar="N",
        help="services that may roll to a new default image at a time; one that gets stuck keeps its turn. 0: only an "
        "edit brings a service the new image (default: 3)",
    )
    add(
        "max-rolling-gpus",
        "inf",
        type=float,
        metavar="N",
        help="GPUs that these rollouts may take beside those that their services have (default: no limit)",
    )
    add(
        "pod-security",
        "restricted",
        choices=PROFILES,
        help="the Pod Security Standard that templates of services must keep: hostPath, privileged containers, host "
        "namespaces and added capabilities need privileged, user 0 baseline (default: restricted)",
    )
    add(
        "allow-secrets",
        ",".join(DEFAULT_SECRETS),
        metavar="A,B*",
        type=_patterns,
        help="Secrets that services may give their pods, as shell patterns of NAME or NAMESPACE/NAME; * for all "
        f"(default: {','.join(DEFAULT_SECRETS)})",
    )
    add(
        "allow-service-accounts",
        "",
        metavar="A,B*",
        type=_patterns,
        help="ServiceAccounts that services may give their pods, and whose tokens, in the same form (default: none)",
    )
    add(
        "gateways",
        "",
        type=_gateways,
        metavar="HOST:PORT,...",
        help="admin ports of the gateways, each name with an address for each replica: by their reports engines of "
        "services with scaling are started and stopped (default: none, such services keep their numbers)",
    )
    add(
        "scaling-gpus-per-namespace",
        "inf",
        type=float,
        metavar="N",
        help="GPUs that the engines of services with scaling may use in a namespace; minReplicas come first (default: "
        "no limit)",
    )
    add("health-port", "8081", type=port_number, metavar="PORT", help="of /healthz and /readyz (default: 8081)")
    add(
        "resync-seconds",
        "300",
        dest="resync_s",
        type=seconds,
        metavar="S",
        help="look at every service at least this often (default: 300)",
    )
    add("log-level", "INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"), help="(default: INFO)")
    options = vars(parse_flags(parser, arguments))
    security = PodSecurity(
        profile=options.pop("pod_security"),
        secrets=options.pop("allow_secrets"),
        service_accounts=options.pop("allow_service_accounts"),
    )
    return OperatorSettings(pod_security=security, **options)


def _text_or_none(text: str) -> str | None:
    return text or None


def _patterns(text: str) -> tuple[str, ...]:
    return tuple(part for piece in text.split(",") if (part := piece.strip()))


def _gateways(text: str) -> tuple[str, ...]:
    names = _patterns(text)
    for name in names:
        found = re.fullmatch(r"(?:\[[^\]]+\]|[^:\[\]]+):(\d{1,5})", name)
        if not found or not 0 < int(found[1]) < 65_536:
            raise argparse.ArgumentTypeError(f"{name!r} is no HOST:PORT, such as mini-infer-gateway-replicas:8081")
    return names


def _class(text: str) -> str:
    if not re.fullmatch(r"([a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?)?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be part of a Lease's name: use at most 63 lower-case letters, digits, '-' and '.'"
        )
    return text


def _identity(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-a-z0-9.]*[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text} is no NAMESPACE/NAME, such as mini-infer-system/mini-infer")
    return text


def _peers(text: str) -> tuple[Peer, ...]:
    """Reads NetworkPolicyPeers from JSON. The API server validates each peer's content."""
    try:
        peers = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(peers, list) or not all(isinstance(peer, dict) for peer in peers):
        raise argparse.ArgumentTypeError(f'{text!r} is not a list of peers: write [{{"podSelector": {{...}}}}]')
    return tuple(peers)
