"""Models whose code is transformers': greedy text equals `generate`'s however passes are cut, cached and preempted."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.architectures import MODELS as NATIVE_MODELS
from mini_infer_engine.config.model.transformers_architectures import REFUSED as REASONS
from mini_infer_engine.config.model.transformers_architectures import THROUGH_TRANSFORMERS
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core.speculation.controller import DraftController
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.models.transformers_backend.alibi import positions_of, slopes_of
from mini_infer_engine.runtime import model_runner
from mini_infer_engine.runtime.model_runner import ModelRunner, load_runner
from tests.support.models_page import page
from tests.support.tiny_models import save_tiny_model
from tests.support.transformers_models import (
    MODELS,
    OTHER_SHAPES,
    REFUSED,
    SPARSE,
    WIDTHS,
    Refused,
    expected_tokens,
    save_config,
    save_model,
)

SAMPLED = ("gpt2", "cohere2", "glm4", "opt", "qwen2_moe")
"""The models of `make test`: absolute positions, windows, interleaved rotation, another decoder path, and experts."""
NATIVE = sorted(each.model_type for name, each in THROUGH_TRANSFORMERS.items() if name in NATIVE_MODELS)
"""The models that a file of ours runs, too."""
DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"
LENGTH = 64
PROMPTS = [[(place * 7 + index * 3) % 150 + 5 for place in range(20 + 23 * index)] for index in range(3)]


def make_engine(directory: Path, **changes: Any) -> tuple[Engine, ModelRunner]:
    defaults = {"device": "cpu", "kv_cache_memory": 16_000_000, "max_num_seqs": 16}
    settings = EngineSettings(model=str(directory), **(defaults | changes))
    runner = load_runner(settings)
    return Engine(settings, runner, (), runner.max_model_len, "revision"), runner


def generate(engine: Engine, prompts: Sequence[list[int]], length: int = LENGTH, **sampling: Any) -> list[list[int]]:
    """The tokens of each prompt, which run together."""
    made: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": length, "ignore_eos": True} | sampling))
        engine.add(Request(request_id=str(index), prompt_token_ids=prompt, sampling=params, noise_seed=index))
    while engine.has_work:
        for output in engine.step():
            assert not output.error
            made[output.request_id] += output.token_ids
    return list(made.values())


def check_text(directory: Path, model_type: str, impl: str = "transformers", **changes: Any) -> None:
    """Compares the text of whole, chunked, cached, batched and preempted runs with `generate`'s."""
    model = save_model(directory, model_type, **changes)
    expected = [expected_tokens(model, prompt, LENGTH) for prompt in PROMPTS]
    assert max(len(set(tokens)) for tokens in expected) > 3, "a text that repeats one token shows nothing"
    engine, runner = make_engine(directory, model_impl=impl)
    assert runner.config.model_impl == impl
    assert generate(engine, PROMPTS[:1]) == expected[:1], "whole and alone"
    assert generate(engine, PROMPTS) == expected, "batched"
    assert generate(engine, PROMPTS) == expected, "cached"
    assert engine.stats().cached_prompt_tokens > 50
    num_pages = runner.kv_cache.most_pages(140, 16, 30)  # what one sequence of the longest context takes
    memory = (num_pages + 1) * runner.worker.page_bytes(16, runner.kv_cache)
    limits = {"kv_cache_memory": memory, "max_num_batched_tokens": 30, "max_model_len": 140}
    small, _ = make_engine(directory, model_impl=impl, **limits)
    prompts = [PROMPTS[0], PROMPTS[0][:-1], PROMPTS[0][1:]]
    whole = generate(engine, prompts)
    assert whole[0] == expected[0]
    assert generate(small, prompts) == whole, "chunked and preempted"
    assert small.stats().preemptions


@pytest.mark.parametrize("model_type", SAMPLED)
def test_text_is_that_of_generate_when_passes_are_cut_cached_and_preempted(model_type: str, tmp_path: Path) -> None:
    check_text(tmp_path, model_type)


@pytest.mark.models
@pytest.mark.parametrize("model_type", sorted(MODELS))
def test_text_of_every_model_is_that_of_generate(model_type: str, tmp_path: Path) -> None:
    check_text(tmp_path, model_type)


def test_text_is_that_of_generate_when_a_file_of_ours_runs_the_model(tmp_path: Path) -> None:
    check_text(tmp_path, "glm4_moe", "native")


@pytest.mark.models
@pytest.mark.parametrize("model_type", NATIVE)
def test_text_of_every_model_with_a_file_of_ours_is_that_of_generate(model_type: str, tmp_path: Path) -> None:
    check_text(tmp_path, model_type, "native")


@pytest.mark.parametrize(
    "shape", [pytest.param(name, marks=[] if "alibi" in name else pytest.mark.models) for name in OTHER_SHAPES]
)
def test_text_is_that_of_generate_when_attention_is_replaced(shape: str, tmp_path: Path) -> None:
    model_type, changes = OTHER_SHAPES[shape]
    check_text(tmp_path, model_type, **changes)


def test_pages_of_8_bits_are_refused_when_keys_have_positions(tmp_path: Path) -> None:
    save_model(tmp_path, "bloom")
    with pytest.raises(ModelError, match="kv_cache_dtype"):
        make_engine(tmp_path, kv_cache_dtype="int8")


@pytest.mark.parametrize("heads", [8, 12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_biases_of_alibi_are_slopes_times_positions_when_they_are_products(heads: int, dtype: torch.dtype) -> None:
    scale, slopes = 128**-0.5, 2.0 ** -torch.arange(1, heads + 1) * 1.3
    positions = torch.tensor([0, 1, 255, 256, 4097, 30_001, 60_000])
    queries, keys = slopes_of(slopes, scale, dtype, torch.device("cpu")), positions_of(positions, dtype)
    biases = scale * queries.double() @ keys.double().T
    assert biases.shape == (heads, len(positions))
    torch.testing.assert_close(biases, slopes.double()[:, None] * positions, rtol=2e-5, atol=0)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that runs by a file of ours, too."""
    folder = tmp_path_factory.mktemp("llama")
    save_tiny_model(folder, "llama")
    return folder


def test_both_implementations_make_one_text_when_the_engine_has_a_file(llama: Path) -> None:
    texts = {}
    for impl in ("native", "transformers"):
        engine, runner = make_engine(llama, model_impl=impl)
        assert runner.config.model_impl == impl
        texts[impl] = generate(engine, PROMPTS, temperature=0.9, top_p=0.9)
    assert texts["transformers"] == texts["native"]
    assert read_config(llama).model_impl == "native", "auto takes the file of ours"


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_text_is_that_without_guesses_when_tokens_are_guessed(
    method: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftController, "choose", lambda self, *_, **__: self.levels[-1])
    guesses: dict[str, Any] = {"speculative_method": method, "num_speculative_tokens": 4}
    guesses |= {"prompt_lookup_min": 1} if method == "ngram" else {"speculative_model": str(llama)}
    plain, _ = make_engine(llama, model_impl="transformers")
    guessing, _ = make_engine(llama, model_impl="transformers", **guesses)
    assert generate(guessing, PROMPTS) == generate(plain, PROMPTS)
    assert guessing.stats().draft_tokens > 20


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_is_refused_with_the_reason_when_its_attention_cannot_be_paged(name: str, tmp_path: Path) -> None:
    refused = REFUSED[name]
    save_config(tmp_path, refused)
    with pytest.raises(ModelError, match=refused.architecture) as error:
        read_config(tmp_path)
    assert refused.named in str(error.value)
    assert "--model-impl" in str(error.value)
    with pytest.raises(ModelError, match=refused.architecture) as error:
        read_config(tmp_path, "native")
    assert REASONS[refused.architecture] in str(error.value)


@pytest.mark.parametrize("refused", [SPARSE, WIDTHS], ids=["sparse", "widths"])
def test_a_model_with_a_file_of_ours_is_refused_when_transformers_is_chosen(refused: Refused, tmp_path: Path) -> None:
    save_config(tmp_path, refused)
    with pytest.raises(ModelError, match=refused.named) as error:
        read_config(tmp_path, "transformers")
    assert refused.architecture in str(error.value)
    assert read_config(tmp_path).model_impl == "native"


@pytest.mark.parametrize(
    ("architecture", "nearest"),
    [
        ("Cohere3ForCausalLM", "CohereForCausalLM"),
        ("Granite9ForCausalLM", "GraniteForCausalLM"),
        ("Qwen9ForCausalLM", "Qwen3ForCausalLM"),
        ("OwnForCausalLM", "LlamaForCausalLM"),
    ],
)
def test_the_nearest_family_that_runs_is_named_when_an_architecture_is_unknown(
    architecture: str, nearest: str, tmp_path: Path
) -> None:
    write_config(tmp_path, architectures=[architecture], model_type="own")
    with pytest.raises(ModelError, match=architecture) as error:
        read_config(tmp_path)
    assert f"{nearest} (" in str(error.value)
    assert "--model-impl" in str(error.value)


@pytest.mark.parametrize(
    ("model_type", "architecture", "impl"),
    [("llama", "Lama4ForCausalLM", "native"), ("cohere", "Cohere9ForCausalLM", "transformers")],
)
def test_the_flag_in_the_error_runs_a_model_when_its_architecture_has_another_name(
    model_type: str, architecture: str, impl: str, tmp_path: Path
) -> None:
    if impl == "native":
        save_tiny_model(tmp_path, model_type)
    else:
        save_model(tmp_path, model_type)
    plain, _ = make_engine(tmp_path)
    expected = generate(plain, PROMPTS[:1], 8)
    fields = json.loads((tmp_path / "config.json").read_text())
    write_config(tmp_path, **(fields | {"architectures": [architecture], "model_type": "own"}))
    with pytest.raises(ModelError, match="--hf-overrides") as refused:
        make_engine(tmp_path)
    flag = str(refused.value).partition("--hf-overrides '")[2].partition("'")[0]
    engine, runner = make_engine(tmp_path, hf_overrides=flag)
    assert runner.config.model_impl == impl
    assert generate(engine, PROMPTS[:1], 8) == expected


def test_no_flag_is_named_when_transformers_has_the_architecture(tmp_path: Path) -> None:
    save_config(tmp_path, REFUSED["own attention"])
    with pytest.raises(ModelError) as refused:
        read_config(tmp_path)
    assert "--hf-overrides" not in str(refused.value)


def test_a_model_is_refused_when_its_rotations_grow_with_the_sequence(tmp_path: Path) -> None:
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
    save_config(tmp_path, Refused("arcee", "ArceeForCausalLM", "dynamic", dynamic))
    with pytest.raises(ModelError, match="dynamic"):
        read_config(tmp_path)


def test_models_page_lists_what_is_tested() -> None:
    assert DOCUMENT.read_text() == page(), "python -m tests.support.models_page > docs/models.md"
    assert sorted(MODELS) == sorted(each.model_type for each in THROUGH_TRANSFORMERS.values())
    assert {each.architecture for each in REFUSED.values()} == set(REASONS)


def write_config(folder: Path, **fields: Any) -> None:
    (folder / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["Qwen9ForCausalLM"], "model_type": "qwen9"}, ["qwen9", "Qwen3ForCausalLM"]),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "llama"}, ["LlamaForCausalLM", "GPT2LMHeadModel"]),
        (
            {"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": {"AutoConfig": "own.Own"}},
            ["--trust"],
        ),
        (
            {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "quantization_config": {}},
            ["quantization_config"],
        ),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, ["T5ForConditionalGeneration"]),
    ],
    ids=["unknown", "another class", "own code", "quantised", "encoder and decoder"],
)
def test_a_config_is_refused_by_name_when_transformers_cannot_run_it(
    fields: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    write_config(tmp_path, **fields)
    with pytest.raises(ModelError) as refused:
        read_config(tmp_path)
    assert all(name in str(refused.value) for name in named), str(refused.value)


def test_an_architecture_is_refused_with_the_flag_that_runs_it_when_native_is_chosen(tmp_path: Path) -> None:
    write_config(tmp_path, architectures=["Granite9ForCausalLM"], model_type="granite9")
    with pytest.raises(ModelError, match="--model-impl transformers") as refused:
        read_config(tmp_path, "native")
    assert "nearest of them is GraniteForCausalLM" in str(refused.value)
    write_config(tmp_path, architectures=["GPT2LMHeadModel"], model_type="gpt2")
    with pytest.raises(ModelError, match="--model-impl transformers runs GPT2LMHeadModel"):
        read_config(tmp_path, "native")


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_folder_runs_only_when_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    save_tiny_model(folder, "llama")
    native, _ = make_engine(folder)
    (folder / "own.py").write_text(OWN_CODE)
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"architectures": ["OwnForCausalLM"], "model_type": "own_llama"}
    fields["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    write_config(folder, **fields)
    with pytest.raises(ModelError, match="--trust-remote-code"):
        make_engine(folder)
    trusting, _ = make_engine(folder, trust_remote_code=True)
    assert generate(trusting, PROMPTS) == generate(native, PROMPTS)
    monkeypatch.setattr(model_runner, "resolve_model", lambda *_, **__: folder)
    with pytest.raises(ModelError, match="local folder"):
        make_engine(Path("somebody/model"), trust_remote_code=True)
    elsewhere = {name: f"somebody/else--{code}" for name, code in fields["auto_map"].items()}
    write_config(folder, **(fields | {"auto_map": elsewhere}))
    with pytest.raises(ModelError, match="another repository"):
        make_engine(folder, trust_remote_code=True)


def test_a_stored_head_is_used_when_it_differs_from_the_embeddings_it_is_tied_to(tmp_path: Path) -> None:
    model = save_model(tmp_path, "gpt2")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["transformer.wte.weight"].flip(0).contiguous()
    save_file(tensors | {"lm_head.weight": head}, file, metadata={"format": "pt"})
    engine, _ = make_engine(tmp_path)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = type(model.lm_head.weight)(head)
    assert generate(engine, PROMPTS[:1]) == [expected_tokens(model, PROMPTS[0], LENGTH)]


@pytest.mark.parametrize("missing", ["transformer.h.1.mlp.c_proj.bias", "transformer.wte.weight"])
def test_a_checkpoint_is_refused_when_a_tensor_is_missing(missing: str, tmp_path: Path) -> None:
    save_model(tmp_path, "gpt2")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[missing]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=missing):
        make_engine(tmp_path)


def test_weights_load_when_a_checkpoint_has_the_names_of_the_base_model_and_old_buffers(tmp_path: Path) -> None:
    model = save_model(tmp_path, "gpt2")
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    mask = tensors["wpe.weight"][:8, :8].reshape(1, 1, 8, 8).contiguous()
    save_file(tensors | {"h.0.attn.bias": mask}, file, metadata={"format": "pt"})
    engine, _ = make_engine(tmp_path)
    assert generate(engine, PROMPTS[:1]) == [expected_tokens(model, PROMPTS[0], LENGTH)]


def test_a_checkpoint_of_experts_is_refused_when_one_has_another_shape(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2_moe")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if ".experts.3." in name)
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="experts"):
        make_engine(tmp_path, model_impl="transformers")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quantization": "int8"}, "quantization"),
        ({"speculative_method": "head", "speculative_model": "x"}, "speculative_method"),
    ],
)
def test_an_option_is_refused_when_it_does_not_go_with_transformers(
    changes: dict[str, Any], named: str, llama: Path
) -> None:
    with pytest.raises(ModelError, match=named):
        make_engine(llama, model_impl="transformers", **changes)


def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    write_config(tmp_path, **transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=199).to_diff_dict())
    fields = json.loads((tmp_path / "config.json").read_text())
    write_config(tmp_path, **(fields | {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}))
    engine, _ = make_engine(tmp_path, load_format="dummy")
    assert len(generate(engine, PROMPTS[:1], 8)[0]) == 8
