"""Runs a model of transformers as a `CausalModel`: its modules compute a pass, and its attention reads the page pool.

The modules see one flat list of tokens with explicit positions, a batch of one. Only the attention pass knows which
token belongs to which sequence.
"""

import logging
import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.model.rope import NO_ROTATION
from mini_infer_engine.layers.attention import Attention, AttentionBlock
from mini_infer_engine.layers.embedding import Embedding
from mini_infer_engine.layers.placement import Placement
from mini_infer_engine.layers.rotary import Rotary
from mini_infer_engine.models.causal_model import CausalModel, StoredWeights
from mini_infer_engine.models.module_memory import take_memory
from mini_infer_engine.models.transformers_backend.alibi import slopes_of
from mini_infer_engine.models.transformers_backend.attention import PAGED, PagedCalls, receiving
from mini_infer_engine.models.transformers_backend.build import build, fix_rotations
from mini_infer_engine.models.transformers_backend.config import TransformersConfig
from mini_infer_engine.models.transformers_backend.fusion import FusedLayers
from mini_infer_engine.models.transformers_backend.names import (
    GatheredPlacement,
    Gathering,
    Names,
    ignored_patterns,
    names_of,
)
from mini_infer_engine.models.transformers_backend.ranks import check_ranks, shard_for_rank
from mini_infer_engine.models.transformers_backend.sharding.forwards import communicating
from mini_infer_engine.models.weights.safetensors_checkpoint import SafetensorsCheckpoint
from mini_infer_engine.ops.base import AttentionPass, Ops, ResidualState

log = logging.getLogger(__name__)

_hidden_states: ContextVar[Tensor | None] = ContextVar("hidden states", default=None)
"""Hidden states [1, rows, hidden] that the decoder returns instead of computing some, while the head runs over them."""


class TransformersModel(CausalModel):
    """A causal language model whose code is transformers'."""

    reads_positions: ClassVar[bool] = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert isinstance(config, TransformersConfig)
        self.config: TransformersConfig = config
        self.taps = self.vision = None
        self._dtype = torch.get_default_dtype()
        self.causal = build(config.hf_config, PAGED, self._dtype, trust_remote_code=config.trust_remote_code)
        self._sharded = shard_for_rank(self.causal, config)
        """The parameters of which this rank has a part, by name."""
        backbone = self.causal.get_submodule(config.backbone)
        self._fused = None if config.tensor_parallel.size > 1 else FusedLayers(backbone)
        """The layers that our operations compute; None on ranks that share the model."""
        self._names: Names | None = None
        self._elsewhere: frozenset[str] = frozenset()
        """Tensors of the checkpoint that only other ranks read."""
        self._embeddings: list[Embedding] = []  # in a list: it is no module of its own, its weight is the model's
        self._blocks = tuple(self._block(layer) for layer in range(config.num_layers))
        self._slopes: list[Tensor | None] = [None] * config.num_layers
        """The further dimensions of each block's queries, from `finish_loading` on."""
        table: Any = self.causal.get_input_embeddings()
        name = next(name for name, module in self.causal.named_modules() if module is table)
        sharded = self._sharded.get(f"{name}.weight")
        self._vocabulary = table.weight.shape[0] if sharded is None else sharded.whole[0]
        """The rows of the whole table of embeddings."""
        backbone.forward = _replaying(backbone.forward, config.output_class)

    def _block(self, layer: int) -> Attention:
        """Returns the attention of one call. Its projections stay without memory: the model's modules project."""
        with torch.device("meta"):
            block = Attention(self.config, layer)
        block.scale = self.config.calls[layer].scale
        block.is_last = False  # the modules after it read all tokens
        return block

    @classmethod
    def check_split(cls, config: ModelConfig) -> None:
        """Probes a rank's part of the model without memory. Raises ModelError if the ranks cannot share it."""
        assert isinstance(config, TransformersConfig)
        check_ranks(config)

    @classmethod
    def layer_weights(cls, config: ModelConfig) -> int:
        """Raises ModelError: the layers are not divided into pipeline stages."""
        raise ModelError(
            f"{config.architecture} runs through transformers, whose layers are not divided into stages yet: leave "
            "pipeline_parallel_size out."
        )

    @property
    def attention_layers(self) -> list[AttentionBlock]:
        """The attention blocks of the calls of a pass, in order."""
        return list(self._blocks)

    @property
    def embeddings(self) -> Embedding:
        """The table with a row for each token, without the factor of `scale_embeddings`."""
        return self._embeddings[0]

    # -- Weights

    def _tensors(self) -> dict[str, Tensor]:
        """Returns parameters and stored buffers by name; those that share memory have several."""
        return dict(self.causal.state_dict(keep_vars=True))

    def read_names(self, checkpoint: StoredWeights) -> None:
        """Finds the place of each stored tensor. A head that differs from the embeddings it is tied to becomes its own.

        Raises:
            ModelError: tensors that are converted together do not fit each other or the model.
        """
        assert isinstance(checkpoint, SafetensorsCheckpoint), "files of other formats run from our own models"
        names = names_of(self.causal, checkpoint.tensors)
        stored = {target: name for name, target in names.renamed.items()}
        for tied, source in dict(self.causal.all_tied_weights_keys).items():
            if tied in stored and source in stored and not checkpoint.are_equal(stored[tied], stored[source]):
                log.warning("%s differs from %s and is used, though config.json says that they are tied", tied, source)
                path, _, own = tied.rpartition(".")
                module = self.causal.get_submodule(path)
                module.register_parameter(own, nn.Parameter(module.get_parameter(own).clone(), requires_grad=False))
        for conversion in names.conversions:
            conversion.check(self.causal, self._sharded)
        self._elsewhere = frozenset().union(*(conversion.shard(self._sharded) for conversion in names.conversions))
        self._names = names

    def checkpoint_tensors(self) -> dict[str, Placement]:
        """Maps the checkpoint's names to the memory they fill; where no checkpoint was read, the parameters' names."""
        tensors, names = self._tensors(), self._names
        unique: dict[int, str] = {}
        for name, tensor in tensors.items():
            unique.setdefault(id(tensor), name)
        if names is None:
            return {name: Placement(tensors[name]) for name in unique.values()}

        def placement(name: str) -> Placement:
            sharded = self._sharded.get(name)
            return Placement(tensors[name]) if sharded is None else sharded.placement(tensors[name])

        def fill(name: str, made: Tensor) -> None:
            sharded = self._sharded.get(name)
            tensors[name].copy_(made if sharded is None else sharded.of(made))

        found = {stored: placement(target) for stored, target in names.renamed.items()}
        filled = {id(tensors[target]) for target in names.renamed.values()}
        for conversion in names.conversions:
            gathering = Gathering(conversion, self.causal, fill)
            target = tensors[conversion.target]
            filled |= {id(tensors[name]) for name in conversion.targets}
            for stored in conversion.sources:
                shapes = (conversion.shapes[stored],)
                part = conversion.parts.get(stored)
                found[stored] = GatheredPlacement(target, shapes, part=part, name=stored, gathering=gathering)
        missing = {name: placement(name) for key, name in unique.items() if key not in filled}
        return found | {name: placement for name, placement in missing.items() if not self._may_miss(name)}

    def _may_miss(self, name: str) -> bool:
        """True if transformers makes this buffer itself where a checkpoint has none."""
        patterns = self.causal._keys_to_ignore_on_load_missing or ()
        is_buffer = name in dict(self.causal.named_buffers())
        return is_buffer and any(re.search(pattern, name) for pattern in patterns)

    def is_unused(self, checkpoint_name: str) -> bool:
        """True if transformers ignores this tensor, too, or only other ranks read it."""
        return self.is_elsewhere(checkpoint_name) or any(
            pattern.search(checkpoint_name) for pattern in ignored_patterns(self.causal)
        )

    def is_elsewhere(self, checkpoint_name: str) -> bool:
        """True if the tensor is of an expert that another rank has."""
        return checkpoint_name in self._elsewhere

    def take_memory(self, device: torch.device) -> None:
        """Allocates memory for parameters and buffers, and computes the buffers that no checkpoint has.

        Parameters that share memory do so afterwards. Raises RuntimeError if there is not enough memory.
        """
        take_memory(self.causal, device)
        if self._fused is not None:
            self._fused.merge()

    def finish_loading(self, max_positions: int) -> None:
        """Derives rotations for contexts of up to `max_positions`, and what decode graphs read of the embeddings."""
        table: Any = self.causal.get_input_embeddings()
        device = table.weight.device
        fix_rotations(self.causal, max_positions)
        rotary = Rotary(NO_ROTATION, self.config.head_dim, max_positions, self._dtype, device)
        for block, call in zip(self._blocks, self.config.calls, strict=True):
            block.rotary = rotary
            block.sinks = None if call.sinks is None else self.causal.get_parameter(call.sinks)
        self._slopes = [
            None if call.alibi is None else slopes_of(torch.tensor(call.alibi), call.scale, self._dtype, device)
            for call in self.config.calls
        ]
        if self._fused is not None:
            self._fused.replace_forwards()
            if self._fused:
                log.info(
                    "%d layers of %s are computed by this engine's operations",
                    len(self._fused),
                    type(self.causal).__name__,
                )
            self._fused = None
        if not self._embeddings:
            with torch.device("meta"):
                self._embeddings.append(Embedding(self._vocabulary, 1, self.config.tensor_parallel))
        embeddings = self._embeddings[0]
        weight, rows = table.weight, embeddings.rows
        if rows is not None and weight.shape[0] == self._vocabulary:  # whole, because a whole head is tied to it
            weight = nn.Parameter(weight[slice(*rows.ranges[0])], requires_grad=False)
        embeddings.weight, embeddings.dtype = weight, weight.dtype

    # -- Passes

    def embed(self, ops: Ops, token_ids: Tensor) -> Tensor:
        """Looks up and scales embeddings as the model does; ranks look up their tokens, and sum."""
        if self.config.tensor_parallel.size > 1:
            return self.scale_embeddings(ops.embed(token_ids, self.embeddings))
        embedded: Tensor = self.causal.get_input_embeddings()(token_ids)
        return embedded

    def scale_embeddings(self, hidden: Tensor) -> Tensor:
        """Scales rows of the table, in place, where the model's embedding module does."""
        scale = getattr(self.causal.get_input_embeddings(), "embed_scale", None)
        return hidden if scale is None else hidden.mul_(scale)

    def forward(self, ops: Ops, hidden: Tensor, attention: AttentionPass) -> ResidualState:
        """Runs the decoder over all tokens. The state has the hidden states after its last norm."""
        backbone = self.causal.get_submodule(self.config.backbone)
        blocks = zip(self._blocks, self._slopes, strict=True)
        calls = PagedCalls(attention, blocks, self._dtype, self.config.tensor_parallel)
        with communicating(ops), receiving(calls):
            output = backbone(
                inputs_embeds=hidden.unsqueeze(0),
                position_ids=attention.positions.to(torch.int64).unsqueeze(0),
                use_cache=False,
                return_dict=True,
            )
        states: Tensor = output.last_hidden_state[0]
        return ResidualState(states if attention.logits_indices is None else states[attention.logits_indices])

    def hidden(self, ops: Ops, state: ResidualState) -> Tensor:
        """Returns the state: the decoder has applied its last norm."""
        del ops
        return state.residual

    def logits(self, ops: Ops, state: ResidualState, out: Tensor | None = None) -> Tensor:
        """Runs the model's forward pass with these hidden states in place of its decoder's: head, scale and cap."""
        states = state.residual.unsqueeze(0)
        token = _hidden_states.set(states)
        try:
            with communicating(ops):
                made: Tensor = self.causal(inputs_embeds=states, use_cache=False, return_dict=True).logits[0]
        finally:
            _hidden_states.reset(token)
        return made if out is None else out.copy_(made)


def _replaying(compute: Callable[..., Any], output_class: type[ModelOutput]) -> Callable[..., Any]:
    """Returns the decoder's forward, or what stands in for it while the head runs."""

    def forward(*arguments: Any, **named: Any) -> Any:
        states = _hidden_states.get()
        return compute(*arguments, **named) if states is None else output_class(last_hidden_state=states)

    return forward
