"""Defines the InferencePreset: image, options and resources of engines, by model family and GPU. Knows no service."""

from typing import Annotated, Literal

from pydantic import Field

from mini_infer_operator.resource.parallelism import Parallelism
from mini_infer_operator.resource.quantity import LabelValue
from mini_infer_operator.resource.reserved import NO_PRESET
from mini_infer_operator.resource.rules import ApiModel, Rule
from mini_infer_operator.resource.service import Metadata
from mini_infer_operator.resource.spec import IMAGE_RULE, EngineSpec, PodTemplate, ResourceRequirements

Family = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9._]*[a-z0-9])?$")]


class PresetMatch(ApiModel):
    """The services to which a preset applies without being named by them."""

    families: list[Family] = Field(min_length=1, max_length=32)
    """Beginnings of model names in lower case, such as llama-3.1-8b. The model's name is the last part of model.uri,
    and a family ends where the name has its end, - or _. The longest family decides if several presets match.
    """
    gpu: dict[str, LabelValue] | None = Field(default=None, min_length=1, max_length=8)
    """Node labels of the GPU, such as {nvidia.com/gpu.product: NVIDIA-H200}: the template.spec.nodeSelector of every
    role has them. If left out, the preset applies to services that ask for no GPU.
    """


class InferencePresetSpec(ApiModel):
    """Fields that services take over where they do not write them themselves."""

    rules = (IMAGE_RULE,)
    match: PresetMatch | None = None
    """The services to which the preset applies; if left out, those that name it in spec.preset."""
    image: str | None = Field(default=None, min_length=1, max_length=1024)
    """The engine's image."""
    resources: ResourceRequirements | None = None
    """Resources of the engine's container, for every role."""
    engine: EngineSpec | None = None
    """Options of the engine, for every role."""
    template: PodTemplate | None = None
    """Additions and changes to the pods of every role, such as a node selector and tolerations."""
    parallelism: Parallelism | None = None
    """The GPUs and nodes over which one engine is spread, for every role."""


class InferencePreset(ApiModel):
    """Settings of engines for a model family on a GPU, which services of all namespaces can use."""

    rules = (
        Rule(
            f"self.metadata.name != '{NO_PRESET}'",
            f"metadata.name must not be {NO_PRESET}: services write preset: {NO_PRESET} to use no preset",
            lambda p: p.metadata.name != NO_PRESET,
        ),
    )
    api_version: Literal["serving.mini-infer.io/v1alpha1"]
    kind: Literal["InferencePreset"]
    metadata: Metadata
    spec: InferencePresetSpec
    """The settings, and the services to which they apply."""
