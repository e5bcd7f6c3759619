"""The layout of images in a pass: embeddings at their placeholders, positions of transformers, visible keys."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel, Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel, Qwen3VLTextRotaryEmbedding

from mini_infer_engine.config.model.rope import RopeParameters
from mini_infer_engine.config.model.vision import VisionConfig
from mini_infer_engine.core.batch import Row
from mini_infer_engine.core.images import PromptImages
from mini_infer_engine.core.request import ImageInput
from mini_infer_engine.layers.rotary import Rotary
from mini_infer_engine.runtime.inputs.image_inputs import (
    grid_positions,
    last_visible_keys,
    placeholder_tokens,
    row_positions,
)

QWEN = VisionConfig(family="qwen2_5_vl", encoder={}, image_token_id=9, patch_width=1, merge_size=2)
GEMMA = VisionConfig(
    family="gemma3", encoder={}, image_token_id=9, patch_width=0, tokens_per_crop=4, is_bidirectional=True
)
CASES: dict[str, tuple[int, list[tuple[int, tuple[int, int, int]]]]] = {
    "text": (9, []),
    "one": (30, [(4, (1, 6, 8))]),
    "first": (20, [(0, (1, 4, 4))]),
    "last": (16, [(4, (1, 8, 6))]),
    "several": (80, [(3, (1, 4, 12)), (16, (1, 8, 4)), (40, (1, 2, 2)), (50, (1, 12, 4))]),
    "frames": (60, [(5, (3, 4, 8))]),
}


def images_of(places: list[tuple[int, tuple[int, int, int]]], vision: VisionConfig = QWEN) -> PromptImages:
    return PromptImages.of(
        [
            ImageInput(
                offset=offset,
                num_tokens=4 if vision is GEMMA else int(np.prod(grid)) // 4,
                digest=bytes([offset]) * 32,
                grid=grid,
                shape=(),
                pixels=b"",
            )
            for offset, grid in places
        ],
        vision,
    )


def expected_positions(model: Any, length: int, images: PromptImages) -> tuple[torch.Tensor, int]:
    """Returns the result of transformers' `get_rope_index` for one prompt."""
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=4)
    owner = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    owner.get_vision_position_ids = model.get_vision_position_ids.__get__(owner)
    types = torch.zeros((1, length), dtype=torch.int64)
    for image in images.inputs:
        types[0, image.offset : image.offset + image.num_tokens] = 1
    grids = torch.tensor([image.grid for image in images.inputs]) if images else None
    positions, deltas = model.get_rope_index(owner, types, types, image_grid_thw=grids)
    return positions[:, 0], int(deltas[0, 0])


@pytest.mark.parametrize("model", [Qwen2_5_VLModel, Qwen3VLModel])
@pytest.mark.parametrize("case", CASES)
def test_positions_equal_transformers_when_a_prompt_is_cut_anywhere(case: str, model: Any) -> None:
    length, places = CASES[case]
    images = images_of(places)
    expected, delta = expected_positions(model, length, images)
    assert images.position_offset == delta
    for start in range(length):
        for end in {start + 1, (start + length) // 2 + 1, length}:
            inside = [images.rows[index] for index in images.overlapping(start, end)]
            found = row_positions(start, end - start, inside, images.offset_at(end))
            assert np.array_equal(found, expected[:, start:end].numpy()), (start, end)


def test_a_pass_has_the_parts_of_images_that_its_chunks_have() -> None:
    images = images_of([(4, (1, 6, 8)), (20, (1, 4, 4))])
    rows = [Row(0, 7, 1, None, [], None), Row(1, 6, 17, [], [], None), Row(2, 0, 6, [], [], None)]
    rows[1].images, rows[2].images = images.rows, images.rows[:1]
    rows[1].position_offset, rows[0].position_offset = images.position_offset, -3
    tokens, parts = placeholder_tokens(rows)
    assert tokens.tolist() == [*range(1, 11), *range(15, 18), 18 + 4, 18 + 5]
    keys = [image.key for image in images.rows]
    assert parts == [(keys[0], 2, 12), (keys[1], 0, 3), (keys[0], 0, 2)]
    assert grid_positions(rows)[:, :1].tolist() == [[4]] * 3


def test_tokens_see_the_end_of_their_image_when_attention_is_bidirectional() -> None:
    images = images_of([(2, (1, 1, 1)), (8, (1, 1, 1)), (12, (1, 1, 1))], GEMMA)
    row = Row(0, 3, 14, [], [], None)
    row.images = images.rows
    seen = [5] * 3 + [6, 7] + [15] * 8 + [16]
    assert last_visible_keys([Row(0, 9, 1, None, [], None), row]).tolist() == [9, *seen]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_rotations_equal_transformers_when_positions_have_three_dimensions(family: str) -> None:
    is_newer = family == "qwen3_vl"
    sections = (8, 4, 4) if is_newer else (4, 6, 6)
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}
    config = SimpleNamespace(rope_parameters=parameters, max_position_embeddings=64, head_dim=32)
    reference: Any = (Qwen3VLTextRotaryEmbedding if is_newer else Qwen2_5_VLRotaryEmbedding)(config)
    positions = torch.randint(0, 64, (3, 20), generator=torch.Generator().manual_seed(1))
    rope = RopeParameters(sections=sections, sections_alternate=is_newer)
    table = Rotary(rope, 32, 64, torch.float32, torch.device("cpu")).by_section(positions)
    cos, sin = reference(torch.zeros(1), positions[:, None])
    assert torch.allclose(table, torch.cat((cos[0, :, :16], sin[0, :, :16]), dim=-1), atol=1e-6)
