"""Splits a request for a response into the part that is generated and the part that is kept. Pure but for new ids."""

from dataclasses import dataclass
from typing import Any

import msgspec

from mini_infer_apis.dialects.response_object import RESPONSE_PREFIX, new_id
from mini_infer_apis.dialects.responses_request import Item
from mini_infer_apis.stored_responses.conversation import history, output_items, turn_items
from mini_infer_apis.stored_responses.store import Owners, ResponseStore, StoredResponse
from mini_infer_web.api_errors import ApiError
from mini_infer_web.body_fields import read_body

KEPT_HEADER = "x-mini-infer-response"
"""Header from the server that keeps responses to the one that generates them: the request is complete, and the header's
value goes into its answer.
"""


class KeptRequest(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The content of `KEPT_HEADER`, as JSON."""

    id: str
    """The id of the response."""
    previous_response_id: str | None = None
    store: bool = True
    background: bool = False
    created_at: int = 0
    """Creation time in seconds since the epoch; 0 means now."""


@dataclass(frozen=True, slots=True)
class StoreView:
    """The store as one client sees it at one moment."""

    store: ResponseStore
    owner: str
    now_s: float
    created_at: int
    """The time in seconds as clients count them."""
    limit_bytes: int
    """Most bytes of a conversation that is continued."""
    tag: str = ""
    """Tag, for ids, of the server that keeps responses here."""
    connection: str = ""
    """Owner of responses that are not stored for the client but remembered as long as its connection lasts; "" if none
    are.
    """

    @property
    def owners(self) -> Owners:
        """The owners whose responses the client may see: itself, and its connection."""
        return frozenset((self.owner, self.connection)) if self.connection else frozenset((self.owner,))

    def item(self, item_id: str) -> Item | None:
        """Returns an item of a kept response's output."""
        entry = self.store.of_item(item_id, self.owners, self.now_s)
        return next((item for item in output_items(entry) if item.get("id") == item_id), None) if entry else None

    def is_clients(self, response_id: str) -> bool:
        """True if a response is kept for the client, and not for its connection alone."""
        return self.store.get(response_id, frozenset((self.owner,)), self.now_s) is not None


@dataclass(frozen=True, slots=True)
class Turn:
    """The facts of one request that are needed until its response is kept."""

    kept: KeptRequest
    owner: str | None
    """Owner of its response; None if the response is not kept."""
    previous_id: str | None
    """Id of the response that it continues, if that is kept for as long as this one."""
    client: str
    """The client that has sent the request."""
    items: bytes
    """The turn's own input as a JSON list, after the history that it continues if there is no `previous_id`."""

    def entry(self, response: dict[str, Any]) -> StoredResponse:
        """Returns the entry to keep for this response."""
        assert self.owner is not None, "it is not to be kept"
        return StoredResponse(
            response_id=response["id"],
            owner=self.owner,
            client=self.client,
            previous_id=self.previous_id,
            items=self.items,
            response=msgspec.json.encode(response),
            status=str(response.get("status")),
            is_background=self.kept.background,
            item_ids=tuple(item["id"] for item in response.get("output", ()) if isinstance(item.get("id"), str)),
        )


def begin_turn(body: dict[str, Any], view: StoreView) -> tuple[Turn, bytes]:
    """Returns a client's body as a turn, and as the body for the generating server, which has the whole conversation.

    Raises ApiError 400 if a field is malformed, or the response that it continues is lost.
    """
    sent, faults = read_body({name: body[name] for name in _FOR_KEEPERS if name in body}, _KeepersFields)
    if sent is None:
        raise ApiError.of_faults(faults)
    previous_id, store, background = sent.previous_response_id, sent.store is not False, bool(sent.background)
    if background and not store:
        raise ApiError(400, "background can only be used when `store` is true", param="background")
    owner = view.owner if store else view.connection or None
    own = turn_items(body, view.item)
    before = list[msgspec.Raw]()
    if previous_id is not None:
        before = history(view.store, previous_id, view.owners, view.now_s, view.limit_bytes)
    is_linked = previous_id is not None and (not store or view.is_clients(previous_id))
    kept = KeptRequest(new_id(RESPONSE_PREFIX, view.tag), previous_id, store, background, view.created_at)
    whole = [*before, *own]
    items = b"" if owner is None else msgspec.json.encode(own if is_linked else whole)
    passed = {name: value for name, value in body.items() if name not in _FOR_KEEPERS} | {"input": whole}
    return Turn(kept, owner, previous_id if is_linked else None, view.owner, items), msgspec.json.encode(passed)


class _KeepersFields(msgspec.Struct):
    """The fields that mean nothing to the server that generates."""

    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None


_FOR_KEEPERS = _KeepersFields.__struct_fields__
