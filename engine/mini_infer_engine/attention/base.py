"""What a model sees of attention: one object a pass, one call a layer."""

from typing import Protocol

from torch import Tensor


class AttentionPass(Protocol):
    """One pass through the model, with all that does not depend on the layer already computed."""

    def attend(self, q: Tensor, kv: Tensor, layer: int) -> Tensor:
        """Write the new keys and values into the pool, then attend: [tokens, heads * head_dim].

        q is [tokens, heads, head_dim], kv [tokens, 2, kv_heads, head_dim]; only the last dimension must be dense.
        """
