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
from mini_infer_engine.text.images.media import MediaRules
from mini_infer_engine.text.images.reader import ImageReader
from mini_infer_engine.text.tokenizing import PromptLimits, Sliced, longest_token
from mini_infer_process.interpreter import lower_thread_priority
from mini_infer_prompts.prompt import PromptAssets, PromptEncoder

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

NO_MEDIA = MediaRules()
"""No images are read by URL but those that contain their data."""
_PROMPT_END_TOKENS = 16
"""Number of tokens that suffices for a marker at the end of a prompt, even if the vocabulary has no token for it."""
LONG_BYTES = 1 << 16
"""Bytes of a body from which its prompt may take longer than a few milliseconds before it can be interrupted."""
_LONG_THREADS = 2
_SLICE_S = 0.005
"""Seconds of work on one prompt while others wait: a hop between threads costs a hundredth of it."""


class TextModel:
    """The tokenizer and settings with which requests are read and answered. Built once, read by all requests."""

    def __init__(
        self,
        names: tuple[str, ...],
        assets: PromptAssets | None,
        defaults: GenerationDefaults,
        parsers: ParserChoice = AS_SHOWN,
        media: MediaRules = NO_MEDIA,
    ) -> None:
        """Creates a model's text side. Raises ValueError if `parsers` names one that does not exist. `media` says which
        images are read by URL.
        """
        self.names = names
        """Names that clients may use for the model; the first is the one in its responses."""
        self.assets = assets
        """Tokenizer and templates; None if requests and responses are token ids."""
        self.defaults = defaults
        self.encoder = None if assets is None else PromptEncoder(assets)
        templates = [] if self.encoder is None else self.encoder.template_sources.values()
        self.formats = output_formats(templates, parsers)
        """Formats in which the model writes tool calls and thinking."""
        self.grammars = Grammars(None if self.encoder is None else self.encoder.tokenizer)
        layout = None if self.encoder is None else self.encoder.images
        self.images = None if layout is None else ImageReader(layout, media)
        """Reader of images; None if the model's files do not say how they are read."""
        self._decoders: dict[tuple[str, ...], Decoder] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._long_threads = ThreadPoolExecutor(_LONG_THREADS, "tokenize-long", initializer=lower_thread_priority)
        self._longest_token = 0 if self.encoder is None else longest_token(self.encoder.tokenizer)

    @property
    def decoder(self) -> Decoder | None:
        """Decoder from token ids to text; thread-safe."""
        return None if self.encoder is None else self.encoder.tokenizer

    def decoder_showing(self, markers: tuple[str, ...]) -> Decoder | None:
        """Returns a decoder that shows these texts even if they are special tokens, which are otherwise left out of
        answers.
        """
        if self.encoder is None:
            return None
        decoder = self._decoders.get(markers)  # there are as many as ways to combine a model's formats
        if decoder is None:
            decoder = self._decoders[markers] = decoder_showing(self.encoder.tokenizer, markers)
        return decoder

    def token_id(self, text: str) -> int | None:
        """Returns the id of the token that is this text, or None if there is none."""
        return None if self.encoder is None else self.encoder.tokenizer.token_to_id(text)

    def prompt_end(self, token_ids: Sequence[int]) -> str:
        """Returns the last words of a prompt, with special tokens shown."""
        if self.encoder is None:
            return ""
        return self.encoder.decode(list(token_ids[-_PROMPT_END_TOKENS:]), skip_special_tokens=False)

    def limits(self, max_model_len: int, output_room: int = 1) -> PromptLimits:
        """Returns the limits on the length of a prompt, which leaves room for so many tokens."""
        return PromptLimits(max_model_len, self._longest_token, output_room)

    async def in_slices(self, job: Sliced[Result], size_bytes: int) -> Result:
        """Runs tokenisation on a thread of its own, a slice at a time, so that other requests come in between.

        On the event loop a long prompt would delay every stream, and in one go every other prompt. `size_bytes` is the
        size of its body. Long ones have threads apart: a template with thousands of messages is rendered in one go, and
        not every tokenizer can take a text in parts.
        """
        loop = asyncio.get_running_loop()
        thread = self._thread if size_bytes < LONG_BYTES else self._long_threads
        while True:
            is_done, result = await loop.run_in_executor(thread, _run_slice, job)
            if is_done:
                return cast("Result", result)

    async def in_thread(self, work: Callable[[], Result], size_bytes: int = 0) -> Result:
        """Runs work that cannot be cut into slices on the thread for bodies of its size."""
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
        media: MediaRules = NO_MEDIA,
    ) -> Self:
        """Loads a model folder, or the dry run's assets if it is None.

        Raises ValueError or OSError if a file is missing or broken. `generation` names the source of sampling defaults,
        as `EngineOptions.generation_config` describes; that class describes `chat_template` too, and `__init__`
        `parsers`.
        """
        template = None if chat_template is None else template_source(chat_template)
        defaults = GenerationDefaults() if directory is None else _generation_defaults(directory, generation)
        try:
            assets = None if skip_tokenizer else _assets(directory)
            if assets is not None and template is not None:
                assets = assets.with_chat_template(template)
            return cls(names, assets, defaults, parsers, media)
        except ValueError as error:
            if directory is not None:
                _check_architecture(directory)
            raise ModelError(
                f"{directory}: {error}. Replace the file; token ids alone need no tokenizer (skip_tokenizer_init)."
            ) from None


def _assets(directory: Path | None) -> PromptAssets:
    return dry_model.dry_assets() if directory is None else PromptAssets.from_directory(directory)


def _check_architecture(directory: Path) -> None:
    """Raises ModelError if the model cannot be served at all, which matters more than an unreadable tokenizer."""
    try:
        fields = Fields.read(directory / "config.json")
    except ModelError:
        return  # as broken as the tokenizer
    text_model(fields)


def template_source(value: str) -> str:
    """Returns a chat template from a caller's file name or template. Raises ModelError if it is neither."""
    if "{{" in value or "{%" in value:
        return value
    try:
        return Path(value).expanduser().read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
        raise ModelError(f"chat_template = {value!r} ({reason}): name a file that holds a Jinja template") from None


def _generation_defaults(directory: Path, source: str) -> GenerationDefaults:
    """Returns the sampling defaults. Raises ModelError if the configured folder has none, or a broken file."""
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
    """Runs a job for one slice. Returns True and its result if it is done."""
    end = time.perf_counter() + _SLICE_S
    try:
        while time.perf_counter() < end:
            next(job)
    except StopIteration as stop:
        return True, stop.value
    return False, None
