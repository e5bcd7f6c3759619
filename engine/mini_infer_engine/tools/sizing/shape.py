"""Reduces a model's config to the sizes on which passes and memory of an engine depend. No torch here."""

from dataclasses import dataclass

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.tools.sizing.precision import BF16, Precision

_BYTES = 2
"""Bytes of a bf16 element."""


class UnsizedModelError(Exception):
    """Raised if no time of a pass is known for a model of this kind; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a dense decoder, and the precision of its weights."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    query_width: int
    """Query heads times their size."""
    kv_width: int
    """KV heads times their size."""
    num_heads: int
    num_kv_heads: int
    tied_embeddings: bool
    max_context: int
    precision: Precision = BF16

    @classmethod
    def of(cls, config: ModelConfig, context: int, precision: Precision = BF16) -> "ModelShape":
        """Returns the shape of a model that serves contexts of this many tokens, with weights in `precision`.

        Raises:
            UnsizedModelError: the model is no dense decoder whose layers all attend to the whole context, or its
                checkpoint is quantised.
        """
        if (reason := _unsized(config, context)) is not None:
            raise UnsizedModelError(
                f"{config.architecture} {reason}, and the time of its passes is not modelled: measure it with "
                "`python benchmarks/engine_serving.py --models DIR` on one GPU, and write replicas by its rates"
            )
        return cls(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            query_width=config.num_heads * config.head_dim,
            kv_width=config.num_kv_heads * config.head_dim,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            tied_embeddings=config.tie_word_embeddings,
            max_context=config.max_position_embeddings,
            precision=precision,
        )

    @property
    def layer_parameters(self) -> int:
        """Parameters of the matrix products of all layers."""
        attention = self.hidden_size * (2 * self.query_width + 2 * self.kv_width)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_parameters(self) -> int:
        """Parameters of the output layer."""
        return self.hidden_size * self.vocab_size

    @property
    def layer_bytes(self) -> int:
        """Bytes of the weights of all layers, which every pass reads."""
        return self.precision.layer_bytes * self.layer_parameters

    @property
    def head_bytes(self) -> int:
        """Bytes of the output layer, which every pass reads."""
        return _BYTES * self.head_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.layer_bytes + self.head_bytes * (1 if self.tied_embeddings else 2)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return _BYTES * 2 * self.num_layers * self.kv_width

    def splits(self, ranks: int) -> bool:
        """True if this many tensor-parallel ranks can share the model equally."""
        shares_kv = self.num_kv_heads % ranks == 0 or ranks % self.num_kv_heads == 0
        return self.num_heads % ranks == 0 and self.intermediate_size % ranks == 0 and shares_kv


def _unsized(config: ModelConfig, context: int) -> str | None:
    if config.model_impl != "native":
        return "runs through transformers"
    if type(config) is not ModelConfig:
        return "is no plain dense decoder (experts, latent attention or another block)"
    if config.mixers is not None or config.head_shapes is not None or config.kv_sources is not None:
        return "has layers of different kinds"
    if config.quantization is not None:
        return "has quantised weights"
    if any(window is not None and window < context for window in config.sliding_windows):
        return "has sliding windows shorter than the context"
    return None
