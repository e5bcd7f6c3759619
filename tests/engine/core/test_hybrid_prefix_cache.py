"""The longest prefix of which a window's blocks are cached, as a look at every length finds it."""

from hypothesis import given
from hypothesis import strategies as st

from mini_infer_engine.core.hybrid_prefix_cache import longest_cached

KEYS = [b"%d" % number for number in range(24)]


@given(st.sets(st.sampled_from(KEYS)), st.integers(0, 24), st.integers(1, 26), st.sampled_from((1, 2, 8)))
def test_longest_prefix_is_that_of_a_look_at_every_length(
    cached: set[bytes], count: int, needed: int, alignment: int
) -> None:
    fitting = [
        end for end in range(0, count + 1, alignment) if all(key in cached for key in KEYS[max(0, end - needed) : end])
    ]
    assert longest_cached(cached, KEYS, count, needed, alignment) == fitting[-1]


class Counted(set[bytes]):
    """Counts the looks at it."""

    looks = 0

    def __contains__(self, key: object) -> bool:
        self.looks += 1
        return super().__contains__(key)


def test_each_block_is_looked_at_once_when_none_is_cached() -> None:
    blocks = Counted()
    assert longest_cached(blocks, KEYS, 24, 8, 1) == 0
    assert blocks.looks == 24
