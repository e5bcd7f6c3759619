import json
from typing import Any

import pytest

from mini_infer_apis.stored_responses.conversation import MAX_ITEMS, history, page_of, turn_items
from mini_infer_apis.stored_responses.store import ResponseStore, StoredResponse
from mini_infer_web.api_errors import ApiError

ANYBODY = frozenset(("",))

ITEMS = [{"id": str(number)} for number in range(50)]


def ids(page: dict[str, Any]) -> list[str]:
    return [item["id"] for item in page["data"]]


def test_consecutive_pages_make_up_the_whole_list() -> None:
    for order in ("asc", "desc"):
        seen: list[str] = []
        query = {"limit": "7", "order": order}
        while True:
            page = page_of(ITEMS, query)
            seen += ids(page)
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            if not page["has_more"]:
                break
            query["after"] = page["last_id"]
        assert seen == [item["id"] for item in (ITEMS if order == "asc" else ITEMS[::-1])]


def test_items_are_listed_newest_first_twenty_a_page() -> None:
    assert ids(page_of(ITEMS, {})) == [str(number) for number in range(49, 29, -1)]
    empty = page_of([], {})
    assert (empty["data"], empty["first_id"], empty["has_more"]) == ([], None, False)


@pytest.mark.parametrize(
    ("name", "value"),
    [("limit", "9" * 5000), ("limit", "0"), ("limit", "101"), ("limit", "x"), ("order", "up"), ("after", "99")],
)
def test_the_error_names_a_query_parameter_when_it_is_invalid(name: str, value: str) -> None:
    with pytest.raises(ApiError) as caught:
        page_of(ITEMS, {name: value})
    assert (caught.value.status, caught.value.param) == (400, name)


def test_input_items_get_ids_and_default_fields() -> None:
    value = ["hi", [{"role": "assistant", "content": "yes"}], [{"type": "function_call", "id": "mine", "name": "f"}]]
    items = [turn_items({"input": one}, lambda _: None)[0] for one in value]
    assert [item["id"][:4] for item in items] == ["msg_", "msg_", "mine"]
    assert items[0]["content"] == [{"type": "input_text", "text": "hi"}]
    assert items[1]["content"] == [{"type": "output_text", "text": "yes"}]


def test_item_references_are_resolved() -> None:
    known = {"msg_1": {"type": "message", "id": "msg_1", "role": "assistant", "content": []}}
    for reference in ({"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}):
        assert turn_items({"input": [reference]}, known.get) == [known["msg_1"]]
    with pytest.raises(ApiError) as caught:
        turn_items({"input": [{"type": "item_reference", "id": "msg_2"}]}, known.get)
    assert (caught.value.param, caught.value.code) == ("input[0].id", "item_not_found")


def kept(name: str, previous: str | None, status: str = "completed") -> StoredResponse:
    response = {"id": name, "output": [{"id": f"out_{name}"}]}
    return StoredResponse(
        response_id=name,
        owner="",
        previous_id=previous,
        items=json.dumps([{"id": f"in_{name}"}]).encode(),
        response=json.dumps(response).encode(),
        status=status,
    )


def test_a_stored_history_alternates_input_and_output() -> None:
    store = ResponseStore(1 << 20, 10.0)
    store.put(kept("a", None), 0.0)
    store.put(kept("b", "a"), 0.0)
    items = [json.loads(bytes(item)) for item in history(store, "b", ANYBODY, 0.0, 1000)]
    assert [item["id"] for item in items] == ["in_a", "out_a", "in_b", "out_b"]
    with pytest.raises(ApiError) as caught:
        history(store, "b", ANYBODY, 0.0, 50)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "context_length_exceeded")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("running", "previous_response_not_completed"),
        ("orphan", "previous_response_not_found"),
        ("unknown", "previous_response_not_found"),
    ],
)
def test_a_history_is_refused_when_a_response_is_running_or_missing(name: str, code: str) -> None:
    store = ResponseStore(1 << 20, 10.0)
    store.put(kept("running", None, "in_progress"), 0.0)
    store.put(kept("orphan", "gone"), 0.0)
    with pytest.raises(ApiError) as caught:
        history(store, name, ANYBODY, 0.0, 1000)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "previous_response_id", code)


def test_a_response_is_refused_when_it_has_too_many_items() -> None:
    body = {"input": [{"role": "user", "content": "hi"}] * (MAX_ITEMS + 1)}
    with pytest.raises(ApiError, match=f"at most {MAX_ITEMS}") as caught:
        turn_items(body, lambda item_id: None)
    assert (caught.value.param, caught.value.code) == ("input", "too_many_values")
    assert len(turn_items({"input": body["input"][1:]}, lambda item_id: None)) == MAX_ITEMS
