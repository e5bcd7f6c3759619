"""Lists names that are reserved for the operator: field managers, engine flags, volumes and lengths of names."""

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
RESERVED_MOUNT_PATHS = ("/tmp", "/model", "/etc/mini-infer/peers")
"""Paths at which the operator mounts its own volumes in an engine's container."""
LONGEST_NAME = 40
"""The most characters of metadata.name: role, revision and the pods' suffixes must still fit into 63."""
LONGEST_NAME_OVER_NODES = 28
"""The most characters of metadata.name if StatefulSets run the pods: a label must fit their names with a revision of
their own.
"""
