"""Configs and files as strangers have them: logits are those of transformers' model of the same folder, or one line of
an error names the field.
"""

import itertools
import json
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine.models.test_models import ROPES
from tests.support.tiny_models import (
    DEEPSEEK,
    DEEPSEEK_V3,
    GPT_OSS,
    GRANITE,
    PageDealer,
    reference_logits,
    run_chunks,
    save_tiny_model,
    tiny_runner,
)
from tests.support.transformers_models import save_model

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(48)]
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"head_dim": 16, "sliding_window": 11},
    "gemma3_text": {"head_dim": 16, "sliding_window": 11},
    "phi3": {"original_max_position_embeddings": 512},
    "granite": GRANITE,
    "olmo2": {},
    "smollm3": {},
    "mixtral": {"num_local_experts": 4, "head_dim": 16},
    "qwen3_moe": EXPERTS,
    "gpt_oss": GPT_OSS,
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK_V3,
}
THROUGH = ("cohere2", "exaone4", "glm4", "gpt2", "gpt_neox", "opt", "stablelm", "starcoder2")
"""Families whose code is transformers', in the shapes of transformers_models.py."""
PREFIXES = re.compile(r"^(model|transformer|gpt_neox)\.")
LATENT = ("deepseek_v2", "deepseek_v3")
"""Families in which every head has its own key."""

SHAPES: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "a key for each head": {"num_key_value_heads": 4},
    "one key": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 48},
    "odd sizes": {"hidden_size": 72, "intermediate_size": 108, "vocab_size": 211, "num_attention_heads": 6},
    "one layer": {"num_hidden_layers": 1},
    "large theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    **{name: {"rope_parameters": rope} for name, rope in ROPES.items() if name in ("linear", "llama3", "yarn")},
}
"""Fields from which a checkpoint is made."""


def edited(**changes: Any) -> Callable[[Path], None]:
    """Returns an editor of config.json; `...` removes a field."""

    def edit(folder: Path) -> None:
        file = folder / "config.json"
        fields = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))

    return edit


def old_rope(folder: Path) -> None:
    """Writes rotations as transformers 4 did."""
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    rope = fields.pop("rope_parameters")
    if "rope_theta" not in rope:  # one for each type of layer
        local, rope = rope["sliding_attention"], rope["full_attention"]
        fields["rope_local_base_freq"] = local["rope_theta"]
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    file.write_text(json.dumps(fields))


def stored_as(dtype: torch.dtype, name: str) -> Callable[[Path], None]:
    """Returns a function that stores weights in a dtype, and names it as older files do."""

    def store(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({key: tensor.to(dtype) for key, tensor in load_file(file).items()}, file)
        edited(torch_dtype=name, dtype=...)(folder)

    return store


def without_prefix(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file({PREFIXES.sub("", name, count=1): tensor for name, tensor in load_file(file).items()}, file)


def sharded(folder: Path) -> None:
    """Stores each tensor of the first half in a file of its own, the others in one."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    names = sorted(tensors)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for place, name in enumerate(names):
        number = min(place, len(names) // 2) + 1
        files.setdefault(f"model-{number:05}-of-{len(names) // 2 + 1:05}.safetensors", {})[name] = tensors[name]
    for name, part in files.items():
        save_file(part, folder / name)
    weight_map = {name: file for file, part in files.items() for name in part}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


FILES: dict[str, Callable[[Path], None]] = {
    "rotations of old": old_rope,
    "unknown keys": edited(
        my_company={"notes": [1, None]}, use_flash_attn=True, transformers_version="4.9", quality=""
    ),
    "few keys": edited(
        **dict.fromkeys(("use_cache", "initializer_range", "bos_token_id", "attention_dropout"), ...),
        dtype=...,
        transformers_version=...,
    ),
    "nulls": edited(pad_token_id=None, bos_token_id=None, eos_token_id=None, rope_scaling=None, dtype=None),
    "lists": edited(eos_token_id=[2, 5], architectures=..., _name_or_path="/somewhere"),
    "bf16": stored_as(torch.bfloat16, "bfloat16"),
    "fp16": stored_as(torch.float16, "float16"),
    "auto dtype": edited(torch_dtype="auto", dtype=...),
    "no prefix": without_prefix,
    "sharded": sharded,
}
"""Changes of the folder of a checkpoint."""
SAMPLED = {("llama", "few keys"), ("qwen3", "one key"), ("gemma3_text", "rotations of old"), ("phi3", "sharded")}


def skips(family: str, variant: str) -> bool:
    """True if a variant is no model of the family, also by transformers."""
    scaled = ("linear", "llama3", "yarn")
    return (
        (family in LATENT and variant in ("one key", "wide heads"))
        or (family == "phi3" and variant in scaled)
        or (family in THROUGH and variant == "auto dtype")  # AutoConfig cannot read it
        or (family in ("gpt2", "opt") and variant == "rotations of old")
        or (family == "gemma3_text" and variant in ("large theta", *scaled))  # its types of layers have two rotations
    )


CASES = [
    pytest.param(family, variant, marks=[] if (family, variant) in SAMPLED else pytest.mark.models)
    for family, variant in (
        *itertools.product(FAMILIES, (*SHAPES, *FILES)),
        *itertools.product(THROUGH, FILES),
    )
    if not skips(family, variant)
]


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_logits_equal_transformers_when_a_config_is_unusual(family: str, variant: str, tmp_path: Path) -> None:
    if family in THROUGH:
        save_model(tmp_path, family)
    else:
        changes = FAMILIES[family] | SHAPES.get(variant, {})
        if family in LATENT and variant == "odd sizes":
            changes |= {"num_key_value_heads": 6}
        save_tiny_model(tmp_path, family, **deepcopy(changes))  # transformers writes into rope_parameters
    if variant in FILES:
        FILES[variant](tmp_path)
    eager = {"attn_implementation": "eager"} if family == "gemma2" else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **eager)
    runner = tiny_runner(tmp_path, dtype="float32")
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(len(TOKENS)), [20, 1, 27])
    expected = reference_logits(model, TOKENS)
    assert expected.std() > 0.01
    assert (actual - expected).abs().max() <= 2e-4 * max(1.0, float(expected.abs().max()))
