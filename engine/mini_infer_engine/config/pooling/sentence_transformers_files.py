"""Reads the files by which sentence-transformers describes a folder: modules, pooling, dense layers and prompts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.pooling.pooler_config import DenseLayer, PoolingType

_POOLING_FLAGS: dict[str, PoolingType] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_POOLING_NAMES: dict[str, PoolingType] = {"cls": "cls", "mean": "mean", "lasttoken": "last", "last": "last"}
_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "Sigmoid": "sigmoid"}
_MOST_MODULES = 16


@dataclass(frozen=True, slots=True)
class SentenceTransformersFiles:
    """The content of the files; the defaults stand for a folder without them."""

    pooling_type: PoolingType | None = None
    """None if there is no modules.json."""
    normalizes: bool = True
    dense: list[DenseLayer] = field(default_factory=list)
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    max_seq_length: int | None = None


def read_sentence_transformers(folder: Path) -> SentenceTransformersFiles:
    """Reads the files of a folder. Raises ModelError that names the file, key and remedy if one asks for a module or a
    pooling that is not supported.
    """
    prompts, default = _prompts(folder)
    length = _max_seq_length(folder)
    if not (folder / "modules.json").is_file():
        return SentenceTransformersFiles(prompts=prompts, default_prompt_name=default, max_seq_length=length)
    pooling, normalizes, dense = None, False, list[DenseLayer]()
    for module in _modules(folder / "modules.json"):
        kind, path = str(module["type"]).rpartition(".")[2], str(module["path"])
        where = folder / "modules.json"
        if kind == "Transformer":
            if path not in ("", "."):
                raise ModelError(
                    f"{where}: the model's files are in its folder {path!r}: move them beside modules.json and make "
                    'the path "".'
                )
        elif kind == "Pooling" and pooling is None:
            pooling = _pooling(_inside(folder, path, where) / "config.json")
        elif kind == "Dense" and pooling is not None:
            dense.append(_dense(_inside(folder, path, where)))
        elif kind == "Normalize" and pooling is not None:
            normalizes = True
        else:
            raise ModelError(
                f"{where}: type = {module['type']!r}: supported are Transformer, Pooling, Dense and Normalize, in this "
                "order: serve it with sentence-transformers."
            )
    if pooling is None:
        raise ModelError(f"{folder / 'modules.json'}: there is no Pooling module: add one, or remove the file.")
    return SentenceTransformersFiles(pooling, normalizes, dense, prompts, default, length)


def _modules(path: Path) -> list[dict[str, Any]]:
    try:
        modules = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}): repair it or download it again.") from None
    is_list = isinstance(modules, list) and 0 < len(modules) <= _MOST_MODULES
    if not is_list or not all(isinstance(module, dict) and {"type", "path"} <= module.keys() for module in modules):
        raise ModelError(f"{path} must be a list of 1 to {_MOST_MODULES} modules with type and path: repair it.")
    return list(modules)


def _inside(folder: Path, path: str, where: Path) -> Path:
    """Returns a folder below `folder`. Raises ModelError if the path leaves it."""
    if not path or Path(path).is_absolute() or ".." in Path(path).parts:
        raise ModelError(f"{where}: path = {path!r}: must name a folder beside the file.")
    return folder / path


def _pooling(path: Path) -> PoolingType:
    fields = Fields.read(path)
    if not fields.boolean("include_prompt", True):
        raise fields.refuse("include_prompt", "prompts are always part of what is pooled: serve it with true.")
    if (named := fields.values.get("pooling_mode")) is not None:
        found = _POOLING_NAMES.get(named) if isinstance(named, str) else None
        if found is None:
            raise fields.refuse("pooling_mode", f"supported are {', '.join(_POOLING_NAMES)}.")
        return found
    modes = [name for name in fields.values if name.startswith("pooling_mode_") and fields.boolean(name, False)]
    if len(modes) != 1 or modes[0] not in _POOLING_FLAGS:
        chosen = ", ".join(modes) or "none of its modes"
        raise ModelError(f"{path}: {chosen} is true: supported is one of {', '.join(_POOLING_FLAGS)}.")
    return _POOLING_FLAGS[modes[0]]


def _dense(folder: Path) -> DenseLayer:
    fields = Fields.read(folder / "config.json")
    name = str(fields.values.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise fields.refuse("activation_function", f"supported are {', '.join(_ACTIVATIONS)}.")
    sizes = fields.size("in_features"), fields.size("out_features")
    layer = {"folder": str(folder), "has_bias": fields.boolean("bias", True), "activation": _ACTIVATIONS[name]}
    return msgspec.convert(layer | dict(zip(("in_features", "out_features"), sizes, strict=True)), DenseLayer)


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return {}, None
    fields = Fields.read(path)
    prompts = fields.values.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise fields.refuse("prompts", "must map names to texts.")
    default = fields.values.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise fields.refuse("default_prompt_name", f"must be one of prompts ({', '.join(prompts) or 'none'}), or null.")
    return dict(prompts), default


def _max_seq_length(folder: Path) -> int | None:
    path = folder / "sentence_bert_config.json"
    if not path.is_file():
        return None
    fields = Fields.read(path)
    if fields.boolean("do_lower_case", False):
        raise fields.refuse("do_lower_case", "texts are tokenised as tokenizer.json says: let its normalizer do that.")
    return None if fields.values.get("max_seq_length") is None else fields.size("max_seq_length")
