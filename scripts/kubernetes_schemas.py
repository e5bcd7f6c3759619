"""Writes tests/support/kubernetes_schemas.json: the fields of Kubernetes' objects by version, 1.30 to 1.36.

usage: kubernetes_schemas.py FOLDER      FOLDER has kubernetes-30.*.whl to kubernetes-36.*.whl:
    pip download --no-deps -d FOLDER 'kubernetes>=30,<31'      and so on

The official client's models are generated from the OpenAPI document of the Kubernetes version with their major number.
The file has the types that the operator and the chart use, each version as the difference from the one before it.
"""

import ast
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "tests" / "support" / "kubernetes_schemas.json"
FIRST, LAST = 30, 36
ROOTS = {
    "v1/ConfigMap": "V1ConfigMap",
    "v1/Event": "CoreV1Event",
    "v1/PersistentVolumeClaim": "V1PersistentVolumeClaim",
    "v1/Pod": "V1Pod",
    "v1/Secret": "V1Secret",
    "v1/Service": "V1Service",
    "v1/ServiceAccount": "V1ServiceAccount",
    "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy": "V1ValidatingAdmissionPolicy",
    "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicyBinding": "V1ValidatingAdmissionPolicyBinding",
    "apiextensions.k8s.io/v1/CustomResourceDefinition": "V1CustomResourceDefinition",
    "apps/v1/ControllerRevision": "V1ControllerRevision",
    "apps/v1/Deployment": "V1Deployment",
    "autoscaling/v2/HorizontalPodAutoscaler": "V2HorizontalPodAutoscaler",
    "batch/v1/Job": "V1Job",
    "coordination.k8s.io/v1/Lease": "V1Lease",
    "networking.k8s.io/v1/Ingress": "V1Ingress",
    "networking.k8s.io/v1/NetworkPolicy": "V1NetworkPolicy",
    "policy/v1/PodDisruptionBudget": "V1PodDisruptionBudget",
    "rbac.authorization.k8s.io/v1/ClusterRole": "V1ClusterRole",
    "rbac.authorization.k8s.io/v1/ClusterRoleBinding": "V1ClusterRoleBinding",
    "rbac.authorization.k8s.io/v1/Role": "V1Role",
    "rbac.authorization.k8s.io/v1/RoleBinding": "V1RoleBinding",
}
_REQUIRED = re.compile(r"Invalid value for `(\w+)`, must not be `None`")
_INNER = re.compile(r"[A-Z]\w+")
Type = dict[str, str]
"""The type of each field by its name in JSON; a required field's type ends with `!`."""


def types_of(wheel: Path) -> dict[str, Type]:
    """Returns the types that objects of ROOTS contain."""
    with zipfile.ZipFile(wheel) as archive:
        names = {_class_name(name): name for name in archive.namelist() if "/client/models/" in name}
        found, due = dict[str, Type](), list(ROOTS.values())
        while due:
            name = due.pop()
            if name not in found:
                found[name] = _fields(archive.read(names[name.lower()]).decode())
                due += [inner for kind in found[name].values() for inner in _INNER.findall(kind)]
    return dict(sorted(found.items()))


def _class_name(path: str) -> str:
    return Path(path).stem.replace("_", "").lower()


def _fields(source: str) -> Type:
    tables: dict[str, Any] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Dict):
            tables[node.targets[0].id] = ast.literal_eval(node.value)
    required = set(_REQUIRED.findall(source))
    names = tables["attribute_map"]
    return {
        names[attribute]: re.sub(r"dict[(\[]str, ", "map[", kind).replace(")", "]") + "!" * (attribute in required)
        for attribute, kind in sorted(tables["openapi_types"].items())
    }


def main() -> None:
    """Writes the file."""
    versions, before = dict[str, dict[str, Type]](), dict[str, Type]()
    for major in range(FIRST, LAST + 1):
        (wheel,) = sorted(Path(sys.argv[1]).glob(f"kubernetes-{major}.*.whl"))[-1:]
        types = types_of(wheel)
        versions[f"1.{major}"] = {name: fields for name, fields in types.items() if before.get(name) != fields}
        before = before | types
    OUT.write_text(json.dumps({"kinds": ROOTS, "versions": versions}, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
