"""Defines the vision encoders of Qwen2.5-VL (arXiv 2502.13923) and Qwen3-VL (arXiv 2511.21631)."""

import torch
from torch import Tensor
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.models.vision.encoder import VisionEncoder, with_sdpa


class Qwen25VLEncoder(VisionEncoder):
    """A ViT with windowed attention, whose merger has the decoder's width."""

    def build(self) -> None:
        """Builds the tower with its merger."""
        config = with_sdpa(Qwen2_5_VLVisionConfig(**self.config.encoder))
        check_width(config.out_hidden_size, self.hidden_size)
        self.tower = Qwen2_5_VisionTransformerPretrainedModel(config)

    def encode(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Returns the merged patches, in rows of the image."""
        made: Tensor = self.tower(pixels, grid_thw=torch.tensor([grid], device=pixels.device)).pooler_output
        return made


class Qwen3VLEncoder(VisionEncoder):
    """A ViT with full attention, some of whose layers have mergers of their own (DeepStack)."""

    def build(self) -> None:
        """Builds the tower with its mergers."""
        config = with_sdpa(Qwen3VLVisionConfig(**self.config.encoder))
        check_width(config.out_hidden_size, self.hidden_size)
        self.tower = Qwen3VLVisionModel(config)

    def encode(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Returns the merged patches and beside them the features for the first layers of the decoder."""
        made = self.tower(pixels, grid_thw=torch.tensor([grid], device=pixels.device))
        return torch.cat((made.pooler_output, *made.deepstack_features), dim=-1)


def check_width(width: int, hidden_size: int) -> None:
    """Raises ModelError if a tower's output has another width than the decoder."""
    if width != hidden_size:
        raise ModelError(f"config.json: out_hidden_size of vision_config is {width}: it must be {hidden_size}.")
