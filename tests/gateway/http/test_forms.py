"""Forms with files: which are taken, what of them is read, and what is changed in them."""

import contextlib
import random

import aiohttp
import pytest

from mini_infer_gateway.http.forms import MOST_PARTS, boundary_of, form_fields, with_model_field
from mini_infer_web.api_errors import ApiError

FILE = bytes(random.Random(0).randbytes(5000)) + b"\r\n--x\r\nno boundary\r\n\r\n"


async def form(**fields: str) -> tuple[bytes, bytes]:
    """As aiohttp writes one, with a file in the middle; and its boundary."""
    with aiohttp.MultipartWriter("form-data", boundary="--- a b") as writer:
        for number, (name, value) in enumerate(fields.items()):
            if number == 1:
                audio = writer.append(FILE, {"content-type": "audio/wav"})
                audio.set_content_disposition("form-data", name="file", filename='name="model".wav')
            writer.append(value).set_content_disposition("form-data", name=name)
        body = bytearray()

        class Sink:
            async def write(self, piece: bytes) -> None:
                body.extend(piece)

        await writer.write(Sink())  # type: ignore[arg-type]  # of a stream it calls write alone
    return bytes(body), boundary_of([(b"content-type", writer.content_type.encode()), (b"authorization", b"Bearer x")])


async def test_form_fields_are_read_and_only_the_model_is_replaced() -> None:
    body, boundary = await form(model="whisper é", language="de", stream="true", empty="")
    assert form_fields(body, boundary) == {"model": "whisper é", "language": "de", "stream": True, "empty": ""}
    changed = with_model_field(body, boundary, "org/other")
    assert changed == body.replace("whisper é".encode(), b"org/other")
    assert FILE in changed


@pytest.mark.parametrize(
    ("head", "boundary"),
    [
        ("application/json", b""),
        ("multipart/form-data; boundary=abc", b"abc"),
        ('Multipart/Form-Data; charset=x; boundary="a b"', b"a b"),
    ],
)
def test_the_form_boundary_is_read_from_the_content_type(head: str, boundary: bytes) -> None:
    assert boundary_of([(b"content-type", head.encode()), (b"authorization", b"")]) == boundary


def test_a_form_is_refused_when_it_has_no_authorization_header() -> None:
    with pytest.raises(ApiError, match="Authorization") as caught:
        boundary_of([(b"content-type", b"multipart/form-data; boundary=x")])
    assert caught.value.status == 415


def part(head: bytes, content: bytes = b"") -> bytes:
    return b"--x\r\n" + head + b"\r\n\r\n" + content + b"\r\n"


NAMED = b'Content-Disposition: form-data; name="a"'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"abc--",
        b"abc--\r\n--",
        b"--x",
        b"--x\r\n",
        part(NAMED, b"b"),
        part(NAMED, b"b") + b"--xy",
        part(b"Content-Type: a/b") + b"--x--",
        part(NAMED) * (MOST_PARTS + 1) + b"--x--",
    ],
)
def test_a_form_is_refused_with_400_when_it_is_malformed(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        form_fields(body, b"x")
    assert caught.value.status == 400


def test_mutated_forms_are_read_or_refused_and_never_raise() -> None:
    dice, whole = random.Random(1), part(NAMED, b"b") * 3 + b"--x--\r\n"
    for _ in range(3000):
        at, length = dice.randrange(len(whole)), dice.randrange(4)
        body = whole[:at] + dice.randbytes(dice.randrange(3)) + whole[at + length :]
        with contextlib.suppress(ApiError):  # and no other error
            form_fields(body, b"x")
