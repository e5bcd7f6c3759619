"""The API verbs that the operator uses, and no others; the chart's ClusterRole equals this by test."""

from typing import Any

from mini_infer_operator.objects.kinds import KINDS
from mini_infer_operator.resource import GROUP, PLURAL, SCALER_PLURAL

RULES: list[dict[str, Any]] = [
    *({"apiGroups": [kind.group], "resources": [kind.plural], "verbs": list(kind.verbs)} for kind in KINDS),
    {"apiGroups": [GROUP], "resources": [f"{PLURAL}/status", f"{SCALER_PLURAL}/status"], "verbs": ["get", "patch"]},
]
"""`rules` of a ClusterRole (or of Roles, where the operator is given namespaces)."""

LEASE_RULES: list[dict[str, Any]] = [
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]},
]
"""`rules` of a Role in the operator's own namespace: its pods agree by a Lease on which of them works."""

PEER_ROOT_RULES: list[dict[str, Any]] = [
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
    {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["mini-infer-peer-root"], "verbs": ["get"]},
]
"""`rules` of a Role in the operator's own namespace: the root secret of peers, NAME-peer-root of the installation's
name. A right to create knows no names."""

CRD_RULES: list[dict[str, Any]] = [
    {
        "apiGroups": ["apiextensions.k8s.io"],
        "resources": ["customresourcedefinitions"],
        "resourceNames": [f"{PLURAL}.{GROUP}", f"{SCALER_PLURAL}.{GROUP}"],
        "verbs": ["get", "patch"],
    },
    {"apiGroups": ["apiextensions.k8s.io"], "resources": ["customresourcedefinitions"], "verbs": ["create"]},
]
"""What `mini-infer-operator --apply-crd` uses: the rights of the chart's hook. A right to create knows no names."""
