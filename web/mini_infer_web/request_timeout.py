"""Computes how long a whole request may take: the server's limit, which a client's header can make shorter."""

import math
from collections.abc import Iterable

from mini_infer_contract.launch import REQUEST_TIMEOUT_HEADER
from mini_infer_web.api_errors import ApiError

_NAME = REQUEST_TIMEOUT_HEADER.encode()


def request_timeout_s(headers: Iterable[tuple[bytes, bytes]], limit_s: float) -> float:
    """Returns the seconds that a request with these headers, names in lower case, may take; infinite if there is no
    limit. `limit_s` is the server's limit, 0 if it has none.

    Raises ApiError 400 if the header is no number of seconds.
    """
    limit_s = limit_s or math.inf
    sent = [value for name, value in headers if name == _NAME]
    if not sent:
        return limit_s
    try:
        requested_s = float(sent[-1])
    except ValueError:
        requested_s = 0.0
    if not requested_s > 0:
        shown = sent[-1][:40].decode("latin-1")
        raise ApiError(
            400,
            f"the header {REQUEST_TIMEOUT_HEADER} is {shown!r}: send a number of seconds above 0",
            param=REQUEST_TIMEOUT_HEADER,
            code="invalid_value",
        )
    return min(limit_s, requested_s)


def timed_out(timeout_s: float) -> ApiError:
    """Returns the error that ends a request that takes longer."""
    return ApiError(
        408,
        f"the request has not been finished within {timeout_s:g} s ({REQUEST_TIMEOUT_HEADER}, --request-timeout): "
        "ask for fewer tokens, or allow more time",
        code="request_timeout",
    )
