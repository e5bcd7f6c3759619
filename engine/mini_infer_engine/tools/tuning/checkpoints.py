"""Lists the shapes of the twenty most used dense checkpoints of 0.5B to 32B, by their files: for the shipped table."""

from collections import Counter
from dataclasses import dataclass, replace

from mini_infer_engine.config.parallelism.tensor_parallel import TensorParallel
from mini_infer_engine.tools.tuning.products import Product


@dataclass(frozen=True, slots=True)
class CheckpointShape:
    """The sizes that determine the products of a dense decoder of Llama's kind."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    layers: int
    is_gated: bool = True
    """True if gate and up are one product with its activation: false with GELU."""
    is_share: bool = False
    """True for the shape of one rank of several."""

    def of_rank(self, ranks: int) -> "CheckpointShape":
        """Returns the shape of one of `ranks` tensor-parallel ranks. Raises ValueError if they cannot share it."""
        sizes = (self.intermediate, self.heads)
        if any(size % ranks for size in sizes) or (self.kv_heads % ranks and ranks % self.kv_heads):
            raise ValueError(f"{ranks} ranks cannot share out {self}")
        return replace(
            self,
            is_share=ranks > 1,
            intermediate=self.intermediate // ranks,
            heads=self.heads // ranks,
            kv_heads=max(1, self.kv_heads // ranks),
            vocabulary=TensorParallel(rank=0, size=ranks).vocabulary_rows(self.vocabulary),
        )

    @property
    def products(self) -> Counter[Product]:
        """The products of one decode step, with the number of times that each is computed."""
        writes = not self.is_share  # ranks add up before the residual stream is added
        width = self.heads * self.head_dim
        both = Product(self.intermediate, self.hidden, gated=True)
        found = Counter(
            {
                Product(width + 2 * self.kv_heads * self.head_dim, self.hidden): self.layers,
                Product(self.vocabulary, self.hidden): 1,
                (both if self.is_gated else Product(2 * self.intermediate, self.hidden)): self.layers,
            }
        )
        found[Product(self.hidden, width, writes_residual=writes)] += self.layers
        found[Product(self.hidden, self.intermediate, writes_residual=writes)] += self.layers
        return found


CHECKPOINTS: dict[str, CheckpointShape] = {
    "Qwen2.5-7B": CheckpointShape(3584, 18944, 28, 4, 128, 152064, 28),
    "Llama-3.1-8B": CheckpointShape(4096, 14336, 32, 8, 128, 128256, 32),
    "Qwen3-8B": CheckpointShape(4096, 12288, 32, 8, 128, 151936, 36),
    "Mistral-7B-v0.3": CheckpointShape(4096, 14336, 32, 8, 128, 32768, 32),
    "Qwen3-14B": CheckpointShape(5120, 17408, 40, 8, 128, 151936, 40),
    "Qwen3-4B": CheckpointShape(2560, 9728, 32, 8, 128, 151936, 36),
    "Qwen3-0.6B": CheckpointShape(1024, 3072, 16, 8, 128, 151936, 28),
    "Qwen2.5-1.5B": CheckpointShape(1536, 8960, 12, 2, 128, 151936, 28),
    "Llama-3.2-1B": CheckpointShape(2048, 8192, 32, 8, 64, 128256, 16),
    "Llama-3.2-3B": CheckpointShape(3072, 8192, 24, 8, 128, 128256, 28),
    "Qwen2.5-32B": CheckpointShape(5120, 27648, 40, 8, 128, 152064, 64),
    "Qwen2.5-0.5B": CheckpointShape(896, 4864, 14, 2, 64, 151936, 24),
    "Qwen3-1.7B": CheckpointShape(2048, 6144, 16, 8, 128, 151936, 28),
    "Qwen2.5-3B": CheckpointShape(2048, 11008, 16, 2, 128, 151936, 36),
    "Phi-4-mini": CheckpointShape(3072, 8192, 24, 8, 128, 200064, 32),
    "Phi-4": CheckpointShape(5120, 17920, 40, 10, 128, 100352, 40),
    "Gemma-2-9B": CheckpointShape(3584, 14336, 16, 8, 256, 256000, 42, is_gated=False),
    "Gemma-3-1B": CheckpointShape(1152, 6912, 4, 1, 256, 262144, 26, is_gated=False),
    "Mistral-Nemo-12B": CheckpointShape(5120, 14336, 32, 8, 128, 131072, 40),
    "Mistral-Small-24B": CheckpointShape(5120, 32768, 32, 8, 128, 131072, 40),
}
"""The shapes, the most important first, because time may be short."""
