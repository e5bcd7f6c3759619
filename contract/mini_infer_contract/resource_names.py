"""Names of the InferenceService and its pods that operator, gateway and users' tools agree on."""

GROUP = "serving.mini-infer.io"
VERSION = "v1alpha1"
KIND = "InferenceService"
PLURAL = "inferenceservices"

# Labels on every child object, and on the pods that the gateway watches.
LABEL_SERVICE = f"{GROUP}/service"
"""metadata.name of the InferenceService."""
LABEL_ROLE = f"{GROUP}/role"
LABEL_CURRENT_ROLE = f"{GROUP}/current-role"
"""The role of a pod whose engine has switched since it started; without it LABEL_ROLE says the role."""
LABEL_REVISION = f"{GROUP}/revision"
LABEL_DRAINING = f"{GROUP}/draining"
"""Is "true" on a pod that is chosen to go: gateways send it nothing new."""

# Written by LeaderWorkerSet on the pods of a group over several nodes, of which the leader alone answers requests.
# https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables/
LABEL_GROUP = "leaderworkerset.sigs.k8s.io/group-key"
"""A value that all pods of one group share, and no other pod has."""
LABEL_WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
""" "0" on a group's leader; a pod with another value is no endpoint."""

# Annotations on the pods: what the gateway must know of an engine beside its address.
ANNOTATION_MODEL = f"{GROUP}/model"
"""The served model name."""
ANNOTATION_PEER_AUTH = f"{GROUP}/peer-auth"
""" "service" if the engine has its service's peer secret; without it peers prove nothing."""
