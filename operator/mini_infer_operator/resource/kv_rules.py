"""Rules on options and tiers of the KV cache that do not go together, or each start of the engine would be refused.

What depends on the model, such as sliding windows, is left to the engine.
"""

from collections.abc import Callable
from typing import Any

from pydantic.alias_generators import to_camel

from mini_infer_operator.resource.reserved import ROLES
from mini_infer_operator.resource.rules import Rule

_SELECTS = "(has(self.kvSelection) && self.kvSelection == 'quest')"
_IS_QUANTIZED = "(has(self.kvCacheDtype) && self.kvCacheDtype != 'auto')"


def _selects(engine: Any) -> bool:
    return bool(engine.kv_selection == "quest")


def _is_quantized(engine: Any) -> bool:
    return engine.kv_cache_dtype not in (None, "auto")


ENGINE_KV_RULES = (
    Rule(
        "!has(self.kvPolicy) || self.kvPolicy == 'full' || has(self.kvBudget)",
        "kvPolicy needs kvBudget, the tokens that a sequence retains: add it, or write kvPolicy: full",
        lambda e: e.kv_policy in (None, "full") or e.kv_budget is not None,
    ),
    Rule(
        f"!has(self.kvSelectionBudget) || {_SELECTS}",
        "kvSelectionBudget goes with kvSelection: quest alone: add that, or leave it out",
        lambda e: e.kv_selection_budget is None or _selects(e),
    ),
    Rule(
        f"!({_SELECTS} && {_IS_QUANTIZED})",
        "kvSelection bounds keys in the model's dtype: leave kvCacheDtype or kvSelection out",
        lambda e: not (_selects(e) and _is_quantized(e)),
    ),
    Rule(
        f"!({_SELECTS} && (has(self.speculativeMethod) || has(self.speculativeModel)))",
        "kvSelection does not check draft tokens yet: leave it or the speculative options out",
        lambda e: not (_selects(e) and (e.speculative_method is not None or e.speculative_model is not None)),
    ),
)
"""Rules of an EngineSpec."""


def _engine_has(role: str, option: str, test: str) -> str:
    """Returns CEL that is true if an option of an existing role's engine is written and passes a test."""
    engine = f"self.spec.{role}.engine"
    return f"(has({engine}) && has({engine}.{to_camel(option)}) && {engine}.{to_camel(option)} {test})"


def _has_tiers(role: str) -> str:
    return f"(has(self.spec.kvCache) || has(self.spec.{role}.kvCache))"


def _packs(role: str) -> str:
    """Returns CEL that is true if an existing role's tiers have four bits an element."""

    def is_int4(tiers: str) -> str:
        return f"(has({tiers}) && has({tiers}.dtype) && {tiers}.dtype == 'int4')"

    own, common = f"self.spec.{role}.kvCache", "self.spec.kvCache"
    return f"({is_int4(own)} || (!has({own}) && {is_int4(common)}))"


def _evicts(role: str) -> str:
    policy, selection = _engine_has(role, "kv_policy", "!= 'full'"), _engine_has(role, "kv_selection", "== 'quest'")
    return f"({policy} || {selection})"


def _of_roles(roles: tuple[str, ...], cel: Callable[[str], str], message: str, breaks: Callable[[Any], bool]) -> Rule:
    """Returns a rule that holds unless one of these roles exists and breaks it."""
    return Rule(
        " && ".join(f"!(has(self.spec.{role}) && {cel(role)})" for role in roles),
        message,
        lambda s: not any(breaks(role) for name, role in s.roles.items() if name in roles and role.engine is not None),
    )


SERVICE_KV_RULES = (
    _of_roles(
        ROLES,
        lambda role: f"{_has_tiers(role)} && {_engine_has(role, 'enable_prefix_caching', '== false')}",
        "kvCache keeps blocks of the prefix cache: leave enablePrefixCaching: false of the engine out, or kvCache",
        lambda r: r.kv_cache is not None and r.engine.enable_prefix_caching is False,
    ),
    _of_roles(
        ROLES,
        lambda role: f"{_packs(role)} && " + _engine_has(role, "kv_cache_dtype", "!= 'auto'"),
        "kvCache.dtype int4 packs pages in the model's dtype: leave it or kvCacheDtype of the engine out",
        lambda r: r.kv_cache is not None and r.kv_cache.dtype == "int4" and _is_quantized(r.engine),
    ),
    _of_roles(
        ("prefill", "decode"),
        _evicts,
        "whole KV caches go from prefill to decode: leave kvPolicy and kvSelection of their engines out, or write "
        "unified",
        lambda r: r.engine.kv_policy not in (None, "full") or _selects(r.engine),
    ),
)
"""Rules of an InferenceService."""
