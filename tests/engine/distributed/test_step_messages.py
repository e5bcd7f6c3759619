"""What the first rank tells the others: they launch the same batches, and what has not changed is not told."""

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_engine.core.batch import Batch, PageCopy, PageSwap, Row, TokenMasks, Transfers
from mini_infer_engine.core.images import EncoderWork, RowImage
from mini_infer_engine.core.request import ImageInput, SamplingParams
from mini_infer_engine.distributed import step_messages
from mini_infer_engine.distributed.step_messages import Launch, StepReader, StepWriter

PAGE = 16
SAMPLING_PARAMS = SamplingParams(temperature=0.7, stop=["x"])


def _chunk(slot: int, start: int, count: int, pages: list[int], **fields: object) -> Row:
    return Row(slot, start, count, list(range(start, start + count)), pages, SAMPLING_PARAMS, 7, **fields)  # type: ignore[arg-type]


def _sent(writer: StepWriter, batch: Batch) -> Launch:
    message = step_messages.decode(step_messages.encode(writer.launch(batch)))
    assert isinstance(message, Launch)
    return message


def _same(read: Batch, batch: Batch) -> None:
    assert (read.num_decodes, read.waits_for_masks) == (batch.num_decodes, batch.waits_for_masks)
    assert read.transfers == batch.transfers
    for one, other in zip(read.rows, batch.rows, strict=True):
        needed = -(-(other.start + other.count) // PAGE)
        assert list(one.page_table[:needed]) == list(other.page_table[:needed])
        for name in Row.__struct_fields__:
            if name == "more_page_tables":
                for ours, theirs in zip(one.more_page_tables, other.more_page_tables, strict=True):
                    assert list(ours[:needed]) == list(theirs[:needed])
            elif name != "page_table":
                left, right = getattr(one, name), getattr(other, name)
                assert (list(left) if isinstance(left, list | tuple) else left) == (
                    list(right) if isinstance(right, list | tuple) else right
                ), name


def test_tickets_of_loads_come_with_their_pass() -> None:
    class Load:
        def wait_for_layer(self, layer: int) -> None: ...

    writer, reader, load = StepWriter(PAGE), StepReader(), Load()
    batch = Batch([_chunk(3, 16, 4, [5, 6])], 0)
    message = step_messages.decode(step_messages.encode(writer.launch(batch, [8, 9])))
    assert isinstance(message, Launch)
    assert message.loads == [8, 9]
    assert reader.batch(message, [load]).layerwise_loads == [load]
    plain = _sent(writer, batch)
    assert plain.loads == []
    assert reader.batch(plain).layerwise_loads == []


def test_a_decode_step_message_has_only_slots_and_appended_pages() -> None:
    writer, reader = StepWriter(PAGE), StepReader()
    pages = [5]
    reader.batch(_sent(writer, Batch([_chunk(3, 0, 15, pages, position_offset=9)], 0)))
    for start in range(15, 40):
        if start % PAGE == 0:
            pages.append(100 + start)
        batch = Batch([Row(3, start, 1, None, pages, SAMPLING_PARAMS, 7, start - 14, position_offset=9)], 1)
        message = _sent(writer, batch)
        assert message.rows == [3]
        assert message.pages == ({3: [100 + start]} if start % PAGE == 0 else {})
        assert len(step_messages.encode(message)) < 60
        _same(reader.batch(message), batch)


def test_ranks_get_images_and_the_encoders_work_when_a_chunk_has_some() -> None:
    writer, reader = StepWriter(PAGE), StepReader()
    image = ImageInput(offset=2, num_tokens=4, digest=b"d" * 32, grid=(1, 4, 4), shape=(16, 2), pixels=b"p" * 128)
    row = _chunk(3, 0, 15, [5], position_offset=-2)
    row.images = [RowImage(b"key", 2, 4, (1, 2, 2), 2, 6)]
    batch = Batch([row], 0, encoder=EncoderWork([b"old"], [(b"key", image)]))
    read = reader.batch(_sent(writer, batch))
    _same(read, batch)
    assert read.encoder == batch.encoder
    decode = Batch([Row(3, 15, 1, None, [5], SAMPLING_PARAMS, 7, 1, position_offset=-2)], 1)
    message = _sent(writer, decode)
    assert (message.rows, message.encoder) == ([3], None)
    _same(reader.batch(message), decode)


def test_a_row_is_sent_whole_when_it_differs() -> None:
    writer, reader = StepWriter(PAGE), StepReader()
    batches = [
        Batch([_chunk(0, 0, 20, [1, 2])], 0),
        Batch([Row(0, 20, 1, None, [1, 2], SAMPLING_PARAMS, 7, 1, suppressed_token_ids=(4,))], 1),
        Batch([Row(0, 21, 1, None, [1, 2], SAMPLING_PARAMS, 7, 2)], 1),
        Batch([Row(0, 30, 1, None, [1, 2], SAMPLING_PARAMS, 7, 2, banned=[(None, 3), (5, 6)])], 1),
        Batch([_chunk(0, 0, 4, [9])], 0),
        Batch([Row(0, 4, 1, None, [9], SAMPLING_PARAMS, 7, 1)], 1),
    ]
    for batch in batches:
        _same(reader.batch(_sent(writer, batch)), batch)


def test_tokens_transfers_and_masks_survive_step_messages() -> None:
    row = Row(0, 0, 3, array("I", [7, 8, 9]), [4], SAMPLING_PARAMS, known_token_ids=array("I", [7, 8, 9]))
    moves = Transfers([PageSwap(1, 2)], [PageSwap(3, 4)], [PageCopy(5, 6, 7)])
    batch = Batch([row], 0, moves, waits_for_masks=True)
    read = StepReader().batch(_sent(StepWriter(PAGE), batch))
    assert read.rows[0].token_ids == [7, 8, 9]
    assert read.rows[0].known_token_ids == [7, 8, 9]
    assert (read.transfers, read.waits_for_masks) == (moves, True)
    masks = TokenMasks([0, 2], np.arange(6, dtype=np.uint32).reshape(2, 3))
    message = step_messages.decode(step_messages.encode(step_messages.masks_message(masks)))
    assert isinstance(message, step_messages.Sample)
    assert step_messages.masks_of(message).rows == [0, 2]
    assert np.array_equal(step_messages.masks_of(message).bits, masks.bits)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["chunk", "decode", "odd"])), min_size=1, max_size=60),
    st.integers(1, 3),
)
def test_every_rank_sees_the_same_rows_when_their_order_is_any(steps: list[tuple[int, str]], num_groups: int) -> None:
    writer, reader = StepWriter(PAGE), StepReader()
    lengths: dict[int, int] = {}
    tables: dict[int, list[list[int]]] = {}
    fresh = iter(range(10_000))
    for slot, kind in steps:
        if kind == "chunk" or slot not in lengths:
            lengths[slot], tables[slot] = 0, [[] for _ in range(num_groups)]
            count = 30
        else:
            count = 1
        start = lengths[slot]
        lengths[slot] += count
        while len(tables[slot][0]) * PAGE < lengths[slot]:
            for table in tables[slot]:
                table.append(next(fresh))
        first, *more = tables[slot]
        if count > 1:
            row = _chunk(slot, start, count, first, more_page_tables=more)
        else:
            index = start - 29 + (kind == "odd")
            row = Row(slot, start, 1, None, first, SAMPLING_PARAMS, 7, index, more_page_tables=more)
        batch = Batch([row], int(count == 1))
        _same(reader.batch(_sent(writer, batch)), batch)
