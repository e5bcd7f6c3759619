"""Defines `status` of an InferenceService, its conditions, and the closed set of their reasons."""

from typing import Literal

from pydantic import Field

from mini_infer_operator.resource.rules import ApiModel


class Reason:
    """Every `reason` that a condition can have; docs/troubleshooting.md says what to do about each."""

    ALL_REPLICAS_READY = "AllReplicasReady"
    STARTING = "Starting"
    ROLLING_OUT = "RollingOut"
    SCALING_DOWN = "ScalingDown"
    SCALED_TO_ZERO = "ScaledToZero"
    REPLACING_ENGINES = "ReplacingEngines"
    """All engines were ready; one was lost since, and another takes its place."""
    MODEL_NAME_SHARED = "ModelNameShared"
    """Several services claim the model name; the oldest owns it (docs/model-names.md)."""
    AVAILABLE = "Available"
    NONE_AVAILABLE = "NoneAvailable"
    COMPLETE = "Complete"
    CANARY = "Canary"
    """A new revision gets a share of the requests and is judged; status.canary has the step and the figures."""
    CANARY_ROLLED_BACK = "CanaryRolledBack"
    """The new revision failed its analysis; the old one serves. Edit the spec, or promote the revision by hand."""
    PAUSED = "Paused"
    """spec.rollout.paused is true: edits wait."""
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    """New engines do not become available; what served before goes on serving. Edit the spec, or edit it back."""

    # The API server or a rule says no.
    INVALID_SPEC = "InvalidSpec"
    """The stored spec breaks a rule: it is older than the rule, or was written without validation."""
    REFUSED = "Refused"
    """The API server refused a child object; the message is its own."""
    PRESET_NOT_FOUND = "PresetNotFound"
    """spec.preset names an InferencePreset that does not exist, or that the operator cannot read."""
    NO_GPU_IMAGE = "NoGpuImage"
    """Engines ask for a GPU, and the image that they would run from computes on CPUs."""
    POD_SECURITY = "PodSecurity"
    """The template uses rights, or credentials of the namespace, that the operator does not allow pods."""
    NO_LEADER_WORKER_SET = "NoLeaderWorkerSet"
    """Engines are to span several nodes, but the cluster does not serve the kind that runs such groups."""
    MODEL_CACHE_FAILED = "ModelCacheFailed"
    """The Job that copies the model onto its volume failed again and again."""
    NAME_TAKEN = "NameTaken"
    """A child's name belongs to an object that this service does not own."""
    API_ERROR = "ApiError"
    """Requests of the operator fail again and again; the message is the API server's, or the network's."""
    PODS_REFUSED = "PodsRefused"
    """The API server refuses the pods: quota, Pod Security, a missing ServiceAccount or PriorityClass."""

    # Pods exist and do not get ready; the message quotes Kubernetes or the engine.
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_START_FAILED = "ContainerStartFailed"
    """The container cannot be made: a missing Secret or ConfigMap, a wrong mount, no such program in the image."""
    ENGINE_CRASHING = "EngineCrashing"
    """The engine ends again and again; the message has its last line."""
    OUT_OF_MEMORY = "OutOfMemory"
    NODE_LOST = "NodeLost"
    """A node does not report: the state of its engines is unknown."""
    ENGINE_NOT_READY = "EngineNotReady"
    """An engine that ran reports that it cannot answer: drained by hand, overloaded, or hung."""
    POD_FAILED = "PodFailed"
    """A node refused or evicted a pod."""


REASONS = frozenset(value for name, value in vars(Reason).items() if name.isupper())


class Condition(ApiModel):
    """One condition, with the fields of metav1.Condition."""

    type: Literal["Ready", "Available", "Progressing", "Reconciling", "Stalled", "ModelNameOwned"]
    """The condition's type. Ready: everything that the spec asks for runs. Available: an engine can answer.
    Progressing: work goes on. Reconciling and Stalled exist only while True, for tools that wait (kstatus): work goes
    on; it cannot go on. ModelNameOwned exists only if several services claim the model name; True for the owner.
    """
    status: Literal["True", "False", "Unknown"]
    """The condition's value: True, False or Unknown."""
    reason: str = Field(min_length=1, max_length=1024)
    """The reason in one word, out of a closed set."""
    message: str = Field(default="", max_length=32768)
    """A sentence for people, with Kubernetes' or the engine's own words where there are some."""
    last_transition_time: str
    """The time at which status last changed."""
    observed_generation: int = Field(default=0, ge=0)
    """The metadata.generation of the service that this describes."""


class RoleStatus(ApiModel):
    """The engines of one role."""

    name: str = Field(min_length=1, max_length=63)
    """The role: unified, prefill or decode."""
    replicas: int = Field(default=0, ge=0)
    """Engines that exist, of all revisions."""
    ready_replicas: int = Field(default=0, ge=0)
    """Engines of the wanted revision that are ready."""
    ready: str = Field(default="", max_length=16)
    """Ready and wanted engines, such as 1/2."""
    gpus: int = Field(default=0, ge=0)
    """GPUs of one engine, over all its pods."""
    scaled_by: Literal["Planner", "Autoscaler"] | None = None
    """The owner of the number of engines, if the role has scaling."""
    wanted: int | None = Field(default=None, ge=0)
    """Engines that the planner has decided on."""


class ModelCacheStatus(ApiModel):
    """The copy of the model on its volume."""

    claim: str | None = None
    """The PersistentVolumeClaim that has the copy."""
    host_path: str | None = None
    """The folder of nodes that have copies; the fields below are those of the copy that has begun last."""
    state: Literal["Waiting", "Copying", "Ready", "Failed"]
    """Waiting: the copy has not begun. Copying. Ready: copied and verified. Failed: the Job's log says why."""
    copied_bytes: int | None = Field(default=None, ge=0)
    """Bytes that are on the volume."""
    total_bytes: int | None = Field(default=None, ge=0)
    """Bytes of the whole model, if its source says so."""
    percent: int | None = Field(default=None, ge=0, le=100)
    """The share of the bytes that is on the volume."""


class PresetStatus(ApiModel):
    """The InferencePreset that applies to the service."""

    name: str
    """The preset's name."""
    uid: str = ""
    """The preset's metadata.uid."""
    generation: int = Field(default=0, ge=0)
    """The preset's metadata.generation whose fields the engines are to have."""
    chosen_by: Literal["Name", "Match"]
    """Name: spec.preset names it. Match: it matches model and GPU."""
    fields: list[str] = Field(default=[])
    """Fields of spec that the preset sets, such as unified.engine.maxModelLen; all others are the service's own."""


class CanaryStatus(ApiModel):
    """The revision that was judged last."""

    phase: Literal["Running", "Promoted", "RolledBack"]
    """Running: it is judged. Promoted: it replaces the old one, or has. RolledBack: the old one serves."""
    revision: str = Field(max_length=63)
    """The new revision."""
    stable_revision: str = Field(max_length=63)
    """The old one, which it is compared with."""
    step: int = Field(default=0, ge=0)
    """The present or last step, from 1."""
    steps: int = Field(default=0, ge=0)
    """The number of steps."""
    step_began: str | None = None
    """The time at which the step began; none while engines are missing for it."""
    weight: int = Field(default=0, ge=0, le=100)
    """Percentage of the sessions whose requests the new revision answers."""
    mirror: int = Field(default=0, ge=0, le=100)
    """Percentage of the requests of which it gets copies."""
    replay: bool = False
    """True if gateways have it score answers of the old revision."""
    reason: str = Field(default="", max_length=64)
    """The reason of the last decision in one word."""
    message: str = Field(default="", max_length=1024)
    """The last decision as a sentence, with the figure that decided."""
    requests: int = Field(default=0, ge=0)
    """Requests that the new revision's engines have ended in this step, copies included."""
    errors: int = Field(default=0, ge=0)
    """Requests that they failed."""
    replays: int = Field(default=0, ge=0)
    """Answers of the old revision that they have scored."""
    divergence: str | None = Field(default=None, max_length=16)
    """Mean absolute difference of log probabilities over these answers, in nats a token."""
    observed_at: str | None = None
    """The time of these figures."""


class InferenceServiceStatus(ApiModel):
    """The state that the operator last observed."""

    observed_generation: int = Field(default=0, ge=0)
    """The metadata.generation that the status describes."""
    conditions: list[Condition] = Field(
        default=[],
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Ready, Available and Progressing, each with its reason."""
    model: str | None = None
    """The name that clients write as `model`: the served name, or namespace/name if another service owns that name."""
    model_impl: str | None = Field(default=None, max_length=32)
    """The code that computes the model: native or transformers."""
    model_cache: ModelCacheStatus | None = None
    """The copy of the model on its volume, if the spec asks for one."""
    preset: PresetStatus | None = None
    """The preset that applies, and the fields that it sets."""
    revision: str | None = None
    """The revision that the spec asks for."""
    canary: CanaryStatus | None = None
    """The revision that was judged last, if the spec has rollout.canary."""
    replicas: int = Field(default=0, ge=0)
    """Engines that exist, of all revisions."""
    ready_replicas: int = Field(default=0, ge=0)
    """Engines that can answer, of all revisions."""
    roles: list[RoleStatus] = Field(
        default=[],
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """The engines of each role of the spec."""
    tensor_parallel: str | None = Field(default=None, max_length=16)
    """GPUs that share every layer of an engine; prefill/decode where these differ, such as 1/2."""
    gpus: int = Field(default=0, ge=0)
    """GPUs of all engines that the spec asks for."""
    selector: str | None = None
    """Label selector of the engines that `spec.unified.replicas` counts, for autoscalers."""
    url: str | None = None
    """The URL for OpenAI clients: the gateway's if the operator knows one, else that of the engines' Service."""
