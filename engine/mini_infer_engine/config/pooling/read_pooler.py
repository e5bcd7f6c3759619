"""Decides from a model folder what a pooling request computes: embeddings or scores, and which code runs the model."""

from pathlib import Path
from typing import Any

import msgspec

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.pooling.pooler_config import Activation, PoolerConfig, TokenClassifier
from mini_infer_engine.config.pooling.sentence_transformers_files import (
    SentenceTransformersFiles,
    read_sentence_transformers,
)

CLASSIFIER = "ForSequenceClassification"
ENCODERS = {
    "AlbertModel": "albert",
    "BertModel": "bert",
    "CamembertModel": "camembert",
    "DebertaV2Model": "deberta-v2",
    "DistilBertModel": "distilbert",
    "ElectraModel": "electra",
    "ErnieModel": "ernie",
    "EuroBertModel": "eurobert",
    "ModernBertModel": "modernbert",
    "MPNetModel": "mpnet",
    "NomicBertModel": "nomic_bert",
    "RobertaModel": "roberta",
    "RoFormerModel": "roformer",
    "XLMRobertaModel": "xlm-roberta",
}
"""Values of `model_type` whose models read texts in both directions, by the name of the model without a head."""
ENCODER_TYPES = frozenset(ENCODERS.values())
_FUNCTIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "identity", "Softmax": "softmax"}
_PROBLEMS: dict[str, Activation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_ORIGINAL_QWEN3 = "is_original_qwen3_reranker"
_MOST_LABELS = 100_000


def is_encoder(fields: Fields) -> bool:
    """Returns True if the model reads a text in both directions."""
    return str(fields.values.get("model_type")) in ENCODER_TYPES


def is_classifier(fields: Fields) -> bool:
    """Returns True if the config is that of a model with a classification head."""
    names = fields.values.get("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and name.endswith(CLASSIFIER) for name in names)


def has_token_labels(fields: Fields) -> bool:
    """Returns True if the labels of a classifier are tokens of a causal model."""
    return bool(fields.values.get("classifier_from_token") or fields.values.get(_ORIGINAL_QWEN3)) and is_classifier(
        fields
    )


def read_pooler(fields: Fields, folder: Path, hidden_size: int) -> PoolerConfig:
    """Returns the pooler of a model. Raises ModelError if a file asks for something unsupported.

    `fields` are those of config.json, overrides included.
    """
    if is_classifier(fields):
        return _classifier(fields, folder)
    return _embedder(fields, read_sentence_transformers(folder), hidden_size)


def _embedder(fields: Fields, files: SentenceTransformersFiles, hidden_size: int) -> PoolerConfig:
    size = hidden_size
    for layer in files.dense:
        if layer.in_features != size:
            raise Fields(Path(layer.folder) / "config.json", {"in_features": layer.in_features}).refuse(
                "in_features", f"must be {size}, the width of what comes before it."
            )
        size = layer.out_features
    return PoolerConfig(
        pooling_type=files.pooling_type or ("cls" if is_encoder(fields) else "last"),
        size=size,
        activation="normalize" if files.normalizes else "identity",
        dense=files.dense,
        matryoshka_dimensions=_matryoshka_dimensions(fields),
        prompts=files.prompts,
        default_prompt_name=files.default_prompt_name,
        max_seq_length=files.max_seq_length,
    )


def _matryoshka_dimensions(fields: Fields) -> list[int] | None:
    """Returns vLLM's field of config.json: the sizes that the model was trained for."""
    sizes = fields.values.get("matryoshka_dimensions")
    if sizes is None:
        return [] if fields.values.get("is_matryoshka") is False else None
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise fields.refuse("matryoshka_dimensions", "must be a list of sizes.")
    return list(sizes)


def _classifier(fields: Fields, folder: Path) -> PoolerConfig:
    tokens = _token_classifier(fields, folder)
    if tokens is None:
        num_labels = _num_labels(fields)
    else:
        num_labels = 1 if tokens.method == "from_2_way_softmax" else len(tokens.token_ids)
    names = fields.values.get("id2label") if tokens is None else None
    names = names if isinstance(names, dict) else {}
    return PoolerConfig(
        task="classify",
        size=num_labels,
        activation=_classifier_activation(fields, num_labels),
        from_tokens=tokens,
        labels=[str(names.get(str(index), f"LABEL_{index}")) for index in range(num_labels)],
        generates=False,
        is_cross_encoder=num_labels == 1,
    )


def _num_labels(fields: Fields) -> int:
    names = fields.values.get("id2label")
    count = len(names) if isinstance(names, dict) else fields.size("num_labels", 2)
    if not 1 <= count <= _MOST_LABELS:
        raise fields.refuse("id2label", f"must have from 1 to {_MOST_LABELS} labels.")
    return count


def _classifier_activation(fields: Fields, num_labels: int) -> Activation:
    """Returns the activation that sentence-transformers' or transformers' fields name, or else the usual one."""
    own: Any = fields.values.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or fields.values.get("sbert_ce_default_activation_function")
    if named is not None:
        function = _FUNCTIONS.get(str(named).rpartition(".")[2])
        if function is None:
            key = "sentence_transformers" if isinstance(own, dict) else "sbert_ce_default_activation_function"
            raise fields.refuse(key, f"supported activations are {', '.join(_FUNCTIONS)}.")
        return function
    problem = fields.values.get("problem_type")
    if problem:
        if not isinstance(problem, str) or problem not in _PROBLEMS:
            raise fields.refuse("problem_type", f"supported are {', '.join(_PROBLEMS)}.")
        return _PROBLEMS[problem]
    return "sigmoid" if num_labels == 1 else "softmax"


def _token_classifier(fields: Fields, folder: Path) -> TokenClassifier | None:
    """Returns the tokens whose logits are the scores (vLLM's `classifier_from_token` and `method`)."""
    tokens, method = fields.values.get("classifier_from_token"), fields.values.get("method")
    if fields.boolean(_ORIGINAL_QWEN3, False):
        tokens, method = tokens or ["no", "yes"], method or "from_2_way_softmax"
    if tokens is None:
        return None
    if method is None:
        method = "no_post_processing"
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise fields.refuse("classifier_from_token", "must be a list of tokens.")
    if method not in ("no_post_processing", "from_2_way_softmax"):
        raise fields.refuse("method", "must be no_post_processing or from_2_way_softmax.")
    if method == "from_2_way_softmax" and len(tokens) != 2:
        raise fields.refuse(
            "classifier_from_token", "must have two tokens for from_2_way_softmax, the false one first."
        )
    ids = [_token_id(fields, folder, token) for token in tokens]
    return msgspec.convert({"token_ids": ids, "method": method}, TokenClassifier)


def _token_id(fields: Fields, folder: Path, token: str) -> int:
    # Imported here: tokenizing is the other process's work.
    from mini_infer_prompts.prompt import PromptAssets, PromptEncoder

    try:
        found: int | None = PromptEncoder(PromptAssets.from_directory(folder)).tokenizer.token_to_id(token)
    except ValueError as error:
        raise fields.refuse("classifier_from_token", f"needs the tokenizer ({error}).") from None
    if found is None:
        raise fields.refuse("classifier_from_token", f"the vocabulary has no token {token!r}.")
    return found
