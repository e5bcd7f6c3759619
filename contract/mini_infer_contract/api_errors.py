"""Errors in OpenAI's shape, the same from an engine and from the gateway."""

from typing import Any


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


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
