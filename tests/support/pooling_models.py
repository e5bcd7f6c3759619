"""Random tiny pooling models in the ways folders are laid out: sentence-transformers', classifiers', rerankers'."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from mini_infer_engine import LLM
from mini_infer_engine.model_path import DEMO_DIRECTORY
from tests.support.tiny_models import save_tiny_model, save_tiny_model_with_text

_VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + [
    f"{before}{letter}" for before in ("", "##") for letter in "abcdefghijklmnopqrstuvwxyz(),.:->?_"
]
_ENCODER: dict[str, Any] = {
    "vocab_size": len(_VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_POSITIONS = {"max_position_embeddings": 130}
"""Positions of models whose first one is that of the padding token."""
_ONE_TYPE = {"type_vocab_size": 1, **_POSITIONS}
ENCODERS: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 32},
    "bert": {},
    "camembert": _ONE_TYPE,
    "deberta-v2": {"type_vocab_size": 0, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "distilbert": {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96},
    "electra": {"embedding_size": 32},
    "ernie": {},
    "eurobert": {},
    "modernbert": {},
    "mpnet": _POSITIONS,
    "nomic_bert": {},
    "roberta": _ONE_TYPE,
    "roformer": {"embedding_size": 64},
    "xlm-roberta": _ONE_TYPE,
}
"""The fields of each kind of encoder's shape beside `_ENCODER`."""
TEXTS = ["Which names are sorted?", "def add(left: int, right: int) -> int:", "Join"]


def pooling_llm(folder: Path, **settings: Any) -> LLM:
    """The model of a folder on a CPU, with a small page pool."""
    defaults: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "kv_cache_memory": 8_000_000}
    return LLM(folder, **(defaults | settings))


def save_embedding_model(folder: Path, *modules: str, **changes: Any) -> Any:
    """A Qwen3 decoder saved as Qwen3-Embedding is, with modules such as "Pooling" and "Dense"; returns the decoder."""
    model = save_tiny_model(folder, "qwen3", vocab_size=4096, **changes).model
    for file in folder.iterdir():
        file.unlink()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_DIRECTORY / name, folder / name)
    if modules:
        write_modules(folder, *modules)
    return model


def write_modules(folder: Path, *modules: str, pooling: str = "lasttoken") -> None:
    """Writes modules.json and the folders of these modules."""
    names = ["Transformer", *modules]
    rows = [
        {"idx": index, "name": str(index), "path": f"{index}_{name}" if index else "", "type": f"st.models.{name}"}
        for index, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(rows))
    for index, name in enumerate(names[1:], start=1):
        (folder / f"{index}_{name}").mkdir(exist_ok=True)
        if name == "Pooling":
            flags = {f"pooling_mode_{each}": each == pooling for each in ("cls_token", "mean_tokens", "lasttoken")}
            write_json(folder / f"{index}_{name}" / "config.json", word_embedding_dimension=64, **flags)


def save_dense(folder: Path, in_features: int, out_features: int) -> nn.Module:
    """Saves a dense layer with tanh as sentence-transformers does, and returns it."""
    torch.manual_seed(3)
    linear = nn.Linear(in_features, out_features)
    save_file({f"linear.{name}": tensor for name, tensor in linear.state_dict().items()}, folder / "model.safetensors")
    sizes = {"in_features": in_features, "out_features": out_features, "bias": True}
    write_json(folder / "config.json", **sizes, activation_function="torch.nn.modules.activation.Tanh")
    return nn.Sequential(linear, nn.Tanh()).requires_grad_(False)


def save_encoder(folder: Path, model_type: str, num_labels: int | None = None, **changes: Any) -> Any:
    """A tiny encoder with random weights and a WordPiece tokenizer of letters; returns transformers' model."""
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(_VOCABULARY))
    transformers.BertTokenizerFast.from_pretrained(folder).save_pretrained(folder)
    torch.manual_seed(13)
    labels = {} if num_labels is None else {"num_labels": num_labels}
    shape = _ENCODER | ENCODERS[model_type] | labels | changes
    config = transformers.AutoConfig.for_model(model_type, **shape)
    kind = transformers.AutoModel if num_labels is None else transformers.AutoModelForSequenceClassification
    model = kind.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name.lower() else parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return model


def save_classifier(folder: Path, architecture: str, num_labels: int, **changes: Any) -> Any:
    """A tiny decoder with a classification head, and the demo's tokenizer; returns transformers' model."""
    save_tiny_model_with_text(folder, architecture, **changes)
    torch.manual_seed(11)
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=num_labels, pad_token_id=0)
    eager = {"attn_implementation": "eager"} if architecture == "gemma2" else {}  # torch's own has no soft cap
    made = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, **eager)
    model = made.eval()
    own, state = load_file(folder / "model.safetensors"), model.state_dict()
    model.load_state_dict(own, strict=False)
    assert state.keys() - own.keys() == {"score.weight"}
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    return model


def write_json(path: Path, **values: Any) -> None:
    """Writes a JSON object."""
    path.write_text(json.dumps(values))
