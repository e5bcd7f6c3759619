"""The API verbs that the operator uses, and no others; the chart's ClusterRole equals this by test."""

from typing import Any

from mini_infer_contract.resources import GROUP, PLURAL
from mini_infer_operator.objects.kinds import KINDS

RULES: list[dict[str, Any]] = [
    *({"apiGroups": [kind.group], "resources": [kind.plural], "verbs": list(kind.verbs)} for kind in KINDS),
    {"apiGroups": [GROUP], "resources": [f"{PLURAL}/status"], "verbs": ["get", "patch"]},
]
"""`rules` of a ClusterRole (or of Roles, where the operator is given namespaces)."""

LEASE_RULES: list[dict[str, Any]] = [
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]},
]
"""`rules` of a Role in the operator's own namespace: its pods agree by a Lease on which of them works."""

CRD_RULES: list[dict[str, Any]] = [
    {
        "apiGroups": ["apiextensions.k8s.io"],
        "resources": ["customresourcedefinitions"],
        "resourceNames": [f"{PLURAL}.{GROUP}"],
        "verbs": ["get", "patch"],
    }
]
"""What `mini-infer-operator --apply-crd` uses where there is a CRD already: the rights of the chart's hook."""
