"""Rules for fields that the engine cannot serve yet: they are refused with a message, never accepted and broken."""

from typing import Any

from pydantic.alias_generators import to_camel

from mini_infer_operator.resource.reserved import ROLES
from mini_infer_operator.resource.rules import Rule
from mini_infer_operator.resource.spec import TRANSFER_OPTIONS


def _above_one(role: str, size: str) -> str:
    """Returns CEL that is true if the role has `parallelism.SIZE` above 1."""
    parallelism = f"self.spec.{role}.parallelism"
    return f"(has(self.spec.{role}) && has({parallelism}) && has({parallelism}.{size}) && {parallelism}.{size} > 1)"


def _is_cut(role: str) -> str:
    """Returns CEL that is true if several GPUs compute one pass of the role's engines."""
    return f"({_above_one(role, 'tensor')} || {_above_one(role, 'pipeline')})"


def _speculates(role: str) -> str:
    """Returns CEL that is true if the role exists and has speculative options."""
    engine = f"self.spec.{role}.engine"
    return f"has({engine}) && (has({engine}.speculativeMethod) || has({engine}.speculativeModel))"


def _engine_speculates(role: Any) -> bool:
    engine = role.engine
    return engine is not None and (engine.speculative_method is not None or engine.speculative_model is not None)


_HIDDEN_STATE_METHODS = ("mtp", "eagle3")
"""Methods whose drafts read hidden states of the model."""


def _reads_hidden_states(role: str) -> str:
    """Returns CEL that is true if the role exists, and its draft reads hidden states."""
    engine = f"self.spec.{role}.engine"
    is_method = f"has({engine}.speculativeMethod) && {engine}.speculativeMethod in {list(_HIDDEN_STATE_METHODS)}"
    return f"(has(self.spec.{role}) && has({engine}) && {is_method})"


def _transfers_hidden_states(name: str, role: Any) -> bool:
    engine = role.engine
    if engine is None or engine.speculative_method not in _HIDDEN_STATE_METHODS:
        return False
    return name != "unified" or bool(engine.names_transfer)


def _sizes(service: Any, size: str) -> dict[str, int]:
    """Returns one of the parallel sizes for each role that has `parallelism`."""
    sizes = {name: role.parallelism for name, role in service.roles.items() if role.parallelism is not None}
    return {name: getattr(parallelism, size) or 1 for name, parallelism in sizes.items()}


_TRANSFER_FIELDS = tuple(to_camel(option) for option in TRANSFER_OPTIONS)
_NAMES_TRANSFER = (
    f"has(self.spec.unified.engine) && ({' || '.join(f'has(self.spec.unified.engine.{f})' for f in _TRANSFER_FIELDS)})"
)

NOT_YET = (
    Rule(
        f"!({_above_one('prefill', 'pipeline')} || {_above_one('decode', 'pipeline')})",
        "stages do not hand KV cache on yet: leave parallelism.pipeline of prefill and decode out, and set tensor",
        lambda s: all(size == 1 for name, size in _sizes(s, "pipeline").items() if name != "unified"),
    ),
    Rule(
        f"!({_above_one('prefill', 'data')} || {_above_one('decode', 'data')})",
        "engines behind one port do not hand KV cache on yet: leave parallelism.data of prefill and decode out, and "
        "set replicas",
        lambda s: all(size == 1 for name, size in _sizes(s, "data").items() if name != "unified"),
    ),
    Rule(
        f"!(({_above_one('unified', 'pipeline')} || {_above_one('unified', 'data')}) && {_NAMES_TRANSFER})",
        "stages, and engines behind one port, do not read KV cache from other engines yet: leave parallelism.pipeline "
        f"and data of unified out, or {', '.join(_TRANSFER_FIELDS)} of its engine",
        lambda s: (
            all(_sizes(s, size).get("unified", 1) == 1 for size in ("pipeline", "data"))
            or s.roles["unified"].engine is None
            or not s.roles["unified"].engine.names_transfer
        ),
    ),
    Rule(
        f"!({_above_one('unified', 'data')} && {_above_one('unified', 'nodes')})",
        "parallelism.data and nodes do not go together yet: leave data out, and set replicas",
        lambda s: _sizes(s, "data").get("unified", 1) == 1 or _sizes(s, "nodes").get("unified", 1) == 1,
    ),
    Rule(
        " && ".join(
            f"!({_above_one(role, 'nodes')} && (has(self.spec.kvCache) || has(self.spec.{role}.kvCache)))"
            for role in ROLES
        ),
        "tiers of the KV cache do not span nodes yet: leave parallelism.nodes out, or kvCache",
        lambda s: all(
            size == 1 or s.roles[name].kv_cache is None for name, size in _sizes(s, "nodes").items() if name in s.roles
        ),
    ),
    Rule(
        f"!{_reads_hidden_states('prefill')} && !{_reads_hidden_states('decode')} && "
        f"!({_reads_hidden_states('unified')} && {_NAMES_TRANSFER})",
        "hidden states are not handed on with KV cache yet: leave out speculativeMethod mtp and eagle3 of prefill and "
        f"decode, and of engines with {', '.join(_TRANSFER_FIELDS)}",
        lambda s: not any(_transfers_hidden_states(name, role) for name, role in s.roles.items()),
    ),
    Rule(
        " && ".join(f"!({_is_cut(role)} && {_speculates(role)})" for role in ROLES),
        "speculative decoding runs on one GPU only yet: leave out parallelism.tensor and pipeline, or the speculative "
        "options",
        lambda s: (
            not any(
                _engine_speculates(role)
                for name, role in s.roles.items()
                if any(_sizes(s, size).get(name, 1) > 1 for size in ("tensor", "pipeline"))
            )
        ),
    ),
)
"""Rules of an InferenceService; each is removed together with the limitation that it reports."""
