"""The pods of one engine: the operator's part, with the user's template merged over it."""

from collections.abc import Mapping, Sequence
from typing import Any

from mini_infer_contract.launch import (
    EVENTS_PORT,
    HEALTH_PATH,
    HTTP_PORT,
    HUB_TOKEN_ENV,
    READY_PATH,
    RENDEZVOUS_PORT,
    REPLAY_PORT,
    TRANSFER_PORT,
)
from mini_infer_operator.gpus import gpu_resources
from mini_infer_operator.launch import Addresses, Launch, grace_s, serve_arguments
from mini_infer_operator.objects.names import selector, service_labels
from mini_infer_operator.objects.peers import PEER_KEY_FILE, PEERS_MOUNT, peers_volume
from mini_infer_operator.resource import (
    ANNOTATION_MODEL,
    ANNOTATION_PEER_AUTH,
    ANNOTATION_SERVICE_CREATED,
    EnvironmentVariable,
    InferenceService,
)
from mini_infer_process.listening import ANY_HOST

CONTAINER = "engine"
_COMMAND = ["env", "--block-signal=TERM", "mini-infer-serve"]
"""A SIGTERM that comes before Python has a handler waits for it: the kernel drops it where a container's first process
has none, and the pod would stay until its grace period ends, which a group that starts anew waits for."""
DEFAULT_REQUESTS = {"cpu": "250m", "memory": "512Mi"}
MODEL_MOUNT = "/model"
MODEL_VOLUME = "mini-infer-model"
SCRATCH_VOLUME = "mini-infer-tmp"
SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_VOLUME = "mini-infer-shm"
GPU_TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists"}
"""For the taint that GPU nodes usually have: a pod that asks for a GPU belongs there."""
SCRAPE = {"prometheus.io/scrape": "true", "prometheus.io/port": str(HTTP_PORT), "prometheus.io/path": "/metrics"}
"""Where Prometheus finds pods by annotation; the user's own annotations win."""

UNROUTE_S = 5
"""preStop waits this long before SIGTERM, so that every gateway has seen the pod go and the engine refuses nobody."""
EXIT_S = 3
"""Left of the grace period for the process to end after its drain."""
HUNG_GRACE_S = 15
"""In place of the grace period where the liveness probe fails: an engine that is dead or hangs has nothing to finish,
and would hold its GPU for as long as a drain may take."""
START_LIMIT_S = 3600
"""A start longer than this (weights from a hub, then into memory) counts as hung."""


def frozen_pods(
    service: InferenceService, role: str, revision: str, launch: Launch, pull_policy: str | None
) -> dict[str, Any]:
    """What a revision's pods are made from, stored once, then never rendered again: `template`, a PodTemplateSpec.

    Of an engine over several nodes that is the leader's; beside it stand `workerTemplate` and `size`, pods of a group.
    """
    template = _pod_template(service, role, revision, launch, pull_policy, is_worker=False)
    if launch.nodes == 1:
        return {"template": template}
    worker = _pod_template(service, role, revision, launch, pull_policy, is_worker=True)
    return {"template": template, "workerTemplate": worker, "size": launch.nodes}


def _pod_template(
    service: InferenceService, role: str, revision: str, launch: Launch, pull_policy: str | None, *, is_worker: bool
) -> dict[str, Any]:
    user = launch.template
    metadata = user.metadata.model_dump(exclude_none=True) if user.metadata else {}
    annotations = {
        ANNOTATION_MODEL: launch.model_name,
        ANNOTATION_PEER_AUTH: "service",
    }
    if service.metadata.creation_timestamp:
        annotations[ANNOTATION_SERVICE_CREATED] = service.metadata.creation_timestamp
    scrape = {} if is_worker else SCRAPE
    return {
        "metadata": {
            "labels": {
                **metadata.get("labels", {}),
                **service_labels(service),
                **selector(service, role, revision),
            },
            "annotations": {**scrape, **metadata.get("annotations", {}), **annotations},
        },
        "spec": _pod_spec(service, launch, selector(service, role, revision), pull_policy, is_worker=is_worker),
    }


def _pod_spec(
    service: InferenceService, launch: Launch, labels: Mapping[str, str], pull_policy: str | None, *, is_worker: bool
) -> dict[str, Any]:
    overrides = launch.template.spec.model_dump(by_alias=True, exclude_none=True) if launch.template.spec else {}
    volumes: list[dict[str, Any]] = [{"name": SCRATCH_VOLUME, "emptyDir": {}}, peers_volume(service)]
    if _needs_shared_memory(launch):
        volumes.append({"name": SHARED_MEMORY_VOLUME, "emptyDir": {"medium": "Memory"}})
    if launch.source.claim is not None:
        claim = {"claimName": launch.source.claim, "readOnly": True}
        volumes.append({"name": MODEL_VOLUME, "persistentVolumeClaim": claim})
    ours: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s(launch),
        "topologySpreadConstraints": [_spread_over_nodes(labels)],
    }
    if gpu_resources(launch.resources):
        overrides["tolerations"] = _tolerating_gpus(overrides.get("tolerations", []))
    if "initContainers" in overrides:
        overrides["initContainers"] = [_hardened(container) for container in overrides["initContainers"]]
    security = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    return {
        **ours,
        **overrides,
        "securityContext": {**security, **overrides.get("securityContext", {})},
        "volumes": volumes + overrides.get("volumes", []),
        "containers": [_container(launch, pull_policy, is_worker=is_worker)],
    }


def _container(launch: Launch, pull_policy: str | None, *, is_worker: bool) -> dict[str, Any]:
    overrides = (
        launch.template.container.model_dump(by_alias=True, exclude_none=True) if launch.template.container else {}
    )
    mounts: list[dict[str, Any]] = [{"name": SCRATCH_VOLUME, "mountPath": "/tmp"}, PEERS_MOUNT]
    if launch.source.claim is not None:
        mounts.append({"name": MODEL_VOLUME, "mountPath": MODEL_MOUNT, "readOnly": True})
    if _needs_shared_memory(launch):
        mounts.append({"name": SHARED_MEMORY_VOLUME, "mountPath": SHARED_MEMORY})
    security = {**_unprivileged(), "readOnlyRootFilesystem": True}
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": launch.image,
        "command": _COMMAND,
        "args": serve_arguments(
            launch,
            Addresses(
                host=ANY_HOST,
                http_port=HTTP_PORT,
                events_port=EVENTS_PORT,
                replay_port=REPLAY_PORT,
                transfer_port=TRANSFER_PORT,
            ),
            claim_mount=MODEL_MOUNT,
            drain_s=grace_s(launch) - UNROUTE_S - EXIT_S,
            peer_key_file=PEER_KEY_FILE,
            nodes=launch.nodes,
        ),
        "env": _environment(launch, launch.template.container.env or () if launch.template.container else ()),
        **({} if is_worker else _serving(launch)),
        **_probes(overrides, HTTP_PORT if is_worker else "http"),
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the last line of a crash is told in the status
        "volumeMounts": mounts + overrides.get("volumeMounts", []),
        "securityContext": {**security, **overrides.get("securityContext", {})},
    }
    container["resources"] = _with_default_requests(launch.resources.model_dump(exclude_none=True))
    if "envFrom" in overrides:
        container["envFrom"] = overrides["envFrom"]
    policy = overrides.get("imagePullPolicy", pull_policy)
    if policy:
        container["imagePullPolicy"] = policy
    return container


def _serving(launch: Launch) -> dict[str, Any]:
    """What a container has that answers requests.

    A worker of a group tells its health alone, at a port without a name: Services and gateways find ports by name.
    """
    ports = {"http": HTTP_PORT, "events": EVENTS_PORT, "replay": REPLAY_PORT}
    if launch.moves_cache:
        ports["transfer"] = TRANSFER_PORT
    if launch.nodes > 1:
        ports["rendezvous"] = RENDEZVOUS_PORT
    return {
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "lifecycle": {"preStop": {"sleep": {"seconds": UNROUTE_S}}},
    }


def _probes(overrides: Mapping[str, Any], port: int | str) -> dict[str, Any]:
    asked = {
        "startupProbe": _probe(READY_PATH, port, period_s=1, failures=START_LIMIT_S),
        "livenessProbe": {
            **_probe(HEALTH_PATH, port, period_s=5, failures=3),
            "terminationGracePeriodSeconds": HUNG_GRACE_S,
        },
        "readinessProbe": _probe(READY_PATH, port, period_s=2, failures=3),
    }
    return {name: {**probe, **overrides.get(name, {})} for name, probe in asked.items()}


def _spread_over_nodes(labels: Mapping[str, str]) -> dict[str, Any]:
    """A node that is lost should not take all engines; where there is one node only, they run all the same."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": dict(labels)},
    }


def _with_default_requests(resources: dict[str, Any]) -> dict[str, Any]:
    """The user's, and small requests where he says nothing: a pod without any is the first that a full node kills."""
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    missing = {name: value for name, value in DEFAULT_REQUESTS.items() if name not in requests and name not in limits}
    return {**resources, "requests": {**missing, **requests}} if missing or requests else resources


def _tolerating_gpus(tolerations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    said = any(item.get("key") == GPU_TOLERATION["key"] for item in tolerations)
    return tolerations if said else [*tolerations, GPU_TOLERATION]


def _needs_shared_memory(launch: Launch) -> bool:
    """NCCL, ranks of one engine, and engines that move KV cache exchange data there; runtimes give it 64 MB."""
    container = launch.template.container
    mounts = (container.volume_mounts if container else None) or ()
    exchanges = gpu_resources(launch.resources) or launch.parallelism.ranks > 1 or launch.moves_cache
    return bool(exchanges) and all(mount.mount_path != SHARED_MEMORY for mount in mounts)


def _unprivileged() -> dict[str, Any]:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _hardened(container: dict[str, Any]) -> dict[str, Any]:
    """A container beside the engine's: with fewer rights than Kubernetes' default, unless the user says otherwise."""
    return {**container, "securityContext": {**_unprivileged(), **container.get("securityContext", {})}}


def _environment(launch: Launch, users: Sequence[EnvironmentVariable]) -> list[dict[str, Any]]:
    ours: list[dict[str, Any]] = [
        {"name": "HOME", "value": "/tmp"},  # the only place to write on a read-only root
        {"name": "PYTHONUNBUFFERED", "value": "1"},
    ]
    if launch.token_secret is not None:
        reference = {"name": launch.token_secret.name, "key": launch.token_secret.key}
        ours.append({"name": HUB_TOKEN_ENV, "valueFrom": {"secretKeyRef": reference}})
    theirs = [item.model_dump() for item in users]
    taken = {item["name"] for item in theirs}
    return [item for item in ours if item["name"] not in taken] + theirs


def _probe(path: str, port: int | str, *, period_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }
