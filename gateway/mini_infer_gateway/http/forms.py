"""Reads the short fields of forms with files (multipart/form-data, RFC 7578), such as audio to be transcribed.

A web page can make any browser send a form, but not with an Authorization header: a form without one is rejected.
"""

import re
from collections.abc import Iterator

from mini_infer_web.api_errors import ApiError
from mini_infer_web.asgi import Headers

MOST_PARTS = 64
LONGEST_VALUE_BYTES = 1 << 16
_MEDIA_TYPE = "multipart/form-data"
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'^content-disposition:[^\r]*;\s*name="([^"\r]*)"', re.IGNORECASE | re.MULTILINE)
_FILE = re.compile(rb"^content-disposition:[^\r]*;\s*filename", re.IGNORECASE | re.MULTILINE)


def boundary_of(headers: Headers) -> bytes:
    """Returns the boundary between the parts of a request's form; empty if the request is not a form.

    Raises ApiError: 415 if a web page could have sent the form, 400 if its head is malformed.
    """
    content_type = next((value.decode("latin-1") for name, value in headers if name == b"content-type"), "")
    if content_type.partition(";")[0].strip().lower() != _MEDIA_TYPE:
        return b""
    if not any(name == b"authorization" for name, _ in headers):
        message = "a form needs an Authorization header, whatever it says: any web page can send one without"
        raise ApiError(415, message, param="Authorization", code="not_json")
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise ApiError(400, f"Content-Type is {content_type[:100]!r}: it names no boundary", param="Content-Type")
    return (found[1] or found[2]).encode("latin-1")


def form_fields(body: bytes, boundary: bytes) -> dict[str, str | bool]:
    """Returns the fields that are not files; "stream" is a bool, as in JSON.

    The last field of a name counts. Raises ApiError 400 if the form is malformed.
    """
    fields: dict[str, str | bool] = {}
    for head, start, end in _parts(body, boundary):
        name = _NAME.search(head)
        if name is None:
            raise ApiError(400, "a part of the form has no name", code="invalid_form")
        if not _FILE.search(head) and end - start <= LONGEST_VALUE_BYTES:
            fields[name[1].decode("utf-8", "replace")] = body[start:end].decode("utf-8", "replace")
    if "stream" in fields:
        fields["stream"] = fields["stream"] == "true"
    return fields


def with_model_field(body: bytes, boundary: bytes, model: str) -> bytes:
    """Returns the form with each `model` set to `model`, and every other byte unchanged."""
    pieces, copied = [], 0
    for head, start, end in _parts(body, boundary):
        if (name := _NAME.search(head)) and name[1] == b"model":
            pieces += [body[copied:start], model.encode()]
            copied = end
    return b"".join([*pieces, body[copied:]])


def _parts(body: bytes, boundary: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yields (headers, start and end of the content) of each part. Raises ApiError 400 if the parts are malformed."""
    between = b"\r\n--" + boundary
    position = 0 if body.startswith(between[2:]) else body.find(between) + 2
    if position == 1:
        message = f"the form is broken: {boundary[:70]!r}, the boundary of its Content-Type, is not in it"
        raise ApiError(400, message, code="invalid_form")
    for _ in range(MOST_PARTS):
        position += len(boundary) + 2
        if body[position : position + 2] == b"--":
            return
        start = body.find(b"\r\n\r\n", position)
        end = body.find(between, start + 2)
        if start < 0 or end < 0 or body[position : position + 2] != b"\r\n":
            raise ApiError(400, "the form is broken: a part of it does not end", code="invalid_form")
        yield body[position:start], start + 4, max(start + 4, end)
        position = end + 2
    raise ApiError(400, f"the form has more than {MOST_PARTS} parts", code="invalid_form")
