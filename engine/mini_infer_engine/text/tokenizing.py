"""Tokenises texts a slice at a time, so that no prompt delays another by more than a few slices. Knows no HTTP.

Its jobs are generators that yield every few milliseconds; `TextModel.in_slices` gives each its turn.
"""

from array import array
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from mini_infer_engine.text.validation import ParameterError
from mini_infer_prompts.image_files import ImageFile
from mini_infer_prompts.image_prompts import ImageError, ImageSize, ImageSlots
from mini_infer_prompts.image_sources import ImageSource
from mini_infer_prompts.prompt import (
    PromptEncoder,
    PromptText,
    chat_prompt_text,
    completion_prompts,
    is_token_ids,
    prompt_path,
)
from mini_infer_web.api_errors import ApiError, FieldPath, context_length, field_name, refuse_field

Result = TypeVar("Result")
Sliced = Generator[None, None, Result]
"""Work that yields between slices of a few milliseconds."""

ImageFiles = Mapping[str, ImageFile]
"""The images of a request by their URLs."""


class PlacedImage(NamedTuple):
    """An image and its place in a prompt."""

    source: ImageSource
    file: ImageFile
    size: ImageSize
    offset: int
    """Index of its first placeholder token."""


class ImagePrompt(list[int]):
    """The token ids of a prompt with images, and where these are. A slice of it is a list of ids alone."""

    def __init__(self, token_ids: Iterable[int], images: Sequence[PlacedImage]) -> None:
        super().__init__(token_ids)
        self.images = images


_COUNTED_BEYOND = 2
"""Contexts up to which a prompt is counted to its end: a client wants to know by how much it is too long."""


_DECODED_TOGETHER = 4_096
"""Token ids whose text takes about half a millisecond, for which a decoder keeps the interpreter."""
_CHARACTER_TOKENS = 4
"""Most bytes of a character, each of which may be a token."""


class PromptLimits:
    """Limits on the length of a prompt: in tokens, and in the characters of the longest text with so many tokens."""

    def __init__(self, max_model_len: int, longest_token_characters: int, output_room: int = 1) -> None:
        self.max_model_len = max_model_len
        self.max_characters = max_model_len * longest_token_characters
        self._output_room = output_room
        self._context = context_length(max_model_len) + (", which must also hold the output" if output_room else "")

    def check_characters(self, count: int, param: FieldPath) -> None:
        """Raises ParameterError if a text of so many characters has more tokens than the context, whatever they are."""
        if count > self.max_characters:
            raise ParameterError(
                param,
                f"{field_name(param)} has {count} characters, and {context_length(self.max_model_len)}, which are "
                f"{self.max_characters} characters at most: send a shorter one",
                code="context_length_exceeded",
            )

    def check_ids(self, prompts: object) -> None:
        """Raises ParameterError if a prompt of token ids, or one of several, is too long to examine each id."""
        is_one = is_token_ids(prompts)
        for index, prompt in enumerate([prompts] if is_one else prompts if isinstance(prompts, list) else ()):
            if is_token_ids(prompt):
                self.check_tokens(len(prompt), ("prompt",) if is_one else ("prompt", index))

    def check_tokens(self, count: int, param: FieldPath) -> None:
        """Raises ParameterError if a prompt of so many token ids is too long to examine each id."""
        if count + self._output_room > self.max_model_len:
            raise ParameterError(
                param,
                f"{field_name(param)} has {count} tokens, and {self._context}: send a shorter one",
                code="context_length_exceeded",
            )

    def refuse_uncounted(self, count: int, param: FieldPath) -> NoReturn:
        """Raises ParameterError: the text has more tokens than are worth counting."""
        raise ParameterError(
            param,
            f"{field_name(param)} has at least {count} tokens, and {self._context}: send a shorter one",
            code="context_length_exceeded",
        )


def longest_token(tokenizer: Tokenizer) -> int:
    """Returns the characters of the longest token: a text of n times as many has n tokens or more."""
    return max((len(token) for token in tokenizer.get_vocab(with_added_tokens=True)), default=1)


def text_ids(
    encoder: PromptEncoder,
    prompt: PromptText,
    param: FieldPath,
    limits: PromptLimits | None = None,
    slots: ImageSlots | None = None,
) -> Sliced[list[int]]:
    """Returns the token ids of a text, with the images of `slots`. Raises ParameterError if it exceeds `limits`,
    ApiError if it cannot be tokenised.
    """
    if limits is not None:
        limits.check_characters(len(prompt.text), param)
    ids: list[int] = []
    for piece in encoder.pieces(prompt):
        ids.extend(piece.ids if slots is None else slots.expand(piece.ids))
        if limits is not None and len(ids) > _COUNTED_BEYOND * limits.max_model_len:
            limits.refuse_uncounted(len(ids), param)
        yield
    return ids


def chat_ids(
    encoder: PromptEncoder,
    body: dict[str, Any],
    limits: PromptLimits | None = None,
    images: ImageFiles | None = None,
) -> Sliced[list[int]]:
    """Returns the token ids of a chat's rendered messages, as an `ImagePrompt` if it has images. Raises errors as
    `text_ids`, and for invalid fields.

    `images` are the files of its images; None if the model reads none, which are then refused.
    """
    if limits is not None:  # rendering gives no other request a turn
        limits.check_characters(sum(map(len, _texts(body.get("messages")))), ("messages",))
    text = chat_prompt_text(encoder, body, reads_images=images is not None)
    yield
    if text.images and images is not None:
        return (yield from image_prompt_ids(encoder, text, ("messages",), limits, images))
    ids = yield from text_ids(encoder, text, ("messages",), limits)
    if not ids:
        refuse_field("messages", "render to an empty prompt")
    return ids


def image_prompt_ids(
    encoder: PromptEncoder, prompt: PromptText, param: FieldPath, limits: PromptLimits | None, files: ImageFiles
) -> Sliced[list[int]]:
    """Returns the ids of a text with images. Raises errors as `text_ids`, and ApiError 400 for an image that the
    model cannot read.
    """
    layout, placeholder_id = encoder.images, encoder.placeholder_id
    assert layout is not None, "a text has images only where the model reads some"
    assert placeholder_id is not None
    sizes: list[ImageSize] = []
    for source in prompt.images:
        if source.url not in files:
            refuse_field(source.path, "was not read: send the image as a data URL")
        try:
            sizes.append(layout.size_of(files[source.url].width, files[source.url].height))
        except ImageError as error:
            refuse_field(source.path, str(error), code="invalid_image")
    tokens = sum(size.num_tokens for size in sizes)
    if limits is not None and tokens > limits.max_model_len:
        limits.refuse_uncounted(tokens, param)
    slots = ImageSlots(placeholder_id, [array("I", [placeholder_id]) * size.num_tokens for size in sizes])
    ids = yield from text_ids(encoder, prompt, param, limits, slots)
    slots.check_all_used()
    placed = zip(prompt.images, sizes, slots.offsets, strict=True)
    return ImagePrompt(ids, [PlacedImage(source, files[source.url], size, at) for source, size, at in placed])


def completion_ids(
    encoder: PromptEncoder | None, body: dict[str, Any], limits: PromptLimits | None = None
) -> Sliced[list[list[int]]]:
    """Returns the token ids of each prompt of a completion. If `encoder` is None, prompts must be token ids."""
    prompt_field = body.get("prompt")
    if limits is not None:
        limits.check_ids(prompt_field)
    made = []
    for index, prompt in enumerate(completion_prompts(body)):
        where = prompt_path(body, index)
        if isinstance(prompt, PromptText):
            if encoder is None:
                refuse_field(where, "is text, but this server has no tokenizer: send token ids")
            prompt = yield from text_ids(encoder, prompt, where, limits)
        if not prompt:
            refuse_field(where, "is empty: send at least one token")
        made.append(prompt)
    return made


def text_of_ids(tokenizer: Tokenizer, token_ids: list[int]) -> Sliced[str]:
    """Returns the text of token ids, with special tokens shown. Raises ApiError if there is no such id.

    Tokens of a byte-level tokenizer are bytes each, so that parts may be decoded alone that do not cut a character.
    Other decoders may look back any number of tokens, and get all at once.
    """
    size, parts, done = tokenizer.get_vocab_size(with_added_tokens=True), list[str](), 0
    for start in range(0, len(token_ids), _DECODED_TOGETHER):
        _check_ids(token_ids[start : start + _DECODED_TOGETHER], size)
        yield
    if not isinstance(tokenizer.decoder, ByteLevel):
        return _text(tokenizer, token_ids)
    while done < len(token_ids):
        end = done + _DECODED_TOGETHER
        while end < len(token_ids) and _cuts_a_character(tokenizer, token_ids, end):
            end += 1
        parts.append(_text(tokenizer, token_ids[done:end]))
        done = end
        yield
    return "".join(parts)


def _cuts_a_character(tokenizer: Tokenizer, token_ids: list[int], at: int) -> bool:
    before, after = token_ids[max(0, at - _CHARACTER_TOKENS) : at], token_ids[at : at + _CHARACTER_TOKENS]
    return _text(tokenizer, before) + _text(tokenizer, after) != _text(tokenizer, before + after)


def _text(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=False)
    return text


def _check_ids(token_ids: list[int], size: int) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < size)
        raise ApiError(400, f"tokens holds {wrong}; ids are from 0 to {size - 1}", param="tokens")


def whole(job: Sliced[Result]) -> Result:
    """Runs a job to its end and returns its result, without giving turns to others."""
    while True:
        try:
            next(job)
        except StopIteration as stop:
            result: Result = stop.value
            return result


def _texts(messages: object) -> Iterator[str]:
    """Yields the texts of messages, as far as these are well-formed."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            parts = (part.get("text") for part in content if isinstance(part, dict))
            yield from (text for text in parts if isinstance(text, str))
