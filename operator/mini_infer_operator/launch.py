"""Describes an engine's start, wherever it runs, and the revision that names it. Knows neither pods nor processes."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mini_infer_contract.engine_options import EngineOptions
from mini_infer_contract.launch import DEMO_MODEL
from mini_infer_contract.options import option_rows
from mini_infer_operator.gpus import resources_of
from mini_infer_operator.resource import (
    EngineSpec,
    InferenceService,
    KvCache,
    ModelCache,
    Parallelism,
    PodTemplate,
    ResourceRequirements,
    RoleSpec,
    SecretKey,
    once_a_service,
    parse_quantity,
)

REVISION_DIGITS = 10
DEFAULT_GRACE_S = 300
_SIZES = {row.name for row in option_rows(EngineOptions) if row.option.is_size}
CACHE_FOLDER = "mini-infer"
"""The folder of a cache's volume that has the models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """The source of the weights. Exactly one of `demo`, `path`, `claim`, `host_path`, `image` and `hub_id` is set."""

    demo: bool = False
    path: str | None = None
    """A folder on the machine, or in the container, of the engine."""
    claim: str | None = None
    """A PersistentVolumeClaim, with `claim_path` inside it ("" is its root)."""
    claim_path: str = ""
    host_path: str | None = None
    """A folder of the node, with `claim_path` inside it, onto which the pod copies the model itself."""
    image: str | None = None
    """An image whose files are the model, with `image_path` inside it ("" is its root)."""
    image_path: str = ""
    hub_id: str | None = None
    """organisation/name, with `hub_revision` (branch, tag or commit)."""
    hub_revision: str | None = None
    copied_from: str | None = None
    """The URI from which the model is copied, by a Job onto `claim` and by each pod onto `host_path`; None if it is
    where it is.
    """

    @property
    def mounted_path(self) -> str | None:
        """The folder of the model in the volume that the pod mounts for it; None if it mounts none."""
        if self.claim is not None or self.host_path is not None:
            return self.claim_path
        return None if self.image is None else self.image_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The start of one engine, without addresses: the code that renders it chooses host and ports."""

    image: str
    model_name: str
    source: ModelSource
    arguments: tuple[str, ...]
    """Flags of `mini-infer-serve` beside the model, its name and addresses."""
    token_secret: SecretKey | None
    resources: ResourceRequirements
    """The resources of one pod."""
    template: PodTemplate
    role: str
    parallelism: Parallelism
    moves_cache: bool
    """True if the engines send or receive KV cache."""
    kv_cache: KvCache | None = None
    """Tiers of the KV cache beside the GPU; None if there are none."""
    kv_disk_folder: str = ""
    """The folder of these engines on the disk of the KV cache: services may share a disk."""
    access: Mapping[str, Any] = field(default_factory=dict)
    """`env` and `envFrom` of the container that copies the model onto its node; empty if none does."""

    @property
    def nodes(self) -> int:
        """The number of nodes that one engine spans, with a pod on each."""
        return self.parallelism.nodes or 1


def cached_folder(uri: str) -> str:
    """Returns the folder of a model on the volume of a cache: one for each URI, whatever service names it."""
    return f"{CACHE_FOLDER}/{hashlib.sha256(uri.encode()).hexdigest()[:16]}"


def model_source(uri: str, cache: ModelCache | None = None) -> ModelSource:
    """Parses `spec.model.uri`; the rules have already checked its form."""
    if cache is not None:
        folder = cached_folder(uri)
        return ModelSource(claim=cache.claim, host_path=cache.host_path, claim_path=folder, copied_from=uri)
    if uri == DEMO_MODEL:
        return ModelSource(demo=True)
    scheme, _, rest = uri.partition("://")
    if scheme == "file":
        return ModelSource(path=rest)
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        return ModelSource(claim=claim, claim_path=path.strip("/"))
    if scheme == "hf":
        hub_id, _, revision = rest.partition("@")
        return ModelSource(hub_id=hub_id, hub_revision=revision or None)
    if scheme == "oci":
        image, _, path = rest.partition("#")
        return ModelSource(image=image, image_path=path.strip("/"))
    raise ValueError(f"model uri {uri!r}: unknown scheme; write demo, file://, pvc://, hf:// or oci://")


def engine_arguments(engine: EngineSpec) -> tuple[str, ...]:
    """Returns a flag for every option that is set: `maxModelLen: 4096` becomes `--max-model-len=4096`."""
    flags: list[str] = []
    for name, value in engine.model_dump(exclude_none=True, exclude={"extra_args"}).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif name in _SIZES:
            flags.append(f"--{flag}={int(parse_quantity(value))}")  # the engine does not read 1e9 or .5Gi
        else:
            flags.append(f"--{flag}={value}")
    return (*flags, *(engine.extra_args or ()))


def parallel_arguments(parallelism: Parallelism) -> tuple[str, ...]:
    """Returns the flags of sizes above 1. The flag for the number of nodes is added by the code that renders the
    launch.
    """
    sizes = ("tensor", "pipeline", "data")
    flags = [f"--{n}-parallel-size={size}" for n in sizes if (size := getattr(parallelism, n) or 1) > 1]
    return (*flags, *(("--enable-expert-parallel",) if parallelism.expert else ()))


def tier_arguments(kv_cache: KvCache | None, host_path: str, disk_path: str) -> tuple[str, ...]:
    """Returns the flags of tiers of the KV cache. `host_path` is a folder in memory for its main memory, "" if it is to
    end with the engine; `disk_path` is the folder of its disk, if it has one.
    """
    if kv_cache is None:
        return ()
    flags = [f"--kv-host-memory={int(parse_quantity(kv_cache.host))}"]
    if host_path:
        flags.append(f"--kv-host-path={host_path}")
    if kv_cache.disk is not None:
        flags += [f"--kv-disk-path={disk_path}", f"--kv-disk-size={int(parse_quantity(kv_cache.disk.size))}"]
    if kv_cache.dtype is not None:
        flags.append(f"--kv-tier-dtype={kv_cache.dtype}")
    return tuple(flags)


def moves_cache(name: str, role: RoleSpec) -> bool:
    """True if engines of the role of this name send or receive KV cache.

    Unified engines do if the user set an option of KV transfer: they read prefixes from each other's caches.
    """
    return name != "unified" or (role.engine is not None and role.engine.names_transfer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """The host and ports on which an engine listens."""

    host: str
    http_port: int
    events_port: int
    replay_port: int
    transfer_port: int
    """The port for KV transfer, used if the launch moves KV cache."""


def serve_arguments(
    launch: Launch,
    addresses: Addresses,
    *,
    model_mount: str,
    kv_host_path: str,
    kv_disk_path: str,
    drain_s: float,
    peer_key_file: str,
    nodes: int = 1,
) -> list[str]:
    """Returns the arguments of `mini-infer-serve`.

    `model_mount` is the path at which the volume of a pvc:// or oci:// model is mounted. `kv_host_path` is the engine's
    folder in memory, and `kv_disk_path` its folder on the disk, for its KV cache. `peer_key_file` contains the secret
    with which peers prove that they belong to the service. `nodes` is the number of pods or processes over which the
    engine's ranks are started; each finds its own number and the first of them by LeaderWorkerSet's environment
    variables.
    """
    source = launch.source
    if source.demo:
        model = DEMO_MODEL
    elif source.mounted_path is not None:
        model = f"{model_mount}/{source.mounted_path}".rstrip("/")
    else:
        model = source.path or source.hub_id or ""
    weights = [f"--model={model}"] + ([f"--revision={source.hub_revision}"] if source.hub_revision else [])
    if "--dry-run" in launch.arguments:
        weights = []  # the engine refuses both
    return [
        *weights,
        f"--served-model-name={launch.model_name}",
        f"--host={addresses.host}",
        f"--port={addresses.http_port}",
        f"--events-port={addresses.events_port}",
        f"--replay-port={addresses.replay_port}",
        f"--peer-key-file={peer_key_file}",
        f"--drain-timeout={drain_s:g}",
        *((f"--role={launch.role}", f"--transfer-port={addresses.transfer_port}") if launch.moves_cache else ()),
        *parallel_arguments(launch.parallelism),
        *((f"--nnodes={nodes}",) if nodes > 1 else ()),
        *tier_arguments(launch.kv_cache, kv_host_path, kv_disk_path),
        *launch.arguments,
    ]


def grace_s(launch: Launch) -> float:
    """Returns the seconds that an engine may take to end after it was asked to."""
    spec = launch.template.spec
    return (spec.termination_grace_period_seconds if spec else None) or DEFAULT_GRACE_S


@once_a_service
def launch_of(service: InferenceService, role: str, default_image: str) -> Launch:
    """Returns the start of the engines of `role`."""
    spec, cache = service.roles[role], service.spec.model.cache
    return Launch(
        image=service.spec.image or default_image,
        model_name=service.model_name,
        source=model_source(service.spec.model.uri, cache),
        access=source_access(cache) if cache is not None and cache.host_path is not None else {},
        arguments=engine_arguments(spec.engine or EngineSpec()),
        token_secret=service.spec.model.token_secret,
        resources=resources_of(spec),
        template=spec.template or PodTemplate(),
        role=role,
        parallelism=spec.parallelism or Parallelism(),
        moves_cache=moves_cache(role, spec),
        kv_cache=spec.kv_cache,
        kv_disk_folder=f"{service.metadata.namespace}-{service.metadata.name}-{role}",
    )


_ACCESS = {"env", "env_from", "service_account_name"}
"""Fields of `spec.model.cache` that change no engine's pod, if a Job copies."""


def source_access(cache: ModelCache) -> dict[str, Any]:
    """Returns what the user gives a copy to reach the model: variables, and a ServiceAccount."""
    return cache.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"claim", "host_path"})


def template_hash(service: InferenceService, role: str, default_image: str) -> str:
    """Returns a hash over what the user wrote that changes pods of `role`, and the image; not over what is rendered
    from it.

    Replicas are left out, so scaling keeps the hash; so are fields at their defaults, so a new optional field of a
    newer operator rolls nothing.
    """
    by_job = service.spec.model.cache is None or service.spec.model.cache.claim is not None
    others: Any = {"name": True, **({"cache": _ACCESS} if by_job else {})}
    parts: dict[str, Any] = {
        "role": role,
        "image": service.spec.image or default_image,
        "name": service.model_name,
        "model": service.spec.model.model_dump(mode="json", exclude_defaults=True, exclude=others),
        "spec": service.roles[role].model_dump(mode="json", exclude_defaults=True, exclude={"replicas", "scaling"}),
    }
    return _digest(json.dumps(parts, sort_keys=True, separators=(",", ":")))


@once_a_service
def service_revision(service: InferenceService, default_image: str) -> str:
    """Returns the revision of the whole service: engines of all its roles that work together have the same one.

    With one role it is that role's template hash, as it was before there were several, so nothing that runs is renamed.
    """
    hashes = {role: template_hash(service, role, default_image) for role in service.roles}
    if len(hashes) == 1:
        return next(iter(hashes.values()))
    return _digest(json.dumps(hashes, sort_keys=True, separators=(",", ":")))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:REVISION_DIGITS]
