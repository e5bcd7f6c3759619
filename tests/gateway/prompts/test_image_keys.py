"""Keys of prompts with images: those of an engine, different for different images, and none for what is unknown."""

import hashlib
from typing import Any

import pytest

from mini_infer_apis.dialects import anthropic, responses
from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS, block_keys
from mini_infer_contract.images import image_key_ids
from mini_infer_engine.text.images.reader import _files
from mini_infer_engine.text.tokenizing import ImagePrompt, chat_ids, whole
from mini_infer_gateway.index.prefix_index import prompt_root
from mini_infer_gateway.prompts import prompt_keys
from mini_infer_gateway.prompts.image_bytes import image_bytes as bytes_of_images
from mini_infer_gateway.prompts.prompt_cache import MIN_CHARACTERS, PromptCache
from mini_infer_gateway.prompts.prompt_keys import key_steps
from mini_infer_gateway.prompts.remote_tokenizer import tokenize_requests
from mini_infer_gateway.prompts.template_workers import TemplateWorkers
from mini_infer_gateway.routing.base import PromptKeys
from mini_infer_prompts.image_sources import image_sources
from mini_infer_prompts.prompt import PromptEncoder
from mini_infer_web.api_errors import ApiError
from tests.support.image_folders import (
    PROCESSORS,
    data_url,
    image_bytes,
    image_part,
    random_image,
    text_part,
    vision_assets,
)

FIRST, SECOND = image_bytes(random_image(100, 60)), image_bytes(random_image(57, 190, seed=1), "JPEG")
ENCODERS = {family: PromptEncoder(vision_assets(family), strict=True) for family in PROCESSORS}
LONG = "some words of a long conversation, " * (2 * MIN_CHARACTERS // 35)


def chat(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


def keys_of(
    body: dict[str, Any], family: str = "qwen2_5_vl", cache: PromptCache | None = None, **more: Any
) -> PromptKeys:
    read = more.pop("read", prompt_keys.chat_prompts)
    steps = key_steps(ENCODERS[family], cache or PromptCache(1 << 24), read, body, more.pop("max_tokens", None), **more)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            keys: PromptKeys = end.value
            return keys


def engine_prompt(body: dict[str, Any], family: str) -> list[int]:
    """The ids of the prompt as the engine's front makes them."""
    files = whole(_files(image_sources(body["messages"]), {}))
    return whole(chat_ids(ENCODERS[family], body, images=files))


def engine_keys(body: dict[str, Any], family: str) -> list[bytes]:
    """The keys of the prompt's blocks as the engine's core makes them."""
    prompt = engine_prompt(body, family)
    assert isinstance(prompt, ImagePrompt)
    ids = list(prompt)
    for image in prompt.images:
        end = image.offset + image.size.num_tokens
        ids[image.offset : end] = image_key_ids(image.file.digest, image.size.num_tokens)
    return block_keys(ids, prompt_root(salt=""))


BODIES = {
    "one image": chat(image_part(FIRST), text_part("?")),
    "two images": chat(image_part(FIRST), text_part("and"), image_part(SECOND)),
    "the same twice": chat(image_part(FIRST), image_part(FIRST)),
    "a long text before": chat(text_part(LONG), image_part(FIRST), text_part("?")),
    "a long text between": chat(image_part(FIRST), text_part(LONG), image_part(SECOND), text_part(LONG)),
}


@pytest.mark.parametrize("family", PROCESSORS)
@pytest.mark.parametrize("name", BODIES)
def test_keys_and_tokens_equal_the_engines_when_a_prompt_has_images(family: str, name: str) -> None:
    body = BODIES[name]
    found = keys_of(body, family)
    assert found.tokens == len(engine_prompt(body, family))
    assert [*found.chains[0]] == engine_keys(body, family)


def test_keys_are_the_same_from_their_image_on_when_images_are() -> None:
    first, other, same = (
        [*keys_of(chat(text_part("x" * 200), image_part(data), text_part("tail " * 20))).chains[0]]
        for data in (FIRST, image_bytes(random_image(100, 60, seed=9)), FIRST)
    )
    assert first == same
    common = sum(1 for one, two in zip(first, other, strict=True) if one == two)
    assert 0 < common < len(first)
    assert first[common:] != other[common:]


def test_remembered_prompts_are_reused_when_they_have_the_same_images_alone() -> None:
    cache = PromptCache(1 << 24)
    for name in ("a long text before", "a long text between"):
        for data in (FIRST, image_bytes(random_image(100, 60, seed=9))):
            parts = [
                image_part(data) if part["type"] == "image_url" else part
                for part in BODIES[name]["messages"][0]["content"]
            ]
            for body in (chat(*parts), chat(*parts, text_part("next turn"))):
                assert [*keys_of(body, cache=cache).chains[0]] == engine_keys(body, "qwen2_5_vl")


def test_keys_end_before_an_image_when_its_content_is_unknown() -> None:
    remote = {"type": "image_url", "image_url": {"url": "https://images.example.com/a.png"}}
    body = chat(text_part("x" * 100), image_part(FIRST), remote, text_part("tail " * 50), image_part(SECOND))
    known = chat(text_part("x" * 100), image_part(FIRST), image_part(SECOND), text_part("tail"))
    found, expected = keys_of(body), [*keys_of(known).chains[0]]
    chain = [*found.chains[0]]
    prompt = engine_prompt(known, "qwen2_5_vl")
    assert isinstance(prompt, ImagePrompt)
    assert len(chain) == prompt.images[1].offset // BLOCK_SIZE_TOKENS
    assert chain == expected[: len(chain)]
    assert found.tokens > len(chain) * BLOCK_SIZE_TOKENS


def test_other_dialects_have_the_keys_of_their_chat() -> None:
    encoded = data_url(FIRST).partition(",")[2]
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}
    message = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [block, text_part("?")]}]}
    response = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": data_url(FIRST)}]}]}
    for body, read, chat_of in (
        (message, prompt_keys.message_prompts, anthropic.chat_body),
        (response, prompt_keys.response_prompts, responses.chat_body),
    ):
        assert [*keys_of(body, read=read).chains[0]] == engine_keys(chat_of(body), "qwen2_5_vl")


BROKEN = {
    "no image": chat(image_part(b"hello")),
    "no base64": chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}),
    "a marker in a text": chat(image_part(FIRST), text_part("<|image_pad|>")),
    "too many": chat(*[{"type": "image_url", "image_url": "data:,"}] * (prompt_keys.MAX_IMAGES + 1)),
    "out of proportion": chat(image_part(image_bytes(random_image(2100, 10)))),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_prompt_has_no_keys_when_an_image_is_at_fault(name: str) -> None:
    with pytest.raises(ApiError) as refused:
        keys_of(BROKEN[name])
    assert (refused.value.status, refused.value.code == "context_length_exceeded") == (400, False)


def test_a_prompt_is_refused_when_its_images_alone_exceed_every_context() -> None:
    with pytest.raises(ApiError) as refused:
        keys_of(chat(*[image_part(FIRST)] * 20), max_tokens=64)
    assert refused.value.code == "context_length_exceeded"


async def test_images_are_found_when_a_process_renders_the_template() -> None:
    encoder, workers = ENCODERS["qwen2_5_vl"], TemplateWorkers(lambda: 0.0)
    body = BODIES["two images"]
    prompts = await workers.prompts(
        "r", encoder.template_sources, encoder.special_tokens, "chat_prompts", body, lambda: False, encoder.image_files
    )
    await workers.close()
    assert prompts is not None
    assert keys_of(body, read=lambda templates, of_body: prompts).chains == keys_of(body).chains


def test_servers_are_not_sent_images_to_tokenise() -> None:
    assert tokenize_requests(prompt_keys.chat_prompts, BODIES["one image"]) is None
    assert tokenize_requests(prompt_keys.chat_prompts, chat(text_part("x"))) is not None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 0),
        ({"messages": "x"}, 0),
        ({"messages": [None, {"content": "x"}, {"content": [None, "x", {"type": "text", "text": "y"}]}]}, 0),
        (chat({"image_url": {"url": "12345"}}, {"image_url": "123"}, {"image_url": {"url": 5}}), 8),
        (chat({"source": {"data": "1234"}}, {"content": [{"source": {"data": "12"}}, 5]}), 6),
        ({"input": [{"output": [{"image_url": "123"}]}]}, 3),
    ],
    ids=str,
)
def test_bytes_of_images_are_not_those_of_a_prompt(fields: dict[str, Any], expected: int) -> None:
    assert bytes_of_images(fields) == expected


def test_a_digest_names_the_file_and_not_its_encoding() -> None:
    assert (
        hashlib.sha256(FIRST).digest()
        == next(iter(whole(_files(image_sources(BODIES["one image"]["messages"]), {})).values())).digest
    )
