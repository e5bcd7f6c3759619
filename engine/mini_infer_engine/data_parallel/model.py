"""What the text side must know of a model that several engines run. Pure."""

from collections.abc import Sequence

from msgspec.structs import replace

from mini_infer_engine.core_process.messages import ModelInfo


def model_of_all(models: Sequence[ModelInfo]) -> ModelInfo:
    """Of each engine, as one: a request must fit whichever engine it goes to; pages are those of all."""
    return replace(
        models[0],
        max_model_len=min(model.max_model_len for model in models),
        num_pages=sum(model.num_pages for model in models),
        data_parallel_size=len(models),
    )
