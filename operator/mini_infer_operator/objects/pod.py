"""Renders the pods of one engine: the operator's part, with the user's template merged over it."""

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
from mini_infer_operator.launch import Addresses, Launch, grace_s, model_source, serve_arguments
from mini_infer_operator.objects.kv_cache import (
    kv_disk_mounts,
    kv_disk_volumes,
    pod_security_of_disk,
    with_kv_cache,
)
from mini_infer_operator.objects.names import selector, service_labels
from mini_infer_operator.objects.peers import PEER_KEY_FILE, PEERS_MOUNT, peers_volume
from mini_infer_operator.objects.weights_service import weights_environment
from mini_infer_operator.resource import (
    ANNOTATION_MODEL,
    ANNOTATION_PEER_AUTH,
    ANNOTATION_SERVICE_CREATED,
    KV_DISK_MOUNT,
    EnvironmentVariable,
    InferenceService,
)
from mini_infer_process.listening import ANY_HOST

CONTAINER = "engine"
_COMMAND = ["env", "--block-signal=TERM", "mini-infer-serve"]
"""The engine's command. SIGTERM is blocked until Python has a handler: the kernel drops it if a container's first
process has none, and the pod would stay until its grace period ends, while a group that restarts waits for it.
"""
DEFAULT_REQUESTS = {"cpu": "250m", "memory": "512Mi"}
MODEL_MOUNT = "/model"
MODEL_VOLUME = "mini-infer-model"
SOURCE_VOLUME, SOURCE_MOUNT = "mini-infer-source", "/source"
"""The claim of a pvc:// model that a pod copies onto its node."""
SCRATCH_VOLUME = "mini-infer-tmp"
SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_VOLUME = "mini-infer-shm"
GPU_TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists"}
"""Toleration of the taint that GPU nodes usually have: a pod that requests a GPU belongs there."""
SCRAPE = {"prometheus.io/scrape": "true", "prometheus.io/port": str(HTTP_PORT), "prometheus.io/path": "/metrics"}
"""Annotations by which Prometheus finds pods; the user's own annotations take precedence."""

UNROUTE_S = 5
"""Seconds that preStop waits before SIGTERM, so that every gateway has seen the pod go and the engine refuses no
request.
"""
EXIT_S = 3
"""Seconds of the grace period reserved for the process to end after its drain."""
ALIVE_TIMEOUT_S, READY_TIMEOUT_S = 20, 10
"""Seconds that an engine has to answer a probe of liveness and of readiness; three failures in a row count.

A refusal (503, a closed port) is the engine's own word and counts at once. Silence may be a node without time for
anybody, which ending an engine makes worse: only a minute of it is an engine that hangs. Gateways notice sooner, and
avoid a silent engine if another one answers.
"""
HUNG_GRACE_S = 15
"""Grace period in seconds if the liveness probe fails: an engine that is dead or hangs has nothing to finish, and would
occupy its GPU for as long as a drain may take.
"""
START_LIMIT_S = 3600
"""Seconds after which a start (weights from a hub, then into memory) counts as hung."""


def frozen_pods(
    service: InferenceService, role: str, revision: str, launch: Launch, pull_policy: str | None
) -> dict[str, Any]:
    """Returns a revision's pod templates, which are stored once and never rendered again.

    `template` is a PodTemplateSpec. If an engine spans several nodes it is the leader's; `workerTemplate` is that of
    the other pods of a group, and `size` is the number of pods in a group.
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
    if launch.source.host_path is not None:
        volumes.append({"name": MODEL_VOLUME, "hostPath": {"path": launch.source.host_path, "type": "Directory"}})
        volumes += _copied_volumes(launch)
    if launch.source.image is not None:
        volumes.append({"name": MODEL_VOLUME, "image": {"reference": launch.source.image}})
    volumes += kv_disk_volumes(launch.kv_cache)
    ours: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s(launch),
        "topologySpreadConstraints": [_spread_over_nodes(labels)],
    }
    if gpu_resources(launch.resources):
        overrides["tolerations"] = tolerating_gpus(overrides.get("tolerations", []))
    copies = launch.source.host_path is not None
    waiting = [_model_wait(launch, pull_policy, copies=copies)] if launch.source.copied_from is not None else []
    if waiting or "initContainers" in overrides:
        users = [_hardened(container) for container in overrides.get("initContainers", [])]
        overrides["initContainers"] = waiting + users
    security = {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        **pod_security_of_disk(launch.kv_cache),
    }
    return {
        **ours,
        **overrides,
        "securityContext": {**security, **overrides.get("securityContext", {})},
        "volumes": volumes + overrides.get("volumes", []),
        "containers": [_container(service, launch, pull_policy, is_worker=is_worker)],
    }


def _copied_volumes(launch: Launch) -> list[dict[str, Any]]:
    """Returns the volume of a pvc:// model that the pod copies onto its node; [] for others."""
    source = model_source(launch.source.copied_from or "") if _copies_claim(launch) else None
    claim = {"claimName": source.claim, "readOnly": True} if source is not None else {}
    return [{"name": SOURCE_VOLUME, "persistentVolumeClaim": claim}] if claim else []


def _copies_claim(launch: Launch) -> bool:
    return launch.source.host_path is not None and (launch.source.copied_from or "").startswith("pvc://")


def _model_copy(launch: Launch) -> tuple[list[str], list[dict[str, Any]]]:
    """Returns arguments and mounts of the container that copies the model onto its node."""
    uri, mounts = launch.source.copied_from or "", [{"name": MODEL_VOLUME, "mountPath": MODEL_MOUNT}]
    if _copies_claim(launch):
        uri = f"{SOURCE_MOUNT}/{model_source(uri).claim_path}".rstrip("/")
        mounts.append({"name": SOURCE_VOLUME, "mountPath": SOURCE_MOUNT})
    folder = f"{MODEL_MOUNT}/{launch.source.claim_path}"
    return [uri, folder, f"--progress-port={HTTP_PORT}", "--make-room"], mounts


def _model_wait(launch: Launch, pull_policy: str | None, *, copies: bool) -> dict[str, Any]:
    """Returns the container that ends once the model is on its volume: the Job that copies it may take longer.

    `copies`: there is no Job, and the first container of a node to get there copies.
    """
    arguments = ["--await", f"{MODEL_MOUNT}/{launch.source.claim_path}"]
    mounts: list[dict[str, Any]] = [{"name": MODEL_VOLUME, "mountPath": MODEL_MOUNT, "readOnly": True}]
    if copies:
        arguments, mounts = _model_copy(launch)
    return {
        "name": MODEL_VOLUME,
        "image": launch.image,
        "command": ["mini-infer", "fetch"],
        "args": arguments,
        "env": [{"name": "HOME", "value": "/tmp"}, *launch.access.get("env", ())],
        **({"envFrom": launch.access["envFrom"]} if "envFrom" in launch.access else {}),
        **({"ports": [{"name": "progress", "containerPort": HTTP_PORT}]} if copies else {}),
        "volumeMounts": [{"name": SCRATCH_VOLUME, "mountPath": "/tmp"}, *mounts],
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        "securityContext": {**unprivileged(), "readOnlyRootFilesystem": True},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **({"imagePullPolicy": pull_policy} if pull_policy else {}),
    }


def _container(
    service: InferenceService, launch: Launch, pull_policy: str | None, *, is_worker: bool
) -> dict[str, Any]:
    overrides = (
        launch.template.container.model_dump(by_alias=True, exclude_none=True) if launch.template.container else {}
    )
    mounts: list[dict[str, Any]] = [{"name": SCRATCH_VOLUME, "mountPath": "/tmp"}, PEERS_MOUNT]
    if launch.source.mounted_path is not None:
        mounts.append({"name": MODEL_VOLUME, "mountPath": MODEL_MOUNT, "readOnly": True})
    if _needs_shared_memory(launch):
        mounts.append({"name": SHARED_MEMORY_VOLUME, "mountPath": SHARED_MEMORY})
    mounts += kv_disk_mounts(launch.kv_cache)
    security = {**unprivileged(), "readOnlyRootFilesystem": True}
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
            model_mount=MODEL_MOUNT,
            kv_host_path=f"{SHARED_MEMORY}/kv-cache",  # of the pod: it survives the container
            kv_disk_path=f"{KV_DISK_MOUNT}/{launch.kv_disk_folder}",
            drain_s=grace_s(launch) - UNROUTE_S - EXIT_S,
            peer_key_file=PEER_KEY_FILE,
            nodes=launch.nodes,
        ),
        "env": _environment(service, launch, launch.template.container.env or () if launch.template.container else ()),
        **({} if is_worker else _serving(launch)),
        **_probes(overrides, HTTP_PORT if is_worker else "http"),
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the last line of a crash is told in the status
        "volumeMounts": mounts + overrides.get("volumeMounts", []),
        "securityContext": {**security, **overrides.get("securityContext", {})},
    }
    resources = _with_default_requests(launch.resources.model_dump(exclude_none=True))
    container["resources"] = with_kv_cache(resources, launch.kv_cache)
    if "envFrom" in overrides:
        container["envFrom"] = overrides["envFrom"]
    policy = overrides.get("imagePullPolicy", pull_policy)
    if policy:
        container["imagePullPolicy"] = policy
    return container


def _serving(launch: Launch) -> dict[str, Any]:
    """Returns the ports and the preStop hook of a container that answers requests.

    A worker of a group serves its health alone, at a port without a name: Services and gateways find ports by name.
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
    probes = {
        "startupProbe": _probe(READY_PATH, port, period_s=1, timeout_s=3, failures=START_LIMIT_S),
        "livenessProbe": {
            **_probe(HEALTH_PATH, port, period_s=5, timeout_s=ALIVE_TIMEOUT_S, failures=3),
            "terminationGracePeriodSeconds": HUNG_GRACE_S,
        },
        "readinessProbe": _probe(READY_PATH, port, period_s=2, timeout_s=READY_TIMEOUT_S, failures=3),
    }
    return {name: {**probe, **overrides.get(name, {})} for name, probe in probes.items()}


def _spread_over_nodes(labels: Mapping[str, str]) -> dict[str, Any]:
    """Spreads engines over nodes, so that a lost node does not take all of them; on a single node they still run."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": dict(labels)},
    }


def _with_default_requests(resources: dict[str, Any]) -> dict[str, Any]:
    """Adds small requests where the user sets none: a full node kills pods without requests first."""
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    missing = {name: value for name, value in DEFAULT_REQUESTS.items() if name not in requests and name not in limits}
    return {**resources, "requests": {**missing, **requests}} if missing or requests else resources


def tolerating_gpus(tolerations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the tolerations with that of the taint of GPU nodes, unless the user has one for it."""
    tolerates_gpu = any(item.get("key") == GPU_TOLERATION["key"] for item in tolerations)
    return tolerations if tolerates_gpu else [*tolerations, GPU_TOLERATION]


def _needs_shared_memory(launch: Launch) -> bool:
    """Returns True if NCCL, ranks, KV transfer or tiers of the KV cache need shared memory and the user mounts none:
    runtimes give 64 MB.
    """
    container = launch.template.container
    mounts = (container.volume_mounts if container else None) or ()
    exchanges = gpu_resources(launch.resources) or launch.parallelism.ranks > 1 or launch.moves_cache or launch.kv_cache
    return bool(exchanges) and all(mount.mount_path != SHARED_MEMORY for mount in mounts)


def unprivileged() -> dict[str, Any]:
    """Returns the part of a container's security context that takes its rights away."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _hardened(container: dict[str, Any]) -> dict[str, Any]:
    """Gives a sidecar container fewer rights than Kubernetes' default, unless the user sets them."""
    return {**container, "securityContext": {**unprivileged(), **container.get("securityContext", {})}}


def _environment(
    service: InferenceService, launch: Launch, users: Sequence[EnvironmentVariable]
) -> list[dict[str, Any]]:
    ours: list[dict[str, Any]] = [
        {"name": "HOME", "value": "/tmp"},  # the only place to write on a read-only root
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        *weights_environment(service, launch),
    ]
    if launch.token_secret is not None:
        reference = {"name": launch.token_secret.name, "key": launch.token_secret.key}
        ours.append({"name": HUB_TOKEN_ENV, "valueFrom": {"secretKeyRef": reference}})
    theirs = [item.model_dump() for item in users]
    overridden = {item["name"] for item in theirs}
    return [item for item in ours if item["name"] not in overridden] + theirs


def _probe(path: str, port: int | str, *, period_s: int, timeout_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }
