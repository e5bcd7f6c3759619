"""Reads conversations from kept responses: input with the whole history before it, and pages of it. Pure."""

from collections.abc import Callable
from typing import Any

import msgspec

from mini_infer_apis.dialects.response_items import input_items
from mini_infer_apis.dialects.response_object import new_id
from mini_infer_apis.dialects.responses_request import Item
from mini_infer_apis.stored_responses.query import PageQuery, read_query
from mini_infer_apis.stored_responses.store import LostResponseError, Owners, ResponseStore, StoredResponse
from mini_infer_web.api_errors import ApiError

_CONTINUABLE = ("completed", "incomplete")
_ID_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
}
MAX_ITEMS = 5_000
"""Most items of one request's input: each is looked at and gets an id while other requests wait."""


def turn_items(body: dict[str, Any], resolve: Callable[[str], Item | None]) -> list[Item]:
    """Returns a request's own input as items with ids; `resolve` knows items by id. Raises ApiError if
    it is malformed.
    """
    sent = body.get("input")
    if isinstance(sent, list) and len(sent) > MAX_ITEMS:
        message = f"input has {len(sent)} items, and at most {MAX_ITEMS} are read at once: send fewer"
        raise ApiError(400, message, param="input", code="too_many_values")
    sent_items = input_items(sent) if sent is not None else _no_input()
    return [_item(item, index, resolve) for index, item in enumerate(sent_items)]


def _no_input() -> list[Item]:
    raise ApiError(400, "input is missing: send a string or a list of items", param="input", code="missing_field")


def _item(item: Item, index: int, resolve: Callable[[str], Item | None]) -> Item:
    if item.get("type") == "item_reference" or item.keys() == {"id"}:
        found = resolve(str(item.get("id")))
        if found is None:
            message = f"input[{index}].id: there is no item {str(item.get('id'))[:100]!r} here: send the item itself"
            raise ApiError(400, message, param=f"input[{index}].id", code="item_not_found")
        return found
    kind = item.get("type") or "message"
    named = {"type": kind} | item
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        named["content"] = [{"type": part, "text": item["content"]}]
    if not isinstance(item.get("id"), str):
        named["id"] = new_id(_ID_PREFIXES.get(str(kind), "item_"))
    return named


def history(
    store: ResponseStore, response_id: str, owners: Owners, now_s: float, limit_bytes: int
) -> list[msgspec.Raw]:
    """Returns all items up to the end of a response, its output included, as JSON.

    Raises ApiError 400 if one is lost, the response is not complete, or all together have more bytes than a request
    may.
    """
    try:
        chain = store.chain(response_id, owners, now_s)
    except LostResponseError as error:
        raise previous_not_found(error.response_id) from None
    if chain[-1].status not in _CONTINUABLE:
        message = f"Previous response with id '{response_id}' is {chain[-1].status}: go on when it is completed."
        raise ApiError(400, message, param="previous_response_id", code="previous_response_not_completed")
    size_bytes = sum(len(entry.items) + len(entry.response) for entry in chain)
    if size_bytes > limit_bytes:
        message = f"the conversation up to '{response_id}' has {size_bytes} bytes, and a request {limit_bytes} at most"
        raise ApiError(400, message, param="previous_response_id", code="context_length_exceeded")
    return [item for entry in chain for item in _items(entry)]


class _Output(msgspec.Struct):
    """The output of a response; all other fields are skipped."""

    output: list[msgspec.Raw]


def _items(entry: StoredResponse) -> list[msgspec.Raw]:
    """Returns the items of one turn: its own input, then its output."""
    own = msgspec.json.decode(entry.items, type=list[msgspec.Raw])
    return own + msgspec.json.decode(entry.response, type=_Output).output


def output_items(entry: StoredResponse) -> list[Item]:
    """Returns the output of a response."""
    output: list[Item] = msgspec.json.decode(entry.response)["output"]
    return output


def previous_not_found(response_id: str) -> ApiError:
    """Returns OpenAI's error for an unknown `previous_response_id`."""
    return ApiError(
        400,
        f"Previous response with id '{response_id[:200]}' not found.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def not_found(response_id: str) -> ApiError:
    """Returns OpenAI's error for an unknown id in the path."""
    return ApiError(404, f"Response with id '{response_id[:200]}' not found.", param="id", code="response_not_found")


def page_of(items: list[Item], query: dict[str, str]) -> dict[str, Any]:
    """Returns a page of a list, in OpenAI's form. Raises ApiError 400 if one of the query's parameters is wrong."""
    page_query = read_query(query, PageQuery)
    limit, after = page_query.limit, page_query.after
    ordered = items if page_query.order == "asc" else items[::-1]
    if after is not None:
        index = next((index for index, item in enumerate(ordered) if item.get("id") == after), None)
        if index is None:
            raise ApiError(400, f"after is {after[:100]!r}: no item has that id", param="after", code="invalid_value")
        ordered = ordered[index + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > len(page),
    }
