"""Parts of ranks of one shared pool: they have equally many slots, and are void together."""

from pathlib import Path

import pytest

from mini_infer_engine.kv_host.open_pool import open_part
from mini_infer_engine.kv_host.pool_file import PoolFile

NUM_BYTES, PAGE_BYTES, PAGE_TOKENS = 1 << 20, 4096, 16


def part(folder: Path, rank: int, *others: int) -> PoolFile:
    """Opens a part; the other ranks have these numbers, whatever is agreed on."""
    return open_part(
        str(folder), NUM_BYTES, PAGE_BYTES, PAGE_TOKENS, "m", lambda: 1 << 40, rank, lambda own: min(own, *others, own)
    )


def test_contents_are_void_when_a_part_is_new(tmp_path: Path) -> None:
    first = part(tmp_path, 0)
    assert first.is_void
    first.close()
    again = part(tmp_path, 0)
    assert not again.is_void
    again.close()
    assert part(tmp_path, 1).is_void, "it is another rank's"
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0", "rank-1"}


def test_part_is_refused_when_those_of_others_have_fewer_slots(tmp_path: Path) -> None:
    part(tmp_path, 0)
    with pytest.raises(OSError, match="--kv-host-memory"):
        part(tmp_path, 0, 5)
