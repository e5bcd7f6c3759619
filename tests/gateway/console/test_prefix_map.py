"""The prefix map, from the index that real KV events fill."""

from mini_infer_contract.blocks import block_keys
from mini_infer_contract.events import block_removed, block_stored
from mini_infer_gateway.console.prefix_map import MAX_PREFIXES, EngineCache, PrefixMap, prefix_map
from mini_infer_gateway.index.prefix_index import PrefixIndex, prompt_root

SHARED = list(range(64))


def store(index: PrefixIndex, engine: str, tokens: list[int]) -> None:
    keys = block_keys(tokens, prompt_root())
    index.apply(engine, [block_stored(keys, None, tokens)])


def cache(name: str) -> EngineCache:
    return EngineCache(name=name, model="m", index="exact", cached_tokens=0, guessed_tokens=0, conversations=0)


def made(index: PrefixIndex, *engines: str, now_s: float = 0.0) -> PrefixMap:
    held = {name: index.conversations(name, 1000) for name in engines}
    return prefix_map([cache(name) for name in engines], held, index.run_end, now_s)


def test_a_shared_prefix_is_one_row_when_two_engines_hold_conversations_of_it() -> None:
    index = PrefixIndex(10_000)
    index.expire(100.0)
    store(index, "e1", SHARED + [1000 + number for number in range(32)])
    store(index, "e1", SHARED + [2000 + number for number in range(32)])
    index.expire(110.0)
    store(index, "e2", SHARED + [1000 + number for number in range(32)])
    found = made(index, "e1", "e2", now_s=130.0)
    shared = next(one for one in found.prefixes if one.tokens == 64)
    assert {name: (held.conversations, held.age_s) for name, held in shared.engines.items()} == {
        "e1": (2, 30.0),
        "e2": (1, 20.0),
    }
    assert shared.conversations == 3
    chats = [one for one in found.prefixes if one.tokens == 96]
    assert {tuple(sorted(one.engines)) for one in chats} == {("e1", "e2"), ("e1",)}
    assert {one.parent for one in chats} == {shared.id}
    both = next(one for one in chats if len(one.engines) == 2)
    assert (both.engines["e1"].age_s, both.engines["e2"].age_s) == (30.0, 20.0)


def test_the_prefix_that_saves_most_comes_first_when_there_are_several() -> None:
    index = PrefixIndex(10_000)
    for number in range(3):
        store(index, "e1", SHARED + [1000 * number + token for token in range(1000, 1016)])
    store(index, "e1", list(range(9000, 9000 + 160)))
    found = made(index, "e1")
    assert [one.tokens for one in found.prefixes[:2]] == [64, 160]
    assert found.shared == 1


def test_conversations_end_when_they_have_more_forks_than_are_looked_at() -> None:
    index, shared = PrefixIndex(100_000), list(range(16 * 100))
    store(index, "e1", shared)
    for number in range(1, 100):  # Each parts from the one before it one block later.
        store(index, "e1", shared[: 16 * number] + [5000 + number] * 16)
    assert len(index.conversations("e1", 1000, 100_000)) == 100
    found = index.conversations("e1", 1000, 1000)
    assert 5 <= len(found) < 100
    assert sum(len(one.forks) for one in found) <= 1000


def test_the_map_is_bounded_when_an_engine_holds_many_conversations() -> None:
    index = PrefixIndex(100_000)
    for number in range(2 * MAX_PREFIXES):
        store(index, "e1", [10_000 + 16 * number + token for token in range(16)])
    assert len(index.conversations("e1", 50)) == 50
    assert len(made(index, "e1").prefixes) == MAX_PREFIXES


def test_a_conversation_that_was_used_again_is_young_when_its_events_are_old() -> None:
    index = PrefixIndex(10_000)
    index.expire(100.0)
    store(index, "e1", SHARED)
    index.expire(200.0)
    index.guess("e1", block_keys(SHARED, prompt_root()), 300.0)
    (only,) = made(index, "e1", now_s=200.0).prefixes
    assert only.engines["e1"].age_s == 0.0
    assert index.guessed_blocks("e1") == 0


def test_a_conversation_ends_earlier_when_its_last_blocks_are_removed() -> None:
    index = PrefixIndex(10_000)
    keys = block_keys(SHARED, prompt_root())
    store(index, "e1", SHARED)
    index.apply("e1", [block_removed(keys[2:])])
    (only,) = made(index, "e1").prefixes
    assert only.tokens == 32


def test_nothing_is_shown_when_an_engine_holds_nothing() -> None:
    found = made(PrefixIndex(100), "e1")
    assert (found.prefixes, found.shared) == ([], 0)
