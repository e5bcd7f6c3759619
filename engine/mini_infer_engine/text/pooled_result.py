"""Makes answers of pooled numbers: normalised embeddings, probabilities, similarities. Knows no model and no HTTP."""

import math
from array import array
from collections.abc import Sequence

from mini_infer_engine.config.pooling.pooler_config import PoolerConfig
from mini_infer_engine.text.validation import ParameterError


def check_dimensions(pooler: PoolerConfig, dimensions: int | None) -> None:
    """Raises ParameterError if the embeddings of this model cannot be cut to this size."""
    if dimensions is None:
        return
    if dimensions < 1 or (pooler.size and dimensions > pooler.size):
        raise ParameterError(
            "dimensions", f"dimensions is {dimensions}, and embeddings of this model have {pooler.size}: ask for fewer"
        )
    allowed = pooler.matryoshka_dimensions
    if allowed is not None and dimensions not in (*allowed, pooler.size):
        sizes = ", ".join(map(str, sorted({*allowed, pooler.size})))
        raise ParameterError(
            "dimensions", f"dimensions is {dimensions}, and this model was trained for {sizes}: ask for one of these"
        )


def embedding_of(
    pooled: bytes, pooler: PoolerConfig, dimensions: int | None = None, *, use_activation: bool | None = None
) -> "array[float]":
    """Returns an embedding from packed fp32 numbers: its first `dimensions`, of length 1 if the model normalises.

    `use_activation` says whether it is normalised; None leaves that to the model.
    """
    vector = array("f", pooled)[:dimensions]
    normalizes = pooler.activation == "normalize" if use_activation is None else use_activation
    if not normalizes:
        return vector
    norm = math.sqrt(math.fsum(value * value for value in vector)) or 1.0
    return array("f", [value / norm for value in vector])


def scores_of(pooled: bytes, pooler: PoolerConfig, *, use_activation: bool | None = None) -> list[float]:
    """Returns a classifier's scores from packed fp32 numbers: probabilities unless the model or the request says
    otherwise.
    """
    logits = array("f", pooled).tolist()
    if use_activation is False or pooler.activation == "identity":
        return logits
    if pooler.activation == "sigmoid":
        return [_sigmoid(logit) for logit in logits]
    highest = max(logits)
    powers = [math.exp(logit - highest) for logit in logits]
    total = math.fsum(powers)
    return [power / total for power in powers]


def similarities(queries: Sequence[Sequence[float]], documents: Sequence[Sequence[float]]) -> list[float]:
    """Returns the cosine of the angle between each document and its query; there is one query for all, or one for
    each.
    """
    measured = [(query, math.hypot(*query)) for query in queries]
    every = measured * len(documents) if len(measured) == 1 else measured
    return [_cosine(query, norm, document) for (query, norm), document in zip(every, documents, strict=True)]


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the cosine of the angle between two embeddings."""
    return _cosine(one, math.hypot(*one), other)


def _cosine(one: Sequence[float], norm: float, other: Sequence[float]) -> float:
    product = math.fsum(a * b for a, b in zip(one, other, strict=True))
    norms = norm * math.hypot(*other)
    return product / norms if norms else 0.0


def _sigmoid(logit: float) -> float:
    if logit < 0:  # the exponential of a large number overflows
        power = math.exp(logit)
        return power / (1 + power)
    return 1 / (1 + math.exp(-logit))
