"""A model with images from the message to the output tokens, against transformers' processor and `generate`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.text.images.decoder_process import Processor, image_processor
from mini_infer_prompts.image_files import decoded_image, read_header
from tests.support.image_folders import image_bytes, image_part, random_image, text_part
from tests.support.vision_folders import save_model_with_files
from tests.support.vision_models import Family

TOKENS = 6
FILES = [image_bytes(random_image(30, 20)), image_bytes(random_image(13, 40, seed=1), "JPEG")]
CONTENT = [text_part("Look:\n"), image_part(FILES[0]), text_part(" and "), image_part(FILES[1]), text_part("?")]


def generated(llm: LLM, model: Any, family: Family, token_ids: list[int]) -> list[int]:
    """The tokens that transformers' model generates after a prompt with the images of `CONTENT`."""
    encoder = llm._encoder
    assert encoder is not None
    assert encoder.images is not None
    process = image_processor(Processor(family, dict(encoder.images.processor)))
    made = [process(decoded_image(read_header(data, b""))) for data in FILES]
    ids = torch.tensor([token_ids])
    is_image = (ids == encoder.placeholder_id).int()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["token_type_ids" if family == "gemma3" else "mm_token_type_ids"] = is_image
    inputs["pixel_values"] = torch.cat([torch.from_numpy(one["pixel_values"]) for one in made])
    if family != "gemma3":
        inputs["image_grid_thw"] = torch.cat([torch.from_numpy(one["image_grid_thw"]) for one in made])
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    found: list[int] = output[0, len(token_ids) :].tolist()
    return found


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_a_chat_with_images_equals_transformers(tmp_path: Path, family: Family) -> None:
    model = save_model_with_files(tmp_path, family)
    llm = LLM(tmp_path, device="cpu", kv_cache_memory=1 << 24)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, min_tokens=TOKENS, ignore_eos=True)
    messages = [{"role": "user", "content": CONTENT}]
    first, again = (llm.chat(messages, params, use_tqdm=False)[0] for _ in range(2))
    prompt = [*(first.prompt_token_ids or [])]
    assert first.outputs[0].token_ids == generated(llm, model, family, prompt)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.num_cached_tokens, "the prefix cache has the images"
    other = [*CONTENT[:1], image_part(image_bytes(random_image(30, 20, seed=7))), *CONTENT[2:]]
    changed = llm.chat([{"role": "user", "content": other}], params, use_tqdm=False)[0]
    assert (changed.num_cached_tokens or 0) < again.num_cached_tokens
