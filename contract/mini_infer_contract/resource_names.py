"""Names of the InferenceService and its pods that operator, gateway and users' tools agree on."""

GROUP = "serving.mini-infer.io"
VERSION = "v1alpha1"
KIND = "InferenceService"
PLURAL = "inferenceservices"
SCALER_KIND = "InferenceScaler"
SCALER_PLURAL = "inferencescalers"

# Labels on every child object, and on the pods that the gateway watches.
LABEL_SERVICE = f"{GROUP}/service"
"""metadata.name of the InferenceService."""
LABEL_ROLE = f"{GROUP}/role"
LABEL_REVISION = f"{GROUP}/revision"
LABEL_DRAINING = f"{GROUP}/draining"
"""Is "true" on a pod that is chosen to go: gateways send it nothing new."""

# Written by LeaderWorkerSet on the pods of a group over several nodes, of which the leader alone answers requests.
# https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables/
LABEL_GROUP = "leaderworkerset.sigs.k8s.io/group-key"
"""A value that all pods of one group share, and no other pod has."""
LABEL_GROUP_INDEX = "leaderworkerset.sigs.k8s.io/group-index"
"""A group's index within its LeaderWorkerSet: the highest is removed first."""
LABEL_WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
""" "0" on a group's leader; a pod with another value is no endpoint."""

# Annotations on the pods: what the gateway must know of an engine beside its address.
ANNOTATION_DRAINING_SINCE = f"{GROUP}/draining-since"
"""The time since when a pod with the draining label has it, RFC 3339."""
ANNOTATION_IGNORE_MANAGERS = f"{GROUP}/ignore-managers"
"""On an InferenceService: field managers, separated by commas, whose additions to Deployments are left alone."""
ANNOTATION_MODEL = f"{GROUP}/model"
"""The served model name."""
ANNOTATION_PEER_AUTH = f"{GROUP}/peer-auth"
""" "service" if the engine has its service's peer secret; without it peers prove nothing."""
ANNOTATION_SERVICE_CREATED = f"{GROUP}/service-created"
"""RFC 3339: the oldest service owns a bare model name that several claim."""

ROLES = ("unified", "prefill", "decode")
"""Fields of `spec`, and values of the role label."""
ANSWERING_ROLES = ("unified", "decode")
"""The roles whose engines answer clients' requests."""
