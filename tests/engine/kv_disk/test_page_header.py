"""Headers of pages on the disk: what is read is what was written, or nothing."""

import random
import struct
import zlib
from array import array

import msgspec
import pytest

from mini_infer_contract.blocks import KEY_BYTES, block_keys, root_key
from mini_infer_engine.core.kv_tiers.page_record import PageRecord, state_records
from mini_infer_engine.core.prefix_cache import Block
from mini_infer_engine.kv_disk.page_header import decode_header, encode_header


def record_of(number: int, num_blocks: int = 2, salt: str = "", digest: int = 7) -> PageRecord:
    """The first page of a prompt whose tokens are all the same number."""
    tokens = array("I", [number] * 16)
    keys = block_keys([number] * 16 * num_blocks, root_key("model", salt=salt))
    parents = [None, *keys]
    return PageRecord(
        tuple(Block(0, key, parent, tokens.tobytes(), salt, []) for key, parent in zip(keys, parents, strict=False)),
        digest,
    )


def facts(record: PageRecord) -> list[object]:
    blocks = [(block.key, block.parent, block.packed_tokens, block.salt) for block in record.blocks]
    return [record.digest, *blocks]


def test_record_is_the_same_when_its_header_is_read() -> None:
    for record in (record_of(3), record_of(4, 8, "a tenant", 2**64 - 1), record_of(0, 1)):
        read = decode_header(encode_header(record) + bytes(100))
        assert read is not None
        assert facts(read) == facts(record)


def test_record_of_a_part_of_a_state_is_the_same_when_its_header_is_read() -> None:
    parts = state_records(b"a prefix", 2**64 - 1, 3)
    read = [decode_header(encode_header(part) + bytes(100)) for part in parts]
    assert [one and (one.key, one.digest, one.blocks) for one in read] == [
        (part.key, part.digest, ()) for part in parts
    ]
    assert len({part.key for part in parts}) == 3
    assert parts[0].key == state_records(b"a prefix", 5, 3)[0].key
    assert not {part.key for part in parts[1:]} & {part.key for part in state_records(b"a prefix", 5, 3)}


def test_nothing_is_read_when_a_header_is_torn_or_changed() -> None:
    header, draw = encode_header(record_of(5, 4)), random.Random(0)
    for length in range(len(header)):
        assert decode_header(header[:length]) is None
        assert decode_header(header[:length] + bytes(len(header) - length)) is None or set(header[length:]) <= {0}
    for _ in range(300):
        changed = bytearray(header)
        changed[draw.randrange(len(header))] ^= 1 << draw.randrange(8)
        assert decode_header(bytes(changed)) is None
    assert decode_header(bytes(5000)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"group": 256},
        {"group": -1},
        {"digest": -1},
        {"tokens": bytes(65)},
        {"tokens": bytes(63)},
        {"tokens": bytes(192)},
        {"keys": bytes(KEY_BYTES + 1)},
        {"keys": b""},
        {"salt": 5},
        {"parent": "x"},
    ],
    ids=str,
)
def test_nothing_is_read_when_a_checksum_is_right_and_the_content_is_none(change: dict[str, object]) -> None:
    content = {"digest": 7, "parent": None, "keys": bytes(KEY_BYTES), "tokens": bytes(64), "salt": "", "group": 0}

    def header(content: dict[str, object]) -> bytes:
        data = msgspec.msgpack.encode(list(content.values()))
        return struct.pack("<8sII", b"MIKV0001", len(data), zlib.crc32(data)) + data

    assert decode_header(header(content)) is not None
    assert decode_header(header(content | change)) is None
