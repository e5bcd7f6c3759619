"""Whole model folders that read images: random weights, a tokenizer, a chat template and an image processor."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.support.image_folders import vision_files
from tests.support.vision_models import Family, save_vision_model


def save_model_with_files(directory: Path, family: Family) -> Any:
    """Saves a random model of `family` with the files of its tokenizer and its processor, and returns the model."""
    small = {"patch_size": 4, "min_pixels": 64, "max_pixels": 1024} if family != "gemma3" else {}
    size = {"size": {"shortest_edge": 64, "longest_edge": 1024}} if family == "qwen3_vl" else {}
    if family == "gemma3":
        size = {"size": {"height": 32, "width": 32}}
    files = vision_files(family, processor=small | size)
    tokenizer = Tokenizer.from_str(files["tokenizer.json"])
    model = save_vision_model(directory, family, vocab_size=tokenizer.get_vocab_size() + 5)
    config = json.loads((directory / "config.json").read_text())
    for name, token in _TOKENS_OF_CONFIGS["gemma3" if family == "gemma3" else "qwen"].items():
        config[name] = tokenizer.token_to_id(token)
        setattr(model.config, name, config[name])
    for name, text in files.items():
        if name != "config.json":
            (directory / name).write_text(text)
    (directory / "config.json").write_text(json.dumps(config))
    return model


_TOKENS_OF_CONFIGS = {
    "gemma3": {
        "image_token_id": "<image_soft_token>",
        "boi_token_id": "<start_of_image>",
        "eoi_token_id": "<end_of_image>",
    },
    "qwen": {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
}
