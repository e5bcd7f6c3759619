"""Merges the descriptions of a model that several engines run, for the text side. Pure."""

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from mini_infer_engine.core_process.messages import ModelInfo


def model_of_all(models: Sequence[ModelInfo]) -> ModelInfo:
    """Merges the descriptions of all engines: a request must fit whichever engine gets it, and the pages
    are added up.
    """
    return replace(
        models[0],
        max_model_len=min(model.max_model_len for model in models),
        num_pages=sum(model.num_pages for model in models),
        kv_cache_tokens=sum(model.kv_cache_tokens for model in models),
        data_parallel_size=len(models),
        device_memory=dict(sum((Counter(model.device_memory) for model in models), Counter[str]())),
    )
