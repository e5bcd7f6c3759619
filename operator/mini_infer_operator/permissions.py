"""The API verbs that the operator uses, and no others; the chart's ClusterRole equals this by test."""

from typing import Any

from mini_infer_contract.resources import GROUP, PLURAL

_OWNED = [
    "get",
    "list",
    "watch",
    "create",
    "patch",
    "delete",
]  # a server-side apply that creates needs create and patch

RULES: list[dict[str, Any]] = [
    {"apiGroups": [GROUP], "resources": [PLURAL], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [GROUP], "resources": [f"{PLURAL}/status"], "verbs": ["get", "patch"]},
    {"apiGroups": ["apps"], "resources": ["deployments", "controllerrevisions"], "verbs": _OWNED},
    {"apiGroups": [""], "resources": ["services"], "verbs": _OWNED},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
]
"""`rules` of a ClusterRole (or of Roles, where the operator is given namespaces)."""
