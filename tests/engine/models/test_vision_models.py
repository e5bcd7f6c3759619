"""Models that read images: logits and texts of transformers, however prompts are cut, cached, batched and preempted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.core.encoder_cache import EncoderCacheManager
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.images import PromptImages
from mini_infer_engine.core.request import BeamSearch, ImageInput, Output, Request, SamplingParams
from mini_infer_engine.core_process.build import BuiltEngine, build_engine
from mini_infer_engine.offline import loaded_model
from mini_infer_engine.runtime.model_runner import ModelRunner
from tests.support.prefill_apart import prefill_apart
from tests.support.thread_group import RanksTogether, ThreadGroup
from tests.support.tiny_models import GREEDY, PageDealer, tiny_runner
from tests.support.vision_models import (
    FAMILIES,
    Family,
    expected_logits,
    expected_text,
    model_inputs,
    prompt_with_images,
    random_image,
    save_vision_model,
)

TOLERANCE = 1e-4
PAIRED: dict[str, Any] = {"device": "cpu", "kv_cache_memory": 4_000_000, "max_num_seqs": 8, "max_model_len": 256}
Prompt = tuple[list[int], list[ImageInput]]


class Model:
    """A family's folder and transformers' model of it."""

    def __init__(self, family: Family, folder: Path) -> None:
        self.family, self.folder = family, folder
        self.reference: Any = save_vision_model(folder, family)
        self.one, self.other = random_image(family, 1, (4, 6)), random_image(family, 2, (8, 4))

    def prompt(self, *parts: int | ImageInput, seed: int = 0) -> Prompt:
        return prompt_with_images(self.family, parts, seed)

    def logits(self, prompt: Prompt) -> Tensor:
        return expected_logits(self.reference, self.family, *prompt)

    def text(self, prompt: Prompt, count: int) -> list[int]:
        return expected_text(self.reference, self.family, *prompt, count)

    def engine(self, **settings: Any) -> tuple[Engine, ModelRunner]:
        runner = tiny_runner(self.folder, **settings)
        vision = runner.config.vision
        return Engine(runner.settings, runner, (), runner.max_model_len, "revision", vision=vision), runner


@pytest.fixture(scope="module", params=[*FAMILIES, "qwen3_vl_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


def request_of(name: str, prompt: Prompt, count: int = 8, **fields: Any) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    token_ids, images = prompt
    return Request(request_id=name, prompt_token_ids=token_ids, images=images, sampling=sampling, **fields)


def run(engine: Engine, *requests: Request) -> dict[str, list[int]]:
    made: dict[str, list[int]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            made.setdefault(output.request_id, []).extend(output.token_ids)
    return made


def chunk_logits(runner: ModelRunner, prompt: Prompt, sizes: Sequence[int]) -> Tensor:
    """Returns the logits [tokens, vocab] of a prompt that is computed in chunks of `sizes`."""
    token_ids, inputs = prompt
    assert runner.config.vision is not None
    images, encoder_cache = PromptImages.of(inputs, runner.config.vision), EncoderCacheManager(1000, 1000)
    table = PageDealer(runner).table(len(token_ids))
    parts, start = [], 0
    for count in sizes:
        batch = Batch([], 0)
        row = Row(0, start, count, token_ids[start : start + count], table, GREEDY)
        encoder_cache.take(batch, row, images)
        batch.rows.append(row)
        parts.append(runner.logits(batch))
        start += count
    return torch.cat(parts)


def test_logits_equal_transformers_when_a_prompt_has_no_one_or_several_images(model: Model) -> None:
    runner = tiny_runner(model.folder)
    for parts in ([20], [5, model.one, 4], [model.one, 3], [6, model.one], [3, model.one, 0, model.other, 9]):
        prompt = model.prompt(*parts)
        actual = chunk_logits(runner, prompt, [len(prompt[0])])
        assert (actual - model.logits(prompt)).abs().max() <= TOLERANCE


def test_logits_equal_transformers_when_a_prompt_is_cut_at_any_boundary(model: Model) -> None:
    runner, prompt = tiny_runner(model.folder), model.prompt(3, model.one, 2, model.other, 2)
    expected, length = model.logits(prompt), len(prompt[0])
    images = PromptImages.of(prompt[1], runner.config.vision)
    boundaries = [end for end in range(1, length) if images.uncut_end(0, end) == end]
    assert len(boundaries) >= 9
    for end in boundaries:
        actual = chunk_logits(runner, prompt, [end, length - end])
        assert (actual - expected).abs().max() <= TOLERANCE, end


def test_texts_equal_generate_when_images_and_text_share_passes(model: Model) -> None:
    prompts = {
        "image": model.prompt(5, model.one, 7, model.other, 4),
        "text": model.prompt(23, seed=1),
        "ends in its image": model.prompt(9, model.other),
        "same image": model.prompt(2, model.one, 6, seed=2),
    }
    engine, _ = model.engine(max_num_batched_tokens=24, max_num_seqs=4, disable_hybrid_kv_cache_manager=False)
    made = run(engine, *(request_of(name, prompt, 12) for name, prompt in prompts.items()))
    assert made == {name: model.text(prompt, 12) for name, prompt in prompts.items()}
    assert engine.scheduler.encoder_cache.num_encoded == 2, "an image that two prompts have is encoded once"


def test_a_cached_image_is_not_encoded_again_and_another_image_does_not_hit(model: Model) -> None:
    engine, _ = model.engine()
    first = model.prompt(8, model.one, 30)
    again, different = model.prompt(8, model.one, 33), model.prompt(8, random_image(model.family, 3, (4, 6)), 30)
    assert run(engine, request_of("first", first))["first"] == model.text(first, 8)
    encoded = engine.scheduler.encoder_cache.num_encoded
    engine.scheduler.encoder_cache.reset()
    outputs: list[Output] = []
    engine.add(request_of("again", again))
    while engine.has_work:
        outputs += engine.step()
    assert [token for output in outputs for token in output.token_ids] == model.text(again, 8)
    assert max(output.num_cached_tokens for output in outputs) >= 16
    assert engine.scheduler.encoder_cache.num_encoded == encoded, "the prefix hit covers the image"
    assert run(engine, request_of("different", different))["different"] == model.text(different, 8)


def test_texts_equal_generate_when_a_hit_ends_within_an_image(model: Model) -> None:
    engine, _ = model.engine()
    image = random_image(model.family, 4, (8, 8))
    run(engine, request_of("first", model.prompt(20, image, 12)))
    token_ids, images = model.prompt(20, image, 9)
    second, outputs = ([*token_ids[:-4], 9, 8, 7, 6], images), list[Output]()
    assert image.num_tokens == 16, "it begins behind the second block's beginning, and ends in the third"
    engine.add(request_of("second", second))
    while engine.has_work:
        outputs += engine.step()
    made = [token for output in outputs for token in output.token_ids]
    assert made == model.text(second, 8)
    assert max(output.num_cached_tokens for output in outputs) == 32


@pytest.mark.parametrize("swap", [0, 1 << 22])
def test_texts_equal_generate_when_sequences_with_images_are_preempted(
    model: Model, swap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [model.prompt(5 + index, model.one, 3, model.other, 4, seed=index) for index in range(4)]
    page_bytes = tiny_runner(model.folder).worker.page_bytes(16)
    limits = {"kv_cache_memory": 10 * page_bytes, "max_num_seqs": 4, "max_model_len": 100}
    engine, _ = model.engine(kv_swap_memory=swap, **limits)
    made = run(engine, *(request_of(str(index), prompt, 30) for index, prompt in enumerate(prompts)))
    assert engine.scheduler.num_preemptions
    assert bool(engine.scheduler.kv_cache.num_swaps) == bool(swap)
    assert made == {str(index): model.text(prompt, 30) for index, prompt in enumerate(prompts)}


def test_texts_equal_generate_when_the_encoder_cache_is_smaller_than_the_prompt(model: Model) -> None:
    prompt = model.prompt(4, model.one, 3, model.other, 3, random_image(model.family, 5, (4, 4)), 2)
    largest = max(image.num_tokens for image in prompt[1])
    engine, _ = model.engine(mm_encoder_cache_tokens=largest)
    assert run(engine, request_of("a", prompt))["a"] == model.text(prompt, 8)
    assert engine.scheduler.encoder_cache.num_embeddings <= largest


def test_texts_equal_generate_when_others_speculate(model: Model) -> None:
    prompts = {"image": model.prompt(5, model.one, 4), "text": ([*range(3, 15)] * 3, list[ImageInput]())}
    engine, _ = model.engine(speculative_method="ngram")
    made = run(engine, *(request_of(name, prompt, 16) for name, prompt in prompts.items()))
    assert made == {name: model.text(prompt, 16) for name, prompt in prompts.items()}


def test_texts_equal_generate_when_two_ranks_share_the_decoder(model: Model) -> None:
    group = ThreadGroup(model.folder, 2, tensor_parallel_size=2)
    first = group.runners[0]
    runner = RanksTogether(group)
    settings = first.settings
    engine = Engine(settings, runner, (), first.max_model_len, "revision", vision=first.config.vision)
    prompts = {"image": model.prompt(5, model.one, 7, model.other, 4), "text": model.prompt(9)}
    made = run(engine, *(request_of(name, prompt) for name, prompt in prompts.items()))
    assert made == {name: model.text(prompt, 8) for name, prompt in prompts.items()}


@pytest.mark.parametrize("size", [1, 2])
def test_logits_equal_transformers_when_pipeline_stages_share_the_decoder(model: Model, size: int) -> None:
    prompt = model.prompt(5, model.one, 7, model.other, 4)
    whole = len(prompt[0])
    group = ThreadGroup(model.folder, size, 2)
    encoders = [rank.worker.model.vision is not None for rank in group.runners]
    assert encoders == [True] * size + [False] * size
    end = whole if model.family == "gemma3" else 9
    sizes = [end, whole - end] if whole > end else [end]
    found = group.run(lambda rank: chunk_logits(rank, prompt, sizes))[-1]
    assert (found - model.logits(prompt)).abs().max() < TOLERANCE


def test_a_stage_is_refused_when_it_has_fewer_layers_than_the_encoder_has_features(tmp_path: Path) -> None:
    save_vision_model(tmp_path, "qwen3_vl")
    with pytest.raises(ModelError, match=r"first 2 layers.*--pipeline-parallel-size"):
        ThreadGroup(tmp_path, 1, 4)


def test_texts_equal_generate_when_another_engine_computes_prompts_with_images(model: Model) -> None:
    """The encoder runs at the prefill engine alone; another image finds no other's keys and values."""
    with prefill_apart():
        built = loaded_model.build_engine(EngineSettings(model=str(model.folder), **PAIRED), None)
        engine = built.engine
        prompts = {
            "image": model.prompt(5, model.one, 7, model.other, 4),
            "other": model.prompt(5, model.other, 7, model.one, 4),
            "text": model.prompt(9),
        }
        made = run(engine, *(request_of(name, prompt) for name, prompt in prompts.items()))
        assert made == {name: model.text(prompt, 8) for name, prompt in prompts.items()}
        assert engine.scheduler.encoder_cache.num_encoded == 0
        assert engine.stats().kv_transfer.fallbacks == {}


def test_beams_equal_those_of_generate_when_a_prompt_has_an_image(model: Model) -> None:
    engine, _ = model.engine()
    prompt = model.prompt(5, model.one, 4)
    beams = BeamSearch(request_ids=["a", "b", "c"])
    made = run(engine, request_of("a", prompt, 6, beam_search=beams))
    with torch.inference_mode():
        expected = model.reference.generate(
            **model_inputs(model.family, *prompt),
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[:, len(prompt[0]) :].tolist()
    assert [made[name] for name in beams.request_ids] == expected


def test_prompt_logprobs_equal_transformers_when_a_prompt_has_images(model: Model) -> None:
    engine, _ = model.engine(max_num_batched_tokens=24, max_num_seqs=4)
    prompt = model.prompt(9, model.one, 7, model.other, 4)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    engine.add(msgspec.structs.replace(request_of("a", prompt), sampling=sampling))
    found: list[float] = []
    while engine.has_work:
        found += [entry.logprob for output in engine.step() for entry in output.prompt_logprobs]
    expected = model.logits(prompt).log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[0][1:])[:, None])[:, 0]
    assert (torch.tensor(found) - expected).abs().max() <= TOLERANCE


def test_an_image_is_encoded_again_when_the_pass_that_encoded_it_has_failed(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runner = model.engine()
    prompt = model.prompt(5, model.one, 4)
    with monkeypatch.context() as broken:
        broken.setattr(runner.worker.model.vision, "encode", lambda *_: 1 / 0)
        engine.add(request_of("failed", prompt))
        assert [output.finish_reason for output in engine.step()] == ["error"]
    assert run(engine, request_of("again", prompt))["again"] == model.text(prompt, 8)


@pytest.mark.parametrize("whole_experts", [False, True])
def test_logits_equal_transformers_when_stacks_of_experts_are_stored_transposed(
    tmp_path: Path, whole_experts: bool
) -> None:
    """The files of the hub have a row for each input, those that transformers saves one for each output."""
    model = Model("qwen3_vl_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in stored.items()
    }
    save_file(turned, file, {"format": "pt"})
    prompt = model.prompt(5, model.one, 4)
    group = ThreadGroup(tmp_path, 2, tensor_parallel_size=2, enable_expert_parallel=whole_experts)
    sizes = [len(prompt[0])]
    for actual in (
        chunk_logits(tiny_runner(tmp_path), prompt, sizes),
        *group.run(lambda rank: chunk_logits(rank, prompt, sizes)),
    ):
        assert (actual - model.logits(prompt)).abs().max() <= TOLERANCE


def test_a_server_learns_which_images_its_model_reads(model: Model) -> None:
    settings = {"skip_tokenizer_init": True, "kv_cache_memory": 1 << 22, "device": "cpu", "max_num_seqs": 4}
    for limit, expected in ((None, 999), ('{"image": 3}', 3), ('{"image": 0}', 0)):
        built = build_engine(EngineSettings(model=str(model.folder), limit_mm_per_prompt=limit, **settings))
        assert isinstance(built, BuiltEngine)
        family = model.family.removesuffix("_moe") if expected else ""
        assert (built.model.vision, built.model.max_images) == (family, expected)
    prompt = model.prompt(5, model.one, 4)
    built = build_engine(EngineSettings(model=str(model.folder), **settings))
    assert run(built.engine, request_of("a", prompt))["a"] == model.text(prompt, 8)


def test_no_encoder_is_loaded_when_the_limit_of_images_is_zero(model: Model) -> None:
    engine, runner = model.engine(limit_mm_per_prompt='{"image": 0}')
    assert runner.worker.model.vision is None
    text = model.prompt(12)
    assert run(engine, request_of("text", text))["text"] == model.text(text, 8)
    with pytest.raises(ValueError, match="images"):
        engine.add(request_of("image", model.prompt(5, model.one, 4)))
