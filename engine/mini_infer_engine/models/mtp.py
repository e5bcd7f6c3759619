"""Defines multi-token prediction as a draft: the layer after a checkpoint's last one, which predicts a further token.

DeepSeek-V3 (arXiv:2412.19437, section 2.2) defines it: a projection of the normalised hidden state and the normalised
embedding of the next token, one decoder layer, a norm, and the model's own output matrix. As in vLLM the hidden state
is the one after the model's last norm, and for each further token the first such layer is applied again, to its own
output. The layer's copies of embeddings and output matrix in a checkpoint are the model's, and are not read.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.models.causal_model import StoredWeights
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.models.hidden_draft import HiddenDraft
from mini_infer_engine.models.kv_spec import KVSpec
from mini_infer_engine.models.mtp_names import MtpNames
from mini_infer_engine.models.sparse_decoder import SparseConfig
from mini_infer_engine.ops.base import AttentionPass, Ops, ResidualState

_COPIES = ("embed_tokens.", "shared_head.head.")
"""Tensors of the layer that are the model's own."""


class MtpModel(HiddenDraft):
    """The first multi-token-prediction layer of a checkpoint."""

    method: ClassVar[str] = "mtp"

    def __init__(self, target: DecoderModel, names: MtpNames) -> None:
        config = target.config
        super().__init__(_with_one_more_layer(config), target, type(target).make_layer)
        self._names, self._number = names, config.num_layers
        self.enorm, self.hnorm, self.norm = (RMSNorm.of(config) for _ in range(3))
        # No `Linear`: where a checkpoint is quantised, this matrix is not.
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self._projection: list[Linear] = []  # in a list: its weight is eh_proj's
        self.tapped_layers, self.hidden_width = (config.num_layers - 1,), config.hidden_size

    def kv_spec(self, page_size: int, dtype: torch.dtype) -> KVSpec:
        """Returns the content of a page as a layer of the target has it."""
        return type(self.target).kv_spec(self, page_size, dtype)

    def read_names(self, checkpoint: StoredWeights) -> None:
        """Prepares the placements as the target does for its own layers."""
        type(self.target).read_names(self, checkpoint)

    def checkpoint_name(self, name: str) -> str:
        """Returns the checkpoint's name of the layer or of one of its tensors."""
        return self.target.checkpoint_name(self._names.name_of(f"{name}.", self._number).removesuffix("."))

    def is_elsewhere(self, checkpoint_name: str) -> bool:
        """True for all tensors outside the layer, and for its copies of the model's matrices."""
        prefix = self._names.prefix_of(self._number)
        return not checkpoint_name.startswith(prefix) or checkpoint_name.removeprefix(prefix).startswith(_COPIES)

    def finish_loading(self, max_positions: int) -> None:
        """Derives everything that depends on weights and config."""
        super().finish_loading(max_positions)
        if not self._projection:
            weight = self.eh_proj.weight
            assert isinstance(weight, nn.Parameter), "nn.Linear's"
            self._projection.append(Linear.borrowing(weight))

    def fuse(self, ops: Ops, states: Tensor) -> Tensor:
        """Returns the target's hidden states after its last norm."""
        return ops.norm(ResidualState(states), self.target.last_norm)

    def combine(self, ops: Ops, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Returns the projection of both, each normalised."""
        parts = ops.norm(ResidualState(embeddings), self.enorm), ops.norm(ResidualState(hidden), self.hnorm)
        return ops.norm_linear(ResidualState(torch.cat(parts, dim=-1)), None, self._projection[0])

    def forward(self, ops: Ops, hidden: Tensor, attention: AttentionPass) -> ResidualState:
        """Returns the state after the decoder layer, before the norm."""
        (layer,) = self.layers
        state: ResidualState = layer(ops, ResidualState(hidden), attention, self.norm)
        return state

    def own_hidden(self, ops: Ops, state: ResidualState) -> Tensor:
        """Returns the layer's output, after its norm where the family has it so."""
        return ops.norm(state, self.norm) if self._names.feeds_normed_back else state.residual

    def logits(
        self,
        ops: Ops,
        state: ResidualState,
        out: Tensor | None = None,
        *,
        head: Linear | None = None,
        norm: RMSNorm | None = None,
    ) -> Tensor:
        """Applies the layer's norm and the target's output matrix: [rows, vocab]."""
        return self.target.logits(ops, state, out, head=head, norm=norm or self.norm)


def _with_one_more_layer(config: ModelConfig) -> ModelConfig:
    """Returns the config of the target with the layer that follows, which has attention whatever the last one has."""
    longer = replace(
        config,
        num_layers=config.num_layers + 1,
        ropes=(*config.ropes, config.ropes[-1]),
        sliding_windows=(*config.sliding_windows, None),
        mixers=None if config.mixers is None else (*config.mixers, "attention"),
        tie_word_embeddings=False,
    )
    if isinstance(longer, SparseConfig) and config.num_layers - 1 in longer.sparse_layers:
        return replace(longer, sparse_layers=longer.sparse_layers | {config.num_layers})
    return longer
