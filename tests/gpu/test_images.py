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
BF16_SHARE = 0.06
"""Largest error in bf16, of the largest logit: four decoder layers after three of an encoder, with wide weights."""


@pytest.fixture(autouse=True)
def exact_convolutions() -> Iterator[None]:
    """cuDNN would compute fp32 convolutions, which make patches, in TF32."""
    usual = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = usual


def runner_of(folder: Path, **settings: Any) -> ModelRunner:
    return make_runner(make_settings(folder, mm_encoder_cache_tokens=256, max_num_seqs=4, **settings))


def prompts_of(family: Family) -> list[tuple[list[int], list[ImageInput]]]:
    one, other = random_image(family, 1, (4, 6)), random_image(family, 2, (8, 4))
    parts = ([5, one, 7, other, 40], [70], [3, one, 9], [30, other])
    return [prompt_with_images(family, each, seed) for seed, each in enumerate(parts)]


def logits_of(runner: ModelRunner, prompt: tuple[list[int], list[ImageInput]]) -> torch.Tensor:
    """Logits of a prompt in two chunks, the first of which ends between its images or within the second."""
    (token_ids, inputs), vision = prompt, runner.config.vision
    assert vision is not None
    images, encoder_cache = PromptImages.of(inputs, vision), EncoderCacheManager(100, 100)
    table, parts, cut = PageDealer(runner).table(len(token_ids)), [], images.rows[0].end + 3
    for start, end in ((0, cut), (cut, len(token_ids))):
        batch, row = Batch([], 0), chunk(0, token_ids, start, end - start, table)
        encoder_cache.take(batch, row, images)
        batch.rows.append(row)
        parts.append(runner.logits(batch))
    return torch.cat(parts).cpu()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_texts_equal_those_of_a_cpu_when_prompts_have_images(tmp_path: Path, family: Family) -> None:
    """Prompts are cut, some share passes with text and decode rows, and the second turn finds prefixes in the cache."""
    model = save_vision_model(tmp_path, family)
    runner = runner_of(tmp_path, page_size=16, max_num_batched_tokens=64, disable_hybrid_kv_cache_manager=False)
    sampling, prompts = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), prompts_of(family)
    expected = [expected_text(model, family, *prompt, 24) for prompt in prompts]
    engine = Engine(runner.settings, runner, (), runner.max_model_len, "revision", vision=runner.config.vision)
    for turn in range(2):
        requests = [
            Request(request_id=f"{turn} {index}", prompt_token_ids=ids, images=images, sampling=sampling)
            for index, (ids, images) in enumerate(prompts)
        ]
        assert texts(engine, requests) == expected
    assert engine.scheduler.encoder_cache.num_encoded == 2
    if runner.kv_cache.is_uniform:  # else rows have several page tables
        error = (logits_of(runner, prompts[0]) - expected_logits(model, family, *prompts[0])).abs().max()
        print(f"{family}: largest difference of logits in fp32 {error:.1e}")
        assert error <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_are_near_those_of_a_cpu_when_prompts_have_images(tmp_path: Path, family: Family) -> None:
    model = save_vision_model(tmp_path, family)
    runner = runner_of(tmp_path, dtype="bfloat16", enforce_eager=True, page_size=128)
    prompt = prompts_of(family)[0]
    expected = expected_logits(model, family, *prompt)
    share = (logits_of(runner, prompt).float() - expected).abs().max() / expected.abs().max()
    print(f"{family}: largest difference of logits in bf16 {share:.1%} of the largest")
    assert share <= BF16_SHARE
