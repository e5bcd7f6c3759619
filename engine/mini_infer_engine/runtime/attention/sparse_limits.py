"""Decides what sparse attention does not support on a GPU yet. A start with it is refused, with the remedy."""

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.config.options.speculation import speculation_of
from mini_infer_engine.models.deepseek_v32 import SparseLatentConfig


def check_sparse_attention(settings: EngineSettings, config: ModelConfig, device_type: str, *, moves_kv: bool) -> None:
    """Raises ModelError if the model's tokens choose what they read, and the engine is to do what does not go with it
    yet.
    """
    del moves_kv  # the keys of the indexer are in the pages, beside the latents
    if not isinstance(config, SparseLatentConfig) or device_type == "cpu":
        return
    if settings.attention_backend == "torch":
        return
    obstacle = None
    if not settings.enforce_eager:
        obstacle = "enforce_eager: its passes are not recorded as CUDA graphs yet: add --enforce-eager"
    elif speculation_of(settings) is not None:
        obstacle = "speculative_method: guesses are not checked on a GPU yet: leave it out"
    if obstacle is not None:
        raise ModelError(f"{config.architecture} has sparse attention: {obstacle}.")
