"""Random tiny models that read images, in Hugging Face format, with images for them and transformers' results."""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor

from mini_infer_engine.core.request import ImageInput

Family = Literal["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3"]
FAMILIES: tuple[Family, ...] = ("qwen2_5_vl", "qwen3_vl", "gemma3")
CLASSES: dict[Family, str] = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
}
IMAGE_TOKEN, VISION_START, VISION_END = 190, 191, 192
GEMMA_TOKENS_PER_IMAGE = 16

_TEXT: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_QWEN_IDS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 193,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "tie_word_embeddings": False,
}
_CONFIGS: dict[Family, dict[str, Any]] = {
    "qwen2_5_vl": {
        **_QWEN_IDS,
        "text_config": _TEXT
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 64,
            "initializer_range": 0.2,
        },
    },
    "qwen3_vl": {
        **_QWEN_IDS,
        "text_config": _TEXT
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
            "out_hidden_size": 64,
            "initializer_range": 0.2,
        },
    },
    "gemma3": {
        "image_token_id": IMAGE_TOKEN,
        "boi_token_id": VISION_START,
        "eoi_token_id": VISION_END,
        "mm_tokens_per_image": GEMMA_TOKENS_PER_IMAGE,
        "tie_word_embeddings": True,
        "text_config": _TEXT
        | {
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 4,
            "vision_use_head": False,
        },
    },
}


_CONFIGS["qwen3_vl_moe"] = _CONFIGS["qwen3_vl"] | {
    "text_config": _CONFIGS["qwen3_vl"]["text_config"]
    | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
}


def config_of(family: Family) -> dict[str, Any]:
    """Returns the config.json of a family's tiny model."""
    return {**_CONFIGS[family], "architectures": [CLASSES[family]]}


def save_vision_model(directory: Path, family: Family, **text_config: Any) -> Any:
    """Saves a random fp32 model of `family` and returns it.

    Values of `text_config` that are not None replace fields of its text model's config. The ids are `IMAGE_TOKEN`,
    `VISION_START` and `VISION_END`. There is neither a tokenizer nor an image processor.
    """
    torch.manual_seed(7)
    made = _CONFIGS[family]
    model_class = getattr(transformers, CLASSES[family])
    changes = {name: value for name, value in text_config.items() if value is not None}
    config = model_class.config_class(**{**made, "text_config": made["text_config"] | changes})
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mm_input_projection_weight") or "patch_embed" in name or "position_embedding" in name:
                parameter.normal_(0, 0.2)
            elif parameter.dim() == 1:  # norms and biases that differ from what they begin with
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "vision_tower" in name:
                parameter.normal_(0, 0.2)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(directory)
    return model


def random_image(family: Family, seed: int, grid: tuple[int, int] = (4, 6), offset: int = 0) -> ImageInput:
    """Returns an image of random values; `grid` are its patches in height and width, of which Gemma's have all."""
    generator = torch.Generator().manual_seed(seed)
    if family == "gemma3":
        shape: tuple[int, ...] = (1, 3, 32, 32)
        grid = (8, 8)
        num_tokens = GEMMA_TOKENS_PER_IMAGE
    else:
        shape = (grid[0] * grid[1], 3 * 2 * 4 * 4)
        num_tokens = grid[0] * grid[1] // 4
    pixels = torch.randn(shape, generator=generator)
    digest = hashlib.sha256(f"{family} {seed} {grid}".encode()).digest()
    return ImageInput(
        offset=offset,
        num_tokens=num_tokens,
        digest=digest,
        grid=(1, *grid),
        shape=shape,
        pixels=pixels.numpy().tobytes(),
    )


def prompt_with_images(
    family: Family, parts: Sequence[int | ImageInput], seed: int = 0
) -> tuple[list[int], list[ImageInput]]:
    """Returns the token ids and the images of a prompt. A number stands for so many random text tokens.

    Each image stands between `VISION_START` and `VISION_END`.
    """
    generator = torch.Generator().manual_seed(seed)
    token_ids: list[int] = []
    images: list[ImageInput] = []
    for part in parts:
        if isinstance(part, int):
            token_ids += torch.randint(3, 180, (part,), generator=generator).tolist()
            continue
        token_ids.append(VISION_START)
        images.append(_at(part, len(token_ids)))
        token_ids += [IMAGE_TOKEN] * part.num_tokens
        token_ids.append(VISION_END)
    return token_ids, images


def _at(image: ImageInput, offset: int) -> ImageInput:
    return ImageInput(
        offset=offset,
        num_tokens=image.num_tokens,
        digest=image.digest,
        grid=image.grid,
        shape=image.shape,
        pixels=image.pixels,
    )


def pixel_values(image: ImageInput) -> Tensor:
    """Returns an image's values as transformers' image processor returns them."""
    assert len(image.pixels) == 4 * math.prod(image.shape)
    return torch.frombuffer(bytearray(image.pixels), dtype=torch.float32).view(image.shape)


def model_inputs(family: Family, token_ids: Sequence[int], images: Sequence[ImageInput]) -> dict[str, Tensor]:
    """Returns the arguments of transformers' forward pass for one prompt."""
    ids = torch.tensor([list(token_ids)])
    types = torch.zeros_like(ids)
    for image in images:
        types[0, image.offset : image.offset + image.num_tokens] = 1
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["token_type_ids" if family == "gemma3" else "mm_token_type_ids"] = types
    if images:
        inputs["pixel_values"] = torch.cat([pixel_values(image) for image in images])
        if family != "gemma3":
            inputs["image_grid_thw"] = torch.tensor([image.grid for image in images])
    return inputs


def expected_logits(model: Any, family: Family, token_ids: Sequence[int], images: Sequence[ImageInput]) -> Tensor:
    """Returns transformers' logits [tokens, vocab] of a whole prompt."""
    with torch.inference_mode():
        logits: Tensor = model(**model_inputs(family, token_ids, images)).logits[0]
    return logits


def expected_text(
    model: Any, family: Family, token_ids: Sequence[int], images: Sequence[ImageInput], count: int
) -> list[int]:
    """Returns the greedy output tokens of transformers' `generate`."""
    with torch.inference_mode():
        made = model.generate(
            **model_inputs(family, token_ids, images),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    found: list[int] = made[0, len(token_ids) :].tolist()
    return found
