"""Defines the InferenceScaler: the number of engines of one role, as an object that autoscalers can write. Knows no
service.
"""

from typing import Literal

from pydantic import Field

from mini_infer_operator.resource.quantity import ObjectName
from mini_infer_operator.resource.rules import ApiModel
from mini_infer_operator.resource.service import Metadata

MOST_REPLICAS = 1000


class InferenceScalerSpec(ApiModel):
    """The role to scale, and its number of engines."""

    service: ObjectName
    """The InferenceService of this namespace."""
    role: Literal["unified", "prefill", "decode"]
    """The role whose engines it counts."""
    replicas: int | None = Field(default=None, ge=0, le=MOST_REPLICAS)
    """Engines to run, in place of the role's own `replicas`; if left out, the operator writes that number here once."""


class InferenceScalerStatus(ApiModel):
    """The state that the operator last observed."""

    replicas: int = Field(default=0, ge=0)
    """Engines of the role that exist, of all revisions."""
    selector: str | None = None
    """A label selector of these engines, for autoscalers."""
    message: str = Field(default="", max_length=1024)
    """The reason for which the scaler has no effect; empty if it has one."""


class InferenceScaler(ApiModel):
    """The number of engines of one role of an InferenceService, with the scale subresource."""

    api_version: Literal["serving.mini-infer.io/v1alpha1"]
    kind: Literal["InferenceScaler"]
    metadata: Metadata
    spec: InferenceScalerSpec
    """The desired number of engines."""
    status: InferenceScalerStatus | None = None
    """The observed state, written by the operator."""
