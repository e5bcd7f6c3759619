"""The InferenceService as the API server stores it: names, and typed models equal by test to `crds/`."""

GROUP = "serving.mini-infer.io"
VERSION = "v1alpha1"
KIND = "InferenceService"
PLURAL = "inferenceservices"
FIELD_MANAGER = "mini-infer-operator"

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
