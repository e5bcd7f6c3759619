"""Defines the InferenceService as the API server stores it: names, and typed models from which `crds/` is generated.

Every static rule is stated here once, as CEL for the API server and as Python for `mini-infer plan` and `mini-infer
up`; tests check that the two give the same answers. Nothing here knows how a service becomes pods or processes.
"""

from mini_infer_contract.resource_names import (
    ANNOTATION_MODEL,
    ANNOTATION_PEER_AUTH,
    GROUP,
    KIND,
    LABEL_CURRENT_ROLE,
    LABEL_DRAINING,
    LABEL_GROUP,
    LABEL_REVISION,
    LABEL_ROLE,
    LABEL_SERVICE,
    LABEL_WORKER_INDEX,
    PLURAL,
    VERSION,
)
from mini_infer_operator.resource.canary import Canary, CanaryAnalysis, CanaryAnswers, CanaryStep
from mini_infer_operator.resource.devices import is_gpu
from mini_infer_operator.resource.environment import EnvironmentVariable
from mini_infer_operator.resource.kv_cache import KvCache
from mini_infer_operator.resource.pairs import PAIRED_ROLES
from mini_infer_operator.resource.parallelism import Parallelism
from mini_infer_operator.resource.preset import InferencePreset, InferencePresetSpec, PresetMatch
from mini_infer_operator.resource.quantity import QUANTITY_PATTERN, Quantity, parse_quantity
from mini_infer_operator.resource.reserved import (
    ANNOTATION_ABORT,
    ANNOTATION_DRAINING_SINCE,
    ANNOTATION_IGNORE_MANAGERS,
    ANNOTATION_PROMOTE,
    ANNOTATION_SERVICE_CREATED,
    ANSWERING_ROLES,
    FIELD_MANAGER,
    KV_DISK_MOUNT,
    LABEL_GROUP_INDEX,
    NO_PRESET,
    PRESET_KIND,
    PRESET_PLURAL,
    RESERVED_ENGINE_FLAGS,
    ROLES,
    SCALER_KIND,
    SCALER_PLURAL,
    STATUS_FIELD_MANAGER,
)
from mini_infer_operator.resource.rollout import DisruptionBudget, Rollout
from mini_infer_operator.resource.rules import ApiModel, KubernetesType, Rule
from mini_infer_operator.resource.scaler import InferenceScaler
from mini_infer_operator.resource.scaling import Scaling, ScalingTargets, ScalingWindows
from mini_infer_operator.resource.service import InferenceService, Metadata
from mini_infer_operator.resource.spec import (
    EngineSpec,
    InferenceServiceSpec,
    ModelCache,
    ModelSpec,
    PodTemplate,
    ResourceRequirements,
    RoleSpec,
    SecretKey,
    TemplateContainer,
    TemplateMetadata,
    TemplateSpec,
)
from mini_infer_operator.resource.status import (
    REASONS,
    CanaryStatus,
    Condition,
    InferenceServiceStatus,
    ModelCacheStatus,
    PresetStatus,
    Reason,
    RoleStatus,
)

__all__ = [
    "ANNOTATION_ABORT",
    "ANNOTATION_DRAINING_SINCE",
    "ANNOTATION_IGNORE_MANAGERS",
    "ANNOTATION_MODEL",
    "ANNOTATION_PEER_AUTH",
    "ANNOTATION_PROMOTE",
    "ANNOTATION_SERVICE_CREATED",
    "ANSWERING_ROLES",
    "FIELD_MANAGER",
    "GROUP",
    "KIND",
    "KV_DISK_MOUNT",
    "LABEL_CURRENT_ROLE",
    "LABEL_DRAINING",
    "LABEL_GROUP",
    "LABEL_GROUP_INDEX",
    "LABEL_REVISION",
    "LABEL_ROLE",
    "LABEL_SERVICE",
    "LABEL_WORKER_INDEX",
    "NO_PRESET",
    "PAIRED_ROLES",
    "PLURAL",
    "PRESET_KIND",
    "PRESET_PLURAL",
    "QUANTITY_PATTERN",
    "REASONS",
    "RESERVED_ENGINE_FLAGS",
    "ROLES",
    "SCALER_KIND",
    "SCALER_PLURAL",
    "STATUS_FIELD_MANAGER",
    "VERSION",
    "ApiModel",
    "Canary",
    "CanaryAnalysis",
    "CanaryAnswers",
    "CanaryStatus",
    "CanaryStep",
    "Condition",
    "DisruptionBudget",
    "EngineSpec",
    "EnvironmentVariable",
    "InferencePreset",
    "InferencePresetSpec",
    "InferenceScaler",
    "InferenceService",
    "InferenceServiceSpec",
    "InferenceServiceStatus",
    "KubernetesType",
    "KvCache",
    "Metadata",
    "ModelCache",
    "ModelCacheStatus",
    "ModelSpec",
    "Parallelism",
    "PodTemplate",
    "PresetMatch",
    "PresetStatus",
    "Quantity",
    "Reason",
    "ResourceRequirements",
    "RoleSpec",
    "RoleStatus",
    "Rollout",
    "Rule",
    "Scaling",
    "ScalingTargets",
    "ScalingWindows",
    "SecretKey",
    "TemplateContainer",
    "TemplateMetadata",
    "TemplateSpec",
    "is_gpu",
    "parse_quantity",
]
