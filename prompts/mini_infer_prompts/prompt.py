"""Converts an OpenAI request to token ids, exactly as the engine's model expects them, on every side that needs them.

An engine serves its tokenizer files under a content hash (`PromptAssets`); engine and gateway build the same
`PromptEncoder` from them. This file knows no HTTP and no sampling.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
from tokenizers import Tokenizer

from mini_infer_prompts.chat_template import ChatTemplate
from mini_infer_prompts.harmony import harmony_effort, harmony_messages
from mini_infer_prompts.harmony_template import built_in_templates
from mini_infer_prompts.image_prompts import LAYOUT_FILES, PROCESSOR_FILES, ImagePrompts, image_prompts
from mini_infer_prompts.image_sources import ImageSource, image_sources
from mini_infer_prompts.messages import ImageForm, template_messages, template_tools
from mini_infer_prompts.segments import MAX_CACHED_BYTES, Piece, SegmentEncoder, encode_whole
from mini_infer_prompts.text_slices import parts_of
from mini_infer_prompts.tokenizer_files import TEMPLATE_FOLDER, load_tokenizer
from mini_infer_web.api_errors import ApiError, FieldPath, refuse_field

FILE_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "config.json",  # transformers chooses the tokenizer's class by its model_type
    *PROCESSOR_FILES,
)

MAX_FILE_BYTES = 100_000_000
"""Largest size of one file: the largest vocabularies have a third of it, and engines send the files to gateways."""


class PromptAssets(msgspec.Struct, frozen=True, kw_only=True):
    """The text files that turn a conversation into token ids, and the hash that names them."""

    revision: str
    """sha256 over names and texts, hex."""
    files: dict[str, str]
    """File name to text; "tokenizer.json" is always there."""

    @classmethod
    def from_directory(cls, path: str | Path) -> Self:
        """Reads a model folder in Hugging Face format. Raises ValueError if it has no tokenizer.json, or a file is no
        text.
        """
        folder = Path(path)
        names = [name for name in FILE_NAMES if (folder / name).is_file()]
        names += [f"{TEMPLATE_FOLDER}/{file.name}" for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))]
        if "tokenizer.json" not in names:
            raise ValueError("there is no tokenizer.json: save_pretrained() a fast tokenizer there")
        return cls.from_files({name: _text(folder / name) for name in names})

    @classmethod
    def from_files(cls, files: dict[str, str]) -> Self:
        """Names the files by their content."""
        digest = hashlib.sha256(msgspec.msgpack.encode(sorted(files.items()))).hexdigest()
        return cls(revision=digest, files=files)

    def with_chat_template(self, source: str) -> Self:
        """Returns the same files with this one chat template, whatever the model's folder has."""
        kept = {name: text for name, text in self.files.items() if not name.startswith(f"{TEMPLATE_FOLDER}/")}
        return self.from_files(kept | {"chat_template.jinja": source})


def _check_surrogates(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(400, f"the text holds half of a surrogate pair at character {error.start}") from error


def _tokens_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """Returns the ids that the post-processor puts before and after every text; None if it may do something else."""
    supported = {"TemplateProcessing", "ByteLevel", "BertProcessing", "RobertaProcessing"}
    if not all(part["type"] in supported for part in parts_of(tokenizer.post_processor)):
        return None
    probe, whole = (encode_whole(tokenizer, "a", add_special_tokens=flag) for flag in (False, True))
    for at in range(len(whole) - len(probe) + 1):
        if probe and whole[at : at + len(probe)] == probe:
            return whole[:at], whole[at + len(probe) :]
    return None


def _text(path: Path) -> str:
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise ValueError(f"{path.name} has {size:,} bytes, and at most {MAX_FILE_BYTES:,} are read: it is no such file")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is no UTF-8 text ({error.reason} at byte {error.start})") from error


class PromptText(NamedTuple):
    """A prompt before it is tokenised."""

    text: str
    add_special_tokens: bool
    """True if special tokens such as BOS go around it, if the tokenizer has them."""
    images: tuple[ImageSource, ...] = ()
    """The images of the prompt, in its order: the text has one placeholder for each (`image_prompts`)."""


class ChatTemplates:
    """Renders conversations for one model."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: dict[str, str],
        *,
        strict: bool = False,
        images: ImagePrompts | None = None,
    ) -> None:
        """Takes `sources` by name, and `special_tokens` by name, such as "eos_token". Raises ValueError if a source is
        no template. `images` is the place of images in prompts; None if the model reads none.
        """
        self.special_tokens = special_tokens
        self.images = images
        self._templates = {name: ChatTemplate(source, strict) for name, source in sources.items()}
        self.template_sources = dict(sources)
        if images is not None:
            for template in self._templates.values():
                template.shows_image_parts(images.marker)  # remembered: a request's rendering may have less time

    def chat_template(self, with_tools: bool) -> ChatTemplate:
        """Returns the template for a conversation: the model's one for tools, if it has two. Raises ApiError 400 if it
        has none.
        """
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            reason = (
                f"this model's chat templates ({', '.join(sorted(self._templates))}) have no default"
                if self._templates
                else "this model has no chat template"
            )
            raise ApiError(400, f"{reason}: use /v1/completions", param="messages", code="no_chat_template")
        return self._templates[name]

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Returns the whole conversation as text, equal to that of transformers' `apply_chat_template`.

        `messages` go to the template as they are; `chat_prompt_ids` is for what clients send.
        """
        return self.chat_template(tools is not None).render(
            messages,
            {**self.special_tokens, **(template_kwargs or {}), "tools": tools},
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )


class PromptEncoder(ChatTemplates):
    """Renders, encodes and decodes for one model. It may be shared by threads."""

    def __init__(self, assets: PromptAssets, cache_bytes: int = MAX_CACHED_BYTES, *, strict: bool = False) -> None:
        """Loads the files. Raises a ValueError that names the file that is broken.

        `cache_bytes` limits the cache of pieces of text and their ids. `strict` has the meaning that it has for
        `ChatTemplate`.
        """
        loaded = load_tokenizer(assets.files)
        templates = loaded.chat_templates or built_in_templates(assets.files)
        images = image_prompts(assets.files)
        placeholder_id = None if images is None else loaded.tokenizer.token_to_id(images.placeholder)
        super().__init__(
            templates, loaded.special_tokens, strict=strict, images=None if placeholder_id is None else images
        )
        self.placeholder_id: int | None = placeholder_id
        """The token that stands for each embedding of an image; None if the model reads none."""
        self.image_files = {name: assets.files[name] for name in LAYOUT_FILES if images and name in assets.files}
        """The files that say how images are read, for `image_prompts`; empty if the model reads none."""
        self.revision = assets.revision
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.segments = SegmentEncoder(loaded.tokenizer, cache_bytes)
        self._adds_special_tokens = loaded.tokenizer.num_special_tokens_to_add(False) > 0
        self._around = _tokens_around(loaded.tokenizer) if self._adds_special_tokens else ([], [])

    @property
    def tokens_around(self) -> tuple[list[int], list[int]] | None:
        """The ids before and after every text with special tokens; None if the tokenizer may do something else."""
        return self._around

    def special_token_id(self, name: str) -> int | None:
        """Returns the id of a special token by its name ("eos_token", "bos_token", ...), or None if the
        model has none.
        """
        token = self.special_tokens.get(name)
        token_id: int | None = None if token is None else self.tokenizer.token_to_id(token)
        return token_id

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of a text, with special tokens that stand in it. `add_special_tokens` puts BOS and such
        around it.
        """
        if add_special_tokens and self._adds_special_tokens:
            return [number for piece in self.pieces(PromptText(text, True)) for number in piece.ids]
        _check_surrogates(text)
        return self.segments.encode(text)

    def pieces(self, prompt: PromptText, start: int = 0) -> Iterator[Piece]:
        """Yields the ids of a text from `start` on, a few milliseconds of work at a time, as `SegmentEncoder.pieces`
        does.

        Raises ApiError 400 if the text cannot be tokenised.
        """
        text = prompt.text
        _check_surrogates(text)
        if not (prompt.add_special_tokens and self._adds_special_tokens):
            yield from self.segments.pieces(text, start)
        elif self._around is None:
            yield Piece(encode_whole(self.tokenizer, text, add_special_tokens=True), len(text), False)
        else:
            before, after = self._around
            if before and start == 0:
                yield Piece(before, 0, True)
            yield from self.segments.pieces(text, start)
            if after:
                yield Piece(after, len(text), False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


def chat_prompt_ids(encoder: PromptEncoder, body: dict[str, Any]) -> list[int]:
    """Returns the token ids of a /v1/chat/completions body without images. Raises ApiError 400 as `chat_prompt_text`
    does.
    """
    prompt = chat_prompt_text(encoder, body)
    ids = encoder.encode(prompt.text, prompt.add_special_tokens)
    if not ids:
        refuse_field("messages", "render to an empty prompt")
    return ids


def chat_prompt_text(encoder: ChatTemplates, body: dict[str, Any], *, reads_images: bool = False) -> PromptText:
    """Returns the text of a /v1/chat/completions body. Raises an ApiError 400 that names the field at fault.

    Reads messages, tools, tool_choice, documents, add_generation_prompt, continue_final_message, chat_template_kwargs,
    reasoning_effort and add_special_tokens, with vLLM's defaults and meaning. `reads_images` is True if images are
    read, provided that the model's files say how.
    """
    # A model that is shown tools may call them, whatever is asked of it: where none may be called, none are shown.
    tools = None if body.get("tool_choice") == "none" else template_tools(body.get("tools"))
    template = encoder.chat_template(tools is not None)
    images = encoder.images if reads_images else None
    form = None if images is None else ImageForm(template.shows_image_parts(images.marker), images.in_text)
    messages = template_messages(
        body.get("messages"),
        content_parts=template.uses_content_parts,
        developer_role=template.knows_developer_role,
        calls=template.call_form,
        images=form,
    )
    template_kwargs = _template_kwargs(body)
    sources = () if images is None else tuple(image_sources(body["messages"]))
    if images is not None and sources:
        _check_reserved(body, images.reserved)
    if template.is_harmony and not template.uses_content_parts:
        messages = harmony_messages(messages)
        if isinstance(effort := body.get("reasoning_effort"), str):
            template_kwargs["reasoning_effort"] = harmony_effort(effort)
    text = encoder.render(
        messages,
        tools,
        add_generation_prompt=_flag(body, "add_generation_prompt", True),
        continue_final_message=_flag(body, "continue_final_message", False),
        template_kwargs=template_kwargs,
    )
    if images is not None and sources:
        text = images.replace_markers(text, len(sources))
    return PromptText(text, _flag(body, "add_special_tokens", False), sources)


_SHOWN_FIELDS = ("messages", "tools", "documents", "chat_template_kwargs")


def _check_reserved(body: dict[str, Any], reserved: frozenset[str]) -> None:
    """Raises ApiError 400 if a text of a chat with images has one of the tokens that stand for these."""
    values: list[tuple[FieldPath, Any]] = [((name,), body.get(name)) for name in _SHOWN_FIELDS]
    while values:
        path, value = values.pop()
        if isinstance(value, str):
            if found := next((token for token in reserved if token in value), None):
                refuse_field(path, f"has {found} in a prompt with images, where it stands for an image: leave it out")
        elif isinstance(value, dict):
            values += [((*path, str(name)), item) for name, item in value.items()]
        elif isinstance(value, list):
            values += [((*path, index), item) for index, item in enumerate(value)]


def completion_prompts(body: dict[str, Any]) -> list[PromptText | list[int]]:
    """Returns each prompt of a /v1/completions body: a string, token ids, or a list of either. Raises an ApiError 400
    that names the field.
    """
    prompt = body.get("prompt")
    add_special_tokens = _flag(body, "add_special_tokens", True)
    if isinstance(prompt, list) and prompt and not is_token_ids(prompt):
        return [_prompt(item, prompt_path(body, index), add_special_tokens) for index, item in enumerate(prompt)]
    return [_prompt(prompt, ("prompt",), add_special_tokens)]


def prompt_path(body: dict[str, Any], index: int) -> FieldPath:
    """Returns the place of the prompt of this index in a body: several are a list."""
    prompt = body.get("prompt")
    return ("prompt", index) if isinstance(prompt, list) and prompt and not is_token_ids(prompt) else ("prompt",)


def is_token_ids(prompt: object) -> bool:
    """True if a `prompt` is one of token ids, judged by its first: it needs no tokenizer, and is still
    to be checked.
    """
    return isinstance(prompt, list) and bool(prompt) and is_token_id(prompt[0])


_MAX_TOKEN_ID = 2**32 - 1
"""Largest id that block keys can carry; the engine knows the vocabulary and refuses ids outside of it."""

_RESERVED_KWARGS = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
}


def _prompt(prompt: object, where: FieldPath, add_special_tokens: bool) -> PromptText | list[int]:
    if isinstance(prompt, str):
        return PromptText(prompt, add_special_tokens)
    if isinstance(prompt, list) and all(map(is_token_id, prompt)):
        return prompt
    return refuse_field(where, "must be a string or a list of token ids")


def is_token_id(value: object) -> bool:
    """True if the value is an id that block keys can carry."""
    return type(value) is int and 0 <= value <= _MAX_TOKEN_ID


def _flag(body: dict[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} must be true or false, not {value!r}", param=name)
    return value


def _template_kwargs(body: dict[str, Any]) -> dict[str, Any]:
    kwargs_field = body.get("chat_template_kwargs") or {}
    if not isinstance(kwargs_field, dict):
        raise ApiError(400, "chat_template_kwargs must be an object", param="chat_template_kwargs")
    if reserved := _RESERVED_KWARGS & kwargs_field.keys():
        refuse_field(("chat_template_kwargs", min(reserved)), "cannot be set there")
    kwargs = dict(kwargs_field)
    effort = body.get("reasoning_effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise ApiError(400, f"reasoning_effort must be a string, not {effort!r}", param="reasoning_effort")
        kwargs["reasoning_effort"] = effort
        kwargs.setdefault("enable_thinking", effort != "none")
    documents = body.get("documents")
    if documents is not None:
        if not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents):
            raise ApiError(400, "documents must be a list of objects with title and text", param="documents")
        kwargs["documents"] = documents
    return kwargs
