"""Types the devices that a pod requests: names of GPUs, and dynamic resource allocation as in core/v1."""

import re

from pydantic import Field

from mini_infer_operator.resource.quantity import ObjectName
from mini_infer_operator.resource.rules import KubernetesType, Rule

WHOLE_GPUS = ("nvidia.com/gpu", "nvidia.com/gpu.shared", "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe")
"""Resources of which each is a whole GPU, or a turn on one (time slicing, MPS): the device plugins' names."""
GPU_PATTERN = (
    r"^(nvidia\.com/(gpu|mig-[-0-9A-Za-z_.]+)(\.shared)?|amd\.com/(gpu|[sdtqc]px_nps[1248])"
    r"|gpu\.intel\.com/(i915|xe))$"
)
"""A pattern of whole GPUs and parts of GPUs (NVIDIA's MIG, AMD's partitions). It does not match resources that are
counted beside GPUs: HAMi's nvidia.com/gpumem, gpucores and gpumem-percentage, nvidia.com/hostdev, rdma/hca.
"""


def is_gpu(resource: str) -> bool:
    """True if a unit of this extended resource is a GPU, a part of one, or a turn on one."""
    return re.match(GPU_PATTERN, resource) is not None


class PodResourceClaim(KubernetesType):
    """A ResourceClaim of the service's namespace, or a template from which each pod gets a claim of its own."""

    rules = (
        Rule(
            "has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",
            "a claim needs exactly one of resourceClaimName and resourceClaimTemplateName",
            lambda c: (c.resource_claim_name is None) != (c.resource_claim_template_name is None),
        ),
    )
    name: str = Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    """The name by which containers refer to it in their resources."""
    resource_claim_name: ObjectName | None = None
    """A claim that all pods share."""
    resource_claim_template_name: ObjectName | None = None
    """A ResourceClaimTemplate; claims made from it are each pod's own."""


class ContainerResourceClaim(KubernetesType):
    """A claim of the pod that this container uses."""

    name: str = Field(min_length=1, max_length=63)
    """The name of a claim in template.spec.resourceClaims."""
    request: str | None = Field(default=None, min_length=1, max_length=253)
    """One request of the claim; all of them if left out."""
