"""Names that the operator keeps for itself: field managers, engine flags, volumes and lengths of names."""

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
"""Where the operator mounts its own volumes in an engine's container."""
LONGEST_NAME = 40
"""Characters of metadata.name: role, revision and the pods' suffixes must still fit into 63."""
LONGEST_NAME_OVER_NODES = 28
"""The same where StatefulSets run the pods, whose names, with a revision of their own, must fit into a label."""
