"""Checks a JSON body's media type and undoes its compression, the same at an engine and at the gateway.

A compressed body is unpacked up to a limit: a few kilobytes can become gigabytes.
"""

import asyncio
import zlib
from collections.abc import Callable, Iterator
from itertools import islice

from mini_infer_web.api_errors import ApiError

MAX_BODY_BYTES = 16 << 20
"""Default limit of a request's body, at the gateway and at an engine: some four million tokens of text."""

_GZIP = 16 + zlib.MAX_WBITS
"""Window bits by which zlib expects gzip's format."""
_PART_BYTES = 1 << 16
_PARTS_OF_A_SLICE = 16


def check_media_type(content_type: str) -> None:
    """Raises ApiError 415 if the body does not say that it is JSON.

    A web page can make any browser post forms and plain text to a server on its user's machine, but not JSON.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        shown = repr(content_type[:100]) if content_type else "missing"
        raise ApiError(
            415, f"Content-Type is {shown}: send JSON, as application/json", param="Content-Type", code="not_json"
        )


def unpacked(body: bytes, content_encoding: str, max_bytes: int) -> bytes:
    """Returns the body without its compression: gzip, deflate, zstd, or several in the order of the header (RFC 9110,
    8.4).

    Raises ApiError 400 if it is broken, 413 if it is larger than `max_bytes` then, 415 if the encoding is not known
    here.
    """
    return b"".join(_bounded_parts(body, content_encoding, max_bytes))


async def unpacked_in_slices(
    body: bytes, content_encoding: str, max_bytes: int, reserve: Callable[[int], bool]
) -> bytes | None:
    """Returns the body without its compression, as `unpacked` does; None if `reserve` has no room for its length.

    Each slice is unpacked in a thread, and the next one only when there is room for it: sixteen megabytes take a tenth
    of a second, and hundreds of them may arrive at once.
    """
    parts = _bounded_parts(body, content_encoding, max_bytes)
    slices, size = [], 0
    while one := await asyncio.to_thread(lambda: b"".join(islice(parts, _PARTS_OF_A_SLICE))):
        slices.append(one)
        size += len(one)
        if not reserve(size):
            return None
    return b"".join(slices)


def _bounded_parts(body: bytes, content_encoding: str, max_bytes: int) -> Iterator[bytes]:
    encodings = [name.strip().lower() for name in content_encoding.split(",") if name.strip()]
    if len(encodings) > 1 + encodings.count("identity"):
        raise ApiError(415, f"Content-Encoding is {content_encoding[:100]!r}: compress once", param="Content-Encoding")
    compressed = next((encoding for encoding in encodings if encoding != "identity"), None)
    length = 0
    for part in (body,) if compressed is None else _parts(body, compressed):
        length += len(part)
        if length > max_bytes:
            raise too_large(max_bytes)
        yield part


def too_large(max_bytes: int) -> ApiError:
    """Returns the error for a body above the limit."""
    return ApiError(
        413, f"the body has more than {max_bytes} bytes, this server's limit (--max-body-size)", code="body_too_large"
    )


def _parts(body: bytes, encoding: str) -> Iterator[bytes]:
    if encoding in ("gzip", "x-gzip"):
        return _inflated(body, _GZIP, encoding)
    if encoding == "deflate":
        return _inflated(body, zlib.MAX_WBITS, encoding)
    if encoding == "zstd":
        return _of_zstd(body)
    raise ApiError(
        415,
        f"Content-Encoding is {encoding[:100]!r}: send gzip, deflate or zstd, or no compression",
        param="Content-Encoding",
        code="unknown_encoding",
    )


def _inflated(body: bytes, window_bits: int, encoding: str) -> Iterator[bytes]:
    inflate = zlib.decompressobj(window_bits)
    rest = body
    try:
        while rest and not inflate.eof:
            yield inflate.decompress(rest, _PART_BYTES)
            rest = inflate.unconsumed_tail
        while not inflate.eof and (part := inflate.decompress(b"", _PART_BYTES)):
            yield part
    except zlib.error as error:
        raise _broken(encoding, str(error)) from None
    if not inflate.eof:
        raise _broken(encoding, "it ends too early")


def _of_zstd(body: bytes) -> Iterator[bytes]:
    import zstandard  # only here: few clients send it, and a server starts sooner without

    try:
        with zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).stream_reader(body) as reader:
            read = 0
            while part := reader.read(_PART_BYTES):
                read += len(part)
                yield part
    except zstandard.ZstdError as error:
        raise _broken("zstd", str(error)) from None
    if body and not read:
        raise _broken("zstd", "it ends too early")


_LARGEST_WINDOW = 8 << 20
"""RFC 9659: what a receiver of zstd over HTTP must take at least, and a sender may use at most."""


def _broken(encoding: str, reason: str) -> ApiError:
    return ApiError(400, f"the body is no {encoding}, as Content-Encoding says: {reason}", code="invalid_encoding")
