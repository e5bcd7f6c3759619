"""Chooses the image that engines run from if the service names none: the GPU image if it asks for a GPU. Pure."""

from dataclasses import dataclass

from mini_infer_operator.gpus import gpus_of_engine, requests_gpu
from mini_infer_operator.resource import InferenceService, Reason
from mini_infer_operator.status import PermanentFailure

_NAME_AN_IMAGE = (
    "name one with a CUDA build of torch in spec.image (Dockerfile target engine-cuda), or give the operator "
    "--engine-cuda-image (chart: engine.cudaImage)"
)


@dataclass(frozen=True, slots=True)
class EngineImages:
    """The operator's default images for engines."""

    cpu: str
    gpu: str | None = None
    """The image for GPUs, or None if the operator has none: services that ask for GPUs must then name an image."""

    def default_for(self, service: InferenceService) -> str:
        """Returns the image of a service that names none; all its roles run from one image."""
        return self.gpu if self.gpu is not None and any(map(requests_gpu, service.roles.values())) else self.cpu

    def failure(self, service: InferenceService) -> PermanentFailure | None:
        """Returns a failure if engines ask for a GPU but their image would compute on CPUs, else None."""
        requesting = sorted(name for name, role in service.roles.items() if requests_gpu(role))
        if not requesting or service.spec.image not in {None, self.cpu} or (service.spec.image is None and self.gpu):
            return None
        remedy = f"leave spec.image out, and {self.gpu} is used" if self.gpu else _NAME_AN_IMAGE
        message = f"{' and '.join(requesting)} asks for a GPU, and {self.cpu} computes on CPUs: {remedy}"
        return PermanentFailure(Reason.NO_GPU_IMAGE, message)


def gpus_of_one_engine(service: InferenceService) -> int:
    """Returns the GPUs that one more engine of the service needs: those of its largest role."""
    return max(map(gpus_of_engine, service.roles.values()), default=0)
