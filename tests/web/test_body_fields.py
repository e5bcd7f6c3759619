"""Bodies into structs: every fault has a path, whatever a client sends, and nothing else is raised."""

from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from mini_infer_web.api_errors import MAX_QUOTED, ApiError, field_name, renaming
from mini_infer_web.body_fields import UnknownFields, quoted, read_body


class Text(Struct, tag_field="type", tag="text"):
    text: str


class Use(Struct, tag_field="type", tag="use"):
    id: str


class Options(Struct, forbid_unknown_fields=True):
    effort: Literal["low", "high"] | None = None
    budget: Annotated[int, Meta(ge=1, le=5)] | None = None
    nested: "Options | None" = None


class Request(Struct, forbid_unknown_fields=True, kw_only=True):
    items: list[Text | Use]
    options: Options | None = None
    metadata: Annotated[dict[Annotated[str, Meta(max_length=3)], str], Meta(max_length=2)] | None = None
    container: None = None


class Choices(Struct):
    policy: Literal["full", "window"] | None = None
    mode: Literal["on", "off"] = "on"


@pytest.mark.parametrize("body", [{"policy": "x"}, {"mode": "x"}])
def test_the_values_of_a_field_are_listed_when_it_has_another(body: dict[str, Any]) -> None:
    (name,) = body
    known = {"policy": "full, window", "mode": "on, off"}[name]
    with pytest.raises(ApiError) as caught:
        parse_body(body, Choices)
    assert caught.value.message == f"{name} is 'x': this server does not know this value, it knows {known}"


def parse_body(body: dict[str, Any], kind: type[Any], unknown: UnknownFields | None = None) -> Any:
    """The body as `kind`, or the error that names all faulty fields."""
    parsed, found = read_body(body, kind, unknown)
    if parsed is None:
        raise ApiError.of_faults(found)
    return parsed


def faults(body: dict[str, Any], mode: Literal["refuse", "warn"] = "refuse") -> dict[str, str | None]:
    with pytest.raises(ApiError) as caught:
        parse_body(body, Request, UnknownFields(mode))
    return {field_name(fault.path): fault.code for fault in caught.value.faults}


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({}, {"items": "missing_field"}),
        (
            {"items": 5, "foo": 1, "bar": None},
            {"items": "invalid_value", "foo": "unknown_field", "bar": "unknown_field"},
        ),
        ({"items": [{"type": "image"}]}, {"items[0].type": "invalid_value"}),
        ({"items": [{"type": "text"}]}, {"items[0].text": "missing_field"}),
        ({"items": [{"type": "text", "text": "x"}, {"type": "use", "id": 5}]}, {"items[1].id": "invalid_value"}),
        ({"items": [], "options": {"effort": "max"}}, {"options.effort": "invalid_value"}),
        ({"items": [], "options": {"budget": 9}}, {"options.budget": "invalid_value"}),
        ({"items": [], "options": {"nested": {"x": 1}}}, {"options.nested.x": "unknown_field"}),
        ({"items": [], "metadata": {"a": "x", "b": 1}}, {"metadata.b": "invalid_value"}),
        ({"items": [], "metadata": {"long": "x"}}, {"metadata.long": "invalid_value"}),
        ({"items": [], "metadata": {"a": "", "b": "", "c": ""}}, {"metadata": "invalid_value"}),
        ({"items": [], "container": "c"}, {"container": "unsupported_value"}),
        ({"items": [{"type": "x` - at `$[0].foo`"}]}, {"items[0].type": "invalid_value"}),
        ({"items": [], "options": {"x` - at `$[0].foo": 1}}, {"options.x` - at `$[0].foo": "unknown_field"}),
    ],
)
def test_each_body_fault_has_its_path_and_code(body: dict[str, Any], found: dict[str, str]) -> None:
    assert faults(body) == found


def test_unknown_fields_are_dropped_and_recorded_when_they_are_ignored() -> None:
    unknown = UnknownFields("warn")
    body = {"items": [], "foo": 1, "options": {"effort": "low", "a": 1, "nested": {"b": None}}}
    parsed = parse_body(body, Request, unknown)
    assert parsed == Request(items=[], options=Options("low", nested=Options()))
    assert sorted(unknown.names) == ["foo", "options.a", "options.nested.b"]
    assert body["options"] == {"effort": "low", "a": 1, "nested": {"b": None}}, "the client's body is not changed"


def test_many_unknown_nested_fields_are_refused_when_unknown_fields_is_warn() -> None:
    assert "options.x" in next(iter(faults({"items": [], "options": {f"x{n}": 1 for n in range(50)}}, "warn")))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["type", "text", "effort", "x"]) | st.text(), inner)
    ),
    max_leaves=10,
)


@given(
    st.dictionaries(st.sampled_from(["items", "options", "metadata", "container"]) | st.text(), json_values),
    st.sampled_from(["refuse", "warn"]),
)
def test_any_body_is_parsed_or_yields_faults(body: dict[str, Any], mode: Literal["refuse", "warn"]) -> None:
    parsed, found = read_body(body, Request, UnknownFields(mode))
    assert (parsed is None) == bool(found)
    for fault in found:
        assert len(field_name(fault.path)) <= MAX_QUOTED
        assert len(fault.sentence) <= 3 * MAX_QUOTED


def test_deep_bodies_are_read_or_refused() -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]

    class AnyField(Struct, forbid_unknown_fields=True):
        value: Any = None
        table: dict[str, Any] | None = None

    assert parse_body({"value": deep, "table": {"x": deep}}, AnyField).value is not None
    with pytest.raises(ApiError):
        parse_body({"value": deep, "table": deep}, AnyField)


def test_error_messages_truncate_quoted_values() -> None:
    for value in ("x" * 10**6, list(range(10**5)), {str(n): n for n in range(10**5)}, 10**5000, msgspec.Raw(b"x")):
        assert len(quoted(value)) <= MAX_QUOTED


@given(st.text(), st.text())
def test_a_clients_words_stay_when_fields_are_renamed(words: str, name: str) -> None:
    rename = renaming({("messages",): ("input",), ("stop",): ("stop_sequences",)})
    error = ApiError(400, f"stop holds {words!r}: messages and stop", param="stop").renamed(rename)
    assert (error.param, error.message) == ("stop_sequences", f"stop_sequences holds {words!r}: messages and stop")
    other = ApiError(404, f"the model {name!r} does not exist", param="model").renamed(rename)
    assert other.message == f"the model {name!r} does not exist"
