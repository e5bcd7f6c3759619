"""Counts the tokens of images and puts them into prompts, family by family, as transformers' processors do.

The number of tokens is a function of an image's width and height and of the files of its model's processor, so a
gateway counts as its engines do. Knows no bytes of images.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mini_infer_web.api_errors import ApiError

LAYOUT_FILES = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
"""Files of a model's folder that `image_prompts` reads."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of a model's folder that describe how images are read."""
_MAX_SIZE = 1 << 31
"""Largest number of a processor's file that is taken."""
_MAX_ASPECT_RATIO = 200


class ImageError(ValueError):
    """An image that cannot be part of a prompt; the message is a clause behind the name of its field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePrompts:
    """The place of images in the prompts of one model."""

    family: str
    """The family as `ModelInfo.vision` names it."""
    marker: str
    """The text by which the chat template marks an image."""
    placeholder: str
    """The token that stands for each embedding of an image."""
    before: str = ""
    """Text that replaces the marker, before the placeholders."""
    after: str = ""
    """Text that replaces the marker, after the placeholders."""
    in_text: str
    """An image within the text of a message, for templates that take no parts."""
    size_of: "Callable[[int, int], ImageSize]"
    """Returns the size of an image of this width and height in pixels. Raises ImageError if it is out of proportion."""
    processor: Mapping[str, Any]
    """The values of the image processor's file."""

    def replace_markers(self, text: str, count: int) -> str:
        """Returns the text with one placeholder for each image. Raises ApiError 400 if it has not `count` markers."""
        found = text.count(self.marker)
        if found != count or (self.placeholder != self.marker and self.placeholder in text):
            raise ApiError(
                400,
                f"the prompt has {found} of the markers {self.marker} for {count} images: the model's chat template "
                "does not show all of them there; send images in messages of the role user",
                param="messages",
                code="chat_template_error",
            )
        return text.replace(self.marker, f"{self.before}{self.placeholder}{self.after}")

    @property
    def reserved(self) -> frozenset[str]:
        """Texts that no client may write into a prompt with images, because they would be taken for one."""
        return frozenset((self.marker, self.placeholder))


@dataclass(frozen=True, slots=True)
class ImageSize:
    """The tokens and values that an image takes in a prompt and in memory."""

    num_tokens: int
    grid: tuple[int, int, int]
    """Patches in time, height and width, before any are merged."""
    num_values: int
    """Values that the image processor makes of it."""


def image_prompts(files: Mapping[str, str]) -> ImagePrompts | None:
    """Returns the place of images in a model's prompts by the files of its folder.

    Returns None if the model reads no images, if no file describes its image processor, or if it is of an unknown form.
    """
    config, tokenizer = _object(files, "config.json"), _object(files, "tokenizer_config.json")
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is None or not isinstance(config.get("vision_config"), dict):
        return None
    nested = _object(files, "processor_config.json").get("image_processor")
    processor = nested if isinstance(nested, dict) else _object(files, "preprocessor_config.json")
    if not processor:
        return None
    try:
        return family(config, tokenizer, processor, _object(files, "processor_config.json"))
    except (TypeError, ValueError, AttributeError):
        return None


class ImageSlots:
    """Replaces each placeholder token of a prompt by the tokens of its image, as the prompt's pieces are made."""

    def __init__(self, placeholder_id: int, images: Sequence[Sequence[int]], first: int = 0, tokens: int = 0) -> None:
        """Takes the ids of each image. `first` is the index of the next one, and `tokens` the number of tokens before
        the first piece.
        """
        self._placeholder_id, self._images = placeholder_id, images
        self._next, self._tokens = first, tokens
        self.offsets: list[int] = []
        """Index of the first token of each image that was replaced."""

    def expand(self, ids: Sequence[int]) -> Sequence[int]:
        """Returns the next ids with their images. Raises ApiError 400 if there are more placeholders than images."""
        if self._placeholder_id in ids:
            expanded: list[int] = []
            for token_id in ids:
                if token_id != self._placeholder_id:
                    expanded.append(token_id)
                    continue
                if self._next == len(self._images):
                    raise self._mismatch()
                self.offsets.append(self._tokens + len(expanded))
                expanded += self._images[self._next]
                self._next += 1
            ids = expanded
        self._tokens += len(ids)
        return ids

    def check_all_used(self) -> None:
        """Raises ApiError 400 if a placeholder was missing, once all ids were expanded."""
        if self._next != len(self._images):
            raise self._mismatch()

    def _mismatch(self) -> ApiError:
        message = f"the prompt has not one placeholder token for each of its {len(self._images)} images: leave out text"
        return ApiError(400, f"{message} that is one", param="messages", code="invalid_image_placeholders")


def smart_resize(width: int, height: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Returns the width and height to which Qwen2-VL's image processor resizes an image: multiples of `factor`.

    The arithmetic is that of transformers' `smart_resize`. Raises ImageError if a side is 200 times the other.
    """
    if max(height, width) / min(height, width) > _MAX_ASPECT_RATIO:
        raise ImageError(
            f"is an image of {width}x{height} pixels, and one side may be {_MAX_ASPECT_RATIO} times the other at most: "
            "cut it"
        )
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    if high * wide > max_pixels:
        beta = math.sqrt((height * width) / max_pixels)
        high = max(factor, math.floor(height / beta / factor) * factor)
        wide = max(factor, math.floor(width / beta / factor) * factor)
    elif high * wide < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        high = math.ceil(height * beta / factor) * factor
        wide = math.ceil(width * beta / factor) * factor
    return wide, high


_Values = Mapping[str, Any]


def _qwen(family: str) -> Callable[[_Values, _Values, _Values, _Values], ImagePrompts]:
    def read(config: _Values, tokenizer: _Values, processor: _Values, whole: _Values) -> ImagePrompts:
        size = processor.get("size") or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
        low, high = processor.get("min_pixels"), processor.get("max_pixels")
        min_pixels = _number(size.get("shortest_edge") if low is None else low)
        max_pixels = _number(size.get("longest_edge") if high is None else high)
        patch = _number(processor.get("patch_size", 14))
        merge, frames = _number(processor.get("merge_size", 2)), _number(processor.get("temporal_patch_size", 2))
        if processor.get("do_resize") is False:
            raise ValueError("images of any size")

        def size_of(width: int, height: int) -> ImageSize:
            wide, high = smart_resize(width, height, patch * merge, min_pixels, max_pixels)
            grid = 1, high // patch, wide // patch
            patches = grid[1] * grid[2]
            return ImageSize(patches // merge**2, grid, patches * 3 * frames * patch**2)

        token = _token(tokenizer, "image_token", "<|image_pad|>")
        return ImagePrompts(
            family=family,
            marker=token,
            placeholder=token,
            in_text=f"<|vision_start|>{token}<|vision_end|>",
            size_of=size_of,
            processor=processor,
        )

    return read


def _gemma3(config: _Values, tokenizer: _Values, processor: _Values, whole: _Values) -> ImagePrompts:
    size = processor.get("size") or {"height": 224, "width": 224}
    height, width = _number(size.get("height")), _number(size.get("width"))
    patch = _number(config["vision_config"].get("patch_size", 14))
    image = ImageSize(
        _number(whole.get("image_seq_length", 256)), (1, height // patch, width // patch), 3 * height * width
    )
    start, end = _token(tokenizer, "boi_token", "<start_of_image>"), _token(tokenizer, "eoi_token", "<end_of_image>")
    return ImagePrompts(
        family="gemma3",
        marker=start,
        placeholder=_token(tokenizer, "image_token", "<image_soft_token>"),
        before=f"\n\n{start}",
        after=f"{end}\n\n",
        in_text=start,
        size_of=lambda width, height: image,
        processor=processor,
    )


_FAMILIES: Mapping[str, Callable[[_Values, _Values, _Values, _Values], ImagePrompts]] = {
    "qwen2_5_vl": _qwen("qwen2_5_vl"),
    "qwen3_vl": _qwen("qwen3_vl"),
    "qwen3_vl_moe": _qwen("qwen3_vl"),
    "gemma3": _gemma3,
}
"""Readers of a model's files by the `model_type` of its config.json."""


def _object(files: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        value = json.loads(files.get(name, "{}"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _number(value: object) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_SIZE:
        raise ValueError(f"{value!r} is no size")
    return value


def _token(tokenizer: _Values, name: str, default: str) -> str:
    """Returns a special token by its name in tokenizer_config.json, where transformers reads it."""
    more = tokenizer.get("extra_special_tokens")
    value = (more if isinstance(more, dict) else {}).get(name, tokenizer.get(name))
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else default
