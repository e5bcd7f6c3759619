"""A prefix cache in ten lines, for simulations: leaf-first LRU over block keys, as an engine's is."""

from collections.abc import Sequence


class FakeCache:
    """Holds at most `capacity` blocks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.parents: dict[bytes, bytes | None] = {}
        """Least recently used first."""

    def serve(self, keys: Sequence[bytes]) -> tuple[int, list[bytes], list[bytes]]:
        """One prompt: (blocks hit, keys stored, keys evicted)."""
        hit = next((position for position, key in enumerate(keys) if key not in self.parents), len(keys))
        stored = list(keys[hit:])
        for position in reversed(range(len(keys))):
            # Children first, so that a leaf is always older than its parent.
            self.parents.pop(keys[position], None)
            self.parents[keys[position]] = keys[position - 1] if position else None
        evicted = []
        while len(self.parents) > self.capacity:
            evicted.append(next(iter(self.parents)))
            del self.parents[evicted[-1]]
        return hit, stored, evicted
