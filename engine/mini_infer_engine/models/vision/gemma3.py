"""Defines the vision encoder of Gemma 3 (arXiv 2503.19786): SigLIP, pooled and projected to the decoder's width."""

from torch import Tensor
from transformers.models.gemma3.configuration_gemma3 import Gemma3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector
from transformers.models.siglip.configuration_siglip import SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipVisionModel

from mini_infer_engine.models.vision.encoder import VisionEncoder, with_sdpa


class Gemma3Encoder(VisionEncoder):
    """SigLIP (arXiv 2303.15343) without its pooling head, and Gemma 3's projector."""

    def build(self) -> None:
        """Builds the tower and the projector."""
        # Gemma 3's files do not always say that the tower has no head.
        vision = with_sdpa(SiglipVisionConfig(**{"vision_use_head": False, **self.config.encoder}))
        self.tower = SiglipVisionModel(vision)
        config = Gemma3Config(
            vision_config=vision.to_dict(),
            text_config={"hidden_size": self.hidden_size},
            mm_tokens_per_image=self.config.tokens_per_crop,
        )
        self.projector = Gemma3MultiModalProjector(config)

    def encode(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Returns the embeddings of all crops, one after the other."""
        del grid  # crops have one size
        made: Tensor = self.projector(self.tower(pixels).last_hidden_state)
        return made.flatten(0, 1)
