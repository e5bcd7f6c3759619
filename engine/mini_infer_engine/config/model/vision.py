"""The vision encoder of a model as frozen data: its family, its sizes, the layout of images. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mini_infer_engine.config.json_fields import Fields

VisionFamily = Literal["qwen2_5_vl", "qwen3_vl", "gemma3"]

FAMILIES: dict[str, VisionFamily] = {
    "Gemma3ForConditionalGeneration": "gemma3",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl",
}
"""Families by the name in `architectures` of config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The vision encoder of a model and the layout of images in its prompts."""

    family: VisionFamily
    encoder: Mapping[str, Any]
    """The object `vision_config` of config.json, which transformers' class reads."""
    image_token_id: int
    """The placeholder token, one for each embedding of an image."""
    patch_width: int
    """Values of one patch, over its pixels, its channels and its frames; 0 if the encoder reads whole images."""
    merge_size: int = 1
    """Patches in height, and in width, that make one embedding."""
    image_size: int = 0
    """Height and width of each crop of an image in pixels, if they are fixed."""
    tokens_per_crop: int = 0
    """Embeddings of each crop, if images have a fixed size."""
    patches_per_side: int = 0
    """Patches in height, and in width, of a crop, which are pooled to `tokens_per_crop` embeddings."""
    num_deepstack: int = 0
    """First layers of the decoder after which features of other encoder layers are added (DeepStack, arXiv
    2406.04334).
    """
    is_bidirectional: bool = False
    """True if the tokens of an image attend to each other in both directions."""

    @property
    def has_grid_positions(self) -> bool:
        """True if the embeddings of an image have positions in time, height and width (M-RoPE)."""
        return not self.tokens_per_crop

    @property
    def pools_evenly(self) -> bool:
        """False if the patches of a crop cannot be pooled to a square of `tokens_per_crop` embeddings."""
        side = math.isqrt(self.tokens_per_crop)
        return side**2 == self.tokens_per_crop and (not side or self.patches_per_side % side == 0)

    def largest_image(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        """Returns shape and grid of the largest image of at most `num_tokens` embeddings, or of the smallest one."""
        if self.tokens_per_crop:
            crops = max(1, num_tokens // self.tokens_per_crop)
            return (crops, 3, self.image_size, self.image_size), (1, 1, 1)
        side = max(1, math.isqrt(num_tokens)) * self.merge_size
        return (side * side, self.patch_width), (1, side, side)


def parse_vision(fields: Fields, architecture: str) -> VisionConfig | None:
    """Reads the vision part of config.json; returns None if the file has none, as those of some text fine-tunes."""
    family = FAMILIES[architecture]
    encoder = fields.values.get("vision_config")
    if not isinstance(encoder, dict):
        return None
    key = "image_token_id" if fields.values.get("image_token_id") is not None else "image_token_index"
    image_token_id = fields.size(key, 262_144 if family == "gemma3" else 151_655)
    vision = Fields(fields.path, encoder)
    if family == "gemma3":
        return VisionConfig(
            family=family,
            encoder=encoder,
            image_token_id=image_token_id,
            patch_width=0,
            image_size=vision.size("image_size", 896),
            tokens_per_crop=fields.size("mm_tokens_per_image", 256),
            patches_per_side=vision.size("image_size", 896) // vision.size("patch_size", 14),
            is_bidirectional=True,
        )
    is_newer = family == "qwen3_vl"
    patch = vision.size("patch_size", 16 if is_newer else 14)
    channels = vision.size("in_channels", vision.size("in_chans", 3))
    layers = encoder.get("deepstack_visual_indexes", [8, 16, 24]) if is_newer else []
    return VisionConfig(
        family=family,
        encoder=encoder,
        image_token_id=image_token_id,
        patch_width=channels * vision.size("temporal_patch_size", 2) * patch**2,
        merge_size=vision.size("spatial_merge_size", 2),
        num_deepstack=len(layers) if isinstance(layers, list) else 0,
    )
