"""Devices that a pod asks for: names of GPUs, and Kubernetes' types for dynamic resource allocation, as in core/v1."""

from pydantic import Field

from mini_infer_contract.resources.quantity import ObjectName
from mini_infer_contract.resources.rules import KubernetesType, Rule

GPU_VENDORS = ("nvidia.com/", "amd.com/")
"""Prefixes of the resources that device plugins give GPUs and parts of them (MIG) out as."""
WHOLE_GPUS = ("nvidia.com/gpu", "amd.com/gpu")
"""Those of which each is a whole GPU, or a turn on one; other names are of parts, or of a GPU's memory."""


class PodResourceClaim(KubernetesType):
    """A ResourceClaim of the service's namespace, or a template that each pod gets a claim of its own from."""

    rules = (
        Rule(
            "has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",
            "a claim needs exactly one of resourceClaimName and resourceClaimTemplateName",
            lambda c: (c.resource_claim_name is None) != (c.resource_claim_template_name is None),
        ),
    )
    name: str = Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    """By which containers name it in their resources."""
    resource_claim_name: ObjectName | None = None
    """A claim that all pods share."""
    resource_claim_template_name: ObjectName | None = None
    """A ResourceClaimTemplate; claims made from it are each pod's own."""


class ContainerResourceClaim(KubernetesType):
    """A claim of the pod that this container uses."""

    name: str = Field(min_length=1, max_length=63)
    """Of a claim in template.spec.resourceClaims."""
    request: str | None = Field(default=None, min_length=1, max_length=253)
    """One request of the claim; all of them if left out."""
