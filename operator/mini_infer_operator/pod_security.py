"""Limits what the pods of a service may do on their node, and which credentials of their namespace they may use. Pure.

Users who may create InferenceServices choose image and template of pods that the operator creates with its own rights.
Without limits such a user gets the node by a hostPath volume, and every Secret and ServiceAccount of the namespace.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

from mini_infer_operator.pod_security_standards import Use, uses_of, uses_of_cache
from mini_infer_operator.resource import InferenceService, Reason
from mini_infer_operator.status import PermanentFailure

Profile = Literal["restricted", "baseline", "privileged"]
"""Kubernetes' Pod Security Standards: https://kubernetes.io/docs/concepts/security/pod-security-standards/"""
PROFILES: tuple[Profile, ...] = get_args(Profile)
DEFAULT_SECRETS = ("hub-token", "hf-token")
"""Names of Secrets with tokens for gated models, which `model.tokenSecret` is for."""
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSecurity:
    """The operator's limits on pods. Names are shell patterns of objects: `hub-*`, with a namespace `team-a/*`."""

    profile: Profile = "restricted"
    secrets: tuple[str, ...] = DEFAULT_SECRETS
    """Secrets that pods may get as files or variables. Secrets for pulling images are not limited: only the kubelet
    reads them.
    """
    service_accounts: tuple[str, ...] = ()
    """ServiceAccounts whose identity pods may have; pods that name none have no token."""

    def failure(
        self, service: InferenceService, roles: Collection[str], *, copies: bool = True
    ) -> PermanentFailure | None:
        """Returns the fields for which pods of these roles must not be created, each with what would allow it; None if
        they may. `copies`: the Job that copies the model is to be created, too.
        """
        found = list(dict.fromkeys(self._violations(service, roles, copies)))
        if not found:
            return None
        more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        message = (
            f"this operator does not allow {'; '.join(found[:_MOST_NAMED])}{more}. Remove the field, or ask whoever "
            "runs the operator for the flag (chart: engine.podSecurity)"
        )
        return PermanentFailure(Reason.POD_SECURITY, message)

    def _violations(self, service: InferenceService, roles: Collection[str], copies: bool) -> Iterator[str]:
        namespace, token = service.metadata.namespace, service.spec.model.token_secret
        uses = [use for role in service.roles if role in roles for use in uses_of(role, service.roles[role])]
        uses += _uses_of_kv_cache(service, roles)
        if token is not None and roles:
            uses.insert(0, Use("spec.model.tokenSecret", secret=token.name))
        if service.spec.model.cache is not None and copies:
            uses += uses_of_cache(service.spec.model.cache)
        for use in uses:
            if use.profile is not None and PROFILES.index(use.profile) > PROFILES.index(self.profile):
                yield f"{use.path} (it needs --pod-security={use.profile})"
            if use.secret is not None and not _matches(namespace, use.secret, self.secrets):
                yield f"{use.path} (it needs --allow-secrets={use.secret})"
            if use.service_account is not None and not _matches(namespace, use.service_account, self.service_accounts):
                yield f"{use.path} (it needs --allow-service-accounts={use.service_account})"


def _uses_of_kv_cache(service: InferenceService, roles: Collection[str]) -> list[Use]:
    """Returns the folders of nodes that disks of the KV cache use, by the field that names each."""
    uses = []
    for name, role in service.roles.items():
        if name in roles and role.kv_cache and role.kv_cache.disk and role.kv_cache.disk.host_path is not None:
            own = getattr(service.spec, name).kv_cache is not None
            field = f"spec.{name}.kvCache" if own else "spec.kvCache"
            uses.append(Use(f"{field}.disk.hostPath", "privileged"))
    return uses


def _matches(namespace: str, name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(f"{namespace}/{name}" if "/" in pattern else name, pattern) for pattern in patterns)
