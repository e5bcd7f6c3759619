"""Computes the block keys of a body's prompts in steps of a few milliseconds, and reuses those of remembered prompts.

Token ids are exactly the engine's: the text is always rendered as a whole, and what is reused was tokenised from the
same characters. Knows no threads and no sockets.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

from mini_infer_apis.dialects import anthropic, responses
from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS, block_keys
from mini_infer_contract.images import image_key_ids
from mini_infer_gateway.index.key_chain import KeyChain
from mini_infer_gateway.index.prefix_index import prompt_root
from mini_infer_gateway.prompts.prompt_cache import MAX_MARKS, MIN_CHARACTERS, CachedPrompt, Mark, PromptCache
from mini_infer_gateway.routing.base import PromptKeys
from mini_infer_prompts.image_files import data_url_bytes, is_data_url, read_header
from mini_infer_prompts.image_prompts import ImageError, ImageSlots
from mini_infer_prompts.prompt import ChatTemplates, PromptEncoder, PromptText, chat_prompt_text, completion_prompts
from mini_infer_prompts.template_budget import DEFAULT_UNITS, rendering_units
from mini_infer_web.api_errors import ApiError, context_length, renaming
from mini_infer_web.body_fields import UnknownFields

PromptReader = Callable[[ChatTemplates, dict[str, Any]], list[PromptText | list[int]]]
"""Returns the prompts of a body, as texts or token ids. Raises ApiError 400 if it has no readable prompt."""

STEP_CHARACTERS = 16 << 10
"""Largest number of characters tokenised in a step, except where the tokenizer cannot process a text in parts."""

ON_A_THREAD = 1 << 30
"""Yielded for work that is not done on the event loop."""
MAX_IMAGES = 1000
"""Most images of a prompt that has keys; one with more is routed by load."""
MAX_IMAGE_TOKENS = 1 << 21
"""Most tokens of a prompt's images, whatever their model's processor says."""
CHARACTERS_A_TOKEN = 4
TYPICAL_IMAGE = (1024, 768)
"""Pixels of an image of which nothing is known but its URL."""

Steps = Generator[int, None, PromptKeys]
"""Yields the number of characters still to be tokenised, and returns the keys."""


_chat = partial(chat_prompt_text, reads_images=True)


def chat_prompts(encoder: ChatTemplates, body: dict[str, Any]) -> list[PromptText | list[int]]:
    """Reads a chat: one prompt, the conversation rendered with the model's template."""
    return [_chat(encoder, body)]


def batch_prompts(encoder: ChatTemplates, body: dict[str, Any]) -> list[PromptText | list[int]]:
    """Reads a batch of chats: one prompt for each."""
    conversations = body.get("messages")
    if not isinstance(conversations, list):
        raise ApiError(400, "messages must be a list of conversations", param="messages")
    return [_chat(encoder, body | {"messages": messages}) for messages in conversations]


def invocation_prompts(encoder: ChatTemplates, body: dict[str, Any]) -> list[PromptText | list[int]]:
    """Reads a body that is a chat or a completion, depending on its fields."""
    return chat_prompts(encoder, body) if "messages" in body else text_prompts(encoder, body)


def message_chat(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the chat equivalent to a message. Unknown fields are ignored here: the engine decides about them."""
    return anthropic.chat_body(body, unknown=UnknownFields("warn"))


def response_chat(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the chat equivalent to a response. Unknown fields are ignored here: the engine decides about them."""
    return responses.chat_body(body, UnknownFields("warn"))


def message_prompts(encoder: ChatTemplates, body: dict[str, Any]) -> list[PromptText | list[int]]:
    """Reads a message of Anthropic's API: one prompt, that of the equivalent chat."""
    return [_chat(encoder, message_chat(body))]


def response_prompts(encoder: ChatTemplates, body: dict[str, Any]) -> list[PromptText | list[int]]:
    """Reads a response whose input is the whole conversation: one prompt, that of the equivalent chat."""
    return [_chat(encoder, response_chat(body))]


def text_prompts(encoder: ChatTemplates, body: dict[str, Any]) -> list[PromptText | list[int]]:
    """Reads a completion: `prompt`, which may contain several."""
    return completion_prompts(body)


def embedding_prompts(encoder: ChatTemplates, body: dict[str, Any]) -> list[PromptText | list[int]]:
    """Reads embeddings: `input`, which may contain several, and is named as the parameter in errors."""
    options = {name: body[name] for name in ("add_special_tokens",) if name in body}
    try:
        return completion_prompts({"prompt": body.get("input")} | options)
    except ApiError as error:
        raise error.renamed(_OF_EMBEDDINGS) from None


_OF_EMBEDDINGS = renaming({("prompt",): ("input",)})


class PromptImage(NamedTuple):
    """An image of a prompt, as keys of blocks have it."""

    digest: bytes
    num_tokens: int


def key_steps(
    encoder: PromptEncoder | None,
    prompt_cache: PromptCache,
    read: PromptReader,
    body: dict[str, Any],
    max_tokens: int | None,
    units: int = DEFAULT_UNITS,
) -> Steps:
    """Computes the keys of a body's prompts. Without an encoder, only prompts of token ids have keys.

    `units` is the work that each rendering may do; errors of `template_budget` are raised. Raises ApiError 400 for an
    invalid prompt (see `contract.prompt`), or one with more than `max_tokens`. An error that names no parameter is
    attributed to the prompt's field, as at an engine.
    """
    try:
        return (yield from _key_steps(encoder, prompt_cache, read, body, max_tokens, units))
    except ApiError as error:
        error.param = error.param or next((name for name in ("messages", "prompt", "input") if name in body), None)
        raise


def _key_steps(
    encoder: PromptEncoder | None,
    prompt_cache: PromptCache,
    read: PromptReader,
    body: dict[str, Any],
    max_tokens: int | None,
    units: int,
) -> Steps:
    if (kept := body.get("truncate_prompt_tokens")) is not None:
        # Of a prompt of any length the engine keeps an end that no cache is known to have.
        return PromptKeys(kept if isinstance(kept, int) and kept > 0 else 0, ())
    salt = body.get("cache_salt")
    root = prompt_root(salt=salt if isinstance(salt, str) else "")
    tokens, chains = 0, []
    with rendering_units(units):
        prompts = completion_prompts(body) if encoder is None else read(encoder, body)
    for prompt in prompts:
        if isinstance(prompt, PromptText):
            if encoder is None:
                raise ApiError(400, "a text, for a server without a tokenizer")
            _check_length(encoder, prompt.text, max_tokens)
            if prompt.images:
                count, chain = yield from _image_prompt_steps(encoder, prompt_cache, prompt, root, max_tokens)
            else:
                count, chain = yield from _text_steps(encoder, prompt_cache, prompt, root, max_tokens)
        else:
            _check_tokens(len(prompt), max_tokens)
            count, chain = len(prompt), block_keys(prompt, root)
        tokens += count
        chains.append(chain)
    return PromptKeys(tokens, tuple(chains))


def _image_prompt_steps(
    encoder: PromptEncoder, prompt_cache: PromptCache, prompt: PromptText, root: bytes, max_tokens: int | None
) -> Generator[int, None, tuple[int, Sequence[bytes]]]:
    """Computes the tokens and keys of a prompt up to its first image that is not in the request itself."""
    layout = encoder.images
    if layout is None or len(prompt.images) > MAX_IMAGES:
        raise ApiError(400, f"{len(prompt.images)} images are more than this gateway looks at", code="too_many_images")
    images: list[PromptImage] = []
    for source in prompt.images:
        if not is_data_url(source.url):
            break
        # Nothing of an image is read on the event loop.
        yield ON_A_THREAD
        try:
            data, digest = yield from _data_steps(source.url)
            file = read_header(data, digest)
            images.append(PromptImage(digest, layout.size_of(file.width, file.height).num_tokens))
        except ImageError as error:
            raise ApiError(400, str(error), code="invalid_image") from None
        _check_tokens(sum(image.num_tokens for image in images), max_tokens)
    if sum(image.num_tokens for image in images) > MAX_IMAGE_TOKENS:
        raise ApiError(400, "images of more tokens than a context has", code="too_many_images")
    end, unknown = len(prompt.text), len(prompt.images) - len(images)
    if unknown:
        end = -1
        for _ in range(len(images) + 1):
            end = prompt.text.find(layout.placeholder, end + 1)
    known = prompt._replace(text=prompt.text[:end])
    count, chain = yield from _text_steps(encoder, prompt_cache, known, root, max_tokens, tuple(images))
    rest = (len(prompt.text) - end) // CHARACTERS_A_TOKEN
    return count + rest + unknown * layout.size_of(*TYPICAL_IMAGE).num_tokens, chain


def _data_steps(url: str) -> Generator[int, None, tuple[bytes, bytes]]:
    """Returns the content of a data URL and its SHA-256."""
    steps = data_url_bytes(url)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: tuple[bytes, bytes] = end.value
            return found
        yield ON_A_THREAD


def _text_steps(
    encoder: PromptEncoder,
    prompt_cache: PromptCache,
    prompt: PromptText,
    root: bytes,
    max_tokens: int | None,
    images: tuple[PromptImage, ...] = (),
) -> Generator[int, None, tuple[int, Sequence[bytes]]]:
    text = prompt.text
    if len(text) < MIN_CHARACTERS:
        short_ids = encoder.encode(prompt.text, prompt.add_special_tokens)
        if slots := _slots(encoder, images):
            short_ids = [*slots.expand(short_ids)]
            slots.check_all_used()
        _check_tokens(len(short_ids), max_tokens)
        return len(short_ids), block_keys(short_ids, root)
    kind = (encoder.revision, root, prompt.add_special_tokens, images)
    found = prompt_cache.find(kind, text)
    cached_keys, mark = (found[0].keys, found[1]) if found else (None, Mark(0, 0, ()))
    slots = _slots(encoder, images, text, mark.end)
    first_block = mark.tokens // BLOCK_SIZE_TOKENS
    ids, closed, stepped = [*mark.rest], [], mark.end
    if len(text) - mark.end > STEP_CHARACTERS:
        yield len(text) - mark.end
    keys: list[bytes] = []
    parent = cached_keys[first_block - 1] if cached_keys and first_block else root
    for piece in encoder.pieces(prompt, mark.end):
        ids += slots.expand(piece.ids) if slots else piece.ids
        if piece.closed and piece.end:
            closed.append((piece.end, len(ids)))
        if piece.end - stepped >= STEP_CHARACTERS:
            _check_tokens(first_block * BLOCK_SIZE_TOKENS + len(ids), max_tokens)
            keys += block_keys(ids[len(keys) * BLOCK_SIZE_TOKENS :], keys[-1] if keys else parent)
            stepped = piece.end
            yield len(text) - stepped
    if slots:
        slots.check_all_used()
    tokens = first_block * BLOCK_SIZE_TOKENS + len(ids)
    _check_tokens(tokens, max_tokens)
    keys += block_keys(ids[len(keys) * BLOCK_SIZE_TOKENS :], keys[-1] if keys else parent)
    chain = KeyChain(keys, cached_keys, first_block)
    marks = [*_marks_before(found)]
    marks += [_mark(end, count, ids, first_block) for end, count in closed[-MAX_MARKS:]]
    if marks and marks[-1].end >= MIN_CHARACTERS:
        entry = CachedPrompt(kind, text, chain, tuple(marks[-MAX_MARKS:]), grown_from=found)
        prompt_cache.add(entry, instead_of=found)
    return tokens, chain


def _slots(encoder: PromptEncoder, images: Sequence[PromptImage], text: str = "", end: int = 0) -> ImageSlots | None:
    """Returns the slots of a prompt's images with words of their digests, for the text behind its first `end`
    characters.
    """
    if not images or encoder.images is None or encoder.placeholder_id is None:
        return None
    first = text.count(encoder.images.placeholder, 0, end)
    return ImageSlots(encoder.placeholder_id, [image_key_ids(*image) for image in images], first)


def _marks_before(found: tuple[CachedPrompt, Mark] | None) -> list[Mark]:
    return [mark for mark in found[0].marks if mark.end <= found[1].end] if found else []


def _mark(end: int, count: int, ids: list[int], first_block: int) -> Mark:
    """Returns the mark after `count` of `ids`, which begin with block `first_block`."""
    rest = ids[count - count % BLOCK_SIZE_TOKENS : count]
    return Mark(end, first_block * BLOCK_SIZE_TOKENS + count, tuple(rest))


def _check_length(encoder: PromptEncoder, text: str, max_tokens: int | None) -> None:
    longest = encoder.segments.longest_token_characters
    if max_tokens is not None and longest and len(text) > max_tokens * longest:
        raise too_long(f"at least {len(text) // longest}", max_tokens)


def _check_tokens(tokens: int, max_tokens: int | None) -> None:
    if max_tokens is not None and tokens > max_tokens:
        raise too_long(f"{tokens} or more", max_tokens)


def too_long(tokens: str, max_tokens: int) -> ApiError:
    """Returns the 400 for a prompt that no endpoint of its model can take."""
    return ApiError(
        400,
        f"the prompt has {tokens} tokens, and {context_length(max_tokens)}: shorten it",
        code="context_length_exceeded",
    )
