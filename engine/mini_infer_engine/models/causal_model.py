"""Defines what runtime and loader know of a model: a decoder of ours, or one whose code is transformers'."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from mini_infer_engine.config.model.model_config import HeadShape, ModelConfig
from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.layers.embedding import Embedding
from mini_infer_engine.layers.placement import Placement
from mini_infer_engine.models.hidden_taps import HiddenTaps
from mini_infer_engine.models.kv_spec import KVSpec
from mini_infer_engine.models.state_spec import StateSpec
from mini_infer_engine.ops.base import AttentionPass, Ops, ResidualState

if TYPE_CHECKING:  # it imports transformers
    from mini_infer_engine.models.vision.encoder import VisionEncoder


class StoredWeights(Protocol):
    """Weights on disk, of which `weights.checkpoint.Checkpoint` says more."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The tensors by name."""


class CausalModel(nn.Module):
    """A causal language model.

    Construct it under the target device and dtype, fill it by `loader`, then call `finish_loading`.
    """

    caches_latents: ClassVar[bool] = False
    """True if a page stores latents instead of keys and values."""
    reads_positions: ClassVar[bool] = False
    """True if the model rotates queries and keys itself, by `AttentionPass.positions`."""
    config: ModelConfig
    vision: "VisionEncoder | None"
    """The vision encoder; None if the model reads text alone."""
    taps: HiddenTaps | None
    """Collects hidden states of layers; set by their reader."""

    @classmethod
    def check_split(cls, config: ModelConfig) -> None:
        """Raises ModelError if the ranks of `config.tensor_parallel` cannot share this model."""
        raise NotImplementedError

    @classmethod
    def layer_weights(cls, config: ModelConfig) -> int:
        """Returns the approximate number of weights in a usual layer of the whole model, by which pipeline stages are
        balanced.
        """
        raise NotImplementedError

    @property
    def embeddings(self) -> Embedding:
        """The table with a row for each token."""
        raise NotImplementedError

    @property
    def attention_layers(self) -> list[AttentionBlock]:
        """The attention blocks of the layers, in order, for the page pool and attention backends."""
        raise NotImplementedError

    def kv_spec(self, page_size: int, dtype: torch.dtype) -> KVSpec:
        """Returns the content of a page of `page_size` tokens, before quantisation."""
        config = self.config
        if config.head_shapes is not None:
            shapes = [config.head_shape(layer) for layer in config.attention_layers]
            kv_heads_of = config.tensor_parallel.num_heads
            local = [HeadShape(kv_heads_of(shape.num_kv_heads), shape.head_dim) for shape in shapes]
            return KVSpec.mixed(local, page_size, dtype)
        kv_heads = config.tensor_parallel.num_heads(config.num_kv_heads)
        return KVSpec(len(config.attention_layers), page_size, kv_heads, config.head_dim, dtype)

    def state_spec(self, dtype: torch.dtype) -> StateSpec | None:
        """Returns the content of a slot of recurrent state, or None if no layer has one."""
        recurrence = self.config.recurrence
        if recurrence is None:
            return None
        recurrence = recurrence.on_rank(self.config.tensor_parallel)
        width = recurrence.kernel_size - 1
        shape = recurrence.state_shape
        return StateSpec(len(self.config.recurrent_layers), recurrence.convolution_channels, width, shape, dtype)

    def read_names(self, checkpoint: StoredWeights) -> None:
        """Prepares `checkpoint_tensors` for the names in a checkpoint, where they depend on it.

        Raises:
            ModelError: tensors of the checkpoint cannot be converted to those of the model.
        """

    def checkpoint_tensors(self) -> dict[str, Placement]:
        """Maps the name of every tensor that a checkpoint must have to the memory that it fills."""
        raise NotImplementedError

    def is_unused(self, checkpoint_name: str) -> bool:
        """True if a checkpoint may have this tensor although the model does not read it."""
        raise NotImplementedError

    def is_elsewhere(self, checkpoint_name: str) -> bool:
        """True if another stage, or another rank with whole experts, has this tensor."""
        del checkpoint_name
        return False

    def take_memory(self, device: torch.device) -> None:
        """Allocates uninitialised memory for all parameters. Raises RuntimeError if there is not enough."""
        raise NotImplementedError

    def finish_loading(self, max_positions: int) -> None:
        """Derives everything that depends on weights and config, for contexts of up to `max_positions`."""
        raise NotImplementedError

    def tied_head_parameters(self) -> list[Tensor]:
        """Returns the parameters of a tied head that has memory of its own."""
        return []

    def embed(self, ops: Ops, token_ids: Tensor) -> Tensor:
        """Maps token ids [tokens] int64 to [tokens, hidden], in new memory: the first step of every pass."""
        raise NotImplementedError

    def enter(self, ops: Ops, hidden: Tensor) -> Tensor:
        """Begins a pass in a pipeline stage with the output [tokens, hidden] of the stage before it."""
        raise NotImplementedError

    def scale_embeddings(self, hidden: Tensor) -> Tensor:
        """Scales rows of the embedding table for the first layer, in place."""
        raise NotImplementedError

    def forward(self, ops: Ops, hidden: Tensor, attention: AttentionPass) -> ResidualState:
        """Maps embedded tokens [tokens, hidden] to the state after the last layer, of the tokens that `attention`
        selects.
        """
        raise NotImplementedError

    def hidden(self, ops: Ops, state: ResidualState) -> Tensor:
        """Returns the hidden states after the last norm: [rows, hidden]."""
        raise NotImplementedError

    def logits(self, ops: Ops, state: ResidualState, out: Tensor | None = None) -> Tensor:
        """Applies the head: [rows, vocab], written to `out` if one is given."""
        raise NotImplementedError
