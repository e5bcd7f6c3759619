"""Models that read images on a GPU: logits and texts of transformers on a CPU, by graphs and kernel by kernel."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.batch import Batch
from mini_infer_engine.core.encoder_cache import EncoderCacheManager
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.images import PromptImages
from mini_infer_engine.core.request import ImageInput, Request, SamplingParams
from mini_infer_engine.runtime.model_runner import ModelRunner
from tests.gpu.device import GPU_ONLY
from tests.gpu.runs import make_runner, make_settings, texts
from tests.support.tiny_models import PageDealer, chunk
from tests.support.vision_models import (
    FAMILIES,
    Family,
    expected_logits,
    expected_text,
    prompt_with_images,
    random_image,
    save_vision_model,
)

pytestmark = GPU_ONLY
TOLERANCE = 2e-3
"""Sums of fp32 in another order than a CPU's, through a vision encoder and a decoder."""


@pytest.fixture(autouse=True)
def exact_convolutions() -> Iterator[None]:
    """cuDNN would compute fp32 convolutions, which make patches, in TF32."""
    usual = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = usual


def engine_of(folder: Path, **settings: Any) -> tuple[Engine, ModelRunner]:
    runner = make_runner(make_settings(folder, **settings))
    vision = runner.config.vision
    assert vision is not None
    return Engine(runner.settings, runner, (), runner.max_model_len, "revision", vision=vision), runner


def prompts_of(family: Family) -> list[tuple[list[int], list[ImageInput]]]:
    one, other = random_image(family, 1, (4, 6)), random_image(family, 2, (8, 4))
    parts = ([5, one, 7, other, 40], [70], [3, one, 9], [30, other])
    return [prompt_with_images(family, each, seed) for seed, each in enumerate(parts)]


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_a_cpu_when_a_prompt_has_images(tmp_path: Path, family: Family, page_size: int) -> None:
    model = save_vision_model(tmp_path, family)
    runner = engine_of(tmp_path, page_size=page_size)[1]
    token_ids, inputs = prompts_of(family)[0]
    assert runner.config.vision is not None
    images, encoder_cache = PromptImages.of(inputs, runner.config.vision), EncoderCacheManager(100, 100)
    table, parts, cut = PageDealer(runner).table(len(token_ids)), [], images.rows[0].end + 3
    for start, end in ((0, cut), (cut, len(token_ids))):
        batch, row = Batch([], 0), chunk(0, token_ids, start, end - start, table)
        encoder_cache.take(batch, row, images)
        batch.rows.append(row)
        parts.append(runner.logits(batch))
    error = (torch.cat(parts).cpu() - expected_logits(model, family, token_ids, inputs)).abs().max()
    print(f"{family}: largest difference of logits {error:.1e}")
    assert error <= TOLERANCE


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 48}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_equal_generate_when_images_and_text_share_passes(
    tmp_path: Path, family: Family, settings: dict[str, Any]
) -> None:
    model = save_vision_model(tmp_path, family)
    engine, _ = engine_of(tmp_path, disable_hybrid_kv_cache_manager=False, **settings)
    sampling, prompts = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), prompts_of(family)
    expected = [expected_text(model, family, *prompt, 24) for prompt in prompts]
    for turn in range(2):  # the second finds prefixes in the cache
        requests = [
            Request(request_id=f"{turn} {index}", prompt_token_ids=ids, images=images, sampling=sampling)
            for index, (ids, images) in enumerate(prompts)
        ]
        assert texts(engine, requests) == expected
    assert engine.scheduler.encoder_cache.num_encoded == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_texts_are_those_of_passes_without_graphs_when_prompts_have_images(
    tmp_path: Path, family: Family
) -> None:
    save_vision_model(tmp_path, family)
    sampling, made = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), []
    for eager in (False, True):
        engine, _ = engine_of(tmp_path, dtype="bfloat16", enforce_eager=eager)
        ids, images = prompts_of(family)[0]
        request = Request(request_id="a", prompt_token_ids=ids, images=images, sampling=sampling)
        made.append(texts(engine, [request]))
    assert made[0] == made[1]
