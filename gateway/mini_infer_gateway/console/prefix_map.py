"""Collects which engine has which prefixes cached, from the prefix index. Pure; the index knows keys, and no text."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_gateway.index.prefix_index import Conversation

MAX_CONVERSATIONS: Final = 1000
"""Conversations of each engine that the map is made of: those that were used last."""
MAX_FORKS: Final = 50_000
"""Places at which conversations part, over all engines, that the map is made of: the most that clients can have it look
at. Each engine has its share, and one for each of its conversations at least.
"""
MAX_PREFIXES: Final = 200
"""Prefixes that the map shows: those that save the most tokens."""
ID_CHARACTERS: Final = 10
"""Hexadecimal digits of a prefix's key by which people tell prefixes apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One prefix at one engine."""

    conversations: int
    """Number of cached conversations there that begin with it."""
    age_s: float
    """Seconds since the last use of one of them, to within a few seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """One prefix, and the engines that have it cached."""

    id: str
    parent: str
    """The id of the next shorter prefix that conversations share; "" if there is none."""
    tokens: int
    conversations: int
    engines: Mapping[str, Holding]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCache:
    """The cache of one engine as a whole."""

    name: str
    model: str
    index: str
    cached_tokens: int
    guessed_tokens: int
    """Tokens among them that no event has confirmed yet."""
    conversations: int
    """Number of its conversations that the map is made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMap:
    """The whole map."""

    engines: list[EngineCache]
    prefixes: list[Prefix]
    shared: int
    """Number of prefixes that at least two conversations share, also of those that are not shown."""


@dataclass(slots=True)
class _Node:
    blocks: int
    parent: bytes
    holdings: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Number of conversations and time of the last use, by engine."""

    @property
    def conversations(self) -> int:
        return sum(count for count, _ in self.holdings.values())


RunEnd = Callable[[str, bytes], bytes | None]
"""Returns the key at which the unforked run of blocks ends that has this key at this engine; None if it has none."""


def prefix_map(
    engines: Sequence[EngineCache],
    conversations: Mapping[str, Iterable[Conversation]],
    run_end: RunEnd,
    now_s: float,
) -> PrefixMap:
    """Returns the map of these conversations by engine: the prefixes that several share, and the longest ones."""
    nodes: dict[bytes, _Node] = {}
    for engine, cached in conversations.items():
        for conversation in cached:
            _add(nodes, engine, conversation)
    best = sorted((key for key, node in nodes.items() if node.blocks), key=lambda key: _rank(key, nodes[key]))
    best = best[: 2 * MAX_PREFIXES]
    for key in best:
        _complete(key, nodes, conversations, run_end)
    shared = sum(node.conversations > 1 for node in nodes.values())
    best.sort(key=lambda key: _rank(key, nodes[key]))
    prefixes = [_prefix(key, nodes[key], nodes, now_s) for key in best[:MAX_PREFIXES]]
    return PrefixMap(engines=list(engines), prefixes=prefixes, shared=shared)


def _rank(key: bytes, node: _Node) -> tuple[int, int, bytes]:
    """Returns a sort key, least first: a prefix of n conversations is computed once instead of n times."""
    return -node.blocks * (node.conversations - 1), -node.blocks, key


def _complete(key: bytes, nodes: Mapping[bytes, _Node], engines: Iterable[str], run_end: RunEnd) -> None:
    """Adds the engines that hold a prefix although no conversations part from each other there."""
    node = nodes[key]
    for engine in engines:
        end = nodes.get(run_end(engine, key) or b"")
        if end and engine in end.holdings:
            node.holdings.setdefault(engine, end.holdings[engine])


def _add(nodes: dict[bytes, _Node], engine: str, conversation: Conversation) -> None:
    forks = conversation.forks
    for position, (key, blocks) in enumerate(forks):
        node = nodes.get(key)
        if node is None:
            parent = forks[position + 1][0] if position + 1 < len(forks) else b""
            node = nodes[key] = _Node(blocks, parent)
        count, used_s = node.holdings.get(engine, (0, 0.0))
        node.holdings[engine] = count + 1, max(used_s, conversation.used_s)


def _prefix(key: bytes, node: _Node, nodes: Mapping[bytes, _Node], now_s: float) -> Prefix:
    return Prefix(
        id=_id(key),
        parent=_id(node.parent) if node.parent in nodes else "",
        tokens=node.blocks * BLOCK_SIZE_TOKENS,
        conversations=node.conversations,
        engines={
            engine: Holding(conversations=count, age_s=round(max(0.0, now_s - used_s), 1))
            for engine, (count, used_s) in node.holdings.items()
        },
    )


def _id(key: bytes) -> str:
    return key.hex()[:ID_CHARACTERS]
