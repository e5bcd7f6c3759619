"""Finds the images in messages as clients send them. Knows no bytes, no template and no tokens.

The forms are OpenAI's: `image_url` parts of chat completions, whose `image_url` is an object or a string, and
`input_image` parts of the Responses API.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from mini_infer_web.api_errors import ApiError, FieldPath, refuse_field

IMAGE_PARTS = frozenset(("image_url", "input_image"))
"""Types of parts that are images."""


class ImageSource(NamedTuple):
    """An image of a conversation, before anything is read or fetched."""

    path: FieldPath
    """Place of its URL in the request."""
    url: str


def image_source(part: dict[str, object], where: FieldPath) -> ImageSource:
    """Returns the image of a part whose type is in `IMAGE_PARTS`. Raises ApiError 400 if it has no URL."""
    if part.get("file_id") is not None:
        refuse_field((*where, "file_id"), "is not supported, for this server keeps no files: send the image_url")
    found = part.get("image_url")
    path: FieldPath = (*where, "image_url")
    if isinstance(found, dict):
        found, path = found.get("url"), (*path, "url")
    if not isinstance(found, str) or not found:
        refuse_field(path, "must be the URL of an image, such as data:image/png;base64,...")
    return ImageSource(path, found)


def image_sources(messages: object, where: FieldPath = ("messages",)) -> list[ImageSource]:
    """Returns the images of messages in their order. Whatever is malformed is passed over: `template_messages` refuses
    it.
    """
    found = []
    for part, path in _image_parts(messages, where):
        with suppress(ApiError):
            found.append(image_source(part, path))
    return found


def _image_parts(messages: object, where: FieldPath) -> Iterator[tuple[dict[str, object], FieldPath]]:
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for place, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind in IMAGE_PARTS:
                yield part, (*where, index, "content", place)
