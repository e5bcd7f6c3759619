"""A request for a response, taken apart: what is generated, and what is kept. Pure but for new ids."""

from dataclasses import dataclass
from typing import Any

import msgspec

from mini_infer_contract.api_errors import ApiError
from mini_infer_contract.dialects.response_items import Item
from mini_infer_contract.dialects.response_object import RESPONSE_PREFIX, new_id
from mini_infer_contract.stored_responses.conversation import history, output_items, turn_items
from mini_infer_contract.stored_responses.store import ResponseStore, StoredResponse

KEPT_HEADER = "x-mini-infer-response"
"""From whoever keeps responses to whoever generates them: the request is complete, and this stands in its answer."""


class KeptRequest(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What `KEPT_HEADER` says, as JSON."""

    id: str
    """Of the response."""
    previous_response_id: str | None = None
    store: bool = True
    background: bool = False


@dataclass(frozen=True, slots=True)
class StoreView:
    """The store as one client sees it at one moment."""

    store: ResponseStore
    owner: str
    now_s: float
    local: dict[str, list[Item]]
    """Conversations that its connection remembers by the id of their last response."""

    def history(self, response_id: str) -> list[Item]:
        """All items up to the end of this response. ApiError 400: it is not known."""
        known = self.local.get(response_id)
        return known if known is not None else history(self.store, response_id, self.owner, self.now_s)

    def item(self, item_id: str) -> Item | None:
        """An item of a stored response's output."""
        entry = self.store.of_item(item_id, self.owner, self.now_s)
        return next((item for item in output_items(entry) if item.get("id") == item_id), None) if entry else None


@dataclass(frozen=True, slots=True)
class Turn:
    """What of one request is needed until its response is kept."""

    kept: KeptRequest
    owner: str
    previous_id: str | None
    """A stored response that it goes on from."""
    items: bytes
    """Its own input; all of the conversation where what it goes on from is not stored."""

    def entry(self, response: dict[str, Any]) -> StoredResponse:
        """What is kept once the response is as given."""
        return StoredResponse(
            response_id=response["id"],
            owner=self.owner,
            previous_id=self.previous_id,
            items=self.items,
            response=msgspec.json.encode(response),
            status=str(response.get("status")),
            is_background=self.kept.background,
            item_ids=tuple(item["id"] for item in response.get("output", ()) if isinstance(item.get("id"), str)),
        )


def begin_turn(body: dict[str, Any], view: StoreView) -> tuple[Turn, bytes]:
    """A client's body as a turn, and as the body for whoever generates, which holds the whole conversation.

    ApiError 400: a field is malformed, or the response that it goes on from is lost.
    """
    previous_id = _typed(body, "previous_response_id", str, "a string")
    store = _typed(body, "store", bool, "true or false") is not False
    background = bool(_typed(body, "background", bool, "true or false"))
    if background and not store:
        raise ApiError(400, "background can only be used when `store` is true", param="background")
    own = turn_items(body, view.item)
    whole = own if previous_id is None else view.history(previous_id) + own
    is_linked = previous_id is not None and previous_id not in view.local
    passed = {name: value for name, value in body.items() if name not in _FOR_KEEPERS} | {"input": whole}
    kept = KeptRequest(new_id(RESPONSE_PREFIX), previous_id, store, background)
    items = msgspec.json.encode(own if is_linked else whole) if store else b""
    return Turn(kept, view.owner, previous_id if is_linked else None, items), msgspec.json.encode(passed)


_FOR_KEEPERS = ("previous_response_id", "store", "background")
"""Fields that mean nothing to whoever generates."""


def _typed(body: dict[str, Any], name: str, kind: type, described: str) -> Any:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise ApiError(400, f"{name} must be {described}", param=name, code="invalid_value")
    return value
