"""Broken model folders end `mini-infer-serve` and `LLM` with one line that names the file and says what to do."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_infer_contract.engine_options import ModelImpl
from mini_infer_engine import LLM
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.model_path import DEMO_DIRECTORY, resolve_model
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.text.text_model import TextModel
from tests.engine.server.dry_server import HANG_S, environment, serve_command
from tests.support.tiny_models import save_tiny_model

WEIGHTS = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A whole model and one in shards, both with a tokenizer."""
    folders = {}
    for kind, shard_size in (("whole", "1GB"), ("sharded", "60KB")):
        folders[kind] = tmp_path_factory.mktemp(kind)
        save_tiny_model(folders[kind], "qwen3", shard_size=shard_size)
        for name in TOKENIZER_FILES:
            shutil.copy(DEMO_DIRECTORY / name, folders[kind])
    return folders


def edit_json(folder: Path, name: str, **changes: Any) -> None:
    values = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    values = {key: value for key, value in (values | changes).items() if value is not ...}
    (folder / name).write_text(json.dumps(values))


def cut_weights(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:100_000])


def replace_tensor(tensor: torch.Tensor) -> Callable[[Path], object]:
    name = "model.layers.0.self_attn.k_proj.weight"
    return lambda folder: save_file(load_file(folder / WEIGHTS) | {name: tensor}, folder / WEIGHTS)


def remove_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def writing(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def editing(name: str, **changes: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder, name, **changes)


def removing(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


INDEX = "model.safetensors.index.json"
CASES: dict[str, tuple[str, Callable[[Path], object], list[str]]] = {
    "no config": ("whole", removing("config.json"), ["config.json is missing", "Hugging Face"]),
    "config is no JSON": ("whole", writing("config.json", b"<html>"), ["config.json", "Replace the file"]),
    "architecture": ("whole", editing("config.json", architectures=["GPT2LMHeadModel"]), ["GPT2", "Qwen3ForCausalLM"]),
    "cut weights": ("whole", cut_weights, [WEIGHTS, "cut short", "download it again"]),
    "git-lfs pointer": ("whole", writing(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"), ["download it"]),
    "shape": ("whole", replace_tensor(torch.ones(7, 64)), ["k_proj.weight", "[7, 64]", "asks for [48, 64]"]),
    "integers": ("whole", replace_tensor(torch.ones(48, 64, dtype=torch.int8)), ["int8", "original weights"]),
    "config of another size": ("whole", editing("config.json", vocab_size=10**12), ["embed_tokens", "[1000000000000,"]),
    "no weights": ("whole", removing(WEIGHTS), ["no safetensors file", "convert"]),
    "no shard": ("sharded", remove_shard, ["model-00002-of-", "is missing", "download it"]),
    "index of another form": ("sharded", writing(INDEX, b'{"weight_map": []}'), [INDEX, "download it again"]),
    "index names no files": ("sharded", writing(INDEX, b'{"weight_map": {"a": 1}}'), [INDEX, "download it again"]),
    "no tokenizer": ("whole", removing("tokenizer.json"), ["no tokenizer.json", "save_pretrained"]),
    "tokenizer is no JSON": ("whole", writing("tokenizer.json", b"{"), ["tokenizer.json", "Replace the file"]),
    "tokenizer is no text": ("whole", writing("tokenizer.json", b"\xff"), ["tokenizer.json is no UTF-8 text"]),
    "tokenizer settings": ("whole", editing("tokenizer_config.json", added_tokens_decoder=[1]), ["Replace the file"]),
    "token ids that are none": (
        "whole",
        editing("tokenizer_config.json", added_tokens_decoder={"x": "y"}),
        ["tokenizer_config.json", "added_tokens_decoder"],
    ),
    "template": ("whole", writing("chat_template.jinja", b"{% if %}"), ["chat template, line 1", "Replace the file"]),
    "generation config": ("whole", writing("generation_config.json", b"{"), ["generation_config.json", "repair it"]),
}  # fmt: skip


SERVED_CASES = ["config is no JSON", "cut weights", "no tokenizer"]
"""Cases that the HTTP process notices before it starts the core, that the core notices, and that the HTTP process
notices meanwhile. A server takes up to three seconds for each.
"""


def break_folder(case: str, good: dict[str, Path], folder: Path) -> list[str]:
    """Make the folder of a case; the words that its error must have."""
    kind, change, words = CASES[case]
    shutil.copytree(good[kind], folder)
    change(folder)
    return words


@pytest.mark.parametrize("case", CASES)
def test_llm_raises_one_line_when_the_model_folder_is_broken(case: str, good: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    words = break_folder(case, good, folder)
    with pytest.raises(ValueError) as raised:  # noqa: PT011  # the words are checked below
        LLM(str(folder), device="cpu", kv_cache_memory=2**22)
    for word in words:
        assert word in str(raised.value)
    assert "\n" not in str(raised.value)


def test_llm_raises_when_weights_exceed_the_machines_memory(good: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(good["whole"], tmp_path / "model")
    edit_json(tmp_path / "model", "config.json", vocab_size=10**12)
    with pytest.raises(ValueError, match=r"GB as torch\.float32"):
        LLM(str(tmp_path / "model"), device="cpu", kv_cache_memory=2**22, load_format="dummy")


@pytest.mark.parametrize("case", SERVED_CASES)
def test_the_server_exits_with_one_line_when_the_model_folder_is_broken(
    case: str, good: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    words = break_folder(case, good, folder)
    flags = ("--model", str(folder), "--device", "cpu", "--port", "0", "--log-level", "warning")
    done = subprocess.run(
        serve_command(*flags), capture_output=True, text=True, timeout=HANG_S, env=environment(), check=False
    )
    assert done.returncode == 1
    for word in words:
        assert word in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 8}, {}, (7, 8, 2)),
        ({"eos_token_id": [2, 7]}, {"eos_token_id": 7}, {}, (2, 7)),
        ({}, {"eos_token_id": 8}, {}, (8, 2)),
        ({}, {"eos_token_id": 8}, {"eos_token": ...}, (8,)),
        ({}, {"eos_token_id": 8}, {"eos_token": "<|not in the vocabulary|>"}, (8,)),
        ({}, {"eos_token_id": -1}, {}, (2,)),
        ({"eos_token_id": [-1, 10**12]}, {"eos_token_id": 10**6}, {}, (2,)),
        ({"eos_token_id": -1}, {}, {"eos_token": ...}, ()),
        ({}, {}, {}, (2,)),
        ({}, {}, {"eos_token": {"content": "<|im_end|>"}}, (2,)),
        ({}, {}, {"eos_token": ...}, ()),
        ({}, {}, {"eos_token": "<|not in the vocabulary|>"}, ()),
    ],
)
def test_texts_end_at_any_eos_when_config_generation_config_and_tokenizer_name_different_ones(
    generation: dict[str, Any],
    config: dict[str, Any],
    tokenizer: dict[str, Any],
    expected: tuple[int, ...],
    good: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good["whole"], folder)
    edit_json(folder, "generation_config.json", **{"eos_token_id": ...} | generation)
    edit_json(folder, "config.json", **{"eos_token_id": ...} | config)
    edit_json(folder, "tokenizer_config.json", **tokenizer)
    assert read_config(folder).eos_token_ids == expected
    assert ("no file names an EOS token" in caplog.text) == (not expected)


def test_generation_defaults_used_and_ignored_are_logged_once(
    good: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good["whole"], folder)
    edit_json(folder, "generation_config.json", repetition_penalty=1.0, no_repeat_ngram_size=0)
    caplog.set_level("WARNING")
    TextModel.load(("m",), folder)
    assert caplog.text == ""
    edit_json(
        folder, "generation_config.json", repetition_penalty=1.05, no_repeat_ngram_size=3, temperature=0.7, top_k=20
    )
    TextModel.load(("m",), folder)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    used, ignored = record.getMessage().split("; ")
    assert used.endswith("requests that say nothing else get temperature = 0.7, top_k = 20, repetition_penalty = 1.05")
    assert ignored == "not supported and ignored: no_repeat_ngram_size = 3"


def test_default_output_length_comes_from_the_generation_config(
    good: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good["whole"], folder)
    edit_json(folder, "generation_config.json", max_new_tokens=20)
    caplog.set_level("INFO")
    own, named, none = (TextModel.load(("m",), folder, generation=source) for source in ("auto", str(folder), "vllm"))
    limits = (None, 5, 50)
    assert [own.defaults.output_tokens(one) for one in limits] == [20, 5, 50]
    assert [named.defaults.output_tokens(one) for one in limits] == [20, 5, 20]
    assert [none.defaults.output_tokens(one) for one in limits] == [None, 5, 50]
    messages = [record.getMessage() for record in caplog.records]
    assert [("max_tokens = 20" in line, "no request gets more tokens" in line) for line in messages] == [
        (True, False),
        (True, True),
    ]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"adapter_config.json": '{"base_model_name_or_path": "org/base"}'}, ["adapter (LoRA) of 'org/base'", "merge"]),
        ({"adapter_config.json": "broken"}, ["adapter (LoRA), not a model", "merge"]),
        ({"params.json": "{}"}, ["params.json", "Hugging Face format"]),
        ({}, ["config.json is missing", "Hugging Face format"]),
    ],
)
def test_what_a_folder_holds_is_named_when_it_holds_no_model(
    files: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError) as raised:
        resolve_model(str(tmp_path))
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, ["Qwen2VL", "images"]),
        ({"architectures": [["LlamaForCausalLM"], 5]}, ["architectures", "supported"]),
        ({}, ["tokenizer.json"]),
    ],
)
def test_the_architecture_is_named_when_the_tokenizer_is_missing_too(
    config: dict[str, Any], words: list[str], good: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good["whole"], folder)
    (folder / "tokenizer.json").unlink()
    edit_json(folder, "config.json", **config)
    with pytest.raises(ModelError) as raised:
        TextModel.load(("m",), folder)
    assert all(word in str(raised.value) for word in words)


UNREAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "MLX, floats": (
        {"quantization_config": {"group_size": 32, "bits": 4, "mode": "mxfp4"}},
        ["MLX", "--quantization int4"],
    ),
    "bitsandbytes": (
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        ["bitsandbytes", "--quantization int4"],
    ),
    "HQQ": (
        {"quantization_config": {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 3}}}},
        ["HQQ", "--quantization int4"],
    ),
    "torchao": (
        {"quantization_config": {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnly"}}}},
        ["torchao", "--quantization int4"],
    ),
    "torchao, fp8": (
        {"quantization_config": {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8Weight"}}}},
        ["torchao", "--quantization fp8"],
    ),
    "AutoRound": ({"quantization_config": {"quant_method": "auto-round", "bits": 4}}, ["AutoRound", "auto_gptq"]),
    "unknown": ({"quantization_config": {"quant_method": "own"}}, ["'own'", "compressed-tensors"]),
}


WIDENED: dict[str, dict[str, Any]] = {
    "MLX": {"quantization_config": {"group_size": 64, "bits": 4}},
    "old MLX": {"quantization": {"group_size": 64, "bits": 8}},
    "bitsandbytes": {
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    },
    "HQQ": {"quantization_config": {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}},
    "bitsandbytes, 8 bits": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
}


@pytest.mark.parametrize("form", WIDENED)
def test_a_form_that_files_of_ours_dequantise_is_refused_when_transformers_runs_the_model(
    form: str, good: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((good["whole"] / "config.json").read_bytes())
    edit_json(tmp_path, "config.json", **WIDENED[form])
    assert read_config(tmp_path, "native").widened is not None
    with pytest.raises(ModelError, match="original weights"):
        read_config(tmp_path, "transformers")


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("form", UNREAD)
def test_a_quantised_form_is_named_with_what_to_do_when_it_is_not_read(
    form: str, impl: ModelImpl, good: dict[str, Path], tmp_path: Path
) -> None:
    config, words = UNREAD[form]
    (tmp_path / "config.json").write_bytes((good["whole"] / "config.json").read_bytes())
    edit_json(tmp_path, "config.json", **config)
    with pytest.raises(ModelError) as raised:
        read_config(tmp_path, impl)
    assert "original weights" in str(raised.value)
    if impl == "native":
        assert all(word in str(raised.value) for word in words), str(raised.value)


def test_hqq_is_named_when_a_folder_has_its_file_of_weights(good: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good["whole"], folder)
    (folder / WEIGHTS).rename(folder / "qmodel.pt")
    with pytest.raises(ModelError, match="HQQ"):
        LLM(str(folder), device="cpu")
