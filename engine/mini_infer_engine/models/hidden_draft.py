"""Defines the interface of drafts that read hidden states of the model for which they draft, their target.

The entry of the token at position p is made of its embedding and of the target's hidden state at position p - 1, as in
EAGLE (Li et al., arXiv:2401.15077) and in DeepSeek-V3's multi-token prediction (arXiv:2412.19437). It has the cache
index p - 1, so that the first token has none. Behind the last token that the target has computed, the draft's own
hidden states take the place of the target's.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.parallelism.pipeline_parallel import PipelineStage
from mini_infer_engine.layers.embedding import Embedding
from mini_infer_engine.models.decoder import DecoderLayer, DecoderModel
from mini_infer_engine.ops.base import AttentionPass, Ops, ResidualState


class HiddenDraft(DecoderModel):
    """A draft of one decoder layer. Its embeddings are the target's unless it has its own."""

    method: ClassVar[str]
    """The value of speculative_method under which it runs."""
    tapped_layers: tuple[int, ...]
    """The target's layers whose outputs it reads, from 0, in ascending order."""
    hidden_width: int
    """The width of what `fuse` returns for a token."""

    def __init__(
        self, config: ModelConfig, target: DecoderModel, make_layer: Callable[[ModelConfig, int], DecoderLayer]
    ) -> None:
        """Builds the last layer of `config` alone, as a stage in the middle of a pipeline would."""
        stage = PipelineStage(1, 3, range(config.num_layers - 1, config.num_layers))
        super().__init__(replace(config, stage=stage), make_layer)
        self._target = [target]  # in a list: its weights are not this model's

    @property
    def target(self) -> DecoderModel:
        """The model for which it drafts."""
        return self._target[0]

    @property
    def embeddings(self) -> Embedding:
        """The target's table of embeddings."""
        return self.target.embeddings

    def embed(self, ops: Ops, token_ids: Tensor) -> Tensor:
        """Maps token ids [tokens] int64 to embeddings [tokens, hidden], in new memory."""
        return self.target.embed(ops, token_ids)

    def fuse(self, ops: Ops, states: Tensor) -> Tensor:
        """Returns what is stored of each token [tokens, hidden_width], from the outputs of the tapped layers
        [tokens, layers * hidden].
        """
        raise NotImplementedError

    def combine(self, ops: Ops, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Returns the input of `forward` in new memory, from embeddings [tokens, hidden] and the stored or own hidden
        states [tokens, hidden_width] of the tokens before them.
        """
        raise NotImplementedError

    def forward(self, ops: Ops, hidden: Tensor, attention: AttentionPass) -> ResidualState:
        """Maps the output of `combine` to the state after the layer, of the tokens that `attention` selects."""
        raise NotImplementedError

    def own_hidden(self, ops: Ops, state: ResidualState) -> Tensor:
        """Returns the hidden states [tokens, hidden_width] that take the place of the target's for the next token."""
        raise NotImplementedError
