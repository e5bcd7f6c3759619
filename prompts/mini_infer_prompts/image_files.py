"""Reads images as clients send them: data URLs, and the headers of files. Nothing is decoded but headers.

What a client sends is hostile input, so that every error of the image library is the image's fault.
"""

import base64
import binascii
import hashlib
import io
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mini_infer_prompts.image_prompts import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are read; of an animation the first frame."""
MAX_IMAGE_PIXELS = 1 << 26
"""Most pixels of an image: decoding one takes twelve bytes of memory for each."""
_SLICE_CHARACTERS = 1 << 20
"""Characters of base64 that are decoded at once, in a millisecond."""
_DATA = "data:"
_BASE64 = ";base64"
_MAX_TYPE_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image as a file, with the facts of its header."""

    data: bytes
    digest: bytes
    """SHA-256 of `data`."""
    width: int
    """Width in pixels, as the image is to be seen: its orientation is taken into account."""
    height: int


def is_data_url(url: str) -> bool:
    """True if the URL contains the image itself."""
    return url[: len(_DATA)].lower() == _DATA


def data_url_bytes(url: str) -> Generator[None, None, tuple[bytes, bytes]]:
    """Returns the content of a data URL and its SHA-256, after yielding every few milliseconds.

    Raises ImageError if it is no base64.
    """
    comma = url.find(",", 0, _MAX_TYPE_CHARACTERS)
    if comma < 0 or not url[:comma].lower().endswith(_BASE64):
        raise ImageError("must be of the form data:image/png;base64,...")
    digest, parts = hashlib.sha256(), []
    for start in range(comma + 1, len(url), _SLICE_CHARACTERS):
        piece = url[start : start + _SLICE_CHARACTERS]
        try:
            part = base64.b64decode(piece, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ImageError(f"is no base64 ({error})") from None
        if start + _SLICE_CHARACTERS < len(url) and piece.endswith("="):
            raise ImageError("is no base64 (data after its end)")
        digest.update(part)
        parts.append(part)
        yield
    return b"".join(parts), digest.digest()


def read_header(data: bytes, digest: bytes) -> ImageFile:
    """Returns the image with the size that its header names. Raises ImageError if it is none that is read here."""
    from PIL import Image

    with _opened(data) as image:
        try:
            # The method of PNG files would decode the whole image to find a description behind it.
            turned = Image.Image.getexif(image).get(_ORIENTATION) in _TURNED
        except Exception as error:
            raise ImageError(f"is an image whose Exif data cannot be read ({_words(error)}): leave it out") from None
        width, height = (image.height, image.width) if turned else image.size
        return ImageFile(data, digest, width, height)


def decoded_image(file: ImageFile) -> "PilImage":
    """Returns the whole image as PIL has it, in RGB and upright, as transformers' `load_image` makes it.

    Raises ImageError if the file is broken, or has another size than its header says, and MemoryError.
    """
    from PIL import ImageOps

    with _opened(file.data) as image:
        try:
            found = ImageOps.exif_transpose(image).convert("RGB")
        except MemoryError:
            raise
        except Exception as error:
            raise ImageError(f"is a broken image ({_words(error)}): save it again") from None
    if found.size != (file.width, file.height):
        raise ImageError(
            f"is an image of {file.width}x{file.height} pixels by its header and of {found.width}x{found.height} by "
            "its data: save it again"
        )
    return found


_ORIENTATION, _TURNED = 0x0112, frozenset((5, 6, 7, 8))
"""The Exif tag of an image's orientation, and those at which its width is the height of what is stored."""


def _opened(data: bytes) -> "PilImage":
    """Returns the image, of which only the header was read. Raises ImageError if it is too large or no image."""
    from PIL import Image, UnidentifiedImageError

    _check_canvas(data)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ImageError(f"is no image of a format that this server reads: {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise ImageError(f"is an image of more than {MAX_IMAGE_PIXELS} pixels: scale it down") from None
    except Exception as error:
        raise ImageError(f"is a broken image ({_words(error)}): save it again") from None
    _check_size(*image.size)
    return image


def _check_canvas(data: bytes) -> None:
    """Checks the size of a WebP file before the library reserves memory for its canvas."""
    if data[:4] == b"RIFF" and data[8:16] == b"WEBPVP8X" and len(data) >= 30:
        _check_size(1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little"))


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise ImageError(f"is an image of {width}x{height} pixels: send one that has some")
    if width * height > MAX_IMAGE_PIXELS:
        raise ImageError(
            f"is an image of {width}x{height} pixels, and this server reads {MAX_IMAGE_PIXELS} at most: scale it down"
        )


def _words(error: Exception) -> str:
    """Returns the words of a library's error; the file chooses some of them."""
    return "".join(character for character in str(error)[:100] if character.isprintable()) or type(error).__name__
