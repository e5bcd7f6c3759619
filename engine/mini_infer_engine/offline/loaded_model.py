"""Loads a model and makes its engine, in this process or, for several replicas, in processes of its own."""

import gc
import logging
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_infer_engine.config.options.idle_options import idle_options
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core_process.build import BuiltEngine, build_engine
from mini_infer_engine.core_process.messages import ModelInfo
from mini_infer_engine.data_parallel.offline import OfflineEngines
from mini_infer_engine.dry.dry_run import DRY_MODEL, DryRun
from mini_infer_engine.model_path import resolve_model
from mini_infer_engine.offline.metrics import Counter, Gauge, metrics_of
from mini_infer_engine.pooling.engine import PoolingEngine
from mini_infer_engine.text.images.media import MediaRules
from mini_infer_engine.text.text_model import TextModel

MAX_MEDIA_BYTES = 64 << 20
"""Most bytes of the images that one conversation names by URL."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LoadedModel:
    """A model, its text side and its engine."""

    settings: EngineSettings
    directory: Path | None
    """The model's folder; None for the model that pretends."""
    text: TextModel
    engine: Engine | PoolingEngine | OfflineEngines
    info: ModelInfo

    def engine_here(self, caller: str) -> Engine | PoolingEngine:
        """Returns the engine of this process. Raises ValueError if engines are processes of their own."""
        if isinstance(self.engine, OfflineEngines):
            raise ValueError(f"{caller} needs the engine in this process: leave data_parallel_size at 1")
        return self.engine

    def metrics(self, caller: str) -> list[Counter | Gauge]:
        """Returns the engine's counters and gauges. Raises ValueError as `engine_here` does."""
        return metrics_of(self.engine_here(caller).stats(), self.settings.model)

    def tokenizer(self) -> Any:
        """Returns transformers' tokenizer of the model's folder.

        Raises ImportError if transformers is not installed, ValueError if there is no folder.
        """
        if self.directory is None:
            raise ValueError(f"get_tokenizer: the model {self.settings.model} pretends, and has no folder")
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise ImportError("get_tokenizer needs the package transformers: install it") from None
        return AutoTokenizer.from_pretrained(self.directory)


def load_model(settings: EngineSettings) -> LoadedModel:
    """Loads the model of the settings. Raises a ValueError that says why model or settings are at fault."""
    if idle := idle_options(settings):
        log.warning("options without effect: %s", ", ".join(idle))
    model = settings.model
    dry_run = DryRun() if model == DRY_MODEL else None
    weights = settings.load_format != "dummy"
    directory = None if dry_run else resolve_model(model, settings.revision, weights=weights)
    text = TextModel.load(
        (model,),
        directory,
        settings.skip_tokenizer_init,
        settings.generation_config,
        chat_template=settings.chat_template,
        media=MediaRules.of(settings.allowed_media_domains, settings.allowed_local_media_path, MAX_MEDIA_BYTES),
    )
    engine: Engine | PoolingEngine | OfflineEngines
    if settings.data_parallel_size > 1:
        engine = OfflineEngines(settings, dry_run)
        info = engine.model
    else:
        built = build_engine(settings, dry_run, record_events=False)
        while isinstance(built, BuiltEngine) and built.warm_up():
            pass  # nobody waits for readiness here, and each batch is to have a graph of its size
        engine, info = built.engine, built.model
    loaded = LoadedModel(settings, directory, text, engine, info)
    # What is here now stays: full collections, a tenth of a second each, need not walk it while requests run. When
    # this object goes, they walk again, and find the cycles that hold the weights.
    gc.collect()
    gc.freeze()
    weakref.finalize(loaded, gc.unfreeze)
    return loaded
