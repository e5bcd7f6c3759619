"""A body decoded in slices is what it is in one go, and so are its errors."""

import json
from collections.abc import Iterator
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_web import sliced_json
from mini_infer_web.api_errors import ApiError, read_json_object
from mini_infer_web.sliced_json import decode_in_slices, read_large_json_object

TEXT = st.text(st.sampled_from('ab"\\/\n\t\0é€\U0001f600\u2028{}[]:,'), max_size=60)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(autouse=True, scope="module")
def small_slices() -> Iterator[None]:
    with patch.object(sliced_json, "SLICE_BYTES", 16):
        yield


def in_slices(body: bytes) -> tuple[object, int]:
    """The value or the error's message, and the number of slices."""
    job, slices = decode_in_slices(body), 0
    while True:
        try:
            next(job)
        except StopIteration as stop:
            return stop.value, slices
        except ApiError as error:
            return error.message, slices
        slices += 1


def at_once(body: bytes) -> object:
    try:
        return read_json_object(body)
    except ApiError as error:
        return error.message


@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_slices_make_what_one_go_makes(value: object, ascii_only: bool, indent: int | None) -> None:
    body = json.dumps({"value": value}, ensure_ascii=ascii_only, indent=indent).encode()
    assert in_slices(body)[0] == at_once(body) == {"value": value}


@given(VALUES, st.integers(0, 400), st.binary(max_size=3), st.integers(0, 3))
def test_broken_bodies_get_the_same_error(value: object, place: int, inserted: bytes, dropped: int) -> None:
    body = msgspec.json.encode({"value": value, "long": "é" * 40})
    place %= len(body)
    broken = body[:place] + inserted + body[place + dropped :]
    assert in_slices(broken)[0] == at_once(broken)


def test_a_long_string_is_decoded_in_slices() -> None:
    value = {"messages": [{"role": "user", "content": 'say "hi"\n' * 100}], "k" * 100: 1}
    decoded, slices = in_slices(msgspec.json.encode(value))
    assert decoded == value
    assert slices > 100


@pytest.mark.parametrize("body", [b'{"a": "' + rb"\ud83d\ude00" * 20 + b'"}', b'{"a": "' + rb"\ud83d x" * 20 + b'"}'])
def test_pairs_of_surrogates_stay_together(body: bytes) -> None:
    assert in_slices(body)[0] == at_once(body)


async def test_small_bodies_are_decoded_at_once_and_large_ones_alike() -> None:
    value = {"prompt": "a word or two " * 100_000}
    assert len(msgspec.json.encode(value)) > sliced_json.LARGE_BYTES
    with patch.object(sliced_json, "SLICE_BYTES", 1 << 17):
        assert await read_large_json_object(msgspec.json.encode(value)) == value
    assert await read_large_json_object(b'{"a": 1}') == {"a": 1}


def long_list(count: int = 60_000) -> str:
    return ", ".join(str(number % 150_000) for number in range(count))


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt": [%s], "model": "m"}',
        '{"prompt": [[%s], [1]], "text": "\\u0000"}',
        '{"prompt": [ %s ]}',
        '{"prompt": "[%s]"}',
        '{"prompt": "a [%s] b"}',
        '{"prompt": [%s,]}',
        '{"prompt": [,%s]}',
        '{"prompt": [%s,,1]}',
        '{"prompt": [%s 1]}',
        '{"prompt": [%s, 007]}',
        '{[%s]: 1}',
        '[%s]',
        '{"prompt": [%s}',
        '{"prompt": [%s], "a": tru}',
    ],
)  # fmt: skip
async def test_long_lists_of_numbers_are_what_they_are_in_one_go_when_they_are_decoded_in_slices(body: str) -> None:
    text = (body % long_list()).encode()
    with patch.object(sliced_json, "SLICE_BYTES", 1 << 14):
        try:
            made: object = await read_large_json_object(text)
        except ApiError as error:
            made = error.message
    assert made == at_once(text)


def test_no_slice_takes_long_when_a_million_token_ids_are_decoded() -> None:
    text = f'{{"prompt": [{long_list(1_000_000)}]}}'.encode()
    with patch.object(sliced_json, "SLICE_BYTES", 1 << 17):
        slices = sum(1 for _ in sliced_json.decode_numbers_in_slices(text))
    assert slices > len(text) // (1 << 17)
