"""Names images in errors by their places in the client's request: a chat that is made of one has others.

Both have the same images in the same order, whatever becomes of the messages around them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mini_infer_prompts.image_sources import image_sources
from mini_infer_web.api_errors import FieldPath, Rename, renaming

_PREFIX = 4
"""Fields that lead to a part: messages, its message's index, content, its own index."""


def with_images(
    rename: Rename, messages: Sequence[Mapping[str, Any]], images: Sequence[Mapping[FieldPath, FieldPath]]
) -> Rename:
    """Returns `rename` with the images of a chat's `messages` named as their client has.

    `images` have for each image the client's paths of its fields, by those of a chat's part; that of the empty path is
    the part's own.
    """
    sources = image_sources(list(messages))
    if not sources:
        return rename
    names = {
        source.path[:_PREFIX] + field: path
        for source, fields in zip(sources, images, strict=False)
        for field, path in fields.items()
    }
    of_image = renaming(names)
    return lambda path: of_image(path) if path[:_PREFIX] in names else rename(path)
