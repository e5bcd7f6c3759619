"""Builds a model's vision encoder; transformers, which takes seconds, is imported only here."""

from typing import TYPE_CHECKING

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.vision import VisionConfig

if TYPE_CHECKING:
    from mini_infer_engine.models.vision.encoder import VisionEncoder


def make_vision_encoder(config: VisionConfig, hidden_size: int) -> "VisionEncoder":
    """Returns the encoder for a decoder of this width. Raises ModelError if transformers is not installed."""
    try:
        if config.family == "gemma3":
            from mini_infer_engine.models.vision.gemma3 import Gemma3Encoder

            return Gemma3Encoder(config, hidden_size)
        from mini_infer_engine.models.vision.qwen_vl import Qwen3VLEncoder, Qwen25VLEncoder
    except ImportError as error:
        raise ModelError(
            f"the vision encoder is transformers' and cannot be imported ({error}): install transformers, or serve "
            "text alone by --limit-mm-per-prompt '{\"image\": 0}'."
        ) from None
    return (Qwen3VLEncoder if config.family == "qwen3_vl" else Qwen25VLEncoder)(config, hidden_size)
