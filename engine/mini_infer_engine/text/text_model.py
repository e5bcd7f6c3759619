"""The text side of a model: names, tokenizer, template and sampling defaults. Weights and shapes are the core's."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.architectures import text_model
from mini_infer_engine.config.model.generation_defaults import GenerationDefaults
from mini_infer_engine.dry import vocabulary as dry_model
from mini_infer_engine.parsing.registry import AS_SHOWN, ParserChoice, output_formats
from mini_infer_engine.text.detokenizer import Decoder, decoder_showing
from mini_infer_engine.text.grammars import Grammars
from mini_infer_engine.text.tokenizing import PromptLimits, Sliced, longest_token
from mini_infer_process.interpreter import give_way
from mini_infer_prompts.prompt import PromptAssets, PromptEncoder

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_PROMPT_END_TOKENS = 16
"""Enough for a marker that stands there, also where the vocabulary has no token for it."""
LONG_BYTES = 1 << 16
"""Of a body whose prompt may take longer than a few milliseconds before it can be interrupted."""
_LONG_THREADS = 2
_SLICE_S = 0.005
"""Work on one prompt while others wait: a hop between threads costs a hundredth of it."""


class TextModel:
    """What requests are read and answered with. Built once, read by all requests."""

    def __init__(
        self,
        names: tuple[str, ...],
        assets: PromptAssets | None,
        defaults: GenerationDefaults,
        parsers: ParserChoice = AS_SHOWN,
    ) -> None:
        """ValueError: `parsers` names what there is not."""
        self.names = names
        """What clients may call the model; the first is what it calls itself."""
        self.assets = assets
        """None: token ids in, token ids out."""
        self.defaults = defaults
        self.encoder = None if assets is None else PromptEncoder(assets)
        templates = [] if self.encoder is None else self.encoder.template_sources.values()
        self.formats = output_formats(templates, parsers)
        """How the model writes calls of tools and thinking."""
        self.grammars = Grammars(None if self.encoder is None else self.encoder.tokenizer)
        self._decoders: dict[tuple[str, ...], Decoder] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._long_threads = ThreadPoolExecutor(_LONG_THREADS, "tokenize-long", initializer=give_way)
        self._longest_token = 0 if self.encoder is None else longest_token(self.encoder.tokenizer)

    @property
    def decoder(self) -> Decoder | None:
        """Token ids to text; safe anywhere."""
        return None if self.encoder is None else self.encoder.tokenizer

    def decoder_showing(self, markers: tuple[str, ...]) -> Decoder | None:
        """The same that shows these texts also where they are special tokens, which are left out of answers."""
        if self.encoder is None:
            return None
        decoder = self._decoders.get(markers)  # there are as many as ways to combine a model's formats
        if decoder is None:
            decoder = self._decoders[markers] = decoder_showing(self.encoder.tokenizer, markers)
        return decoder

    def token_id(self, text: str) -> int | None:
        """The id of the token that is this text; None: there is none."""
        return None if self.encoder is None else self.encoder.tokenizer.token_to_id(text)

    def prompt_end(self, token_ids: Sequence[int]) -> str:
        """The last words of a prompt, special tokens shown."""
        if self.encoder is None:
            return ""
        return self.encoder.decode(list(token_ids[-_PROMPT_END_TOKENS:]), skip_special_tokens=False)

    def limits(self, max_model_len: int) -> PromptLimits:
        """How long a text may be."""
        return PromptLimits(max_model_len, self._longest_token)

    async def in_slices(self, job: Sliced[Result], size_bytes: int) -> Result:
        """Run what tokenises on a thread of its own, a slice at a time: what else is asked for comes in between.

        On the event loop a long prompt would hold up every stream, and in one go every other prompt. `size_bytes`: of
        its body. Long ones have threads apart: a template with thousands of messages is rendered in one go, and not
        every tokenizer can take a text in parts.
        """
        loop = asyncio.get_running_loop()
        thread = self._thread if size_bytes < LONG_BYTES else self._long_threads
        while True:
            is_done, result = await loop.run_in_executor(thread, _run_slice, job)
            if is_done:
                return cast("Result", result)

    async def in_thread(self, work: Callable[[], Result], size_bytes: int = 0) -> Result:
        """The same for what cannot be cut."""
        thread = self._thread if size_bytes < LONG_BYTES else self._long_threads
        return await asyncio.get_running_loop().run_in_executor(thread, work)

    @classmethod
    def load(
        cls,
        names: tuple[str, ...],
        directory: Path | None,
        skip_tokenizer: bool = False,
        generation: str = "auto",
        parsers: ParserChoice = AS_SHOWN,
        chat_template: str | None = None,
    ) -> Self:
        """From a model folder, or of the dry run (None). ValueError, OSError: a file is missing or broken.

        `generation`: where sampling defaults come from, see `EngineOptions.generation_config`, as `chat_template`;
        `parsers`: `__init__`.
        """
        template = None if chat_template is None else template_source(chat_template)
        defaults = GenerationDefaults() if directory is None else _generation_defaults(directory, generation)
        try:
            assets = None if skip_tokenizer else _assets(directory)
            if assets is not None and template is not None:
                assets = assets.with_chat_template(template)
            return cls(names, assets, defaults, parsers)
        except ValueError as error:
            if directory is not None:
                _check_architecture(directory)
            raise ModelError(
                f"{directory}: {error}. Replace the file; token ids alone need no tokenizer (skip_tokenizer_init)."
            ) from None


def _assets(directory: Path | None) -> PromptAssets:
    return dry_model.dry_assets() if directory is None else PromptAssets.from_directory(directory)


def _check_architecture(directory: Path) -> None:
    """ModelError: the model cannot be served at all, which counts for more than that its tokenizer cannot be read."""
    try:
        fields = Fields.read(directory / "config.json")
    except ModelError:
        return  # as broken as the tokenizer
    text_model(fields)


def template_source(given: str) -> str:
    """A chat template from what a caller names: a file, or the template itself. ModelError: it is neither."""
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
        raise ModelError(f"chat_template = {given!r} ({reason}): name a file that holds a Jinja template") from None


def _generation_defaults(directory: Path, source: str) -> GenerationDefaults:
    """ModelError: the folder that is to have them has none, or a broken file."""
    if source == "vllm":
        return GenerationDefaults()
    folder = directory if source == "auto" else Path(source).expanduser()
    if source != "auto" and not (folder / "generation_config.json").is_file():
        raise ModelError(
            f"generation_config = {source!r}: there is no generation_config.json in it; write auto, vllm or a folder"
        )
    # As in vLLM: a folder that is named limits all requests, the model's own says what holds where they say nothing.
    defaults = replace(GenerationDefaults.from_directory(folder), is_limit=source != "auto")
    if summary := defaults.summary():
        level = logging.WARNING if defaults.ignored else logging.INFO
        logger.log(level, "%s: %s", folder / "generation_config.json", summary)
    return defaults


def _run_slice(job: Sliced[Any]) -> tuple[bool, Any]:
    """Whether the job is done, and then its result."""
    end = time.perf_counter() + _SLICE_S
    try:
        while time.perf_counter() < end:
            next(job)
    except StopIteration as stop:
        return True, stop.value
    return False, None
