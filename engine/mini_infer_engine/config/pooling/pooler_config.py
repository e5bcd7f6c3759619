"""The pooler of a model as frozen data, which the core sends to the text side. Names are vLLM's where it has one."""

from typing import Literal

import msgspec

PoolingTask = Literal["embed", "classify"]
PoolingType = Literal["last", "cls", "mean"]
Activation = Literal["normalize", "softmax", "sigmoid", "identity"]


class DenseLayer(msgspec.Struct, frozen=True):
    """A linear layer that a sentence-transformers folder has after its pooling."""

    folder: str
    in_features: int
    out_features: int
    has_bias: bool
    activation: Literal["identity", "tanh", "relu", "gelu", "sigmoid"]


class TokenClassifier(msgspec.Struct, frozen=True):
    """Scores that are read from a causal model's logits of some tokens, as Qwen3-Reranker has them."""

    token_ids: list[int]
    method: Literal["no_post_processing", "from_2_way_softmax"]
    """no_post_processing: a score for each token; from_2_way_softmax: the second token's logit less the first's."""


class PoolerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the result of a pooling request to this model."""

    task: PoolingTask = "embed"
    pooling_type: PoolingType = "last"
    size: int = 0
    """Numbers of a result: the width of an embedding, or the number of labels. 0: a dry run decides it."""
    activation: Activation = "normalize"
    """Applied to the pooled numbers unless a request has `use_activation: false`."""
    dense: list[DenseLayer] = []
    from_tokens: TokenClassifier | None = None
    labels: list[str] = []
    """Names of the scores of a classifier."""
    matryoshka_dimensions: list[int] | None = None
    """The sizes to which an embedding may be cut; None: any."""
    prompts: dict[str, str] = {}
    """Texts that go before an input, by name (sentence-transformers' `prompts`)."""
    default_prompt_name: str | None = None
    generates: bool = True
    """True if the model also generates text."""
    is_cross_encoder: bool = False
    """True if it scores a pair of texts that it reads together."""
    uses_token_types: bool = False
    """True if the second text of a pair has token type 1."""
    max_seq_length: int | None = None
    """The longest input by sentence_bert_config.json; None if it says nothing."""


LAST_TOKEN = PoolerConfig()
"""The pooler of a decoder whose folder says nothing: the normalised hidden state of the last token."""
