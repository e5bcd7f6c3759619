"""Defines the vision encoder of a model: one image in, embeddings of the decoder's width out. It knows no prompts."""

from typing import Any

import torch
from torch import Tensor, nn

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.vision import VisionConfig
from mini_infer_engine.models.module_memory import take_memory


class VisionEncoder(nn.Module):
    """A vision tower of transformers. The checkpoint's tensors are in `tower`, and in `projector` if there is one."""

    tower: Any

    def __init__(self, config: VisionConfig, hidden_size: int) -> None:
        """Builds the tower for a decoder of this width. Raises ModelError if the config does not describe one."""
        super().__init__()
        self.config, self.hidden_size = config, hidden_size
        try:
            self.build()
        except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
            reason = str(error).partition("\n")[0]
            raise ModelError(f"config.json: transformers cannot build the vision encoder ({reason}).") from error

    def build(self) -> None:
        """Sets `tower`, and `projector` if the tower's output has another width."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """The numbers of one embedding: the decoder's width, once more for each layer of DeepStack."""
        return self.hidden_size * (1 + self.config.num_deepstack)

    def encode(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Returns the embeddings [tokens, width] of one image, whose values are as transformers' processor makes them.

        `grid` are its patches in time, height and width.
        """
        raise NotImplementedError

    def take_memory(self, device: torch.device) -> None:
        """Allocates parameters and computes buffers. Raises RuntimeError if there is not enough memory."""
        for part in self.children():
            take_memory(part, device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.parameters()).dtype


def with_sdpa(config: Any) -> Any:
    """Returns a config of transformers whose model attends by torch's scaled_dot_product_attention."""
    config._attn_implementation = "sdpa"
    return config
