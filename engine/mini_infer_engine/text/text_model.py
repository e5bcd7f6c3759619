"""The text side of a model: names, tokenizer, template and sampling defaults. Weights and shapes are the core's."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, Self, TypeVar

from mini_infer_contract.prompt import PromptAssets, PromptEncoder
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model_config import GenerationDefaults
from mini_infer_engine.dry import vocabulary as dry_model
from mini_infer_engine.text.detokenizer import Decoder

logger = logging.getLogger(__name__)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class TextModel:
    """What requests are read and answered with. Built once, read by all requests."""

    def __init__(self, names: tuple[str, ...], assets: PromptAssets | None, defaults: GenerationDefaults) -> None:
        self.names = names
        """What clients may call the model; the first is what it calls itself."""
        self.assets = assets
        """None: token ids in, token ids out."""
        self.defaults = defaults
        self.encoder = None if assets is None else PromptEncoder(assets)
        """Not thread-safe: used on the tokenising thread alone, through `in_thread`."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    @property
    def decoder(self) -> Decoder | None:
        """Token ids to text; safe anywhere."""
        return None if self.encoder is None else self.encoder.tokenizer

    async def in_thread(
        self, work: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """Run what tokenises: a long prompt takes long enough to hold up every stream on the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))

    @classmethod
    def load(cls, names: tuple[str, ...], directory: Path | None, skip_tokenizer: bool = False) -> Self:
        """From a model folder, or of the dry run (None). ValueError, OSError: a file is missing or broken."""
        if directory is None:
            return cls(names, None if skip_tokenizer else dry_model.dry_assets(), GenerationDefaults())
        defaults = GenerationDefaults.from_directory(directory)
        if summary := defaults.summary():
            level = logging.WARNING if defaults.ignored else logging.INFO
            logger.log(level, "%s: %s", directory / "generation_config.json", summary)
        try:
            return cls(names, None if skip_tokenizer else PromptAssets.from_directory(directory), defaults)
        except ValueError as error:
            raise ModelError(
                f"{directory}: {error}. Replace the file; token ids alone need no tokenizer (skip_tokenizer_init)."
            ) from None
