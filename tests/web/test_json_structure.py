"""What counts is what a JSON decoder would make, not what texts hold; and nobody waits while it is counted."""

import asyncio
import json
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_web import json_structure
from mini_infer_web.api_errors import ApiError
from mini_infer_web.json_structure import MAX_FIELDS, MAX_OBJECTS, MAX_TEXTS, MAX_VALUES, check_structure

TEXT = st.text(st.sampled_from('ab"\\{}[]:, \n'), max_size=40)
VALUES = st.recursive(
    st.none() | st.integers(0, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=15,
)


def counted(value: Any) -> tuple[int, int, int, int]:
    """Objects and lists, fields, texts, and commas."""
    if not isinstance(value, dict | list):
        return 0, 0, int(isinstance(value, str)), 0
    inner = list(value.values()) if isinstance(value, dict) else value
    inside = [counted(item) for item in inner]
    fields = len(value) if isinstance(value, dict) else 0
    objects, more_fields, texts, commas = map(sum, zip(*inside, strict=True)) if inside else (0, 0, 0, 0)
    return objects + 1, fields + more_fields, texts + fields, max(0, len(inner) - 1) + commas


@given(VALUES, st.booleans(), st.integers(4, 40))
def test_json_structure_ignores_the_content_of_strings(value: Any, ascii_only: bool, slice_bytes: int) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    with patch.object(json_structure, "_SLICE_BYTES", slice_bytes):
        rest = b"".join(json_structure._outside_of_strings(body))
    objects = rest.count(b"{") + rest.count(b"[")
    assert (objects, rest.count(b":"), rest.count(b'"'), rest.count(b",")) == counted(value)


@given(st.binary(max_size=60), st.integers(1, 20))
def test_json_structure_ends_for_any_bytes(body: bytes, slice_bytes: int) -> None:
    with patch.object(json_structure, "_SLICE_BYTES", slice_bytes):
        list(json_structure._outside_of_strings(body))


@pytest.mark.parametrize(
    ("body", "answered"),
    [
        ([{}] * MAX_OBJECTS, f"{MAX_OBJECTS} objects and lists"),
        ([[]] * 1_000_000, f"{MAX_OBJECTS} objects and lists"),
        ({str(number): 1 for number in range(MAX_FIELDS + 1)}, f"{MAX_FIELDS} fields"),
        (["a"] * (MAX_TEXTS + 1), f"{MAX_TEXTS} texts"),
        ([5] * (MAX_VALUES + 2), f"{MAX_VALUES} values"),
    ],
)
async def test_a_body_is_refused_when_it_has_too_many_values(body: Any, answered: str) -> None:
    with pytest.raises(ApiError, match=answered) as caught:
        await check_structure(json.dumps(body).encode())
    assert (caught.value.status, caught.value.code) == (400, "too_many_values")


@pytest.mark.parametrize(
    "body",
    [
        [{}] * (MAX_OBJECTS - 1),
        {"prompt": "{[1, 2]: 3}, " * 300_000},
        {"prompt": '{"a": [1, "b"]},' * 200_000},  # as texts that are JSON stand in JSON
        {"texts": ["a, b: [c]"] * (MAX_TEXTS - 1)},
        [5] * MAX_VALUES,
    ],
)
async def test_long_texts_are_accepted_without_blocking_the_loop(body: Any) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    text = json.dumps(body).encode()
    await check_structure(text)
    beside.cancel()
    assert turns >= len(text) // (1 << 20), "others had their turns"
