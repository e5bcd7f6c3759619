"""Builds the pooling engine from settings: the model and its limits."""

from pathlib import Path

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.device import choose_device, choose_threads
from mini_infer_engine.pooling.engine import PoolingEngine
from mini_infer_engine.pooling.model import PoolingModel, load_pooling_model, longest_input


def load_pooling_engine(
    settings: EngineSettings, folder: Path, fields: Fields, *, record_events: bool
) -> tuple[PoolingEngine, PoolingModel]:
    """Loads the model and creates its engine. Raises ModelError if the model or the settings are at fault."""
    device = choose_device(settings)
    if device.type == "cpu":
        choose_threads(settings.data_parallel_size)
    model = load_pooling_model(settings, folder, fields, device)
    max_model_len = longest_input(model, fields, settings)
    budget = settings.resolved(device.type).max_num_batched_tokens
    engine = PoolingEngine(
        model, max_model_len, token_budget=budget, max_inputs=settings.max_num_seqs, record_events=record_events
    )
    return engine, model
