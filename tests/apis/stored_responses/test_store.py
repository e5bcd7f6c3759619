"""What is kept, for how long, and for whom: invariants over random uses, then examples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_apis.stored_responses.store import OVERHEAD_BYTES, LostResponseError, ResponseStore, StoredResponse

ANYBODY = frozenset(("",))


def entry(name: str, previous: str | None = None, owner: str = "", size: int = 0, client: str = "") -> StoredResponse:
    return StoredResponse(
        response_id=name,
        owner=owner,
        client=client,
        previous_id=previous,
        items=b"x" * size,
        response=b"",
        status="completed",
        item_ids=(f"msg_{name}",),
    )


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["puts", "grows", "gets", "deletes"]), st.integers(0, 9), st.integers(0, 3000)),
    max_size=60,
)


@given(OPERATIONS, st.integers(0, 20_000))
def test_response_store_stays_within_its_bytes(uses: list[tuple[str, int, int]], limit: int) -> None:
    store, now_s = ResponseStore(limit, ttl_s=50.0), 0.0
    for use, number, size in uses:
        now_s += size / 100
        name = str(number)
        if use == "puts":
            store.put(entry(name, size=size), now_s)
        elif use == "grows":
            store.has_grown(name, size, now_s)
        elif use == "gets":
            found = store.get(name, ANYBODY, now_s)
            assert found is None or found.response_id == name
        else:
            store.delete(name, ANYBODY, now_s)
        assert store.used_bytes <= limit
        assert store.used_bytes == sum(kept.size_bytes for kept in store._kept.values())
        assert store._client_bytes.total() == store.used_bytes
        assert set(store._of_item.values()) == set(store._kept)
        assert all(kept.used_s + 50.0 >= now_s or use not in ("puts", "gets") for kept in store._kept.values())


def chain(store: ResponseStore, name: str, now_s: float = 0.0) -> list[str]:
    return [kept.response_id for kept in store.chain(name, ANYBODY, now_s)]


def test_response_store_evicts_whole_conversations() -> None:
    store = ResponseStore(4 * OVERHEAD_BYTES, 10.0)
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        store.put(entry(name, previous), 0.0)
    assert chain(store, "c") == ["a", "b", "c"]
    store.put(entry("other"), 1.0)
    assert chain(store, "c", 1.0) == ["a", "b", "c"]
    store.put(entry("d", "c"), 2.0)  # No room for all: what was not used longest goes.
    assert store.get("other", ANYBODY, 2.0) is None
    assert chain(store, "d", 2.0) == ["a", "b", "c", "d"]


def test_using_a_response_renews_its_ancestors() -> None:
    store = ResponseStore(2 * OVERHEAD_BYTES, 10.0)
    store.put(entry("a"), 0.0)
    store.put(entry("b", "a"), 0.0)
    assert chain(store, "b") == ["a", "b"]
    store.put(entry("x"), 0.0)
    assert store.get("b", ANYBODY, 0.0) is None, "the end goes first"
    assert store.get("a", ANYBODY, 0.0)


def test_the_error_names_the_missing_response_of_a_chain() -> None:
    store = ResponseStore(1 << 20, 10.0)
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        store.put(entry(name, previous), 0.0)
    assert store.delete("a", ANYBODY, 0.0)
    with pytest.raises(LostResponseError, match=r"^a$"):
        chain(store, "c")


def test_response_ttl_counts_from_the_last_use() -> None:
    store = ResponseStore(1 << 20, 10.0)
    store.put(entry("a"), 0.0)
    assert store.get("a", ANYBODY, 9.0)
    assert store.get("a", ANYBODY, 18.0)
    assert store.get("a", ANYBODY, 29.0) is None
    assert store.used_bytes == 0


def test_stored_responses_are_invisible_to_other_owners() -> None:
    store = ResponseStore(1 << 20, 10.0)
    store.put(entry("a", owner="me"), 0.0)
    store.put(entry("b", "a", owner="you"), 0.0)
    assert store.get("a", frozenset(("you",)), 0.0) is None
    assert store.get("a", ANYBODY, 0.0) is None
    assert not store.delete("a", frozenset(("you",)), 0.0)
    assert store.of_item("msg_a", frozenset(("you",)), 0.0) is None
    assert store.of_item("msg_a", frozenset(("me",)), 0.0) is store.get("a", frozenset(("me",)), 0.0)
    with pytest.raises(LostResponseError, match=r"^a$"):
        store.chain("b", frozenset(("you",)), 0.0)


def test_a_response_is_not_stored_when_it_exceeds_all_memory() -> None:
    store = ResponseStore(2 * OVERHEAD_BYTES, 10.0)
    store.put(entry("a", size=5000), 0.0)
    assert len(store) == 0


@pytest.mark.parametrize("previous", [{"a": "a"}, {"a": "b", "b": "a"}, {"a": "b", "b": "c", "c": "b"}])
def test_a_chain_is_lost_when_a_response_continues_itself(previous: dict[str, str]) -> None:
    store = ResponseStore(1 << 20, 10.0)
    for name, before in previous.items():
        store.put(entry(name, before), 0.0)
    with pytest.raises(LostResponseError):
        store.chain("a", ANYBODY, 0.0)


def test_other_clients_keep_their_responses_when_one_stores_much() -> None:
    store = ResponseStore(20 * OVERHEAD_BYTES, 10.0)
    for number in range(8):
        store.put(entry(f"b{number}", owner="b", client="b"), 0.0)
    for number in range(100):
        store.put(entry(f"a{number}", owner="a", client="a", size=number % 3 * 100), 1.0)
        connection = f"connection {number}"
        store.put(entry(f"c{number}", owner=connection, client="a"), 1.0)
    assert all(store.get(f"b{number}", frozenset(("b",)), 1.0) for number in range(8))
    assert store.get("c99", frozenset(("connection 99",)), 1.0)
    assert not store.get("a0", frozenset(("a",)), 1.0)
