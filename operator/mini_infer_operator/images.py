"""Which image engines run from, where the service names none: the one for GPUs where it asks for a GPU. Pure."""

from dataclasses import dataclass

from mini_infer_contract.resources import InferenceService, Reason, ResourceRequirements, RoleSpec, parse_quantity
from mini_infer_operator.status import PermanentFailure

GPU_VENDORS = ("nvidia.com/", "amd.com/")
"""Prefixes of the resources that device plugins give GPUs and parts of them (MIG) out as."""

_NAME_AN_IMAGE = (
    "name one with a CUDA build of torch in spec.image (Dockerfile target engine-cuda), or give the operator "
    "--engine-cuda-image (chart: engine.cudaImage)"
)


@dataclass(frozen=True, slots=True)
class EngineImages:
    """The operator's defaults."""

    cpu: str
    gpu: str | None = None
    """None: there is none, and services that ask for GPUs must name an image."""

    def default_for(self, service: InferenceService) -> str:
        """For a service that names no image; all its roles run from one."""
        return self.gpu if self.gpu is not None and any(map(asks_for_gpu, service.roles.values())) else self.cpu

    def failure(self, service: InferenceService) -> PermanentFailure | None:
        """Why engines that ask for a GPU would not use it."""
        asking = sorted(name for name, role in service.roles.items() if asks_for_gpu(role))
        if not asking or service.spec.image not in {None, self.cpu} or (service.spec.image is None and self.gpu):
            return None
        remedy = f"leave spec.image out, and {self.gpu} is used" if self.gpu else _NAME_AN_IMAGE
        message = f"{' and '.join(asking)} asks for a GPU, and {self.cpu} computes on CPUs: {remedy}"
        return PermanentFailure(Reason.NO_GPU_IMAGE, message)


def asks_for_gpu(role: RoleSpec) -> bool:
    """Whether engines of this role are given a GPU."""
    return role.resources is not None and bool(gpu_resources(role.resources))


def gpu_resources(resources: ResourceRequirements) -> dict[str, float]:
    """How many of what: by a device plugin's resource, or as 1 by a claim's name (dynamic resource allocation)."""
    claimed = {claim.name: 1.0 for claim in resources.claims or ()}
    counted = {name: parse_quantity(n) for name, n in resources.allowed.items() if name.startswith(GPU_VENDORS)}
    return claimed | {name: number for name, number in counted.items() if number}


def gpus_of_one_engine(service: InferenceService) -> float:
    """GPUs that one engine more of the service takes: of its largest role."""
    asked = [sum(gpu_resources(role.resources).values()) for role in service.roles.values() if role.resources]
    return max(asked, default=0.0)
