"""Maps a checkpoint's tensor names to those of our models: "model.layers.0...." and "lm_head.weight".

Embedding models are saved without the causal model around them, and models that also read images have their text part
under a name of its own. Knows no file.
"""

from collections.abc import Iterable

_TEXT_PARTS = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.", "model."),
    ("backbone.", "model."),
)
"""Prefixes of the text part of a model that reads images, the longest first, and of Nemotron-H's layers, and their
replacements.
"""
_BESIDE = ("lm_head.", "mtp.")
"""Prefixes of what stands beside the text part: the output matrix, and layers that predict further tokens."""
_VISION_PARTS = (
    ("visual.", "tower."),
    ("vision_tower.vision_model.", "tower."),
    ("vision_tower.", "tower."),
    ("multi_modal_projector.", "projector."),
)
"""Prefixes of the vision part, the longest first, perhaps after "model.", and their names in our `vision` module."""
_BASE_PARTS = ("embed_tokens.", "layers.", "norm.")


def model_names(names: Iterable[str], *, reads_images: bool = False) -> dict[str, str]:
    """Maps each tensor's name to ours. Tensors that are neither of the text model nor, if it `reads_images`, of the
    vision encoder are left out.
    """
    every = list(names)
    vision = {name: ours for name in every if (ours := _vision_name(name)) is not None}
    text = _text_model_names(name for name in every if name not in vision)
    return text | vision if reads_images else text


def _text_model_names(names: Iterable[str]) -> dict[str, str]:
    every = list(names)
    if any(name.startswith(prefix) for prefix, _ in _TEXT_PARTS for name in every):
        found = {name: _text_name(name) for name in every}
        return {name: ours for name, ours in found.items() if ours is not None}
    if is_base_model(every):
        return {name: f"model.{name}" if name.startswith(_BASE_PARTS) else name for name in every}
    return {name: name for name in every}


def is_base_model(names: Iterable[str]) -> bool:
    """Returns True if the tensors are a decoder's alone, saved without the prefix of the causal model around it."""
    every = list(names)
    return any(name.startswith("layers.") for name in every) and not any(name.startswith("model.") for name in every)


def _vision_name(name: str) -> str | None:
    own = name.removeprefix("model.")
    for prefix, ours in _VISION_PARTS:
        if own.startswith(prefix):
            return f"vision.{ours}{own.removeprefix(prefix)}"
    return None


def _text_name(name: str) -> str | None:
    for prefix, ours in _TEXT_PARTS:
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name if name.startswith(_BESIDE) else None
