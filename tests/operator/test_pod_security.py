"""Rights and credentials that a template must not pass on unless the operator allows them."""

from typing import Any

import pytest

from mini_infer_operator.parse import parse_service
from mini_infer_operator.pod_security import PROFILES, PodSecurity
from tests.support.services import changed

OPEN = PodSecurity(profile="privileged", secrets=("*",), service_accounts=("*",))
LOGS = {"name": "logs", "image": "i"}


def service(template: dict[str, Any], **spec: Any) -> Any:
    return parse_service(changed({"spec": {"unified": {"template": template}, **spec}}))


def volume(**source: Any) -> dict[str, Any]:
    return {"spec": {"volumes": [{"name": "v", **source}]}}


def security(**context: Any) -> dict[str, Any]:
    return {"container": {"securityContext": context}}


def environment(**source: Any) -> dict[str, Any]:
    return {"container": {"env": [{"name": "A", "valueFrom": source}]}}


def reported(allowed: PodSecurity, service: Any) -> str:
    failure = allowed.failure(service, service.roles)
    assert failure is None or failure.reason == "PodSecurity"
    return failure.message if failure else ""


RIGHTS: list[tuple[dict[str, Any], str, str]] = [
    (volume(hostPath={"path": "/"}), "privileged", "spec.volumes[v].hostPath"),
    (volume(nfs={"server": "s", "path": "/"}), "baseline", "spec.volumes[v].nfs"),
    (volume(iscsi={"targetPortal": "p"}), "baseline", "spec.volumes[v].iscsi"),
    (volume(fc={"lun": 1}), "baseline", "spec.volumes[v].fc"),
    (security(privileged=True), "privileged", "container.securityContext.privileged"),
    (security(runAsUser=0), "baseline", "container.securityContext.runAsUser"),
    (security(runAsNonRoot=False), "baseline", "container.securityContext.runAsNonRoot"),
    (security(allowPrivilegeEscalation=True), "baseline", "container.securityContext.allowPrivilegeEscalation"),
    (security(procMount="Unmasked"), "privileged", "container.securityContext.procMount"),
    (security(capabilities={"add": ["SYS_ADMIN"], "drop": ["ALL"]}), "privileged", "capabilities.add"),
    (security(capabilities={"add": ["ALL"], "drop": ["ALL"]}), "privileged", "capabilities.add"),
    (security(capabilities={"add": ["CHOWN"], "drop": ["ALL"]}), "baseline", "capabilities.add"),
    (security(capabilities={"drop": ["MKNOD"]}), "baseline", "capabilities.drop"),
    (security(seccompProfile={"type": "Unconfined"}), "privileged", "securityContext.seccompProfile"),
    (security(appArmorProfile={"type": "Unconfined"}), "privileged", "securityContext.appArmorProfile"),
    (security(seLinuxOptions={"type": "spc_t"}), "privileged", "securityContext.seLinuxOptions"),
    (security(seLinuxOptions={"user": "root"}), "privileged", "securityContext.seLinuxOptions"),
    ({"spec": {"securityContext": {"runAsUser": 0}}}, "baseline", "spec.securityContext.runAsUser"),
    (
        {"spec": {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}},
        "privileged",
        "spec.securityContext.sysctls[kernel.msgmax]",
    ),
    (
        {"spec": {"initContainers": [{**LOGS, "securityContext": {"privileged": True}}]}},
        "privileged",
        "spec.initContainers[logs].securityContext.privileged",
    ),
    (
        {"metadata": {"annotations": {"container.apparmor.security.beta.kubernetes.io/engine": "unconfined"}}},
        "privileged",
        "metadata.annotations",
    ),
]


@pytest.mark.parametrize(("template", "profile", "path"), RIGHTS, ids=[row[2] for row in RIGHTS])
def test_a_right_is_refused_when_the_profile_is_stricter(template: dict[str, Any], profile: Any, path: str) -> None:
    service_with_rights = service(template)
    for allowed in PROFILES:
        message = reported(PodSecurity(profile=allowed), service_with_rights)
        if PROFILES.index(allowed) >= PROFILES.index(profile):
            assert message == ""
        else:
            assert "spec.unified.template." in message
            assert path in message
            assert f"--pod-security={profile}" in message
            assert "engine.podSecurity" in message


SECRETS: list[tuple[dict[str, Any], str]] = [
    (volume(secret={"secretName": "db"}), "volumes[v].secret"),
    (volume(projected={"sources": [{"secret": {"name": "db"}}]}), "volumes[v].projected.sources[0].secret"),
    (volume(csi={"driver": "d", "nodePublishSecretRef": {"name": "db"}}), "volumes[v].csi.nodePublishSecretRef"),
    (
        volume(csi={"driver": "secrets-store.csi.k8s.io", "volumeAttributes": {"secretProviderClass": "db"}}),
        "volumes[v].csi.volumeAttributes.secretProviderClass",
    ),
    (volume(iscsi={"secretRef": {"name": "db"}}), "volumes[v].iscsi.secretRef"),
    (environment(secretKeyRef={"name": "db", "key": "k"}), "container.env[A].valueFrom.secretKeyRef"),
    ({"container": {"envFrom": [{"secretRef": {"name": "db"}}]}}, "container.envFrom[0].secretRef"),
    (
        {"spec": {"initContainers": [{**LOGS, "envFrom": [{"secretRef": {"name": "db"}}]}]}},
        "spec.initContainers[logs].envFrom[0].secretRef",
    ),
]


@pytest.mark.parametrize(("template", "path"), SECRETS, ids=[row[1] for row in SECRETS])
def test_a_secret_is_refused_when_no_pattern_has_its_name(template: dict[str, Any], path: str) -> None:
    service_with_rights = service(template)
    for patterns in ((), ("hub-*",), ("other/db",)):
        message = reported(PodSecurity(profile="privileged", secrets=patterns), service_with_rights)
        assert path in message
        assert "--allow-secrets=db" in message
    for patterns in (("db",), ("d*",), ("default/*",), ("hub", "default/db")):
        assert reported(PodSecurity(profile="privileged", secrets=patterns), service_with_rights) == ""


def test_a_models_token_is_refused_when_its_secret_is_no_hub_token() -> None:
    def of(name: str) -> Any:
        return service({}, model={"uri": "hf://a/b", "tokenSecret": {"name": name, "key": "password"}})

    assert reported(PodSecurity(), of("hub-token")) == ""
    assert "spec.model.tokenSecret (it needs --allow-secrets=db)" in reported(PodSecurity(), of("db"))


@pytest.mark.parametrize(
    ("template", "path", "account"),
    [
        ({"spec": {"serviceAccountName": "admin"}}, "spec.serviceAccountName", "admin"),
        (volume(projected={"sources": [{"serviceAccountToken": {"path": "t"}}]}), "serviceAccountToken", "default"),
        (volume(projected={"sources": [{"podCertificate": {}}]}), "podCertificate", "default"),
    ],
)
def test_an_identity_is_refused_when_no_pattern_has_its_service_account(
    template: dict[str, Any], path: str, account: str
) -> None:
    message = reported(PodSecurity(profile="privileged"), service(template))
    assert path in message
    assert f"--allow-service-accounts={account}" in message
    assert reported(PodSecurity(profile="privileged", service_accounts=(account,)), service(template)) == ""


@pytest.mark.parametrize(
    "template",
    [
        {},
        volume(emptyDir={}),
        volume(persistentVolumeClaim={"claimName": "weights"}),
        volume(configMap={"name": "c"}),
        volume(downwardAPI={"items": []}),
        volume(ephemeral={"volumeClaimTemplate": {}}),
        volume(image={"reference": "weights:1"}),
        volume(projected={"sources": [{"configMap": {"name": "c"}}, {"downwardAPI": {}}]}),
        volume(projected={"sources": None}),
        volume(projected={"sources": "wrong"}),
        volume(csi={"driver": "d"}),
        security(readOnlyRootFilesystem=False, runAsUser=1000, capabilities={"drop": ["ALL"]}),
        security(capabilities={"add": ["NET_BIND_SERVICE"], "drop": ["ALL"]}),
        {"spec": {"securityContext": {"fsGroup": 1, "sysctls": [{"name": "net.ipv4.tcp_rmem", "value": "1"}]}}},
        {"spec": {"imagePullSecrets": [{"name": "pull"}], "runtimeClassName": "nvidia", "initContainers": [LOGS]}},
        {"container": {"envFrom": [{"configMapRef": {"name": "c"}}], "env": [{"name": "A", "value": "b"}]}},
        environment(fieldRef={"fieldPath": "status.podIP"}),
    ],
)
def test_pod_security_allows_templates_when_they_need_no_privileges(template: dict[str, Any]) -> None:
    assert reported(PodSecurity(), service(template)) == ""


def test_pod_security_checks_only_roles_with_a_new_revision() -> None:
    """Pods of a revision whose template is stored go on: an upgrade of the operator breaks no running service."""
    service_with_rights = service(volume(hostPath={"path": "/"}))
    assert PodSecurity().failure(service_with_rights, ()) is None
    assert PodSecurity().failure(service_with_rights, ("unified",)) is not None


def test_pod_security_names_some_fields_and_counts_the_rest() -> None:
    service_with_rights = service(
        security(privileged=True, runAsUser=0, allowPrivilegeEscalation=True, runAsNonRoot=False)
    )
    assert "; and 1 more. Remove the field" in reported(PodSecurity(), service_with_rights)
    assert reported(OPEN, service_with_rights) == ""
