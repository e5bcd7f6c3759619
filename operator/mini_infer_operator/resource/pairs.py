"""Rules on options that prefill and decode must have in common, or every transfer between them would be refused.

The rules report before anything runs what the engines' handshake would report at run time. What only the engines know,
such as which dtype a checkpoint needs for keys and values, is left to them.
"""

from typing import Any

from pydantic.alias_generators import to_camel

from mini_infer_contract.engine_options import EngineOptions
from mini_infer_contract.options import option_rows
from mini_infer_operator.resource.rules import Rule

PAIRED_ROLES = ("prefill", "decode")
_WEIGHTS = (
    "load_format",
    "quantization",
    "quantization_calibration",
    "quantize_lm_head",
    "quantize_embeddings",
    "gguf_blocks",
)
"""Engine options that change its weights."""
_MEETS_AUTO = ("nixl", "cuda-ipc")
"""Transports that an engine with kvTransport auto may also have."""
_DEFAULTS: dict[str, Any] = {row.name: row.default for row in option_rows(EngineOptions)}


def _cel_of(role: str, option: str) -> str:
    """Returns CEL for an option of a role: the written value, else the default."""
    default, engine, name = _DEFAULTS[option], f"self.{role}.engine", to_camel(option)
    if isinstance(default, bool):
        return f"self.{role}.?engine.?{name}.orValue({str(default).lower()})"
    # An optional text has no known greatest length, and the API server refuses what may take long.
    return f"(has({engine}) && has({engine}.{name}) ? {engine}.{name} : '{default or ''}')"


def _kv_dtype_cel(role: str) -> str:
    return f"{_cel_of(role, 'kv_cache_dtype')}.replace('fp8_e4m3', 'fp8')"


_ALIKE_TENSOR = " == ".join(f"self.{role}.?parallelism.?tensor.orValue(1)" for role in PAIRED_ROLES)
_PAGE_SIZES = tuple(f"self.{role}.?engine.?pageSize" for role in PAIRED_ROLES)
_ALIKE_PAGES = f"{_PAGE_SIZES[0]}.or({_PAGE_SIZES[1]}) == {_PAGE_SIZES[1]}.or({_PAGE_SIZES[0]})"
"""CEL that compares the page sizes if both roles have one written."""


def _value(role: Any, option: str) -> Any:
    value = getattr(role.engine, option) if role.engine is not None else None
    return _DEFAULTS[option] if value is None else value


def _kv_dtype(role: Any) -> str:
    return str(_value(role, "kv_cache_dtype")).replace("fp8_e4m3", "fp8")


def _tensor(role: Any) -> int:
    return (role.parallelism.tensor if role.parallelism is not None else None) or 1


def _page_sizes(spec: Any) -> set[int]:
    """Returns the page sizes that are written; the default depends on the device."""
    sizes = (role.engine.page_size for role in (spec.prefill, spec.decode) if role.engine is not None)
    return {size for size in sizes if size is not None}


def _transports_meet(spec: Any) -> bool:
    kinds = {_value(role, "kv_transport") for role in (spec.prefill, spec.decode)}
    return len(kinds) == 1 or ("auto" in kinds and not kinds.isdisjoint(_MEETS_AUTO))


def _of_pairs(cel: str, message: str, is_valid: Any) -> Rule:
    """Returns a rule that holds unless both roles exist and break it."""
    return Rule(
        f"!has(self.prefill) || !has(self.decode) || ({cel})",
        message,
        lambda s: s.prefill is None or s.decode is None or is_valid(s),
    )


_TRANSPORTS = tuple(_cel_of(role, "kv_transport") for role in PAIRED_ROLES)

PAIRS = (
    _of_pairs(
        " && ".join(f"{_cel_of('prefill', option)} == {_cel_of('decode', option)}" for option in _WEIGHTS),
        "prefill and decode must compute with the same weights, or keys and values of one are not the other's: write "
        f"the same {', '.join(map(to_camel, _WEIGHTS[:-1]))} and {to_camel(_WEIGHTS[-1])} into the engine of both",
        lambda s: all(_value(s.prefill, option) == _value(s.decode, option) for option in _WEIGHTS),
    ),
    _of_pairs(
        f"{_kv_dtype_cel('prefill')} == {_kv_dtype_cel('decode')}",
        "prefill and decode must keep keys and values alike, or no KV cache goes from one to the other: write the same "
        "kvCacheDtype into the engine of both",
        lambda s: _kv_dtype(s.prefill) == _kv_dtype(s.decode),
    ),
    _of_pairs(
        f"{_cel_of('prefill', 'kv_cache_dtype')} == 'auto' || ({_ALIKE_TENSOR} && {_ALIKE_PAGES})",
        "pages of a quantised kvCacheDtype go from prefill to decode whole only: write the same parallelism.tensor and "
        "engine.pageSize into both, or leave kvCacheDtype out",
        lambda s: (
            _kv_dtype(s.prefill) == "auto" or (_tensor(s.prefill) == _tensor(s.decode) and len(_page_sizes(s)) < 2)
        ),
    ),
    _of_pairs(
        f"{_TRANSPORTS[0]} == {_TRANSPORTS[1]} || "
        + " || ".join(
            f"({one} == 'auto' && {other} in {list(_MEETS_AUTO)})"
            for one, other in (_TRANSPORTS, tuple(reversed(_TRANSPORTS)))
        ),
        "prefill and decode have no transport in common: write the same kvTransport into the engine of both (auto "
        "meets nixl and cuda-ipc, too)",
        _transports_meet,
    ),
)
"""Rules of an InferenceServiceSpec that compare its prefill and decode roles."""
