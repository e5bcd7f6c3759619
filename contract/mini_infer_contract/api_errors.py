"""Errors in OpenAI's shape, the same from an engine and from the gateway."""

from typing import Any

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


def read_json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a request's body. ApiError 400: it is none, and where it goes wrong."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the request body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the request body must be a JSON object, not {type(value).__name__}", code="invalid_json")
    return value


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
