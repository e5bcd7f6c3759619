"""Which image engines run from, where the service names none: the one for GPUs where it asks for a GPU. Pure."""

from dataclasses import dataclass

from mini_infer_operator.gpus import asks_for_gpu, gpus_of_engine
from mini_infer_operator.resource import InferenceService, Reason
from mini_infer_operator.status import PermanentFailure

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


def gpus_of_one_engine(service: InferenceService) -> int:
    """GPUs that one engine more of the service takes: of its largest role."""
    return max(map(gpus_of_engine, service.roles.values()), default=0)
