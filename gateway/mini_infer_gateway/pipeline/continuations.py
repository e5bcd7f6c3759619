"""Which way of going on fits a stream whose engine may die."""

from collections.abc import Mapping
from typing import Any

from mini_infer_apis.dialects.responses import LOGPROBS
from mini_infer_gateway.paths import StreamForm
from mini_infer_gateway.pipeline.continuation import Continuation, can_be_continued, may_outlive_its_engine
from mini_infer_gateway.pipeline.message_continuation import MessageContinuation
from mini_infer_gateway.pipeline.replayed_continuation import ReplayedContinuation
from mini_infer_gateway.pipeline.response_continuation import ReplayedResponse, ResponseContinuation

RESUMED: Mapping[StreamForm, type[Continuation]] = {
    "chunks": Continuation,
    "messages": MessageContinuation,
    "responses": ResponseContinuation,
}
"""Another engine takes the stream up behind its last token."""
REPLAYED: Mapping[StreamForm, type[Continuation]] = {"chunks": ReplayedContinuation, "responses": ReplayedResponse}
"""Another engine makes the stream again, of which the client gets what it has not got."""


def continuation_of(form: StreamForm, fields: Mapping[str, Any]) -> type[Continuation] | None:
    """For a request with these fields on a path with streams of this form; None: nobody can go on with it."""
    if can_be_continued(fields):
        return RESUMED[form]
    replays = may_outlive_its_engine(fields) and (form == "chunks" or LOGPROBS in (fields.get("include") or ()))
    return REPLAYED.get(form) if replays else None
