"""Describes how an architecture of GGUF is translated: fields, names of tensors, and changes of their content.

It knows no architecture and no file. No torch.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.gguf.header import GgufHeader

Change = Literal[
    "none",
    "interleaved_rows",
    "plus_one",
    "flat",
    "channels",
    "logarithm",
    "transposed_experts",
    "stacked_rows",
    "latents",
    "expert_columns",
    "expert_biases",
    "mxfp4_blocks",
    "mxfp4_scales",
    "mxfp4_fused_blocks",
    "mxfp4_fused_scales",
    "grouped_heads",
    "row",
    "tiled_rows",
    "tiled_heads",
    "tiled_logarithm",
    "tiled_columns",
    "tiled_values",
    "tiled_channels",
]
"""The converter's change of a tensor, which `models.weights.gguf_changes` undoes."""

EXPERT = "{expert}"
"""A placeholder in a name for the number of each expert: a file has all experts of a layer in one tensor."""
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS_TENSORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""Tensors of divisors of the rotation's frequencies, [rotated dimensions / 2]: scaling of Llama 3.1 and longrope.

`model_config` takes their values.
"""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The translation of one value of `general.architecture`."""

    name: str
    """The name in `architectures` of config.json."""
    fields: Callable[["Metadata"], dict[str, Any]]
    """Returns the fields of config.json that not all architectures share."""
    block: Mapping[str, str]
    """Names within a layer, from GGUF's to the checkpoint's."""
    interleaves: bool = False
    """True if q and k are stored interleaved."""
    offsets_norms: bool = False
    """True if norms are stored plus one."""
    rotates_partly: bool = False
    """True if a model may rotate only the first dimensions of a head."""
    rotates_apart: bool = False
    """True if a head's rotated dimensions are a tensor of their own, or none are rotated."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """Other changes, by GGUF's names within a layer."""
    fusions: tuple["Fusion", ...] = ()
    """The tensors that the converter has split."""
    outside: Mapping[str, str] = field(default_factory=lambda: OUTSIDE)
    """The names outside of layers, from GGUF's to the checkpoint's."""
    norms_kept: tuple[str, ...] = ()
    """GGUF's names of the norms that are stored as they are, if `offsets_norms`."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """One tensor of a checkpoint's layer that is several, or another form, in a GGUF file."""

    name: str
    """The checkpoint's name within a layer."""
    parts: tuple[str, ...]
    """GGUF's names within a layer."""
    change: Change
    encoding: str | None = None
    """The encoding of the parts for which it is so; None: any that is not another fusion's of these parts."""


class Metadata:
    """The metadata fields of one architecture, whose keys begin with its name."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.architecture = str(header.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value, or the default."""
        return self.header.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """Returns a value. Raises ModelError if there is none."""
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.header.path}: {self.architecture}.{key} is missing: convert the model again.")
        return value

    def width(self, key: str) -> int | None:
        """Returns a value that a hybrid's file has for each layer: 0 where a layer has no such block.

        Raises ModelError if layers differ.
        """
        value = self.get(key)
        if not isinstance(value, list):
            return value if value is None else self.need(key)
        widths = {width for width in value if width != 0}
        if len(widths) > 1:
            raise self.refuse(key, "layers of different widths are not supported")
        return next(iter(widths), 0)

    def in_layers(self, key: str) -> list[bool]:
        """Returns whether each layer has the block whose widths stand under a key."""
        value, count = self.get(key), num_layers(self)
        return [bool(width) for width in value[:count]] if isinstance(value, list) else [bool(value)] * count

    def has_tensor(self, name: str) -> bool:
        """True if the file has the tensor."""
        return name in self.header.tensors

    def refuse(self, key: str, remedy: str) -> ModelError:
        """Returns the error for a value that is not supported."""
        return ModelError(f"{self.header.path}: {self.architecture}.{key} = {self.get(key)!r}: {remedy}.")


def num_layers(metadata: Metadata) -> int:
    """Returns the number of layers, without those that predict further tokens, which some files have behind them."""
    count: int = metadata.need("block_count") - metadata.get("nextn_predict_layers", 0)
    return count


def checkpoint_name(architecture: Architecture, name: str) -> str | None:
    """Returns a tensor's name in Hugging Face's checkpoints, with `EXPERT` if it has all experts, or None if it is no
    weight.
    """
    if name in FACTORS_TENSORS:
        return None  # it is in the config
    if name in architecture.outside:
        return architecture.outside[name]
    found = _BLOCK.fullmatch(name)
    if found is None:
        return name  # unknown: whoever loads it says so
    layer, own = found[1], found[2]
    stem, _, kind = own.rpartition(".")
    if own in architecture.block:
        return f"model.layers.{layer}.{architecture.block[own]}"
    if stem in architecture.block and kind in ("weight", "bias"):
        return f"model.layers.{layer}.{architecture.block[stem]}.{kind}"
    return name


def layer_of(name: str) -> int | None:
    """Returns the layer of a tensor of GGUF's name, or None if it is outside of them."""
    found = _BLOCK.fullmatch(name)
    return None if found is None else int(found[1])


def change_of(architecture: Architecture, name: str) -> Change:
    """Returns the change that must be undone for a tensor of GGUF's name."""
    found = _BLOCK.fullmatch(name)
    own = name if found is None else found[2]
    if own in architecture.changes:
        return architecture.changes[own]
    if architecture.interleaves and own.partition(".")[0] in ("attn_q", "attn_k"):
        return "interleaved_rows"
    if architecture.offsets_norms and name.endswith("norm.weight") and own not in architecture.norms_kept:
        return "plus_one"
    return "none"
