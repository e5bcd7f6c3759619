"""The InferenceService as the API server stores it: names, and typed models from which `crds/` is made.

Every static rule stands here once, as CEL for the API server and as Python for `mini-infer plan` and `mini-infer up`;
tests hold the two to the same answers. Nothing here knows how a service becomes pods or processes.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, WithJsonSchema, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

GROUP = "serving.mini-infer.io"
VERSION = "v1alpha1"
KIND = "InferenceService"
PLURAL = "inferenceservices"
FIELD_MANAGER = "mini-infer-operator"
STATUS_FIELD_MANAGER = "mini-infer-operator-status"

# Labels on every child object, and on the pods that the gateway watches.
LABEL_SERVICE = f"{GROUP}/service"
"""metadata.name of the InferenceService."""
LABEL_ROLE = f"{GROUP}/role"
LABEL_REVISION = f"{GROUP}/revision"
LABEL_DRAINING = f"{GROUP}/draining"
""" "true" on a pod that is chosen to go: gateways send it nothing new."""

# Annotations on the pods: what the gateway must know of an engine beside its address.
ANNOTATION_MODEL = f"{GROUP}/model"
"""The served model name."""
ANNOTATION_SERVICE_CREATED = f"{GROUP}/service-created"
"""RFC 3339: the oldest service owns a bare model name that several claim."""

RESERVED_ENGINE_FLAGS = (
    "--model",
    "--revision",
    "--served-model-name",
    "--host",
    "--port",
    "--events-port",
    "--replay-port",
    "--drain-timeout",
)
"""Flags that the operator writes itself; `engine.extraArgs` must not repeat them."""
RESERVED_VOLUME_PREFIX = "mini-infer-"
LONGEST_NAME = 40
"""Characters of metadata.name: role, revision and the pods' suffixes must still fit into 63."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One static rule: `cel` for the API server and `holds` for everybody else say the same."""

    cel: str
    message: str
    """Says what to write instead."""
    holds: Callable[[Any], bool]


class ApiModel(BaseModel):
    """Base of all models here: camelCase names, no coercion, unknown fields are errors, rules checked last."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        validate_by_name=True,
        validate_by_alias=True,
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = [rule.message for rule in self.rules if not rule.holds(self)]
        if broken:
            raise ValueError("; ".join(broken))
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core_schema))
        if cls.rules:
            schema["x-kubernetes-validations"] = [{"rule": rule.cel, "message": rule.message} for rule in cls.rules]
        return schema


class NamedItem(BaseModel):
    """An item of a Kubernetes list keyed by name; what else it holds is checked when the pod template is applied."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    name: str = Field(min_length=1, max_length=253)


# Quantities as Kubernetes writes them: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
QUANTITY_PATTERN = r"^(\+|-)?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
_QUANTITY = re.compile(r"^[+-]?[0-9.]+(?P<suffix>[a-zA-Z].*)?$")
_SUFFIXES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3}
_SUFFIXES |= {letter: 1000.0**power for power, letter in enumerate("MGTPE", start=2)}
_SUFFIXES |= {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", start=1)}


def parse_quantity(value: int | str) -> float:
    """The number that a Kubernetes quantity such as `250m`, `1Gi` or 3 stands for. ValueError for anything else."""
    if isinstance(value, int):
        return float(value)
    match = _QUANTITY.match(value)
    if match is None or not re.match(QUANTITY_PATTERN, value):
        raise ValueError(f"{value!r} is not a Kubernetes quantity: write a number such as 2, 250m, 256Mi or 1Gi")
    suffix = match.group("suffix") or ""
    if suffix in _SUFFIXES:
        return float(value.removesuffix(suffix)) * _SUFFIXES[suffix]
    return float(value)  # with an exponent, such as 1e3


def _checked_quantity(value: int | str) -> int | str:
    parse_quantity(value)
    return value


Quantity = Annotated[
    int | str,
    AfterValidator(_checked_quantity),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": QUANTITY_PATTERN,
        }
    ),
]
AnyObject = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})]
"""Kubernetes' own types below the first level: the API server checks them when the pod template is applied."""
ShortText = Annotated[str, Field(max_length=1024)]
NAME_KEYED: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}

MODEL_URI_PATTERN = (
    r"^(demo|file:///.+|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/.*)?"
    r"|hf://[A-Za-z0-9][-\w.]*/[A-Za-z0-9][-\w.]*(@[-\w./]+)?)$"
)
MODEL_NAME_PATTERN = r"^[A-Za-z0-9]([-\w.:/]*[A-Za-z0-9])?$"


class SecretKey(ApiModel):
    """One key of a Secret in the service's namespace."""

    name: str = Field(min_length=1, max_length=253)
    """Name of the Secret."""
    key: str = Field(default="token", min_length=1, max_length=253)
    """Key inside it."""


class ModelSpec(ApiModel):
    """Which weights to serve, and under which name."""

    rules = (
        Rule(
            f"self.uri.matches(r'{MODEL_URI_PATTERN}') && !self.uri.contains('/../') && !self.uri.endsWith('/..')",
            "uri must be demo, file:///absolute/path, pvc://claim/path or hf://organisation/name[@revision], "
            "without '..'",
            lambda m: (
                re.match(MODEL_URI_PATTERN, m.uri, re.ASCII) is not None
                and "/../" not in m.uri
                and not m.uri.endswith("/..")
            ),
        ),
        Rule(
            f"!has(self.name) || self.name.matches(r'{MODEL_NAME_PATTERN}')",
            "name is what clients write as model: letters, digits and . _ - : / only, with a letter or digit at both "
            "ends, such as qwen3-8b or Qwen/Qwen3-8B",
            lambda m: m.name is None or re.match(MODEL_NAME_PATTERN, m.name, re.ASCII) is not None,
        ),
        Rule(
            "!has(self.tokenSecret) || self.uri.startsWith('hf://')",
            "tokenSecret is used for hf:// models only: remove it, or write uri: hf://organisation/name",
            lambda m: m.token_secret is None or m.uri.startswith("hf://"),
        ),
    )
    uri: str = Field(min_length=1, max_length=1024)
    """Where the weights are: `demo` (ships with the engine), `file:///path` (a folder where the engine runs: in its
    image, on a volume of the template, or on this machine with `mini-infer up`), `pvc://claim/path` (mounted
    read-only) or `hf://organisation/name[@revision]`."""
    name: str | None = Field(default=None, min_length=1, max_length=128)
    """What clients write as `model`; metadata.name if left out."""
    token_secret: SecretKey | None = None
    """Where the token for a gated hf:// model is."""


class ResourceRequirements(ApiModel):
    """As in a container of a pod."""

    requests: dict[str, Quantity] | None = Field(default=None, max_length=32)
    limits: dict[str, Quantity] | None = Field(default=None, max_length=32)


class EngineSpec(ApiModel):
    """Options of the engine; what is left out is the engine's default (`mini-infer-serve --help`)."""

    rules = (
        Rule(
            "!has(self.pageSize) || self.pageSize % 16 == 0",
            "pageSize must be a multiple of 16, such as 16 or 256",
            lambda e: e.page_size is None or e.page_size % 16 == 0,
        ),
        Rule(
            "!(has(self.kvCacheMemory) && has(self.gpuMemoryUtilization))",
            "kvCacheMemory and gpuMemoryUtilization both size the page pool: leave one out",
            lambda e: e.kv_cache_memory is None or e.gpu_memory_utilization is None,
        ),
        Rule(
            f"!has(self.extraArgs) || self.extraArgs.all(a, !(a.split('=')[0] in {list(RESERVED_ENGINE_FLAGS)}))",
            "extraArgs must not hold --model, --revision, --served-model-name (write spec.model), --drain-timeout "
            "(write template.spec.terminationGracePeriodSeconds) nor --host, --port, --events-port, --replay-port "
            "(the operator sets them)",
            lambda e: not any(a.split("=")[0] in RESERVED_ENGINE_FLAGS for a in e.extra_args or ()),
        ),
    )
    dtype: Literal["auto", "float32", "bfloat16"] | None = None
    load_format: Literal["auto", "dummy"] | None = None
    """dummy: random weights, for benchmarks."""
    attention_backend: Literal["auto", "torch", "flash", "triton"] | None = None
    max_model_len: int | None = Field(default=None, ge=1, le=16777216)
    """Tokens of prompt and output together."""
    max_num_seqs: int | None = Field(default=None, ge=1, le=65536)
    """Sequences that run at once."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=16777216)
    """Tokens of one forward pass."""
    long_prefill_token_threshold: int | None = Field(default=None, ge=0, le=16777216)
    """Largest prefill chunk in tokens; 0: only the budget of a pass cuts."""
    page_size: int | None = Field(default=None, ge=16, le=4096)
    """Tokens of a KV page."""
    kv_cache_memory: Quantity | None = None
    """Size of the page pool, such as 256Mi or 40Gi."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory for weights, activations and the page pool."""
    enable_prefix_caching: bool | None = None
    extra_args: list[Annotated[str, Field(min_length=1, max_length=512)]] | None = Field(default=None, max_length=32)
    """More flags of `mini-infer-serve`, each as `--flag=value`."""


class TemplateMetadata(ApiModel):
    """Labels and annotations that every pod of the role gets."""

    rules = (
        Rule(
            f"!has(self.labels) || self.labels.all(k, !k.startsWith('{GROUP}/'))",
            f"labels under {GROUP}/ are written by the operator: choose another prefix",
            lambda t: not any(key.startswith(f"{GROUP}/") for key in t.labels or ()),
        ),
        Rule(
            f"!has(self.annotations) || self.annotations.all(k, !k.startsWith('{GROUP}/'))",
            f"annotations under {GROUP}/ are written by the operator: choose another prefix",
            lambda t: not any(key.startswith(f"{GROUP}/") for key in t.annotations or ()),
        ),
    )
    labels: dict[str, Annotated[str, Field(max_length=63)]] | None = Field(default=None, max_length=64)
    annotations: dict[str, Annotated[str, Field(max_length=16384)]] | None = Field(default=None, max_length=64)


class TemplateSpec(ApiModel):
    """The fields of a pod's spec that a user may set."""

    rules = (
        Rule(
            f"!has(self.volumes) || self.volumes.all(v, !v.name.startsWith('{RESERVED_VOLUME_PREFIX}'))",
            f"volume names that start with {RESERVED_VOLUME_PREFIX} are the operator's: choose another",
            lambda t: not any(volume.name.startswith(RESERVED_VOLUME_PREFIX) for volume in t.volumes or ()),
        ),
    )
    node_selector: dict[str, ShortText] | None = Field(default=None, max_length=64)
    tolerations: list[AnyObject] | None = Field(default=None, max_length=64)
    affinity: AnyObject | None = None
    topology_spread_constraints: list[AnyObject] | None = Field(default=None, max_length=16)
    scheduler_name: str | None = Field(default=None, max_length=253)
    priority_class_name: str | None = Field(default=None, max_length=253)
    service_account_name: str | None = Field(default=None, max_length=253)
    runtime_class_name: str | None = Field(default=None, max_length=253)
    image_pull_secrets: list[NamedItem] | None = Field(default=None, max_length=16, json_schema_extra=NAME_KEYED)
    security_context: AnyObject | None = None
    """Merged over the operator's: runAsNonRoot, seccomp RuntimeDefault."""
    termination_grace_period_seconds: int | None = Field(default=None, ge=10, le=86400)
    """How long a draining engine may take to finish its requests; 300 if left out."""
    volumes: list[NamedItem] | None = Field(default=None, max_length=32, json_schema_extra=NAME_KEYED)


class TemplateContainer(ApiModel):
    """The fields of the engine's container that a user may set."""

    env: list[NamedItem] | None = Field(default=None, max_length=128, json_schema_extra=NAME_KEYED)
    """Wins over the operator's variables of the same name."""
    env_from: list[AnyObject] | None = Field(default=None, max_length=32)
    volume_mounts: list[NamedItem] | None = Field(default=None, max_length=32)
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    security_context: AnyObject | None = None
    """Merged over the operator's: no capabilities, no privilege escalation, read-only root file system."""


class PodTemplate(ApiModel):
    """What a user may add to or change in the pods that the operator makes."""

    metadata: TemplateMetadata | None = None
    spec: TemplateSpec | None = None
    container: TemplateContainer | None = None


class Parallelism(ApiModel):
    """How one engine is spread over GPUs and nodes. Refused above 1 until the engine can."""

    rules = (
        Rule(
            "(!has(self.tensor) || self.tensor == 1) && (!has(self.nodes) || self.nodes == 1)",
            "parallelism above 1 does not work yet: leave it out, and set replicas to use more GPUs",
            lambda p: (p.tensor or 1) == 1 and (p.nodes or 1) == 1,
        ),
    )
    tensor: int | None = Field(default=None, ge=1, le=64)
    """GPUs that share every layer of one engine."""
    nodes: int | None = Field(default=None, ge=1, le=64)
    """Nodes that one engine spans."""


class Scaling(ApiModel):
    """Bounds for an autoscaler. Refused until it works."""

    min_replicas: int | None = Field(default=None, ge=0, le=1000)
    max_replicas: int | None = Field(default=None, ge=1, le=1000)


class RoleSpec(ApiModel):
    """The engines of one role: how many, how large, with which options."""

    rules = (
        Rule(
            "!has(self.scaling)",
            "scaling does not work yet: leave it out and write replicas",
            lambda r: r.scaling is None,
        ),
    )
    replicas: int = Field(default=1, ge=0, le=1000)
    """Engines to run; changing it restarts none."""
    resources: ResourceRequirements | None = None
    """Of the engine's container."""
    engine: EngineSpec | None = None
    template: PodTemplate | None = None
    parallelism: Parallelism | None = None
    scaling: Scaling | None = None


class InferenceServiceSpec(ApiModel):
    """What the user wants served."""

    rules = (
        Rule(
            "has(self.unified)",
            "unified is missing: write `unified: {replicas: 1}`",
            lambda s: s.unified is not None,
        ),
        Rule(
            "!has(self.prefill)",
            "prefill does not work yet: write unified, whose engines do prefill and decode",
            lambda s: s.prefill is None,
        ),
        Rule(
            "!has(self.decode)",
            "decode does not work yet: write unified, whose engines do prefill and decode",
            lambda s: s.decode is None,
        ),
    )
    model: ModelSpec
    image: str | None = Field(default=None, min_length=1, max_length=1024)
    """The engine's image; the operator's `--engine-image` if left out."""
    unified: RoleSpec | None = None
    """Engines that do prefill and decode."""
    prefill: RoleSpec | None = None
    decode: RoleSpec | None = None


class Reason:
    """Every `reason` that a condition can have."""

    ALL_REPLICAS_READY = "AllReplicasReady"
    STARTING = "Starting"
    ROLLING_OUT = "RollingOut"
    SCALED_TO_ZERO = "ScaledToZero"
    PODS_FAILING = "PodsFailing"
    """A pod cannot start or keeps dying; the message quotes Kubernetes."""
    INVALID_SPEC = "InvalidSpec"
    """The stored spec breaks a rule (older than the rule, or written past it)."""
    REFUSED = "Refused"
    """The API server refused a child object; the message is its own."""
    NAME_TAKEN = "NameTaken"
    """A child's name belongs to an object that this service does not own."""
    AVAILABLE = "Available"
    NONE_AVAILABLE = "NoneAvailable"
    COMPLETE = "Complete"


REASONS = frozenset(value for name, value in vars(Reason).items() if name.isupper())


class Condition(ApiModel):
    """As metav1.Condition."""

    type: Literal["Ready", "Available", "Progressing"]
    """Ready: what the spec asks for runs, all of it. Available: some engine can answer. Progressing: work goes on."""
    status: Literal["True", "False", "Unknown"]
    reason: str = Field(min_length=1, max_length=1024)
    message: str = Field(default="", max_length=32768)
    last_transition_time: str
    observed_generation: int = Field(default=0, ge=0)


class InferenceServiceStatus(ApiModel):
    """What the operator saw last."""

    observed_generation: int = Field(default=0, ge=0)
    conditions: list[Condition] = Field(
        default=[],
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    model: str | None = None
    """The name that clients ask for."""
    revision: str | None = None
    """The revision that the spec asks for."""
    replicas: int = Field(default=0, ge=0)
    """Engines that exist, of all revisions."""
    ready_replicas: int = Field(default=0, ge=0)
    url: str | None = None
    """Where an OpenAI client finds the model: the gateway where the operator knows one, else the engines' Service."""


class Metadata(BaseModel):
    """The part of an object's metadata that the operator reads."""

    model_config = ConfigDict(alias_generator=to_camel, extra="ignore", frozen=True, validate_by_name=True)
    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    creation_timestamp: str = ""


class InferenceService(ApiModel):
    """One model served by engines of one or more roles."""

    rules = (
        Rule(
            f"self.metadata.name.size() <= {LONGEST_NAME} && "
            "self.metadata.name.matches(r'^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            f"metadata.name must start with a letter, hold only a-z, 0-9 and -, and have at most {LONGEST_NAME} "
            "characters, such as qwen3-8b (the names of its Service and pods are made from it)",
            lambda s: (
                len(s.metadata.name) <= LONGEST_NAME
                and re.match(r"^[a-z]([-a-z0-9]*[a-z0-9])?$", s.metadata.name) is not None
            ),
        ),
    )
    api_version: Literal["serving.mini-infer.io/v1alpha1"]
    kind: Literal["InferenceService"]
    metadata: Metadata
    spec: InferenceServiceSpec
    status: InferenceServiceStatus | None = None

    @property
    def model_name(self) -> str:
        """What clients write as `model`."""
        return self.spec.model.name or self.metadata.name

    @property
    def roles(self) -> dict[str, RoleSpec]:
        """The roles that the spec asks for, by name."""
        named = {"unified": self.spec.unified, "prefill": self.spec.prefill, "decode": self.spec.decode}
        return {name: role for name, role in named.items() if role is not None}
