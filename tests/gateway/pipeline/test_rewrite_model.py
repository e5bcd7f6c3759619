"""The body but for `model`, byte for byte."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_gateway.pipeline.rewrite_model import with_model

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("model"), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), values, max_size=5), st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_rewriting_changes_only_the_model_field(
    body: dict[str, object], ascii_only: bool, indent: int | str | None
) -> None:
    def text(model: str) -> bytes:
        # One order for both: the model is in the middle of the others.
        items = sorted({**body, "model": model}.items())
        return json.dumps(dict(items), ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")

    before = text("ns/name")
    try:
        before.decode()
    except UnicodeDecodeError:
        return  # Not JSON in UTF-8; refused before it comes here.
    assert with_model(before, "m") == text("m")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b' {"model":"a"}\n', b' {"model":"x"}\n'),
        (b'{"model" :\t"a" , "model":null}', b'{"model" :\t"x" , "model":"x"}'),
        (b'{"mod\\u0065l":"a"}', b'{"mod\\u0065l":"x"}'),
        (b'{"p":"\\"model\\":1,}","n":1e400,"model":"a"}', b'{"p":"\\"model\\":1,}","n":1e400,"model":"x"}'),
        (b"{}", b"{}"),
    ],
)
def test_the_model_field_is_rewritten_for_each_json_spelling(before: bytes, after: bytes) -> None:
    assert with_model(before, "x") == after


@pytest.mark.parametrize("value", [b"[" * 5000 + b"]" * 5000, b"9" * 5000])
def test_the_last_model_counts_when_a_body_has_more_than_pythons_decoder_reads(value: bytes) -> None:
    before = b'{"model":"a","more":%b} ' % value
    assert with_model(before, "x") == b'{"model":"a","more":%b,"model":"x"}' % value
