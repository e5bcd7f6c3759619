"""Lists the API verbs that the operator uses, and no others; a test checks that the chart's ClusterRole equals them."""

from typing import Any

from mini_infer_operator.objects.kinds import KINDS
from mini_infer_operator.resource import GROUP, PLURAL, PRESET_PLURAL, SCALER_PLURAL

RULES: list[dict[str, Any]] = [
    *({"apiGroups": [kind.group], "resources": [kind.plural], "verbs": list(kind.verbs)} for kind in KINDS),
    {"apiGroups": [GROUP], "resources": [f"{PLURAL}/status", f"{SCALER_PLURAL}/status"], "verbs": ["get", "patch"]},
]
"""The `rules` of a ClusterRole (or of Roles, if the operator is given namespaces)."""

LEASE_RULES: list[dict[str, Any]] = [
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]},
]
"""The `rules` of a Role in the namespace of the Lease, by which the operators of a class elect the one that works."""

PEER_ROOT_RULES: list[dict[str, Any]] = [
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
    {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["mini-infer-peer-root"], "verbs": ["get"]},
]
"""The `rules` of a Role in the operator's own namespace: it covers the root secret of peers, NAME-peer-root, where NAME
is the installation's. A right to create cannot be restricted to names.
"""

CRD_RULES: list[dict[str, Any]] = [
    {
        "apiGroups": ["apiextensions.k8s.io"],
        "resources": ["customresourcedefinitions"],
        "resourceNames": [f"{plural}.{GROUP}" for plural in (PLURAL, SCALER_PLURAL, PRESET_PLURAL)],
        "verbs": ["get", "patch"],
    },
    {"apiGroups": ["apiextensions.k8s.io"], "resources": ["customresourcedefinitions"], "verbs": ["create"]},
]
"""The rights of `mini-infer-operator --apply-crd`, the chart's hook. A right to create cannot be restricted to names.
"""
