"""Prompts that were sent to an endpoint and count as cached there until an event confirms them or they expire.

A guess covers the part of a prompt beyond what is cached or guessed already. A growing chat therefore adds its new
part, and extends the time of the rest, guess by guess and not block by block. Pure: time is passed in.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from mini_infer_gateway.index.key_chain import Lookup

NONE = -1


@dataclass(slots=True)
class _Guess:
    """The blocks that one request added."""

    keys: Sequence[bytes]
    expires_s: float
    before: int
    """The guess that contains the prompt's preceding blocks; NONE if they are confirmed, or there are none."""
    dropped: int = 0
    """Number of keys, counted from the last, that are forgotten already."""


class Guesses:
    """The guesses about one endpoint."""

    def __init__(self) -> None:
        self.by_key: dict[bytes, int] = {}
        """The guess that each of our keys belongs to."""
        self._guesses: dict[int, _Guess] = {}
        self._by_time: list[tuple[float, int]] = []
        """A heap of (expiry, guess); an extended guess stays at its old expiry."""
        self._next = 0

    def __len__(self) -> int:
        return len(self.by_key)

    def add(self, keys: Sequence[bytes], cached: int, expires_s: float) -> None:
        """Records that a prompt was sent whose first `cached` blocks are cached."""
        num_known = cached
        before = NONE
        if cached < len(keys) and keys[cached] in self.by_key:
            num_known = self._num_known(keys, cached)
            before = self._cut_after(keys[num_known - 1])
        self._extend(before, expires_s)
        if num_known < len(keys):
            self._begin(keys[num_known:], expires_s, before)

    def depth(self, keys: Lookup, cached: int, now_s: float, step: int) -> int:
        """Returns the number of blocks that count as cached, given that `cached` are; a multiple of `step`."""
        if not self.by_key or cached >= keys.length or not self._is_alive(keys.last_of(cached + 1), now_s):
            return cached
        depth = keys.deepest(self.by_key.__contains__, cached + 1, keys.length)
        if not self._is_alive(keys.last_of(depth), now_s):  # The time of some is up, which nobody has noticed yet.
            depth = keys.deepest(lambda key: self._is_alive(key, now_s), cached + 1, depth)
        return depth - depth % step

    def confirm(self, key: bytes) -> None:
        """Removes a key from the guesses, because an event reported it as cached."""
        self.by_key.pop(key, None)

    def expire(self, now_s: float, blocks: int) -> int:
        """Forgets expired guesses, at most `blocks` blocks. Returns the number of blocks that it inspected."""
        spent = 0
        while spent < blocks and self._by_time and self._by_time[0][0] <= now_s:
            spent += 1 + self._drop_first(now_s, blocks - spent)
        return spent

    def evict(self, blocks: int) -> None:
        """Forgets this many blocks, those that expire first."""
        while blocks > 0 and self._by_time:
            blocks -= self._drop_first(self._by_time[0][0], blocks)

    def _drop_first(self, now_s: float, blocks: int) -> int:
        """Drops up to `blocks` blocks of the heap's first guess if it has expired. Returns the number dropped."""
        _, number = self._by_time[0]
        guess = self._guesses[number]
        if guess.expires_s > now_s:
            heapq.heapreplace(self._by_time, (guess.expires_s, number))
            return 0
        evicted = 0
        while guess.dropped < len(guess.keys) and evicted < blocks:
            guess.dropped += 1
            key = guess.keys[len(guess.keys) - guess.dropped]
            if self.by_key.get(key) == number:
                del self.by_key[key]
            evicted += 1
        if guess.dropped == len(guess.keys):
            heapq.heappop(self._by_time)
            del self._guesses[number]
        return evicted

    def _is_alive(self, key: bytes, now_s: float) -> bool:
        number = self.by_key.get(key)
        return number is not None and self._guesses[number].expires_s > now_s

    def _num_known(self, keys: Sequence[bytes], cached: int) -> int:
        """Returns the number of leading keys that are cached or guessed; the key at `cached` is guessed."""
        return Lookup(keys).deepest(self.by_key.__contains__, cached + 1, len(keys))

    def _cut_after(self, key: bytes) -> int:
        """Returns the guess that ends with this key, split there if another prompt continues beyond it."""
        number = self.by_key[key]
        guess = self._guesses[number]
        length = len(guess.keys) - guess.dropped
        if guess.keys[length - 1] == key:
            return number
        end = next(position for position in range(length - 1, -1, -1) if guess.keys[position] == key) + 1
        rest = guess.keys[end:length]
        guess.keys, guess.dropped = guess.keys[:end], 0
        self._begin([key for key in rest if self.by_key.get(key) == number], guess.expires_s, number)
        return number

    def _extend(self, number: int, expires_s: float) -> None:
        while number in self._guesses and self._guesses[number].expires_s < expires_s:
            guess = self._guesses[number]
            guess.expires_s = expires_s
            number = guess.before

    def _begin(self, keys: Sequence[bytes], expires_s: float, before: int) -> None:
        number = self._next
        self._next += 1
        self._guesses[number] = _Guess(keys, expires_s, before)
        heapq.heappush(self._by_time, (expires_s, number))
        for key in keys:
            self.by_key[key] = number
