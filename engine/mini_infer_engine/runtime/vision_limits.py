"""Decides whether a start serves images: options that do not go with them win, unless images are requested by name."""

import logging
from dataclasses import replace

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.options.media_limits import parse_most_images
from mini_infer_engine.config.options.settings import EngineSettings

log = logging.getLogger(__name__)


def with_served_images(settings: EngineSettings, config: ModelConfig) -> ModelConfig:
    """Returns the config, without its vision encoder if this start serves text alone.

    Raises:
        ModelError: --limit-mm-per-prompt requests images, and the model or another option rules them out.
    """
    most = parse_most_images(settings.limit_mm_per_prompt)
    if config.vision is None:
        if most:
            raise ModelError(
                f"limit_mm_per_prompt: {config.architecture} is served here as a model of text: leave it out."
            )
        return config
    if most == 0:
        return replace(config, vision=None)
    obstacle = obstacle_to_images(settings, config)
    if obstacle is None:
        return config
    if most:
        raise ModelError(f"limit_mm_per_prompt: images do not go with {obstacle} yet: leave out one of them.")
    log.warning("images are refused and the vision encoder is not loaded: they do not go with %s yet", obstacle)
    return replace(config, vision=None)


def obstacle_to_images(settings: EngineSettings, config: ModelConfig) -> str | None:
    """Returns the option, or the value of config.json, that images do not go with, or None."""
    if (vision := config.vision) is not None and not vision.pools_evenly:
        return f"mm_tokens_per_image = {vision.tokens_per_crop} of config.json"
    if vision is not None and vision.image_token_id >= config.vocab_size:
        return f"image_token_id = {vision.image_token_id} of config.json, which the vocabulary lacks,"
    if vision is not None and vision.is_bidirectional:
        # Chunks of such prompts end where images end, and their tokens see keys after them.
        if settings.attention_backend == "flash":
            return "--attention-backend flash"
        if settings.kv_cache_dtype != "auto":
            return "--kv-cache-dtype"
    return None
