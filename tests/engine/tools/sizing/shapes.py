"""The shapes of benchmarks/common/models.py, as `mini-infer size` reads them."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common.models import model_folder
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.tools.sizing.shape import ModelShape


@cache
def shape_of(name: str, context: int = 1280) -> ModelShape:
    with TemporaryDirectory() as root:
        return ModelShape.of(read_config(Path(model_folder(name, Path(root)))), context)
