"""Defines `spec` of an InferenceService, which users write, as typed models with their rules. Knows no status."""

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model
from pydantic.alias_generators import to_camel

from mini_infer_contract.engine_options import KV_TRANSFER, EngineOptions
from mini_infer_contract.options import OptionRow, option_rows
from mini_infer_contract.resource_names import GROUP
from mini_infer_operator.resource.containers import InitContainer, ProbeLimits
from mini_infer_operator.resource.devices import (
    GPU_PATTERN,
    WHOLE_GPUS,
    ContainerResourceClaim,
    PodResourceClaim,
    is_gpu,
)
from mini_infer_operator.resource.environment import EnvironmentFrom, EnvironmentVariable, ObjectReference
from mini_infer_operator.resource.kv_cache import KvCache
from mini_infer_operator.resource.kv_rules import ENGINE_KV_RULES
from mini_infer_operator.resource.pairs import PAIRS
from mini_infer_operator.resource.parallelism import Parallelism
from mini_infer_operator.resource.quantity import (
    LABEL_KEY_PATTERN,
    LabelValue,
    ObjectName,
    Quantity,
    parse_quantity,
)
from mini_infer_operator.resource.reserved import RESERVED_ENGINE_FLAGS, RESERVED_VOLUME_PREFIX
from mini_infer_operator.resource.rollout import DisruptionBudget, Rollout
from mini_infer_operator.resource.rules import ApiModel, Rule, keyed_by
from mini_infer_operator.resource.scaling import Scaling
from mini_infer_operator.resource.scheduling import Affinity, Toleration, TopologySpreadConstraint
from mini_infer_operator.resource.security import PodSecurityContext, SecurityContext
from mini_infer_operator.resource.volumes import Volume, VolumeMount

_IMAGE_PART = "[a-z0-9]+(([.]|_|__|-+)[a-z0-9]+)*"
_IMAGE = (
    rf"([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?(:[0-9]+)?/)?{_IMAGE_PART}(/{_IMAGE_PART})*"
    r"(:[A-Za-z0-9_][-A-Za-z0-9_.]{0,127})?(@sha256:[0-9a-f]{64})?"
)
IMAGE_PATTERN = rf"^{_IMAGE}$"
"""https://pkg.go.dev/github.com/distribution/reference"""
MODEL_URI_PATTERN = (
    r"^(demo|file:///.+|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/.*)?"
    r"|hf://[A-Za-z0-9][-\w.]*/[A-Za-z0-9][-\w.]*(@[-\w./]+)?"
    rf"|oci://{_IMAGE}(#[^/#][^#]*)?"
    r"|https?://[^\s/?#@]+(/[^\s?#]*)?|(s3|gs)://[a-z0-9][-a-z0-9._]{1,220}[a-z0-9](/[^\s?#]*)?)$"
)
MODEL_NAME_PATTERN = r"^[A-Za-z0-9]([-\w.:/]*[A-Za-z0-9])?$"
LEAST_KV_CACHE = "1Mi"
NO_NUL_PATTERN = r"^[^\x00]*$"
"""No program takes an argument with a zero byte: containers with one never start."""
_COPIED = ("http://", "https://", "s3://", "gs://")
"""Schemes of models that engines do not read themselves."""

_BY_NAME = keyed_by("name")
_BY_MOUNT_PATH = keyed_by("mount_path")


class SecretKey(ApiModel):
    """One key of a Secret in the service's namespace."""

    name: str = Field(min_length=1, max_length=253)
    """Name of the Secret."""
    key: str = Field(default="token", min_length=1, max_length=253)
    """A key inside it."""


class ModelCache(ApiModel):
    """A volume, or a folder of each node, onto which the model is copied once, and from which engines read it."""

    rules = (
        Rule(
            "has(self.claim) != has(self.hostPath)",
            "cache needs exactly one of claim and hostPath",
            lambda c: (c.claim is None) != (c.host_path is None),
        ),
        Rule(
            "!has(self.hostPath) || !self.hostPath.matches('(^|/)[.][.]?(/|$)')",
            "cache.hostPath is a folder of the node, such as /var/lib/models, without '.' and '..'",
            lambda c: c.host_path is None or re.search(r"(^|/)[.][.]?(/|$)", c.host_path) is None,
        ),
        Rule(
            "!has(self.hostPath) || !has(self.serviceAccountName)",
            "cache.serviceAccountName is the copying pod's, and with hostPath engines' pods copy: write "
            "template.spec.serviceAccountName",
            lambda c: c.host_path is None or c.service_account_name is None,
        ),
    )
    claim: ObjectName | None = None
    """A PersistentVolumeClaim of the service's namespace; ReadWriteMany if engines run on several nodes. Models are in
    folders of their own under `mini-infer/`.
    """
    host_path: str | None = Field(default=None, min_length=2, max_length=512, pattern=r"^/[^\s:]+$")
    """A folder of every node, which exists there and belongs to user 65532. The first pod of a node copies, others
    wait. Models are in folders of their own under `mini-infer/`; the least recently used ones are deleted when a copy
    needs room.
    """
    env: Annotated[list[EnvironmentVariable], _BY_NAME[0]] | None = Field(
        default=None, max_length=32, json_schema_extra=_BY_NAME[1]
    )
    """Variables of the copying container, such as AWS_ENDPOINT_URL, AWS_REGION and HTTPS_PROXY; with claim, changing
    them restarts no engine.
    """
    env_from: list[EnvironmentFrom] | None = Field(default=None, max_length=8)
    """ConfigMaps and Secrets of which every key becomes a variable of the copying container, such as a Secret with
    AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or with GOOGLE_SERVICE_ACCOUNT_KEY.
    """
    service_account_name: ObjectName | None = None
    """The ServiceAccount of the copying pod, for clouds that give it an identity; its token is not mounted."""


class ModelSpec(ApiModel):
    """The weights to serve, and the name under which to serve them."""

    rules = (
        Rule(
            f"self.uri.matches(r'{MODEL_URI_PATTERN}') && !self.uri.contains('/../') && !self.uri.endsWith('/..') && "
            "!self.uri.contains('#../') && !self.uri.endsWith('#..')",
            "uri must be demo, file:///absolute/path, pvc://claim/path or hf://organisation/name[@revision], or "
            "oci://registry/image:tag[#folder], or with cache http(s)://host/path, s3://bucket/path or "
            "gs://bucket/path, without '..' and user:password@",
            lambda m: (
                re.match(MODEL_URI_PATTERN, m.uri, re.ASCII) is not None
                and not any(part in m.uri for part in ("/../", "#../"))
                and not m.uri.endswith(("/..", "#.."))
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
        Rule(
            "has(self.cache) || !self.uri.matches('^(https?|s3|gs)://')",
            "http://, https://, s3:// and gs:// models are copied onto a volume first: write cache: {claim: NAME}",
            lambda m: m.cache is not None or not m.uri.startswith(_COPIED),
        ),
        Rule(
            "!has(self.cache) || self.uri.matches('^(https?|s3|gs|pvc)://')",
            "cache is filled from http://, https://, s3://, gs:// and pvc:// models: leave it out, or write such a uri",
            lambda m: m.cache is None or m.uri.startswith((*_COPIED, "pvc://")),
        ),
        Rule(
            "!has(self.cache) || !has(self.cache.claim) || (self.uri != 'pvc://' + self.cache.claim && "
            "!self.uri.startsWith('pvc://' + self.cache.claim + '/'))",
            "cache.claim is the claim that uri names: leave cache out, or name another claim",
            lambda m: m.cache is None or m.uri.removeprefix("pvc://").partition("/")[0] != m.cache.claim,
        ),
    )
    uri: str = Field(min_length=1, max_length=1024, pattern=NO_NUL_PATTERN)
    """The location of the weights: `demo` (ships with the engine), `file:///path` (a folder where the engine runs: in
    its image, on a volume of the template, or on this machine with `mini-infer up`), `pvc://claim/path` (mounted
    read-only), `hf://organisation/name[@revision]`, `oci://registry/image:tag[#folder]` (an image volume: pulled once
    by each node, mounted read-only; Kubernetes 1.33 or newer with the feature ImageVolume) or, with `cache`,
    `http(s)://host/path`, `s3://bucket/path` or `gs://bucket/path`.
    """
    name: str | None = Field(default=None, min_length=1, max_length=128)
    """The name that clients write as `model`; metadata.name if left out."""
    token_secret: SecretKey | None = None
    """The Secret key with the token for a gated hf:// model."""
    cache: ModelCache | None = None
    """The volume onto which an http(s)://, s3://, gs:// or pvc:// model is copied once, by a Job, before engines
    start.
    """


def _is_extended(resource: str) -> bool:
    """True if the resource is allocated in whole units, such as nvidia.com/gpu."""
    return "/" in resource and "kubernetes.io/" not in resource


_EXTENDED = "k.contains('/') && !k.contains('kubernetes.io/')"


class ResourceRequirements(ApiModel):
    """Requests, limits and claims, as in a container of a pod."""

    rules = (
        Rule(
            "(!has(self.requests) || "
            "self.requests.all(k, !quantity(string(self.requests[k])).isLessThan(quantity('0')))) && "
            "(!has(self.limits) || self.limits.all(k, !quantity(string(self.limits[k])).isLessThan(quantity('0'))))",
            "requests and limits must not be negative",
            lambda r: all(parse_quantity(value) >= 0 for value in [*r.requested.values(), *r.allowed.values()]),
        ),
        Rule(
            "!has(self.requests) || !has(self.limits) || self.requests.all(k, !(k in self.limits) || "
            "quantity(string(self.requests[k])).compareTo(quantity(string(self.limits[k]))) <= 0)",
            "a request must not be above its limit: raise the limit, or lower the request",
            lambda r: all(
                parse_quantity(value) <= parse_quantity(r.allowed.get(k, value)) for k, value in r.requested.items()
            ),
        ),
        Rule(
            f"!has(self.limits) || self.limits.all(k, !({_EXTENDED}) || quantity(string(self.limits[k])).isInteger())",
            "devices such as nvidia.com/gpu are given out whole: write 1, 2, ...",
            lambda r: all(parse_quantity(v).is_integer() for k, v in r.allowed.items() if _is_extended(k)),
        ),
        Rule(
            f"!has(self.requests) || self.requests.all(k, !({_EXTENDED}) || (has(self.limits) && k in self.limits && "
            "quantity(string(self.requests[k])).compareTo(quantity(string(self.limits[k]))) == 0))",
            "devices such as nvidia.com/gpu need a limit, and a request for them must equal it: write the limit alone",
            lambda r: all(
                k in r.allowed and parse_quantity(v) == parse_quantity(r.allowed[k])
                for k, v in r.requested.items()
                if _is_extended(k)
            ),
        ),
    )
    requests: dict[str, Quantity] | None = Field(default=None, max_length=32)
    """Resources that a node must have free, such as {cpu: 4, memory: 32Gi}."""
    limits: dict[str, Quantity] | None = Field(default=None, max_length=32)
    """The most that the container may use, and its devices, such as {nvidia.com/gpu: 1}."""
    claims: Annotated[list[ContainerResourceClaim], _BY_NAME[0]] | None = Field(
        default=None, max_length=8, json_schema_extra=_BY_NAME[1]
    )
    """Devices by dynamic resource allocation, out of template.spec.resourceClaims."""

    @property
    def requested(self) -> dict[str, Quantity]:
        """The requests; empty if there are none."""
        return self.requests or {}

    @property
    def allowed(self) -> dict[str, Quantity]:
        """The limits; empty if there are none."""
        return self.limits or {}

    @property
    def gpus(self) -> int:
        """The number of GPUs, or parts of GPUs (MIG), in the limits; claimed ones are not counted."""
        return int(sum(parse_quantity(n) for name, n in self.allowed.items() if is_gpu(name)))


def _field_of(row: OptionRow) -> tuple[Any, Any]:
    """Returns type and details of an option's field; a field that is left out has the engine's default."""
    option = row.option
    if option.is_size:
        return Quantity | None, Field(default=None, description=f"{row.description} Such as 256Mi or 40Gi.")
    low: dict[str, float] = {"ge" if option.low_is_allowed else "gt": option.low} if option.low is not None else {}
    bounds: dict[str, Any] = {name: value if row.type is float else int(value) for name, value in low.items()}
    if option.high is not None:
        bounds["le"] = option.high if row.type is float else int(option.high)
    return row.type | None, Field(default=None, description=row.description, **bounds)


if TYPE_CHECKING:

    class _EngineFields(ApiModel):
        """The engine's options as fields, for type checkers; the class is created below."""

else:  # from the engine's options: a type checker cannot follow, and no field is read by name
    _EngineFields = create_model(
        "_EngineFields",
        __base__=ApiModel,
        **{row.name: _field_of(row) for row in option_rows(EngineOptions) if row.option.in_resource},
    )


_LONG_FLAGS = "|".join(flag.removeprefix("--") for flag in RESERVED_ENGINE_FLAGS if flag.startswith("--"))
_RESERVED_FLAG_PATTERN = rf"^(-[a-z]|--({_LONG_FLAGS})(=|$))"
"""A pattern of reserved flags. It matches all flags with one dash, because the engine's parser accepts their
prefixes.
"""


_DEFAULTS: dict[str, Any] = {row.name: row.default for row in option_rows(EngineOptions)}
_LOOKUP_CEL = {
    option: f"self.?{to_camel(option)}.orValue({_DEFAULTS[option]})"
    for option in ("prompt_lookup_min", "prompt_lookup_max")
}


def _lookup(engine: Any, option: str) -> int:
    """Returns the written value, else the engine's default."""
    value: int | None = getattr(engine, option)
    return _DEFAULTS[option] if value is None else value


TRANSFER_OPTIONS = tuple(row.name for row in option_rows(EngineOptions) if row.option.group == KV_TRANSFER)


_SIZES = tuple(row for row in option_rows(EngineOptions) if row.option.in_resource and row.option.is_size)
"""Options that are a number of bytes."""


def _size_rule(row: OptionRow) -> Rule:
    """Returns the rule that a size is not below what the engine takes, which a quantity's schema cannot say."""
    field, low = to_camel(row.name), int(row.option.low or 0)
    return Rule(
        f"!has(self.{field}) || quantity(string(self.{field})).compareTo(quantity('{low}')) >= 0",
        f"{field} must be at least {low}, such as 256Mi or 40Gi",
        lambda e: getattr(e, row.name) is None or parse_quantity(getattr(e, row.name)) >= low,
    )


class EngineSpec(_EngineFields):
    """Options of the engine; an option that is left out has the engine's default (`mini-infer-serve --help`)."""

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
            "!has(self.kvCacheMemory) || "
            f"quantity(string(self.kvCacheMemory)).compareTo(quantity('{LEAST_KV_CACHE}')) >= 0",
            f"kvCacheMemory must be at least {LEAST_KV_CACHE}, such as 256Mi or 40Gi",
            lambda e: e.kv_cache_memory is None or parse_quantity(e.kv_cache_memory) >= parse_quantity(LEAST_KV_CACHE),
        ),
        *(_size_rule(row) for row in _SIZES if row.name != "kv_cache_memory"),
        Rule(
            "!has(self.speculativeMethod) || self.speculativeMethod in ['ngram', 'mtp'] || has(self.speculativeModel)",
            "speculativeMethod draft_model, head and eagle3 need speculativeModel, a folder or hub id: add it, or "
            "write ngram or mtp",
            lambda e: e.speculative_method in (None, "ngram", "mtp") or e.speculative_model is not None,
        ),
        Rule(
            "!has(self.speculativeMethod) || !(self.speculativeMethod in ['ngram', 'mtp']) || "
            "!has(self.speculativeModel)",
            "speculativeMethod ngram and mtp have no model of their own: leave speculativeModel out, or write "
            "draft_model, head or eagle3",
            lambda e: e.speculative_method not in ("ngram", "mtp") or e.speculative_model is None,
        ),
        Rule(
            "!(has(self.speculativeMethod) || has(self.speculativeModel)) || "
            f"{_LOOKUP_CEL['prompt_lookup_min']} <= {_LOOKUP_CEL['prompt_lookup_max']}",
            "promptLookupMin must not be above promptLookupMax "
            f"({_DEFAULTS['prompt_lookup_min']} and {_DEFAULTS['prompt_lookup_max']} where they are left out)",
            lambda e: (
                (e.speculative_method is None and e.speculative_model is None)
                or _lookup(e, "prompt_lookup_min") <= _lookup(e, "prompt_lookup_max")
            ),
        ),
        Rule(
            "has(self.quantization) || "
            "!(self.?quantizeLmHead.orValue(false) || self.?quantizeEmbeddings.orValue(false))",
            "quantizeLmHead and quantizeEmbeddings go with quantization alone: write how weights are rounded, or leave "
            "them out",
            lambda e: e.quantization is not None or not (e.quantize_lm_head or e.quantize_embeddings),
        ),
        Rule(
            "!has(self.kvCacheDtype) || self.kvCacheDtype == 'auto' || !has(self.attentionBackend) || "
            "self.attentionBackend != 'flash'",
            "flash-attn does not read a quantised kvCacheDtype: leave attentionBackend or kvCacheDtype out",
            lambda e: e.kv_cache_dtype in (None, "auto") or e.attention_backend != "flash",
        ),
        *ENGINE_KV_RULES,
        Rule(
            f"!has(self.extraArgs) || self.extraArgs.all(a, !a.matches('{_RESERVED_FLAG_PATTERN}'))",
            "extraArgs must not hold --model, --revision, --served-model-name (write spec.model), --drain-timeout "
            "(write template.spec.terminationGracePeriodSeconds), --tensor-parallel-size, --pipeline-parallel-size, "
            "--data-parallel-size, --enable-expert-parallel, --nnodes, --node-rank (write parallelism), --role (write "
            "unified, or prefill and decode), --transfer-port (write engine.kvTransport), --kv-host-memory, "
            "--kv-host-path, --kv-disk-path, --kv-disk-size, --kv-tier-dtype (write kvCache) nor --host, --port, "
            "--events-port, --replay-port (the operator sets them), and no flag of one dash, such as -tp",
            lambda e: not any(re.match(_RESERVED_FLAG_PATTERN, a) for a in e.extra_args or ()),
        ),
    )
    extra_args: list[Annotated[str, Field(min_length=1, max_length=512, pattern=NO_NUL_PATTERN)]] | None = Field(
        default=None, max_length=32
    )
    """More flags of `mini-infer-serve`, each as `--flag=value`."""

    @property
    def names_transfer(self) -> bool:
        """True if an option of KV transfer is written, even with its default."""
        return any(getattr(self, option) is not None for option in TRANSFER_OPTIONS)


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
        Rule(
            f"(!has(self.labels) || self.labels.all(k, k.matches(r'{LABEL_KEY_PATTERN}'))) && "
            f"(!has(self.annotations) || self.annotations.all(k, k.matches(r'{LABEL_KEY_PATTERN}')))",
            "a key of labels and annotations is a name of at most 63 letters, digits and - _ . with an optional "
            "prefix, such as example.org/team",
            lambda t: all(re.match(LABEL_KEY_PATTERN, key) for key in [*(t.labels or ()), *(t.annotations or ())]),
        ),
    )
    labels: dict[str, LabelValue] | None = Field(default=None, max_length=64)
    """Labels as texts: numbers, and words such as yes or true, need quotes."""
    annotations: dict[str, Annotated[str, Field(max_length=16384)]] | None = Field(default=None, max_length=64)
    """Annotations as texts: numbers, and words such as yes or true, need quotes."""


class TemplateSpec(ApiModel):
    """The fields of a pod's spec that a user may set."""

    rules = (
        Rule(
            f"!has(self.volumes) || self.volumes.all(v, !v.name.startsWith('{RESERVED_VOLUME_PREFIX}'))",
            f"volume names that start with {RESERVED_VOLUME_PREFIX} are the operator's: choose another",
            lambda t: not any(volume.name.startswith(RESERVED_VOLUME_PREFIX) for volume in t.volumes or ()),
        ),
        Rule(
            "!has(self.initContainers) || self.initContainers.all(c, c.name != 'engine')",
            "initContainers must not be named engine: that is the engine's own container",
            lambda t: not any(container.name == "engine" for container in t.init_containers or ()),
        ),
    )
    node_selector: dict[str, LabelValue] | None = Field(default=None, max_length=64)
    """Labels that a node must have."""
    tolerations: list[Toleration] | None = Field(default=None, max_length=64)
    """Taints of nodes that the pods tolerate."""
    affinity: Affinity | None = None
    """The nodes and other pods to run near to."""
    topology_spread_constraints: list[TopologySpreadConstraint] | None = Field(default=None, max_length=16)
    """An even spread of the pods over nodes or zones."""
    scheduler_name: ObjectName | None = None
    """The scheduler that places the pods."""
    priority_class_name: ObjectName | None = None
    """The PriorityClass of the pods."""
    service_account_name: ObjectName | None = None
    """The ServiceAccount of the pods; its token is not mounted."""
    runtime_class_name: ObjectName | None = None
    """The RuntimeClass that runs the containers, such as nvidia."""
    image_pull_secrets: Annotated[list[ObjectReference], _BY_NAME[0]] | None = Field(
        default=None, max_length=16, json_schema_extra=_BY_NAME[1]
    )
    """Secrets with which the image is pulled."""
    security_context: PodSecurityContext | None = None
    """Merged over the operator's: runAsNonRoot, seccomp RuntimeDefault."""
    termination_grace_period_seconds: int | None = Field(default=None, ge=10, le=86400)
    """Seconds that a draining engine may take to finish its requests; 300 if left out."""
    volumes: Annotated[list[Volume], _BY_NAME[0]] | None = Field(
        default=None, max_length=32, json_schema_extra=_BY_NAME[1]
    )
    """Volumes beside the operator's own."""
    init_containers: Annotated[list[InitContainer], _BY_NAME[0]] | None = Field(
        default=None, max_length=8, json_schema_extra=_BY_NAME[1]
    )
    """Containers that end before the engine starts, and with restartPolicy Always sidecars beside it."""
    resource_claims: Annotated[list[PodResourceClaim], _BY_NAME[0]] | None = Field(
        default=None, max_length=8, json_schema_extra=_BY_NAME[1]
    )
    """Devices that each pod claims (dynamic resource allocation); resources.claims names those that the engine uses."""


class TemplateContainer(ApiModel):
    """The fields of the engine's container that a user may set."""

    env: Annotated[list[EnvironmentVariable], _BY_NAME[0]] | None = Field(
        default=None, max_length=128, json_schema_extra=_BY_NAME[1]
    )
    """Variables that override the operator's of the same name."""
    env_from: list[EnvironmentFrom] | None = Field(default=None, max_length=32)
    """ConfigMaps and Secrets of which every key becomes a variable."""
    volume_mounts: Annotated[list[VolumeMount], _BY_MOUNT_PATH[0]] | None = Field(
        default=None, max_length=32, json_schema_extra=_BY_MOUNT_PATH[1]
    )
    """Mounts of the template's volumes."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """The time at which the image is pulled; Kubernetes chooses by the tag if left out."""
    security_context: SecurityContext | None = None
    """Merged over the operator's: no capabilities, no privilege escalation, read-only root file system."""
    startup_probe: ProbeLimits | None = None
    """The time for weights to load: periodSeconds times failureThreshold; an hour if left out."""
    liveness_probe: ProbeLimits | None = None
    """The time until an engine that does not answer is restarted; 15 seconds if left out."""
    readiness_probe: ProbeLimits | None = None
    """The time until an engine that does not answer gets no more requests; 6 seconds if left out."""


class PodTemplate(ApiModel):
    """Fields that a user may add to or change in the pods that the operator creates."""

    metadata: TemplateMetadata | None = None
    """Labels and annotations of the pods."""
    spec: TemplateSpec | None = None
    """Fields of the pods."""
    container: TemplateContainer | None = None
    """Fields of the engine's container."""


_IS_GPU = f"k.matches(r'{GPU_PATTERN}')"
_LIMITS = "has(self.resources) && has(self.resources.limits)"
_GPUS = f"self.resources.limits.map(k, {_IS_GPU}, quantity(string(self.resources.limits[k])).asInteger()).sum()"
"""CEL that counts what `ResourceRequirements.gpus` counts."""
_RANKS = " * ".join(f"self.parallelism.?{size}.orValue(1)" for size in ("tensor", "pipeline", "data"))


class RoleSpec(ApiModel):
    """The engines of one role: their number, size and options."""

    rules = (
        Rule(
            f"!has(self.parallelism) || !({_LIMITS}) || {_GPUS} * self.parallelism.?nodes.orValue(1) in [0, {_RANKS}]",
            "resources.limits asks for another number of GPUs than parallelism needs: write tensor x pipeline x data / "
            "nodes, which is what each pod of an engine needs, or leave it out",
            lambda r: (
                r.parallelism is None
                or r.resources is None
                or not r.resources.gpus
                or r.resources.gpus * (r.parallelism.nodes or 1) == r.parallelism.ranks
            ),
        ),
        Rule(
            f"has(self.parallelism) || !({_LIMITS}) || {list(WHOLE_GPUS)}.all(k, !(k in self.resources.limits) || "
            "quantity(string(self.resources.limits[k])).asInteger() <= 1)",
            "resources.limits asks for several GPUs and an engine without parallelism uses one: write parallelism, "
            "such as {tensor: 2} for two GPUs, or ask for one",
            lambda r: (
                r.parallelism is not None
                or r.resources is None
                or all(parse_quantity(n) <= 1 for name, n in r.resources.allowed.items() if name in WHOLE_GPUS)
            ),
        ),
        Rule(
            f"!has(self.engine) || !has(self.engine.device) || self.engine.device != 'cpu' || !({_LIMITS}) || "
            f"{_GPUS} == 0",
            "resources.limits asks for GPUs and engine.device is cpu, which would leave them idle: leave one of them "
            "out",
            lambda r: r.engine is None or r.engine.device != "cpu" or r.resources is None or not r.resources.gpus,
        ),
    )
    replicas: int = Field(default=1, ge=0, le=1000)
    """Engines to run; changing it restarts none. With scaling, the number to begin with."""
    resources: ResourceRequirements | None = None
    """Resources of the engine's container."""
    engine: EngineSpec | None = None
    """Options of the engine."""
    template: PodTemplate | None = None
    """Additions and changes to the pods."""
    parallelism: Parallelism | None = None
    """The GPUs and nodes over which one engine is spread."""
    kv_cache: KvCache | None = None
    """Tiers of the KV cache beside the GPU; those of the service if left out."""
    scaling: Scaling | None = None
    """Bounds and targets by which the operator sets the number of engines, in place of replicas."""


IMAGE_RULE = Rule(
    f"!has(self.image) || self.image.matches(r'{IMAGE_PATTERN}')",
    "image must be [registry/]name[:tag][@digest] in lower case (a tag may have capitals), such as "
    "example.org/mini-infer-engine:0.1.0",
    lambda s: s.image is None or re.match(IMAGE_PATTERN, s.image) is not None,
)


class InferenceServiceSpec(ApiModel):
    """The model that the user wants served, and the engines that serve it."""

    rules = (
        Rule(
            "has(self.unified) || has(self.prefill) || has(self.decode)",
            "no role is given: write `unified: {replicas: 1}`, or prefill and decode",
            lambda s: s.unified is not None or s.prefill is not None or s.decode is not None,
        ),
        Rule(
            "has(self.prefill) == has(self.decode)",
            "prefill and decode need each other: write both, or unified, whose engines do both",
            lambda s: (s.prefill is None) == (s.decode is None),
        ),
        Rule(
            "!has(self.unified) || !(has(self.prefill) || has(self.decode))",
            "unified engines do prefill and decode: leave out unified, or prefill and decode",
            lambda s: s.unified is None or (s.prefill is None and s.decode is None),
        ),
        IMAGE_RULE,
        *PAIRS,
    )
    model: ModelSpec
    """The weights to serve, and the name under which to serve them."""
    image: str | None = Field(default=None, min_length=1, max_length=1024)
    """The engine's image; the operator's `--engine-image` if left out."""
    preset: ObjectName | None = None
    """The InferencePreset whose fields stand in for those that are left out here; none for no preset. If left out, the
    preset that matches model and GPU, if there is one.
    """
    operator_class: str | None = Field(default=None, min_length=1, max_length=63)
    """The `--operator-class` of the operator that manages it; if left out, an operator without one."""
    kv_cache: KvCache | None = None
    """Tiers of the KV cache beside the GPU, for all roles that have none of their own."""
    rollout: Rollout | None = None
    """Limits on the way from one revision to the next."""
    disruption_budget: DisruptionBudget | None = None
    """The engines that may be evicted at a time."""
    unified: RoleSpec | None = None
    """Engines that do prefill and decode."""
    prefill: RoleSpec | None = None
    """Engines that compute prompts and send their KV cache; fields as in unified."""
    decode: RoleSpec | None = None
    """Engines that generate, with the KV cache of a prefill engine or their own; fields as in unified."""
