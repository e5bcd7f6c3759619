"""Model folders that read images, without weights: tokenizer, template and processor of each family, and images."""

import base64
import io
import json
import random
from collections.abc import Mapping
from typing import Any

from PIL import Image

from mini_infer_prompts.prompt import PromptAssets
from tests.prompts.folders import byte_level, gemma_split

QWEN_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GEMMA_TOKENS = ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>")
GEMMA_NAMES = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}

_QWEN_CONTENT = (
    "{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part.type == 'image' or 'image_url' in part %}"
    "{% if add_vision_id %}Picture: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
)
QWEN_TEMPLATE = (
    f"{{% macro shown(content) %}}{_QWEN_CONTENT}{{% endmacro %}}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ shown(message.content) }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}"
    "{% if message.content is string %}{{ message.content | trim }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}{{ '<start_of_image>' }}"
    "{% elif part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TEXT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that takes strings alone."""

PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": 280 * 280,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    "qwen3_vl": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 64 * 64, "longest_edge": 320 * 320},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 56, "width": 56},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_pan_and_scan": None,
    },
}
GEMMA_TOKENS_PER_IMAGE = 16


def vision_files(
    family: str, *, template: str | None = None, processor: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Returns the files of a model folder of `family`. `processor` replaces fields of the image processor's file."""
    is_gemma = family == "gemma3"
    tokenizer = gemma_split() if is_gemma else byte_level()
    tokenizer.add_special_tokens([*(GEMMA_TOKENS if is_gemma else QWEN_TOKENS)])
    ends = {"bos_token": "<s>", "eos_token": "</s>"} if is_gemma else {"eos_token": "<|im_end|>"}
    values = {**PROCESSORS[family], **(processor or {})}
    files = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", **ends, **(GEMMA_NAMES if is_gemma else {})}
        ),
        "config.json": json.dumps({"model_type": family, "vision_config": {"patch_size": 14}}),
        "preprocessor_config.json": json.dumps(values),
        "chat_template.jinja": template or (GEMMA_TEMPLATE if is_gemma else QWEN_TEMPLATE),
    }
    if is_gemma:
        files["processor_config.json"] = json.dumps({"image_seq_length": GEMMA_TOKENS_PER_IMAGE})
    return files


def vision_assets(family: str, **changes: Any) -> PromptAssets:
    """Returns the files of `vision_files` as an engine publishes them."""
    return PromptAssets.from_files(vision_files(family, **changes))


def random_image(width: int, height: int, *, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Returns an image of random values."""
    channels = {"RGB": 3, "RGBA": 4, "L": 1, "LA": 2, "CMYK": 4}[mode]
    return Image.frombytes(mode, (width, height), random.Random(seed).randbytes(width * height * channels))


def image_bytes(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """Returns an image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    """Returns a file as a data URL."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes) -> dict[str, Any]:
    """Returns a file as a part of a chat message."""
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def text_part(text: str) -> dict[str, Any]:
    """Returns a text as a part of a chat message."""
    return {"type": "text", "text": text}
