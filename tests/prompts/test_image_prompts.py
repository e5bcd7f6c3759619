"""Prompts with images against transformers' processors: the same sizes, text and token ids."""

import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from transformers import AutoTokenizer, Gemma3Processor, Qwen2_5_VLProcessor, Qwen3VLProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mini_infer_prompts import prompt as prompts
from mini_infer_prompts.image_prompts import ImageError, ImageSlots, image_prompts
from mini_infer_prompts.prompt import PromptEncoder, PromptText
from mini_infer_web.api_errors import ApiError
from tests.support.image_folders import (
    GEMMA_TOKENS_PER_IMAGE,
    PROCESSORS,
    TEXT_TEMPLATE,
    data_url,
    image_bytes,
    random_image,
    text_part,
    vision_assets,
    vision_files,
)

FAMILIES = tuple(PROCESSORS)
chat_prompt_text = functools.partial(prompts.chat_prompt_text, reads_images=True)
SIZES = [(1, 1), (28, 28), (100, 30), (30, 100), (333, 222), (640, 480), (1999, 10), (13, 1300), (2000, 2000), (57, 55)]


@functools.cache
def encoder_of(family: str) -> PromptEncoder:
    return PromptEncoder(vision_assets(family))


@functools.cache
def processor_of(family: str) -> Any:
    """Transformers' processor of the family's folder."""
    with TemporaryDirectory() as name:
        for file, text in vision_files(family).items():
            Path(name, file).write_text(text)
        tokenizer = AutoTokenizer.from_pretrained(name)
    if family == "gemma3":
        images = Gemma3ImageProcessorPil.from_dict(dict(PROCESSORS[family]))
        return Gemma3Processor(images, tokenizer, image_seq_length=GEMMA_TOKENS_PER_IMAGE)
    kind: Any = Qwen3VLProcessor if family == "qwen3_vl" else Qwen2_5_VLProcessor
    # Its processor of videos needs torchvision, and no video is read here.
    without_videos = type("WithoutVideos", (kind,), {"check_argument_for_proper_class": lambda *_: object})
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    values = {"size": size, **PROCESSORS[family]}
    return without_videos(Qwen2VLImageProcessorPil.from_dict(values), tokenizer, None)


def expanded(encoder: PromptEncoder, prompt: PromptText, sizes: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """The ids of a prompt with images of these sizes, and the offsets of the images."""
    assert encoder.images is not None
    assert encoder.placeholder_id is not None
    ids = [[encoder.placeholder_id] * encoder.images.size_of(*size).num_tokens for size in sizes]
    slots = ImageSlots(encoder.placeholder_id, ids)
    found = [token_id for piece in encoder.pieces(prompt) for token_id in slots.expand(piece.ids)]
    slots.check_all_used()
    return found, slots.offsets


def chat(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


def an_image(width: int = 40, height: int = 40) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image_bytes(random_image(width, height)))}}


@pytest.mark.parametrize("family", FAMILIES)
def test_image_sizes_equal_transformers(family: str) -> None:
    images, processor = encoder_of(family).images, processor_of(family).image_processor
    assert images is not None
    for width, height in SIZES:
        if family != "gemma3" and max(width, height) > 200 * min(width, height):
            continue
        made = processor([random_image(width, height)], return_tensors="np")
        size = images.size_of(width, height)
        assert size.num_values == made["pixel_values"].size
        if family != "gemma3":
            assert [*size.grid] == made["image_grid_thw"][0].tolist()
            assert size.num_tokens == made["image_grid_thw"][0].prod() // 4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "content",
    [
        ["image"],
        ["What is this?\n", "image"],
        ["image", "\nWhat is this?"],
        ["a", "image", "image", "\n\n\n", "b", "image"],
        ["image", "x\n", "image", " y"],
    ],
)
def test_ids_of_prompts_with_images_equal_transformers(family: str, content: list[str]) -> None:
    encoder, processor = encoder_of(family), processor_of(family)
    sizes = [(40 + 30 * index, 100) for index, part in enumerate(content) if part == "image"]
    images = iter(an_image(*size) for size in sizes)
    prompt = chat_prompt_text(encoder, chat(*(next(images) if c == "image" else text_part(c) for c in content)))
    parts = [{"type": "image"} if part == "image" else text_part(part) for part in content]
    text = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    pictures = [random_image(*size) for size in sizes]
    made = processor(images=[pictures] if family == "gemma3" else pictures, text=[text], add_special_tokens=False)
    found, offsets = expanded(encoder, prompt, sizes)
    assert found == made["input_ids"][0]
    assert [source.path for source in prompt.images] == [
        ("messages", 0, "content", index, "image_url", "url") for index, part in enumerate(content) if part == "image"
    ]
    assert all(found[offset] == encoder.placeholder_id != found[offset - 1] for offset in offsets)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": "data:,"},
        {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}},
        {"type": "input_image", "image_url": "data:,", "detail": "auto"},
    ],
)
def test_images_are_found_when_parts_have_openais_forms(part: dict[str, Any]) -> None:
    prompt = chat_prompt_text(encoder_of("qwen3_vl"), chat(part, text_part("x")))
    assert "<|vision_start|><|image_pad|><|vision_end|>x" in prompt.text
    assert [source.url for source in prompt.images] == ["data:,"]


def test_images_stand_before_the_text_when_a_template_takes_strings() -> None:
    encoder = PromptEncoder(vision_assets("qwen2_5_vl", template=TEXT_TEMPLATE))
    prompt = chat_prompt_text(encoder, chat(text_part("a"), an_image(), text_part("b")))
    assert "user\n<|vision_start|><|image_pad|><|vision_end|>\na\nb<|im_end|>" in prompt.text


def test_tool_results_have_images_when_the_template_shows_them() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [text_part("seen"), an_image()]},
    ]
    prompt = chat_prompt_text(encoder_of("qwen3_vl"), {"messages": messages})
    assert "tool\nseen<|vision_start|><|image_pad|><|vision_end|><|im_end|>" in prompt.text


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_other_roles_have_images_when_the_template_shows_them(role: str) -> None:
    user = {"role": "user", "content": [an_image(), text_part("look")]}
    other = {"role": role, "content": [text_part("seen"), an_image()]}
    messages = [other, user] if role == "system" else [user, other, user]
    prompt = chat_prompt_text(encoder_of("qwen2_5_vl"), {"messages": messages})
    assert f"{role}\nseen<|vision_start|><|image_pad|><|vision_end|><|im_end|>" in prompt.text
    assert len(prompt.images) == len(messages)


def test_a_chat_is_refused_when_the_template_hides_an_image_of_the_system() -> None:
    template = TEXT_TEMPLATE.replace("message.content", "message.content if message.role == 'user' else ''")
    assert template != TEXT_TEMPLATE
    encoder = PromptEncoder(vision_assets("qwen2_5_vl", template=template))
    with pytest.raises(ApiError) as refused:
        chat_prompt_text(encoder, {"messages": [{"role": "system", "content": [an_image()]}, *chat("x")["messages"]]})
    assert (refused.value.status, refused.value.code) == (400, "chat_template_error")


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (chat({"type": "image_url"}), "messages[0].content[0].image_url"),
        (chat({"type": "image_url", "image_url": {}}), "messages[0].content[0].image_url.url"),
        (chat({"type": "image_url", "image_url": {"url": 5}}), "messages[0].content[0].image_url.url"),
        (chat({"type": "image_url", "image_url": ["x"]}), "messages[0].content[0].image_url"),
        (chat({"type": "input_image", "file_id": "f"}), "messages[0].content[0].file_id"),
        (chat({"type": "image_pil", "image_pil": "x"}), "messages[0].content[0].type"),
        (chat({"type": ["image_url"]}), "messages[0].content[0].type"),
        (chat(an_image(), text_part("<|image_pad|>")), "messages[0].content[1].text"),
        (chat(an_image()) | {"tools": [{"type": "function", "function": {"name": "<|image_pad|>"}}]}, "tools"),
        ({"messages": [{"role": "developer", "content": [an_image()]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "system", "content": [an_image()]}, {"role": "developer", "content": "x"}]},
            "messages[0].content",
        ),
        (chat(an_image(), text_part("<|image_"), text_part("pad|>")), "messages"),
    ],
    ids=str,
)
def test_a_chat_is_refused_by_its_field_when_an_image_is_malformed(body: dict[str, Any], path: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat_prompt_text(encoder_of("qwen2_5_vl"), body)
    assert (refused.value.status, (refused.value.param or "")[: len(path)]) == (400, path)


def test_markers_of_images_are_plain_text_when_a_chat_has_no_image() -> None:
    prompt = chat_prompt_text(encoder_of("qwen2_5_vl"), chat(text_part("what is <|image_pad|>?")))
    assert "what is <|image_pad|>?" in prompt.text
    assert prompt.images == ()


def test_images_are_refused_in_todays_words_when_the_model_reads_none() -> None:
    with pytest.raises(ApiError) as refused:
        prompts.chat_prompt_text(encoder_of("qwen2_5_vl"), chat(an_image()))
    assert refused.value.message == (
        "messages[0].content[0].type 'image_url' is not supported: this server reads text parts only"
    )


def test_an_image_is_refused_when_its_sides_are_out_of_proportion() -> None:
    images = encoder_of("qwen2_5_vl").images
    assert images is not None
    with pytest.raises(ImageError, match="2010x10"):
        images.size_of(2010, 10)


@pytest.mark.parametrize("images", [[], [[9], [9]]])
def test_a_prompt_is_refused_when_placeholders_and_images_differ_in_number(images: list[list[int]]) -> None:
    slots = ImageSlots(7, images)

    def expand() -> None:
        slots.expand([1, 7, 2])
        slots.check_all_used()

    with pytest.raises(ApiError) as refused:
        expand()
    assert refused.value.code == "invalid_image_placeholders"


@pytest.mark.parametrize(
    "changes",
    [
        {"config.json": "{}"},
        {"config.json": '{"model_type": "qwen3_vl"}'},
        {"config.json": '{"model_type": "qwen3"}'},
        {"config.json": "[" * 5000},
        {"preprocessor_config.json": ""},
        {"preprocessor_config.json": '{"patch_size": 0}'},
        {"preprocessor_config.json": '{"size": {"shortest_edge": "1"}}'},
        {"preprocessor_config.json": '{"size": [1]}'},
        {"preprocessor_config.json": '{"min_pixels": 1e9}'},
        {"preprocessor_config.json": '{"min_pixels": true}'},
    ],
    ids=str,
)
def test_no_images_are_read_when_a_folders_files_do_not_say_how(changes: dict[str, str]) -> None:
    assert image_prompts(vision_files("qwen3_vl") | changes) is None


def test_the_image_processor_is_read_when_it_stands_in_the_processors_file() -> None:
    files = vision_files("qwen3_vl")
    nested = {"processor_config.json": json.dumps({"image_processor": dict(PROCESSORS["qwen3_vl"])})}
    images = image_prompts(files | nested | {"preprocessor_config.json": "{}"})
    assert images is not None
    assert images.size_of(64, 64).num_tokens == 4
