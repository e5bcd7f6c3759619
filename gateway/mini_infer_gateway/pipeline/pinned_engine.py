"""Restricts a request to one engine that its client names, where the client may see engines at all."""

from collections.abc import Callable, Sequence
from typing import Final

from mini_infer_web.api_errors import ApiError
from mini_infer_web.asgi import Scope

ENGINE_HEADER: Final = b"x-mini-infer-engine"
"""A client's header: the name of the only endpoint that may answer."""


def pinned(
    scope: Scope, model: str, names: Sequence[str], may_pin: Callable[[Scope], bool]
) -> tuple[str, Sequence[str]]:
    """Returns the name and the endpoints under which a request is placed: those of its model, or the one it names.

    `may_pin` returns True if the client of a request may name an engine.
    Raises ApiError: 403 if the client may not name an engine, 404 if the model has no such engine.
    """
    sent = b""
    for name, value in scope["headers"]:
        if name == ENGINE_HEADER:
            sent = value
    if not sent:
        return model, names
    wanted = sent.decode("latin-1")
    if not may_pin(scope):
        message = "x-mini-infer-engine is for administrators' keys: leave it out, and the gateway chooses an engine"
        raise ApiError(403, message, code="engine_not_chosen_by_clients")
    if wanted not in names:
        raise ApiError(404, f"model {model!r} has no engine {wanted[:200]!r} now", code="engine_not_found")
    return f"{model}@{wanted}", (wanted,)
