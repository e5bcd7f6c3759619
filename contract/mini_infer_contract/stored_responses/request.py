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
class ResponseRequest:
    """One request."""

    kept: KeptRequest
    owner: str
    body: dict[str, Any]
    """The client's, its input as items with ids, and without what whoever generates need not know."""
    own_items: list[Item]
    """The input of this turn."""
    history: list[Item]
    """All before it."""
    is_history_stored: bool
    """`previous_response_id` names a stored response."""

    @classmethod
    def of(cls, body: dict[str, Any], view: StoreView) -> "ResponseRequest":
        """ApiError 400: a field is malformed, or the response that it goes on from is lost."""
        previous_id = _typed(body, "previous_response_id", str, "a string")
        kept = KeptRequest(
            new_id(RESPONSE_PREFIX),
            previous_id,
            _typed(body, "store", bool, "true or false") is not False,
            bool(_typed(body, "background", bool, "true or false")),
        )
        if kept.background and not kept.store:
            raise ApiError(400, "background can only be used when `store` is true", param="background")
        own = turn_items(body, view.item)
        before = view.history(previous_id) if previous_id is not None else []
        dropped = ("previous_response_id", "store", "background")
        rest = {name: value for name, value in body.items() if name not in dropped}
        return cls(kept, view.owner, rest | {"input": before + own}, own, before, previous_id not in view.local)

    def entry(self, response: dict[str, Any]) -> StoredResponse:
        """What is kept once the response is as given."""
        is_linked = self.is_history_stored and self.kept.previous_response_id is not None
        items = self.own_items if is_linked else self.history + self.own_items
        return StoredResponse(
            response_id=response["id"],
            owner=self.owner,
            previous_id=self.kept.previous_response_id if is_linked else None,
            items=msgspec.json.encode(items),
            response=msgspec.json.encode(response),
            status=str(response.get("status")),
            is_background=self.kept.background,
            item_ids=tuple(item["id"] for item in response.get("output", ()) if isinstance(item.get("id"), str)),
        )


def _typed(body: dict[str, Any], name: str, kind: type, described: str) -> Any:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise ApiError(400, f"{name} must be {described}", param=name, code="invalid_value")
    return value
