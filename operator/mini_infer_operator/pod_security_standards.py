"""Lists the rights that the template of a role uses, by Kubernetes' Pod Security Standards and by name of credentials.
Pure.

The order of checks and the lists of harmless values are those of
https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mini_infer_operator.resource import ModelCache, RoleSpec

Object = Mapping[str, Any]
_RESTRICTED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
_BASELINE_VOLUMES = _RESTRICTED_VOLUMES | {"nfs", "iscsi", "fc"}
_RESTRICTED_CAPABILITIES = {"NET_BIND_SERVICE"}
_BASELINE_CAPABILITIES = {
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
}
_SE_LINUX_TYPES = {None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
_SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
}
_APP_ARMOR_ANNOTATION = "container.apparmor.security.beta.kubernetes.io/"
_TOKENS = ("serviceAccountToken", "podCertificate")
"""Sources of a projected volume that prove the pod's identity."""
_SECRETS_STORE = "secrets-store.csi"


@dataclass(frozen=True, slots=True)
class Use:
    """One field that uses a right: of a profile, of a Secret, or of a ServiceAccount."""

    path: str
    profile: Literal["baseline", "privileged"] | None = None
    """The strictest profile that allows the field; None if `restricted` does."""
    secret: str | None = None
    service_account: str | None = None


def uses_of(role: str, spec: RoleSpec) -> Iterator[Use]:
    """Yields every right that the role's template uses beyond what the operator gives pods, with the field's path."""
    if spec.template is None:
        return
    template = spec.template.model_dump(by_alias=True, exclude_none=True)
    path, pod, container = f"spec.{role}.template", template.get("spec", {}), template.get("container", {})
    for name, value in template.get("metadata", {}).get("annotations", {}).items():
        if name.startswith(_APP_ARMOR_ANNOTATION) and not value.startswith(("runtime/default", "localhost/")):
            yield Use(f"{path}.metadata.annotations[{name}]", "privileged")
    yield from _of_pod(f"{path}.spec", pod)
    for inner, one in [(f"{path}.container", container)] + [
        (f"{path}.spec.initContainers[{item['name']}]", item) for item in pod.get("initContainers", ())
    ]:
        yield from _of_security(f"{inner}.securityContext", one.get("securityContext", {}))
        yield from _of_environment(inner, one)


def uses_of_cache(cache: ModelCache) -> Iterator[Use]:
    """Yields the Secrets and the ServiceAccount that the pod which copies a model is given."""
    fields = cache.model_dump(by_alias=True, exclude_none=True)
    if "hostPath" in fields:
        yield Use("spec.model.cache.hostPath", "privileged")
    if "serviceAccountName" in fields:
        yield Use("spec.model.cache.serviceAccountName", service_account=fields["serviceAccountName"])
    yield from _of_environment("spec.model.cache", fields)


def _of_pod(path: str, pod: Object) -> Iterator[Use]:
    if "serviceAccountName" in pod:
        yield Use(f"{path}.serviceAccountName", service_account=pod["serviceAccountName"])
    for sysctl in pod.get("securityContext", {}).get("sysctls", ()):
        if sysctl["name"] not in _SYSCTLS:
            yield Use(f"{path}.securityContext.sysctls[{sysctl['name']}]", "privileged")
    yield from _of_security(f"{path}.securityContext", pod.get("securityContext", {}))
    for volume in pod.get("volumes", ()):
        for source, content in volume.items():
            if source != "name":
                inner = f"{path}.volumes[{volume['name']}].{source}"
                yield from _of_volume(inner, source, _mapping(content), pod.get("serviceAccountName", "default"))


def _of_security(path: str, context: Object) -> Iterator[Use]:
    """Yields the rights that a security context uses, of a pod or of a container."""
    if context.get("privileged"):
        yield Use(f"{path}.privileged", "privileged")
    if context.get("procMount", "Default") != "Default":
        yield Use(f"{path}.procMount", "privileged")
    for profile in ("seccompProfile", "appArmorProfile"):
        if context.get(profile, {}).get("type") == "Unconfined":
            yield Use(f"{path}.{profile}", "privileged")
    labels = context.get("seLinuxOptions", {})
    if labels.get("type") not in _SE_LINUX_TYPES or labels.get("user") or labels.get("role"):
        yield Use(f"{path}.seLinuxOptions", "privileged")
    if context.get("allowPrivilegeEscalation"):
        yield Use(f"{path}.allowPrivilegeEscalation", "baseline")
    if context.get("runAsNonRoot") is False:
        yield Use(f"{path}.runAsNonRoot", "baseline")
    if context.get("runAsUser") == 0:
        yield Use(f"{path}.runAsUser", "baseline")
    if "capabilities" in context:
        added = set(context["capabilities"].get("add", ()))
        if added - _BASELINE_CAPABILITIES:
            yield Use(f"{path}.capabilities.add", "privileged")
        elif added - _RESTRICTED_CAPABILITIES:
            yield Use(f"{path}.capabilities.add", "baseline")
        if "ALL" not in context["capabilities"].get("drop", ()):
            yield Use(f"{path}.capabilities.drop", "baseline")


def _of_volume(path: str, source: str, content: Object, service_account: str) -> Iterator[Use]:
    if source not in _RESTRICTED_VOLUMES:
        yield Use(path, "baseline" if source in _BASELINE_VOLUMES else "privileged")
    if source == "secret":
        yield Use(path, secret=str(content.get("secretName", "")))
    for reference in ("secretRef", "nodePublishSecretRef"):  # of iscsi, csi
        if reference in content:
            yield Use(f"{path}.{reference}", secret=str(_mapping(content[reference]).get("name", "")))
    if source == "csi" and _SECRETS_STORE in str(content.get("driver", "")):
        provider = _mapping(content.get("volumeAttributes")).get("secretProviderClass", "")
        yield Use(f"{path}.volumeAttributes.secretProviderClass", secret=str(provider))
    if source == "projected":
        for number, item in enumerate(_items(content.get("sources"))):
            if "secret" in item:
                name = str(_mapping(item["secret"]).get("name", ""))
                yield Use(f"{path}.sources[{number}].secret", secret=name)
            for token in _TOKENS:
                if token in item:
                    yield Use(f"{path}.sources[{number}].{token}", service_account=service_account)


def _of_environment(path: str, container: Object) -> Iterator[Use]:
    for variable in container.get("env", ()):
        reference = variable.get("valueFrom", {}).get("secretKeyRef")
        if reference is not None:
            yield Use(f"{path}.env[{variable['name']}].valueFrom.secretKeyRef", secret=reference["name"])
    for number, source in enumerate(container.get("envFrom", ())):
        if "secretRef" in source:
            yield Use(f"{path}.envFrom[{number}].secretRef", secret=source["secretRef"]["name"])


def _mapping(value: Any) -> Object:
    """Returns an open object's part as a mapping; the API server checks it when the pod template is written."""
    return value if isinstance(value, Mapping) else {}


def _items(value: Any) -> list[Object]:
    return [_mapping(item) for item in value] if isinstance(value, Sequence) and not isinstance(value, str) else []
