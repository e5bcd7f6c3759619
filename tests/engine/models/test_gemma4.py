"""What Gemma 4 has of its own: its configs, pages with layers of different widths, and what these do not go with."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.model_config import HeadShape
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import PageCopy
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import BeamSearch, Request, SamplingParams
from mini_infer_engine.core.speculation.controller import DraftController
from mini_infer_engine.models.gemma4_config import Gemma4Config
from mini_infer_engine.models.kv_spec import KVSpec
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.runtime.memory.mixed_limits import check_mixed_heads
from mini_infer_engine.runtime.memory.mixed_pool import MixedKVPool
from mini_infer_engine.runtime.model_runner import ModelRunner, load_runner
from tests.support.tiny_models import GEMMA4_INPUTS, PageDealer, reference_logits, run_chunks, save_tiny_model

E2B: dict[str, Any] = {
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 512,
    "use_double_wide_mlp": True,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
MOE: dict[str, Any] = {
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_size": 2816,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 2112,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "sliding_window": 1024,
    "top_k_experts": 8,
}


def config_of(folder: Path, text: dict[str, Any], **changes: Any) -> Gemma4Config:
    """The config of a checkpoint that also reads images, as they are published."""
    whole = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text | changes,
        "vision_config": {},
    }
    (folder / "config.json").write_text(json.dumps(whole))
    config = read_config(folder)
    assert isinstance(config, Gemma4Config)
    return config


def test_layers_share_keys_of_the_last_layer_of_their_kind_when_the_config_is_that_of_e2b(tmp_path: Path) -> None:
    config = config_of(tmp_path, E2B)
    assert config.kv_sources is not None
    assert config.kv_sources[13:20] == (13, 14, 13, 13, 13, 13, 14)
    assert list(config.attention_layers) == list(range(15))
    assert config.head_shape(3) == HeadShape(1, 256)
    assert config.head_shape(4) == HeadShape(1, 512)
    assert [config.kv_index(layer) for layer in (0, 4, 13, 14, 33, 34)] == [0, 0, 11, 2, 11, 2]
    assert config.needs_token_ids
    assert config.tie_word_embeddings


def test_full_layers_have_fewer_and_wider_heads_when_the_config_is_that_of_26b_a4b(tmp_path: Path) -> None:
    config = config_of(tmp_path, MOE)
    assert (config.head_shape(0), config.head_shape(5)) == (HeadShape(8, 256), HeadShape(2, 512))
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.top_k, config.moe.activation) == (128, 8, "gelu_tanh")
    assert not config.needs_token_ids
    assert config.sliding_windows[4:6] == (1024, None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 32}, "num_kv_shared_layers"),
        ({"vocab_size_per_layer_input": 1000}, "vocab_size_per_layer_input"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ({"per_layer_config": [1]}, "per_layer_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"global_head_dim": 17}, "global_head_dim"),
        ({"enable_moe_block": True}, "num_experts"),
        ({"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3}, "top_k_experts"),
    ],
)
def test_a_config_is_refused_by_name_when_it_asks_for_another_computation(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=named):
        config_of(tmp_path, E2B, **changes)


@pytest.mark.parametrize(
    ("options", "device", "moves_kv", "named"),
    [
        ({"pipeline_parallel_size": 2}, "cpu", False, "pipeline_parallel_size"),
        ({}, "cpu", True, "transfer_port"),
        ({"kv_cache_dtype": "int8"}, "cpu", False, "kv_cache_dtype"),
        ({"quantization": "int8"}, "cpu", False, "quantization"),
        ({"attention_backend": "flash"}, "cuda", False, "attention_backend"),
        ({}, "cuda", False, "--enforce-eager"),
    ],
)
def test_an_option_is_refused_by_name_when_layers_have_different_heads(
    options: dict[str, Any], device: str, moves_kv: bool, named: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, E2B)
    with pytest.raises(ModelError, match=named):
        check_mixed_heads(EngineSettings(model="any", **options), config, device, moves_kv=moves_kv)
    check_mixed_heads(EngineSettings(model="any", enforce_eager=True), config, "cuda", moves_kv=False)
    check_mixed_heads(EngineSettings(model="any", attention_backend="torch"), config, "cuda", moves_kv=False)


def test_logits_are_unchanged_when_a_checkpoint_has_unused_keys_and_names_of_the_whole_model(tmp_path: Path) -> None:
    """Published files have keys and values of layers that share those of others, and towers for images."""
    model = save_tiny_model(tmp_path, "gemma4_text", **GEMMA4_INPUTS)
    file = tmp_path / "model.safetensors"
    tensors = {f"model.language_model.{name[6:]}": tensor for name, tensor in load_file(file).items()}
    prefix = "model.language_model.layers.3.self_attn."
    extra = {"k_proj": (64, 64), "v_proj": (64, 64), "k_norm": (32,)}
    tensors |= {f"{prefix}{name}.weight": torch.ones(shape) for name, shape in extra.items()}
    tensors["model.vision_tower.patch_embedder.weight"] = torch.ones(3)
    save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    runner = make_engine(tmp_path, disable_hybrid_kv_cache_manager=True)[1]
    actual = run_chunks(runner, PROMPTS[1], PageDealer(runner).table(60), [40, 1, len(PROMPTS[1]) - 41])
    assert (actual - reference_logits(model, PROMPTS[1])).abs().max() <= 1e-4


def test_views_of_a_page_do_not_overlap_when_layers_have_different_heads() -> None:
    shapes = [HeadShape(2, 6), HeadShape(1, 8), HeadShape(2, 6), HeadShape(1, 4)]
    pool = MixedKVPool(KVSpec.mixed(shapes, 4, torch.float32), 5, torch.device("cpu"))
    offsets = torch.arange(4)
    indexes = {shape: iter(range(len(shapes))) for shape in shapes}
    kept = []
    for layer, shape in enumerate(shapes):
        view = pool.views[shape]
        (rows,) = [view.by_layer([view.token_rows_of(torch.full((4,), 3), offsets)])[next(indexes[shape])]]
        new = torch.full((4, 2, shape.num_kv_heads, shape.head_dim), layer + 1.0)
        view.write(rows, new)
        kept.append((view, rows, new))
    pool.copy([PageCopy(3, 1, 2)])
    assert torch.equal(pool.storage[1], pool.storage[3])
    for view, rows, new in kept:
        found = view.read(rows, torch.empty(8, view.spec.row_width))
        assert torch.equal(found.flatten(), new.flatten())
    assert pool.storage[0].count_nonzero() == pool.storage[2].count_nonzero() == 0


PROMPTS = [[(place * 7 + index * 3) % 190 + 5 for place in range(20 + 30 * index)] for index in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("gemma4")
    save_tiny_model(found, "gemma4_text", **GEMMA4_INPUTS)
    return found


def make_engine(directory: Path, **changes: Any) -> tuple[Engine, ModelRunner]:
    defaults = {"device": "cpu", "kv_cache_memory": 16_000_000, "max_num_seqs": 16, "max_num_batched_tokens": 30}
    settings = EngineSettings(model=str(directory), **(defaults | changes))
    runner = load_runner(settings)
    return Engine(settings, runner, (), runner.max_model_len, "revision"), runner


def generate(engine: Engine, prompts: Sequence[list[int]], **sampling: Any) -> list[list[int]]:
    made: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": 40, "ignore_eos": True} | sampling))
        engine.add(Request(request_id=str(index), prompt_token_ids=prompt, sampling=params, noise_seed=index))
    while engine.has_work:
        for output in engine.step():
            assert not output.error
            made[output.request_id] += output.token_ids
    return list(made.values())


@pytest.mark.parametrize("swap_memory", [0, 10_000_000])
def test_text_is_that_of_a_large_pool_when_sequences_are_preempted(folder: Path, swap_memory: int) -> None:
    prompts = [[(place * 5 + index) % 190 + 5 for place in range(20)] for index in range(6)]
    roomy, _ = make_engine(folder)
    expected = generate(roomy, prompts, max_tokens=60)
    common = {"max_model_len": 96, "kv_swap_memory": swap_memory}
    _, runner = make_engine(folder, **common)
    num_pages = 11 * len(runner.kv_cache.groups)
    memory = (num_pages + 1) * runner.worker.page_bytes(16, runner.kv_cache)
    small, _ = make_engine(folder, kv_cache_memory=memory, **common)
    assert generate(small, prompts, max_tokens=60) == expected
    assert small.stats().preemptions


def test_text_is_that_without_guesses_when_tokens_are_guessed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftController, "choose", lambda self, *_, **__: self.levels[-1])
    plain, _ = make_engine(folder)
    guesses = {"speculative_method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    guessing, _ = make_engine(folder, max_num_batched_tokens=200, **guesses)
    assert generate(guessing, PROMPTS) == generate(plain, PROMPTS)
    assert guessing.stats().draft_tokens > 20


def test_beams_are_equal_when_pages_have_groups_or_not(folder: Path) -> None:
    found = []
    for disabled in (True, False):
        engine, _ = make_engine(folder, disable_hybrid_kv_cache_manager=disabled)
        search = BeamSearch(request_ids=["a", "b", "c"], length_penalty=1.0, early_stopping=False)
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        engine.add(Request(request_id="a", prompt_token_ids=PROMPTS[1], sampling=params, beam_search=search))
        made: dict[str, list[int]] = {}
        while engine.has_work:
            made |= {output.request_id: output.token_ids for output in engine.step()}
        found.append(made)
    assert set(found[0]) == {"a", "b", "c"}
    assert found[0] == found[1]
