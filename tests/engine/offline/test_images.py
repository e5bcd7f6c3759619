"""Images that callers of `LLM` give: what they become for the core, and what is refused."""

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mini_infer_engine.config.model.generation_defaults import GenerationDefaults
from mini_infer_engine.core.request import ImageInput, Request
from mini_infer_engine.core_process.messages import ModelInfo
from mini_infer_engine.offline.requests import RequestMaker
from mini_infer_engine.offline.sampling_params import SamplingParams
from mini_infer_engine.text.images.decoder_process import Processor, image_processor
from mini_infer_engine.text.images.media import MediaRules
from mini_infer_engine.text.text_model import TextModel
from tests.support.image_folders import (
    PROCESSORS,
    data_url,
    image_bytes,
    image_part,
    random_image,
    text_part,
    vision_assets,
)

MARKER = {"qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>", "gemma3": "<start_of_image>"}


def maker(family: str = "qwen3_vl", media: MediaRules | None = None, **model: Any) -> RequestMaker:
    text = TextModel(("m",), vision_assets(family), GenerationDefaults(), media=media or MediaRules())
    info = {"vision": family, "max_images": 2} | model
    return RequestMaker(text, ModelInfo(max_model_len=2048, vocab_size=2000, page_size=16, num_pages=9, **info))


@pytest.fixture(scope="module")
def qwen() -> RequestMaker:
    return maker()


def request_of(made: RequestMaker, prompt: Any) -> Request:
    (request,) = made.one(None, prompt, SamplingParams(max_tokens=1)).requests
    return request


def pixels_of(family: str, image: Image.Image) -> bytes:
    values: bytes = image_processor(Processor(family, dict(PROCESSORS[family])))(image)["pixel_values"].tobytes()
    return values


@pytest.mark.parametrize("family", MARKER)
def test_an_image_of_pil_is_read_as_it_is(family: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = image_bytes(random_image(64, 96, mode="RGBA"), exif=exif)
    with Image.open(io.BytesIO(file)) as image:
        prompt = {"prompt": f"{MARKER[family]}What?", "multi_modal_data": {"image": image}}
        request = request_of(maker(family), prompt)
        (made,) = request.images
        assert made.pixels == pixels_of(family, image.convert("RGB"))
    assert len({*request.prompt_token_ids[made.offset : made.offset + made.num_tokens]}) == 1


def test_images_of_a_list_stand_in_their_order(qwen: RequestMaker) -> None:
    images = [random_image(64, 64), random_image(128, 64)]
    text = f"{MARKER['qwen3_vl']}and{MARKER['qwen3_vl']}?"
    made = request_of(qwen, {"prompt": text, "multi_modal_data": {"image": images}}).images
    assert [image.grid for image in made] == [(1, 4, 4), (1, 4, 8)]
    assert made[0].offset + made[0].num_tokens < made[1].offset


def test_messages_of_a_chat_have_images_as_over_http(qwen: RequestMaker, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(image_bytes(random_image(64, 64)))
    here = maker(media=MediaRules.of([], str(tmp_path), 10_000_000))
    part = {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a.png"}}
    by_file, by_data = (
        made.conversations([{"role": "user", "content": [one, text_part("?")]}], {})[0]
        for made, one in ((here, part), (qwen, image_part(image_bytes(random_image(64, 64)))))
    )
    assert by_file.token_ids == by_data.token_ids
    assert [*by_file.images] == [*by_data.images]
    assert isinstance(by_file.images[0], ImageInput)


REFUSED = {
    "another kind": ({"prompt": "x", "multi_modal_data": {"video": [1]}}, "video"),
    "no image of PIL": ({"prompt": MARKER["qwen3_vl"], "multi_modal_data": {"image": "cat.png"}}, "PIL"),
    "too many": ({"prompt": "x", "multi_modal_data": {"image": [random_image(9, 9)] * 3}}, "limit_mm_per_prompt"),
    "no marker": ({"prompt": "x", "multi_modal_data": {"image": random_image(9, 9)}}, "image_pad"),
    "token ids": ({"prompt_token_ids": [1], "multi_modal_data": {"image": random_image(9, 9)}}, "multi_modal_data"),
    "uuids": ({"prompt": "x", "multi_modal_uuids": {"image": ["a"]}}, "multi_modal_uuids"),
    "out of proportion": (
        {"prompt": MARKER["qwen3_vl"], "multi_modal_data": {"image": random_image(2100, 10)}},
        "2100x10",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_prompt_is_refused_when_its_image_is(qwen: RequestMaker, name: str) -> None:
    prompt, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        request_of(qwen, prompt)


def test_a_chat_is_refused_when_its_image_is(qwen: RequestMaker) -> None:
    for url, code in ((data_url(b"hello"), "no image"), ("https://h/a.png", "allowed-media-domains")):
        part = {"type": "image_url", "image_url": {"url": url}}
        with pytest.raises(ValueError, match=code):
            qwen.conversations([{"role": "user", "content": [part]}], {})


def test_images_are_refused_when_the_model_reads_none() -> None:
    made = maker(vision="", max_images=0)
    with pytest.raises(ValueError, match="multi_modal_data"):
        request_of(made, {"prompt": "x", "multi_modal_data": {"image": random_image(9, 9)}})
    with pytest.raises(ValueError, match="text parts only"):
        made.conversations([{"role": "user", "content": [image_part(b"x")]}], {})
