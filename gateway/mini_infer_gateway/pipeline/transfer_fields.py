"""Rejects fields of a body that direct an engine to another engine for keys and values: no client may set them. Pure.

An engine that obeyed them would fetch the cache of any host that a client names, and serve it to other clients.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from mini_infer_web.api_errors import ApiError

TRANSFER_FIELDS = frozenset(
    (
        "kv_transfer_params",  # vLLM, and engines of ours
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),  # SGLang
        "disaggregated_params",  # TensorRT-LLM
    )
)
_WITHIN = (("vllm_xargs",), ("sampling_params",), ("sampling_params", "extra_args"))
"""Objects in a body whose fields vLLM treats as its own."""
_WATCHED = TRANSFER_FIELDS.union(path[0] for path in _WITHIN)
"""Top-level fields that need a closer look; most bodies have none of them."""


def refuse_transfer_fields(fields: Mapping[str, Any]) -> None:
    """Raises ApiError 400, which names the field, if a client's body contains one that is not null."""
    if _WATCHED.isdisjoint(fields):
        return
    _refuse(fields, ())
    for path in _WITHIN:
        inner: Any = fields
        for name in path:
            inner = inner.get(name) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping):
            _refuse(inner, path)


def _refuse(fields: Mapping[str, Any], path: Iterable[str]) -> None:
    if TRANSFER_FIELDS.isdisjoint(fields):
        return
    for name in sorted(TRANSFER_FIELDS & fields.keys()):
        if fields[name] is not None:
            where = ".".join((*path, name))
            message = f"{where} is chosen by the gateway, which says to engines where keys and values are: leave it out"
            raise ApiError(400, message, param=where, code="unsupported_parameter")
