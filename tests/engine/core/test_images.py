"""Images of prompts: places, positions, keys of blocks, and what the vision encoder computes in which pass."""

from array import array

import msgspec
import pytest

from mini_infer_contract.blocks import block_keys, root_key
from mini_infer_contract.images import image_key_ids
from mini_infer_engine.config.model.vision import VisionConfig
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.core.encoder_cache import EncoderCacheManager
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.images import PromptImages, images_fault, key_ids
from mini_infer_engine.core.request import ImageInput, Request, SamplingParams
from mini_infer_engine.core.sequence import Sequence
from tests.support.random_runner import RandomRunner

QWEN = VisionConfig(family="qwen3_vl", encoder={}, image_token_id=9, patch_width=2, merge_size=2)
GEMMA = VisionConfig(
    family="gemma3", encoder={}, image_token_id=9, patch_width=0, image_size=2, tokens_per_crop=6, is_bidirectional=True
)


def qwen_image(offset: int, height: int, width: int, name: int = 1) -> ImageInput:
    shape = (height * width, 2)
    return ImageInput(
        offset=offset,
        num_tokens=height * width // 4,
        digest=bytes([name]) * 32,
        grid=(1, height, width),
        shape=shape,
        pixels=bytes(4 * shape[0] * shape[1]),
    )


def gemma_image(offset: int, name: int = 1, crops: int = 1) -> ImageInput:
    return ImageInput(
        offset=offset,
        num_tokens=6 * crops,
        digest=bytes([name]) * 32,
        grid=(1, 1, 1),
        shape=(crops, 3, 2, 2),
        pixels=bytes(48 * crops),
    )


def sequence_of(length: int, *inputs: ImageInput, vision: VisionConfig = QWEN) -> Sequence:
    token_ids = [5] * length
    for image in inputs:
        token_ids[image.offset : image.offset + image.num_tokens] = [9] * image.num_tokens
    request = Request(request_id="a", prompt_token_ids=token_ids, sampling=SamplingParams(), images=list(inputs))
    return Sequence(
        request,
        (0, 0),
        0.0,
        root_key("m"),
        last_position=length,
        stops=frozenset(),
        suppressed=(),
        images=PromptImages.of(inputs, vision),
    )


def test_positions_advance_by_the_longer_side_when_images_have_grids() -> None:
    images = PromptImages.of([qwen_image(3, 4, 12), qwen_image(20, 8, 4)], QWEN)
    assert [(row.grid, row.position) for row in images.rows] == [((1, 2, 6), 3), ((1, 4, 2), 14)]
    assert [images.offset_at(end) for end in (2, 3, 15, 20, 28, 99)] == [0, 0, -6, -6, -10, -10]
    assert images.position_offset == -10


def test_positions_are_indexes_when_images_have_no_grids() -> None:
    images = PromptImages.of([gemma_image(3), gemma_image(20)], GEMMA)
    assert [row.position for row in images.rows] == [3, 20]
    assert images.position_offset == images.offset_at(9) == 0


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 3, 3),
        (0, 4, 3),
        (0, 8, 3),
        (0, 9, 9),
        (3, 8, 3),
        (5, 8, 5),
        (0, 20, 20),
        (0, 21, 20),
        (0, 26, 20),
        (0, 32, 32),
    ],
)
def test_a_chunk_ends_before_a_block_of_images_when_it_would_end_within(start: int, end: int, expected: int) -> None:
    images = PromptImages.of([gemma_image(3), gemma_image(20), gemma_image(26)], GEMMA)  # the last two are neighbours
    assert images.uncut_end(start, end) == expected
    assert images.longest_block() == 12
    causal = PromptImages.of([qwen_image(3, 4, 4)], QWEN)
    assert causal.uncut_end(0, 5) == 5
    assert causal.longest_block() == 1


def test_keys_have_words_of_the_digest_when_tokens_are_placeholders() -> None:
    image, other = qwen_image(10, 8, 8), qwen_image(30, 4, 4, name=2)
    sequence = sequence_of(40, image, other)
    ids = [5] * 10 + list(image_key_ids(image.digest, 16)) + [5] * 4 + list(image_key_ids(other.digest, 4)) + [5] * 6
    assert sequence.key_ids(0, 40).tolist() == ids
    assert [sequence.key_ids(start, start + 7).tolist() for start in range(33)] == [
        ids[start : start + 7] for start in range(33)
    ]
    assert sequence.token_ids[10] == 9, "the model reads placeholders"
    assert sequence.known_keys(2) == block_keys(ids[:32], root_key("m"))
    assert sequence_of(40, image, other).first_key() == block_keys(ids[:16], root_key("m"))[0]
    assert key_ids(array("I", [9] * 4), 12, [image]).tolist() == ids[12:16]


def test_prompts_share_blocks_only_when_they_have_the_same_image() -> None:
    keys = [sequence_of(40, qwen_image(10, 8, 8, name=name)).known_keys(2) for name in (1, 1, 2)]
    assert keys[0] == keys[1]
    assert not set(keys[0]) & set(keys[2])


FAULTS = {
    "has tokens 12 to 16": (qwen_image(12, 4, 4), {}),
    "other tokens than placeholders": (qwen_image(1, 4, 4), {}),
    "digest": (qwen_image(2, 4, 4), {"digest": b"short"}),
    "grid": (qwen_image(2, 4, 4), {"grid": (1, 3, 4)}),
    "shape": (qwen_image(2, 4, 4), {"shape": (16, 3)}),
    "bytes": (qwen_image(2, 4, 4), {"pixels": b""}),
    "embeddings": (qwen_image(2, 4, 4), {"num_tokens": 3}),
}


@pytest.mark.parametrize("word", FAULTS)
def test_images_are_refused_by_reason_when_they_do_not_fit_the_prompt(word: str) -> None:
    image, changes = FAULTS[word]
    assert word in str(images_fault([5, 5, 9, 9, 9, 9, *[5] * 8], [msgspec.structs.replace(image, **changes)], QWEN))


def test_images_are_refused_when_they_overlap() -> None:
    image = qwen_image(2, 4, 4)
    assert images_fault([5, 5, 9, 9, 9, 9, 5], [image], QWEN) is None
    assert "overlap" in str(images_fault([5, 5, 9, 9, 9, 9, 5], [image, image], QWEN))


def plan(cache: EncoderCacheManager, batch: Batch, sequence: Sequence, count: int) -> tuple[int, list[bytes]]:
    """Plans the next chunk; returns its tokens, and the digests of the images that the pass encodes so far."""
    count = cache.most_tokens(batch, sequence, count)
    if count:
        row = Row(0, sequence.num_computed, count, [], [], None)
        cache.take(batch, row, sequence.images)
        batch.rows.append(row)
        sequence.num_computed += count
    return count, [] if batch.encoder is None else [key[:1] for key, _ in batch.encoder.images]


def test_an_image_is_encoded_with_the_first_chunk_that_needs_it_and_once() -> None:
    cache, sequence = EncoderCacheManager(100, 100), sequence_of(40, qwen_image(10, 8, 8), qwen_image(30, 4, 4, name=2))
    assert plan(cache, Batch([], 0), sequence, 10) == (10, [])
    assert plan(cache, Batch([], 0), sequence, 5) == (5, [b"\1"])
    assert plan(cache, Batch([], 0), sequence, 10) == (10, [])
    batch = Batch([], 0)
    assert plan(cache, batch, sequence, 15) == (15, [b"\2"])
    assert plan(cache, batch, sequence_of(20, qwen_image(10, 8, 8)), 20) == (20, [b"\2"])
    assert cache.num_encoded == 2
    assert [[image.offset for image in row.images] for row in batch.rows] == [[10, 30], [10]]
    assert batch.rows[0].position_offset == sequence.images.position_offset


def test_a_chunk_ends_before_an_image_when_the_budget_of_the_pass_is_spent() -> None:
    cache, sequence = EncoderCacheManager(100, 17), sequence_of(40, qwen_image(10, 8, 8), qwen_image(30, 4, 4, name=2))
    assert plan(cache, Batch([], 0), sequence, 40) == (30, [b"\1"])
    assert plan(cache, Batch([], 0), sequence, 10) == (10, [b"\2"])
    large = sequence_of(40, qwen_image(2, 8, 16, name=3))
    assert plan(cache, Batch([], 0), large, 40) == (40, [b"\3"]), "one image may exceed the budget"


def test_embeddings_least_recently_used_are_dropped_when_others_need_room() -> None:
    cache = EncoderCacheManager(20, 100)
    plan(cache, Batch([], 0), sequence_of(30, qwen_image(2, 8, 8, name=1)), 30)
    plan(cache, Batch([], 0), sequence_of(30, qwen_image(2, 4, 4, name=2)), 30)
    batch = Batch([], 0)
    plan(cache, batch, sequence_of(30, qwen_image(2, 8, 8, name=1)), 30)
    assert plan(cache, batch, sequence_of(30, qwen_image(2, 4, 4, name=3)), 30) == (30, [b"\3"])
    assert batch.encoder is not None
    assert [key[:1] for key in batch.encoder.dropped] == [b"\2"], "the pass reads the older one"
    assert plan(cache, batch, sequence_of(30, qwen_image(2, 8, 8, name=4)), 30)[0] == 2, "nothing more can be dropped"
    assert cache.num_embeddings == 20


def test_images_are_encoded_again_when_a_pass_has_failed() -> None:
    cache = EncoderCacheManager(20, 100)
    plan(cache, Batch([], 0), sequence_of(30, qwen_image(2, 8, 8)), 30)
    cache.reset()
    batch = Batch([], 0)
    assert plan(cache, batch, sequence_of(30, qwen_image(2, 8, 8)), 30) == (30, [b"\1"])
    assert batch.encoder is not None
    assert [key[:1] for key in batch.encoder.dropped] == [b"\1"]


def test_bidirectional_images_are_whole_in_a_chunk_when_budgets_cut() -> None:
    cache = EncoderCacheManager(100, 6)
    sequence = sequence_of(40, gemma_image(3), gemma_image(20, name=2), gemma_image(26, name=3), vision=GEMMA)
    assert plan(cache, Batch([], 0), sequence, 8) == (3, [])
    assert plan(cache, Batch([], 0), sequence, 8) == (8, [b"\1"])
    assert plan(cache, Batch([], 0), sequence, 29)[0] == 9, "the budget has no room for the two that follow each other"


def engine(vision: VisionConfig | None, **settings: object) -> Engine:
    runner = RandomRunner(50, [])
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 12, "mm_encoder_cache_tokens": 18} | settings
    return Engine(EngineSettings(model="m", **options).resolved(), runner, (), 500, "m", vision=vision)  # type: ignore[arg-type]


def request_of(*images: ImageInput, length: int = 60) -> Request:
    sequence = sequence_of(length, *images)
    return msgspec.structs.replace(sequence.request, sampling=SamplingParams(max_tokens=3))


@pytest.mark.parametrize(
    ("vision", "image", "word"),
    [
        (None, qwen_image(2, 4, 4), "text alone"),
        (QWEN, qwen_image(2, 8, 12), "--mm-encoder-cache-tokens"),
        (GEMMA, gemma_image(2, crops=2), "--max-num-batched-tokens"),
        (GEMMA, gemma_image(2, crops=4), "--mm-encoder-cache-tokens"),
        (QWEN, msgspec.structs.replace(qwen_image(2, 4, 4), grid=(1, 2, 2)), "shape"),
    ],
)
def test_a_request_is_refused_with_a_remedy_when_its_images_cannot_be_served(
    vision: VisionConfig | None, image: ImageInput, word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        engine(vision).add(request_of(image))


@pytest.mark.parametrize("vision", [QWEN, GEMMA])
def test_events_have_key_ids_when_a_prompt_has_images(vision: VisionConfig) -> None:
    image = qwen_image(20, 8, 8) if vision is QWEN else gemma_image(20)
    running = engine(vision)
    running.add(request_of(image))
    while running.has_work:
        running.step()
    published = [token for event in running.take_events() for token in event.token_ids]  # type: ignore[union-attr]
    assert published[20:26] == list(image_key_ids(image.digest, 6))
    assert published[:20] == [5] * 20


def test_a_budget_of_one_pass_is_never_exceeded_when_images_wait() -> None:
    running = engine(GEMMA, max_num_batched_tokens=14)
    for index in range(4):
        running.add(msgspec.structs.replace(request_of(gemma_image(7, name=index)), request_id=str(index)))
    while running.has_work:
        outputs = running.step()
        assert all(output.finish_reason != "error" for output in outputs)
        for _, step in running._in_flight:
            assert step.batch.num_tokens <= 14
