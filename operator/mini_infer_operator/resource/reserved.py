"""Names that the operator alone uses: roles, annotations, field managers, and what it reserves in engines' pods."""

from mini_infer_contract.resource_names import GROUP

SCALER_KIND = "InferenceScaler"
SCALER_PLURAL = "inferencescalers"
PRESET_KIND = "InferencePreset"
PRESET_PLURAL = "inferencepresets"
NO_PRESET = "none"
"""The value of `spec.preset` for a service to which no preset applies."""
LABEL_GROUP_INDEX = "leaderworkerset.sigs.k8s.io/group-index"
"""A group's index within its LeaderWorkerSet: the highest is removed first."""
ANNOTATION_DRAINING_SINCE = f"{GROUP}/draining-since"
"""The time since when a pod with the draining label has it, RFC 3339."""
ANNOTATION_IGNORE_MANAGERS = f"{GROUP}/ignore-managers"
"""On an InferenceService: field managers, separated by commas, whose additions to Deployments are left alone."""
ANNOTATION_SERVICE_CREATED = f"{GROUP}/service-created"
"""RFC 3339: the oldest service owns a bare model name that several claim."""
ANNOTATION_PROMOTE = f"{GROUP}/promote"
"""The annotation of an InferenceService that names the revision to replace the old one without further analysis."""
ANNOTATION_ABORT = f"{GROUP}/abort"
"""The annotation of an InferenceService that names the revision to roll back."""
ROLES = ("unified", "prefill", "decode")
"""Fields of `spec`, and values of the role label."""
ANSWERING_ROLES = ("unified", "decode")
"""The roles whose engines answer clients' requests."""

FIELD_MANAGER = "mini-infer-operator"
STATUS_FIELD_MANAGER = "mini-infer-operator-status"

RESERVED_ENGINE_FLAGS = (
    "--model",
    "--revision",
    "--served-model-name",
    "--host",
    "--port",
    "--events-port",
    "--replay-port",
    "--drain-timeout",
    "--role",
    "--transfer-port",
    "--peer-key-file",
    "--kv-host-memory",
    "--kv-host-path",
    "--kv-disk-path",
    "--kv-disk-size",
    "--kv-tier-dtype",
    "--tensor-parallel-size",
    "-tp",
    "--pipeline-parallel-size",
    "-pp",
    "--data-parallel-size",
    "-dp",
    "--enable-expert-parallel",
    "--no-enable-expert-parallel",
    "--nnodes",
    "--node-rank",
)
"""Flags that the operator writes itself; `engine.extraArgs` must not repeat them."""
RESERVED_VOLUME_PREFIX = "mini-infer-"
KV_DISK_MOUNT = "/var/cache/mini-infer"
"""The path at which the disk of the KV cache is mounted."""
RESERVED_MOUNT_PATHS = ("/tmp", "/model", "/etc/mini-infer/peers", KV_DISK_MOUNT)
"""Paths at which the operator mounts its own volumes in an engine's container."""
LONGEST_NAME = 40
"""The most characters of metadata.name: role, revision and the pods' suffixes must still fit into 63."""
LONGEST_NAME_OVER_NODES = 28
"""The most characters of metadata.name if StatefulSets run the pods: a label must fit their names with a revision of
their own.
"""
