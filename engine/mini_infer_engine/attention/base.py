"""What every attention backend offers: one preparation a pass, then one call a layer."""

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from torch import Tensor

from mini_infer_engine.inputs import PassInputs
from mini_infer_engine.kv_pool import KVPool
from mini_infer_engine.models.config import ModelConfig


class AttentionPass(Protocol):
    """One pass through the model, with all that does not depend on the layer already computed."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Write the new keys and values into the pool, then attend: [tokens, heads * head_dim].

        q is [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]; only the last dimension must be dense.
        """


class AttentionBackend(ABC):
    """A way to compute attention over the page pool."""

    page_size_step: ClassVar[int] = 16
    """Page sizes must be a multiple of this."""

    def __init__(self, config: ModelConfig, pool: KVPool) -> None:
        self.config = config
        self.pool = pool

    @abstractmethod
    def prepare(self, inputs: PassInputs) -> AttentionPass:
        """Masks and indices of one pass. Must not wait for the device."""
