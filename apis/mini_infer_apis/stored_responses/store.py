"""Keeps responses for a while, bounded in bytes and in time. Pure: the time is passed in, nothing is sent.

Where there is no room, the client that takes most of it loses what it has not used longest: no client evicts others by
storing much.

Each is kept with the input of its own turn; a conversation is a chain of them. A use moves a whole chain to the young
end, so that no response outlives those that it continues.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

Owners = frozenset[str]
"""The identities under which a client looks responses up."""
OVERHEAD_BYTES = 1024
"""Bytes that an entry costs beside its texts: objects, ids, its places in the tables."""


@dataclass(slots=True, kw_only=True)
class StoredResponse:
    """One response and the input that it answers."""

    response_id: str
    owner: str
    """The only one who may see it: a client (`owner_of`), or one of the client's connections."""
    client: str = ""
    """The client whose share of the store it takes, also if one of its connections is the owner."""
    previous_id: str | None
    """Id of the response that it continues."""
    items: bytes
    """The input of its turn, with ids: a JSON list."""
    response: bytes
    """The response object as JSON, as it is now."""
    status: str
    """The response's status."""
    is_background: bool = False
    item_ids: tuple[str, ...] = ()
    """Ids of the items of its output."""
    events: list[bytes] | None = None
    """Events of its stream, if a client that joins later may have them."""
    event_bytes: int = 0
    used_s: float = field(default=0.0, init=False)

    @property
    def size_bytes(self) -> int:
        """Bytes that it counts against the store's limit."""
        return OVERHEAD_BYTES + len(self.items) + len(self.response) + self.event_bytes


class LostResponseError(Exception):
    """A response that others continue is not there: it never was, was deleted, or was evicted."""

    def __init__(self, response_id: str) -> None:
        super().__init__(response_id)
        self.response_id = response_id


class ResponseStore:
    """A store of responses that evicts the least recently used of the client with most bytes first."""

    def __init__(self, limit_bytes: int, ttl_s: float) -> None:
        """Takes `ttl_s`, the seconds for which a response is kept after its last use at most."""
        self._limit_bytes, self._ttl_s = limit_bytes, ttl_s
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._of_client: dict[str, OrderedDict[str, None]] = {}
        """Ids of each client's responses, the one that was not used longest first."""
        self._client_bytes: Counter[str] = Counter()
        self._of_item: dict[str, str] = {}
        """Ids of responses by those of their output items."""
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, response_id: str) -> bool:
        """True if anybody's response with this id is kept."""
        return response_id in self._kept

    def put(self, entry: StoredResponse, now_s: float) -> None:
        """Keeps an entry, in place of one with its id. Others are evicted to make room, and it itself if it is too
        large alone.
        """
        self._drop(entry.response_id)
        entry.used_s = now_s
        self._kept[entry.response_id] = entry
        self._of_client.setdefault(entry.client, OrderedDict())[entry.response_id] = None
        self._count(entry, entry.size_bytes)
        for item_id in entry.item_ids:
            self._of_item[item_id] = entry.response_id
        self._evict(now_s)

    def has_grown(self, response_id: str, size_bytes: int, now_s: float) -> bool:
        """Counts the bytes by which the events of an unfinished response have grown. Returns False if it had to be
        evicted.
        """
        entry = self._kept.get(response_id)
        if entry is None:
            return False
        entry.event_bytes += size_bytes
        self._count(entry, size_bytes)
        self._touch(entry, now_s)
        self._evict(now_s)
        return response_id in self._kept

    def get(self, response_id: str, owners: Owners, now_s: float) -> StoredResponse | None:
        """Returns the response with this id; None if these owners have none."""
        self._evict(now_s)
        entry = self._kept.get(response_id)
        if entry is None or entry.owner not in owners:
            return None
        self._touch(entry, now_s)
        return entry

    def of_item(self, item_id: str, owners: Owners, now_s: float) -> StoredResponse | None:
        """Returns the response that has this item in its output."""
        return self.get(self._of_item.get(item_id, ""), owners, now_s)

    def delete(self, response_id: str, owners: Owners, now_s: float) -> bool:
        """Deletes a response. Returns True if these owners had one with this id."""
        if self.get(response_id, owners, now_s) is None:
            return False
        self._drop(response_id)
        return True

    def chain(self, response_id: str, owners: Owners, now_s: float) -> list[StoredResponse]:
        """Returns the response and all that it continues, the oldest first. Raises LostResponseError if one is not
        there, or continues itself: the ids of other servers' responses are those that their engines chose.
        """
        chain: list[StoredResponse] = []
        seen: set[str] = set()
        current_id: str | None = response_id
        while current_id is not None:
            entry = self.get(current_id, owners, now_s)
            if entry is None or current_id in seen:
                raise LostResponseError(current_id)
            seen.add(current_id)
            chain.append(entry)
            current_id = entry.previous_id
        for entry in chain[1:]:
            self._touch(entry, now_s)  # Those that others go on from are the last to go.
        return chain[::-1]

    def _touch(self, entry: StoredResponse, now_s: float) -> None:
        entry.used_s = now_s
        self._kept.move_to_end(entry.response_id)
        self._of_client[entry.client].move_to_end(entry.response_id)

    def _count(self, entry: StoredResponse, size_bytes: int) -> None:
        self.used_bytes += size_bytes
        self._client_bytes[entry.client] += size_bytes

    def _evict(self, now_s: float) -> None:
        while self._kept and next(iter(self._kept.values())).used_s + self._ttl_s < now_s:
            self._drop(next(iter(self._kept)))
        while self.used_bytes > self._limit_bytes and self._kept:
            largest = max(self._client_bytes, key=self._client_bytes.__getitem__)
            self._drop(next(iter(self._of_client[largest])))

    def _drop(self, response_id: str) -> None:
        entry = self._kept.pop(response_id, None)
        if entry is None:
            return
        self._count(entry, -entry.size_bytes)
        own = self._of_client[entry.client]
        del own[response_id]
        if not own:
            del self._of_client[entry.client], self._client_bytes[entry.client]
        for item_id in _of(entry.item_ids, self._of_item, response_id):
            del self._of_item[item_id]


def _of(item_ids: Iterable[str], table: dict[str, str], response_id: str) -> list[str]:
    return [item_id for item_id in item_ids if table.get(item_id) == response_id]
