"""Decides what a model with recurrent layers does not support yet. A start with it is refused, with the remedy."""

from collections.abc import Sequence

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.request import Request
from mini_infer_engine.models.sparse_decoder import SparseConfig


def check_recurrent(settings: EngineSettings, config: ModelConfig, device_type: str, *, moves_kv: bool) -> None:
    """Raises ModelError if the model has recurrent layers, and the engine is to do what those cannot do yet."""
    del moves_kv  # states go to other engines beside the pages
    if config.recurrence is None:
        return
    obstacle = _gpu_obstacle(settings, config, device_type)
    if obstacle is not None:
        raise ModelError(f"{config.architecture} has layers with a recurrent state: {obstacle}.")


def _gpu_obstacle(settings: EngineSettings, config: ModelConfig, device_type: str) -> str | None:
    """Returns the option that recurrent layers do not support on GPUs, with the reason and the remedy, or None."""
    if device_type == "cpu":
        return None
    has_ungated = isinstance(config, SparseConfig) and not config.moe.is_gated
    if has_ungated and settings.quantization is not None:
        return (
            f"quantization = {settings.quantization!r}: its experts have no gates, and no kernels for quantised "
            "weights yet: leave it out"
        )
    return None


def check_stages(config: ModelConfig, stages: Sequence[range]) -> None:
    """Raises ModelError if a stage of a pipeline would have no layer of attention, or none with a recurrent state."""
    if config.recurrence is None or config.mixers is None:
        return
    for layers in stages:
        for kind, words in (("attention", "of attention"), ("recurrent", "with a recurrent state")):
            if kind not in {config.mixers[layer] for layer in layers}:
                raise ModelError(
                    f"{config.architecture} has no layer {words} among layers {layers[0]} to {layers[-1]}, which would "
                    f"be a stage: use fewer stages than --pipeline-parallel-size {len(stages)}."
                )


def request_obstacle(request: Request) -> str | None:
    """Returns the reason why a model with recurrent layers cannot serve a request, or None."""
    if request.beam_search is not None:
        return "use_beam_search: beams cannot share the recurrent state of this model yet: ask without it"
    return None
