"""Defines the InferenceService as a whole: metadata, spec and status."""

import re
from collections.abc import Callable, Hashable
from functools import cached_property, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from mini_infer_operator.resource.kv_rules import SERVICE_KV_RULES
from mini_infer_operator.resource.not_yet import NOT_YET
from mini_infer_operator.resource.reserved import LONGEST_NAME, LONGEST_NAME_OVER_NODES, ROLES
from mini_infer_operator.resource.rules import ApiModel, Rule
from mini_infer_operator.resource.spec import InferenceServiceSpec, RoleSpec
from mini_infer_operator.resource.status import InferenceServiceStatus

_SPANS_NODES = " || ".join(
    f"(has(self.spec.{role}) && has(self.spec.{role}.parallelism) && has(self.spec.{role}.parallelism.nodes) && "
    f"self.spec.{role}.parallelism.nodes > 1)"
    for role in ROLES
)


class Metadata(BaseModel):
    """The part of an object's metadata that the operator reads."""

    model_config = ConfigDict(alias_generator=to_camel, extra="ignore", frozen=True, validate_by_name=True)
    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    annotations: dict[str, str] = {}


class InferenceService(ApiModel):
    """One model served by engines of one or more roles."""

    rules = (
        Rule(
            f"self.metadata.name.size() <= {LONGEST_NAME} && "
            "self.metadata.name.matches(r'^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            f"metadata.name must start with a letter, hold only a-z, 0-9 and -, and have at most {LONGEST_NAME} "
            "characters, such as qwen3-8b (the names of its Service and pods are made from it)",
            lambda s: (
                len(s.metadata.name) <= LONGEST_NAME
                and re.match(r"^[a-z]([-a-z0-9]*[a-z0-9])?$", s.metadata.name) is not None
            ),
        ),
        Rule(
            f"self.metadata.name.size() <= {LONGEST_NAME_OVER_NODES} || !({_SPANS_NODES})",
            f"metadata.name must have at most {LONGEST_NAME_OVER_NODES} characters where parallelism.nodes is above 1 "
            "(the names of its StatefulSets and their labels are made from it)",
            lambda s: (
                len(s.metadata.name) <= LONGEST_NAME_OVER_NODES
                or all(role.parallelism is None or (role.parallelism.nodes or 1) == 1 for role in s.roles.values())
            ),
        ),
        *SERVICE_KV_RULES,
        *NOT_YET,
    )
    api_version: Literal["serving.mini-infer.io/v1alpha1"]
    kind: Literal["InferenceService"]
    metadata: Metadata
    spec: InferenceServiceSpec
    """The desired state."""
    status: InferenceServiceStatus | None = None
    """The observed state, written by the operator."""

    @property
    def model_name(self) -> str:
        """The name that clients write as `model`."""
        return self.spec.model.name or self.metadata.name

    @cached_property
    def roles(self) -> dict[str, RoleSpec]:
        """The roles that the spec asks for, by name; each with the service's kvCache, unless it has one of its own."""
        named = {name: getattr(self.spec, name) for name in ROLES}
        return {name: self._with_kv_cache(role) for name, role in named.items() if role is not None}

    @cached_property
    def written_spec(self) -> dict[str, Any]:
        """The spec as a user may write it, as JSON."""
        return self.spec.model_dump(mode="json", by_alias=True, exclude_none=True)

    @cached_property
    def results(self) -> dict[Hashable, Any]:
        """Results of functions of this service (`once_a_service`), by function and arguments."""
        return {}

    def _with_kv_cache(self, role: RoleSpec) -> RoleSpec:
        if role.kv_cache is not None or self.spec.kv_cache is None:
            return role
        return role.model_copy(update={"kv_cache": self.spec.kv_cache})


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def once_a_service(
    function: Callable[Concatenate[InferenceService, Arguments], Result],
) -> Callable[Concatenate[InferenceService, Arguments], Result]:
    """Decorates a pure function, so that it runs once for each service object and arguments.

    A service stays one object while its spec is the same (parse.py), and passes over it are many. Arguments must be
    hashable, and nobody may change the result.
    """

    @wraps(function)
    def known(service: InferenceService, /, *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        key = function, arguments, frozenset(options.items())
        if key not in service.results:
            service.results[key] = function(service, *arguments, **options)
        result: Result = service.results[key]
        return result

    return known
