"""The id of a request, which stands on every answer and in every log line: the client's own, or a new one."""

import secrets
from collections.abc import Iterable
from typing import Final

from mini_infer_contract.launch import REQUEST_ID_HEADER
from mini_infer_web.api_errors import ApiError

LONGEST_REQUEST_ID: Final = 200
_NAME: Final = REQUEST_ID_HEADER.encode()
_PRINTABLE: Final = bytes(range(0x21, 0x7F))


def request_id_in(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, ApiError | None]:
    """Returns the id to use, and a 400 for the answer if the client sent one that cannot be logged.

    `headers`: as ASGI has them, names in lower case.
    """
    sent = [value for name, value in headers if name == _NAME]
    if len(sent) == 1 and _is_usable(sent[0]):
        return sent[0].decode("ascii"), None
    return secrets.token_hex(16), _bad_request_id() if sent else None


def _is_usable(value: bytes) -> bool:
    return 0 < len(value) <= LONGEST_REQUEST_ID and not value.translate(None, _PRINTABLE)


def _bad_request_id() -> ApiError:
    return ApiError(
        400,
        f"send the header {REQUEST_ID_HEADER} once or not at all: 1 to {LONGEST_REQUEST_ID} printable ASCII characters "
        "without spaces",
        param=REQUEST_ID_HEADER,
        code="bad_request_id",
    )
