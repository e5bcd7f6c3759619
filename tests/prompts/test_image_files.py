"""Files of images: headers, and what hostile ones cost."""

import hashlib
import io
import random
import struct
import zlib
from typing import Any

import pytest
from PIL import Image
from transformers.image_utils import load_image

from mini_infer_prompts.image_files import MAX_IMAGE_PIXELS, ImageFile, data_url_bytes, decoded_image, read_header
from mini_infer_prompts.image_prompts import ImageError
from tests.support.image_folders import data_url, image_bytes, random_image


def header(data: bytes) -> ImageFile:
    return read_header(data, hashlib.sha256(data).digest())


def content(url: str) -> tuple[bytes, bytes]:
    steps = data_url_bytes(url)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: tuple[bytes, bytes] = end.value
            return found


def turned(width: int, height: int, orientation: int, form: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return image_bytes(random_image(width, height), form, exif=exif)


def palette(**options: Any) -> bytes:
    return image_bytes(random_image(9, 5).quantize(16), "PNG", **options)


def animation(form: str) -> bytes:
    frames = [random_image(12, 8, seed=number) for number in range(3)]
    return image_bytes(frames[0], form, save_all=True, append_images=frames[1:])


READ = {
    "png": image_bytes(random_image(31, 17)),
    "jpeg": image_bytes(random_image(31, 17), "JPEG"),
    "webp": image_bytes(random_image(31, 17), "WEBP"),
    "webp lossless": image_bytes(random_image(31, 17, mode="RGBA"), "WEBP", lossless=True),
    "gif": image_bytes(random_image(31, 17), "GIF"),
    "bmp": image_bytes(random_image(31, 17), "BMP"),
    "alpha": image_bytes(random_image(10, 11, mode="RGBA")),
    "grey": image_bytes(random_image(10, 11, mode="L")),
    "grey with alpha": image_bytes(random_image(10, 11, mode="LA")),
    "cmyk": image_bytes(random_image(10, 11, mode="CMYK"), "JPEG"),
    "palette": palette(),
    "palette with transparency": palette(transparency=3),
    "sixteen bits": image_bytes(Image.frombytes("I;16", (6, 4), bytes(range(48)))),
    "one bit": image_bytes(random_image(10, 11, mode="L").convert("1")),
    "animated gif": animation("GIF"),
    "animated webp": animation("WEBP"),
    "animated png": animation("PNG"),
    "one pixel": image_bytes(random_image(1, 1)),
    **{f"turned {form} {number}": turned(9, 4, number, form) for form in ("JPEG", "WEBP", "PNG") for number in (3, 6)},
}


@pytest.mark.parametrize("name", READ)
def test_images_equal_transformers_when_they_are_decoded(name: str) -> None:
    data = READ[name]
    file = header(data)
    expected = load_image(Image.open(io.BytesIO(data)))
    assert (file.width, file.height) == expected.size
    found = decoded_image(file)
    assert (found.mode, found.tobytes()) == ("RGB", expected.tobytes())
    assert file.digest == hashlib.sha256(data).digest()


def png_of(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG whose header says this size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def webp_canvas(width: int, height: int) -> bytes:
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + sides
    return b"RIFF" + struct.pack("<I", len(body)) + body


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><script>alert(1)</script></svg>'
REFUSED = {
    "nothing": b"",
    "text": b"hello",
    "svg": SVG,
    "a page": b"<!doctype html><img src=x onerror=alert(1)>",
    "pdf": b"%PDF-1.7\n1 0 obj",
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "tiff": image_bytes(random_image(4, 4), "TIFF"),
    "ico": image_bytes(random_image(16, 16), "ICO"),
    "ppm": image_bytes(random_image(4, 4), "PPM"),
    "bomb": png_of(30_000, 30_000),
    "just too large": png_of(MAX_IMAGE_PIXELS // 1024 + 1, 1024),
    "largest size": png_of(2**31 - 1, 2**31 - 1),
    "no width": png_of(0, 5),
    "no height": png_of(5, 0),
    "huge canvas": webp_canvas(16_777_216, 255),
    "png without a header": b"\x89PNG\r\n\x1a\n",
    "jpeg without a frame": b"\xff\xd8\xff\xd9",
    "gif without a frame": b"GIF89a\x01\x00\x01\x00\x00\x00\x00;",
    "numpy": b"\x93NUMPY" + bytes(100),
    "pickle": b"\x80\x04\x95" + bytes(100),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_header_is_refused_when_it_is_no_image_of_an_allowed_kind(name: str) -> None:
    with pytest.raises(ImageError):
        header(REFUSED[name])


CUT = ("png", "jpeg", "webp", "gif", "bmp")


@pytest.mark.parametrize("name", CUT)
def test_a_file_is_refused_when_it_is_truncated(name: str) -> None:
    data = READ[name]
    for length in range(0, len(data) - 20, 7):
        with pytest.raises(ImageError):
            decoded_image(header(data[:length]))


@pytest.mark.parametrize("name", [*CUT, "animated gif", "animated webp", "turned JPEG 6", "palette"])
def test_nothing_but_an_image_error_is_raised_when_bytes_of_a_file_are_changed(name: str) -> None:
    data, draw = READ[name], random.Random(name)
    for _ in range(60):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 6)):
            changed[draw.randrange(min(len(changed), draw.choice((40, 1000))))] = draw.randrange(256)
        try:
            file = header(bytes(changed))
            if file.width * file.height < 1_000_000:
                assert decoded_image(file).size == (file.width, file.height)
        except ImageError:
            continue


def test_the_file_is_read_by_its_content_when_its_type_is_another() -> None:
    data, _ = content(data_url(READ["jpeg"], "image/png"))
    assert header(data).width == 31


def test_a_polyglot_is_the_image_that_it_begins_with() -> None:
    assert (header(READ["gif"] + SVG).width, header(READ["jpeg"] + b"PK\x03\x04").width) == (31, 31)


def test_data_urls_of_any_length_have_the_digest_of_their_file() -> None:
    for length in (0, 1, 2, 3, (3 << 18) - 1, 3 << 18, (3 << 18) + 1, 2_000_000):
        data = random.Random(length).randbytes(length)
        assert content(data_url(data)) == (data, hashlib.sha256(data).digest())


@pytest.mark.parametrize(
    "url",
    [
        "data:",
        "data:image/png,abc",
        "data:image/png;base64",
        "data:image/png;charset=utf-8,abc",
        "data:" + "x" * 300 + ";base64,AAAA",
        "data:image/png;base64,A",
        "data:image/png;base64,AA-_",
        "data:image/png;base64,AA AA",
        "data:image/png;base64,\u0661AAA",
        "data:image/png;base64,AAA",
        "data:image/png;base64," + "A" * ((1 << 20) - 4) + "AA==" + "AAAA",
    ],
    ids=lambda url: url[:30] + url[-9:],
)
def test_a_data_url_is_refused_when_it_is_no_base64(url: str) -> None:
    with pytest.raises(ImageError):
        content(url)


def test_a_long_data_url_is_decoded_in_slices() -> None:
    assert sum(1 for _ in data_url_bytes(data_url(bytes(3 << 20)))) == 4
