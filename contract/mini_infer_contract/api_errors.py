"""Errors in OpenAI's shape, the same from an engine and from the gateway."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec


class ApiError(Exception):
    """A request that cannot be served; the message names the thing, the value and the remedy.

    `param` is the field at fault, `code` a stable machine-readable reason such as "model_not_found".
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON body, https://platform.openai.com/docs/guides/error-codes."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def refuse_field(where: str, message: str, code: str | None = None) -> NoReturn:
    """The 400 of the field that `where` names, such as "messages[2].content"; `message` is the rest of the sentence."""
    raise ApiError(400, f"{where} {message}", param=where, code=code)


def unknown_model(model: str, known: Sequence[str]) -> ApiError:
    """The 404 of a model's name that nobody has."""
    named = repr(model if len(model) <= _MAX_NAME else f"{model[:_MAX_NAME]}...")
    models = ", ".join(known) or "none yet"
    message = f"the model {named} does not exist; models here: {models}"
    return ApiError(404, message, param="model", code="model_not_found")


_MAX_NAME = 200
"""Characters of a name in an error."""


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How an API tells of errors."""

    body: Callable[[ApiError, str], dict[str, Any]]
    """The JSON object of an error's answer; the second is the request's id."""
    event_name: str = ""
    """Of the server-sent event that ends a stream with an error; "": it has no name, as OpenAI's have none."""
    id_header: str = ""
    """The API's own header for the request's id, beside x-request-id; "": it has none."""

    def event(self, error: ApiError, request_id: str) -> bytes:
        """The server-sent event that ends a stream with `error`."""
        name = f"event: {self.event_name}\n".encode() if self.event_name else b""
        return name + b"data: " + msgspec.json.encode(self.body(error, request_id)) + b"\n\n"


OPENAI_ERRORS = ErrorShape(lambda error, request_id: error.body())


def context_length(max_model_len: int) -> str:
    """Says how long the context is, in the words by which OpenAI's clients tell a prompt that is too long."""
    return f"this model's maximum context length is {max_model_len} tokens (max_model_len)"


def read_json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a request's body. ApiError 400: it is none, and where it goes wrong."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the request body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the request body must be a JSON object, not {type(value).__name__}", code="invalid_json")
    return value


_TYPES = {403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
