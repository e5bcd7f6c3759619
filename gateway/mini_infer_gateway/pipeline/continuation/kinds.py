"""Chooses the kind of continuation for a stream whose engine may die."""

from collections.abc import Mapping
from typing import Any

from mini_infer_apis.dialects.responses import LOGPROBS
from mini_infer_gateway.paths import StreamForm
from mini_infer_gateway.pipeline.continuation.base import Continuation, can_be_continued, may_outlive_its_engine
from mini_infer_gateway.pipeline.continuation.messages import MessageContinuation
from mini_infer_gateway.pipeline.continuation.replayed import ReplayedContinuation
from mini_infer_gateway.pipeline.continuation.responses import ReplayedResponse, ResponseContinuation

RESUMED: Mapping[StreamForm, type[Continuation]] = {
    "chunks": Continuation,
    "messages": MessageContinuation,
    "responses": ResponseContinuation,
}
"""Continuations by stream form for which another engine resumes the stream after its last token."""
REPLAYED: Mapping[StreamForm, type[Continuation]] = {"chunks": ReplayedContinuation, "responses": ReplayedResponse}
"""Continuations by stream form for which another engine regenerates the stream; the client receives only the new part.
"""


def continuation_of(form: StreamForm, fields: Mapping[str, Any]) -> type[Continuation] | None:
    """Returns the kind for a request with these fields and this stream form; None if no engine can continue it."""
    if can_be_continued(fields):
        return RESUMED[form]
    replays = may_outlive_its_engine(fields) and (form == "chunks" or LOGPROBS in (fields.get("include") or ()))
    return REPLAYED.get(form) if replays else None
