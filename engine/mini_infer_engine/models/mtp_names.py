"""Names of the tensors of multi-token-prediction layers in checkpoints. Knows neither files nor torch."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MtpNames:
    """The names in one family's checkpoints."""

    prefix: str
    """The beginning of the names of all tensors; `{layer}` stands for the number of layers of the model."""
    decoder_layer: str
    """The place of the decoder layer under the prefix."""
    parts: Mapping[str, str]
    """Parts under the prefix beside the layer, by their names in `mtp.MtpModel`."""
    feeds_normed_back: bool
    """True if the output after the norm is the hidden state for the next token, False if the one before it is."""

    def prefix_of(self, layer: int) -> str:
        """Returns the prefix of all tensors where `layer` is the number of layers of the model."""
        return self.prefix.format(layer=layer)

    def name_of(self, name: str, layer: int) -> str:
        """Returns the checkpoint's name of a tensor of `MtpModel`, whose decoder layer has this number."""
        prefix, own = self.prefix_of(layer), f"model.layers.{layer}."
        if name.startswith(own):
            return prefix + self.decoder_layer + name.removeprefix(own)
        part, _, rest = name.partition(".")
        return f"{prefix}{self.parts[part]}.{rest}"


DEEPSEEK = MtpNames(
    prefix="model.layers.{layer}.",
    decoder_layer="",
    parts={"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"},
    feeds_normed_back=False,
)
"""DeepSeek-V3 and GLM-4.5, as vLLM's deepseek_mtp.py and glm4_moe_mtp.py read them."""
QWEN = MtpNames(
    prefix="mtp.",
    decoder_layer="layers.0.",
    parts={"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"},
    feeds_normed_back=True,
)
"""Qwen3-Next and Qwen3.5, as vLLM's qwen3_next_mtp.py reads them."""
