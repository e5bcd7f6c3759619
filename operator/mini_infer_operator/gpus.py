"""Counts the GPUs, or parts of GPUs, that the engines of a role are given. Pure."""

from mini_infer_operator.resource import EngineSpec, ResourceRequirements, RoleSpec, is_gpu, parse_quantity

DEFAULT_GPU = "nvidia.com/gpu"
_WITHOUT_GPU = ("--device=cpu", "--dry-run")
_NO_OPTIONS, _NO_RESOURCES = EngineSpec(), ResourceRequirements()


def resources_of(role: RoleSpec) -> ResourceRequirements:
    """Returns the resources of a pod of the role: as written, with a GPU for each rank if there are several and none is
    named.

    Nothing is added if the role has one rank, if its resources name a GPU, a part of one (MIG) or a claim, or if its
    engine computes on a CPU: `engine.device: cpu`, or a dry run.
    """
    written = role.resources or _NO_RESOURCES
    parallelism = role.parallelism
    if parallelism is None or parallelism.ranks == 1 or gpu_resources(written) or computes_on_cpu(role):
        return written
    return written.model_copy(update={"limits": {**written.allowed, DEFAULT_GPU: parallelism.ranks_per_pod}})


def computes_on_cpu(role: RoleSpec) -> bool:
    """True if the role's engine options choose the CPU."""
    engine = role.engine or _NO_OPTIONS
    return getattr(engine, "device", None) == "cpu" or any(flag in (engine.extra_args or ()) for flag in _WITHOUT_GPU)


def requests_gpu(role: RoleSpec) -> bool:
    """True if engines of this role are given a GPU."""
    return bool(gpu_resources(resources_of(role)))


def gpu_resources(resources: ResourceRequirements) -> dict[str, float]:
    """Returns the number of each GPU resource: by a device plugin's resource name, or 1 by a claim's name (dynamic
    resource allocation).
    """
    claimed = {claim.name: 1.0 for claim in resources.claims or ()}
    counted = {name: parse_quantity(n) for name, n in resources.allowed.items() if is_gpu(name)}
    return claimed | {name: number for name, number in counted.items() if number}


def gpus_of_engine(role: RoleSpec) -> int:
    """Returns the GPUs of one engine, over all its pods."""
    nodes = (role.parallelism.nodes or 1) if role.parallelism else 1
    return int(sum(gpu_resources(resources_of(role)).values())) * nodes
