"""Decides for which models decodes cannot select pages yet. A start with one is refused, with the remedy."""

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.models.registry import class_of


def check_selection(settings: EngineSettings, config: ModelConfig, device_type: str, *, moves_kv: bool) -> None:
    """Raises ModelError if decodes are to select pages, and the model, the device or KV transfer does not go with it.

    `moves_kv` says if keys and values go to other engines or come from them.
    """
    if settings.kv_selection == "none":
        return
    obstacle = _obstacle(config, moves_kv=moves_kv)
    if settings.kv_policy != "full" and device_type != "cpu":
        obstacle = f"on a GPU, tokens that --kv-policy {settings.kv_policy} keeps have no bounds yet"
    if obstacle is not None:
        raise ModelError(f"kv_selection = {settings.kv_selection!r}: {obstacle}: leave it out.")


def _obstacle(config: ModelConfig, *, moves_kv: bool) -> str | None:
    """Returns the reason why decodes cannot select pages, or None."""
    if class_of(config).caches_latents:
        return f"{config.architecture} caches latents, whose keys have no bounds in pages"
    if config.recurrence is not None:
        return f"{config.architecture} has layers with a recurrent state, whose few other layers need all pages"
    if config.head_shapes is not None or config.kv_sources is not None:
        return f"{config.architecture} has layers with different KV heads, or that share them"
    if any(window is not None for window in config.sliding_windows):
        return f"{config.architecture} has sliding windows, which bound what a decode reads already"
    if moves_kv:
        return "pages go to other engines (--transfer-port), and the bounds of their keys do not yet"
    return None
