"""Turns the inputs of pooling requests into token ids: texts with the model's prompts, and pairs of texts.

Knows neither HTTP nor the core.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mini_infer_engine.config.pooling.pooler_config import PoolerConfig
from mini_infer_engine.text.tokenizing import ImageFiles, PromptLimits, Sliced, text_ids
from mini_infer_engine.text.validation import ParameterError
from mini_infer_prompts.pairs import Cut, Side, TypedIds, pair_ids, single_ids
from mini_infer_prompts.prompt import ChatTemplates, PromptEncoder, PromptText, is_token_id
from mini_infer_web.api_errors import ApiError, FieldPath, refuse_field

TextOrIds = str | list[int]
_SCORE_ROLES = (re.compile(r"""['"]query['"]"""), re.compile(r"""['"]document['"]"""))


class Pair(NamedTuple):
    """Two texts that are read together."""

    first: str
    second: str


def pairs_of(first: Sequence[str], second: Sequence[str]) -> list[Pair]:
    """Returns a pair for each text of the second side; the first has one for all, or one for each."""
    every = list(first) * len(second) if len(first) == 1 else first
    return [Pair(*pair) for pair in zip(every, second, strict=True)]


@dataclass(slots=True)
class PooledPrompts:
    """The inputs of one request, and how they are tokenised."""

    inputs: Sequence[TextOrIds | Pair]
    paths: Sequence[FieldPath]
    """The field of each input, for errors."""
    pooler: PoolerConfig
    prefix: str = ""
    """A prompt that goes before each text."""
    add_special_tokens: bool = True
    cut: Cut | None = None
    type_starts: list[int] = field(default_factory=list)
    """Index of the first token of type 1 of each input; filled by `token_ids`."""

    @property
    def needs_text(self) -> bool:
        """True if something is tokenised."""
        return not all(isinstance(given, list) for given in self.inputs)

    def token_ids(
        self, encoder: PromptEncoder | None, limits: PromptLimits | None, images: ImageFiles | None = None
    ) -> Sliced[list[list[int]]]:
        """Returns the token ids of each input, a slice of work at a time.

        Raises ParameterError or ApiError if one is empty, too long to be looked at, or text without a tokenizer.
        """
        made = []
        self.type_starts.clear()
        for given, path in zip(self.inputs, self.paths, strict=True):
            if isinstance(given, list):
                typed = TypedIds(_checked_ids(given, path, self.cut, limits))
            elif encoder is None:
                refuse_field(path, "is text, but this server has no tokenizer: send token ids")
            elif isinstance(given, str):
                text = self.prefix + given
                typed = TypedIds((yield from self._text_ids(text, self.add_special_tokens, path, encoder, limits)))
            elif has_score_template(encoder):
                _check_characters(given, path, limits)
                text = render_pair(encoder, given)
                typed = TypedIds((yield from self._text_ids(text, False, path, encoder, limits)))
            else:
                _check_characters(given, path, limits)
                typed = pair_ids(encoder.tokenizer, *given, self.cut, add_special_tokens=self.add_special_tokens)
                yield
            if not typed.ids:
                refuse_field(path, "is empty: send at least one token")
            made.append(typed.ids)
            self.type_starts.append(typed.type_start if self.pooler.uses_token_types else 0)
        return made

    def _text_ids(
        self,
        text: str,
        add_special_tokens: bool,
        path: FieldPath,
        encoder: PromptEncoder,
        limits: PromptLimits | None,
    ) -> Sliced[list[int]]:
        """Returns the ids of a text; one that is cut retains its special tokens."""
        if self.cut is None:
            return (yield from text_ids(encoder, PromptText(text, add_special_tokens), path, limits))
        around = encoder.tokens_around if add_special_tokens else ([], [])
        if around is None:
            return single_ids(encoder.tokenizer, text, self.cut)
        before, after = around
        ids = yield from text_ids(encoder, PromptText(text, False), path, limits)
        room = max(0, self.cut.tokens - len(before) - len(after))
        return [*before, *_shortened(ids, room, self.cut.side), *after]


def _check_characters(pair: Pair, path: FieldPath, limits: PromptLimits | None) -> None:
    """Raises ParameterError if a pair exceeds the context, whatever its tokens are, ApiError if it is no Unicode."""
    if limits is not None:
        limits.check_characters(sum(map(len, pair)), path)
    try:
        for text in pair:
            text.encode()
    except UnicodeEncodeError as error:
        refuse_field(path, f"holds half of a surrogate pair at character {error.start}")


def prompt_prefix(pooler: PoolerConfig, name: str | None) -> str:
    """Returns the prompt of this name, or the model's default one if it is None. Raises ParameterError if there is
    none.
    """
    name = pooler.default_prompt_name if name is None else name
    if name is None:
        return ""
    if name not in pooler.prompts:
        known = ", ".join(pooler.prompts) or "none"
        raise ParameterError("prompt_name", f"prompt_name is {name!r}; the prompts of this model are: {known}")
    return pooler.prompts[name]


def has_score_template(encoder: ChatTemplates) -> bool:
    """Returns True if the chat template renders a query and a document, as vLLM's score templates do."""
    source = encoder.template_sources.get("default", "")
    return all(role.search(source) for role in _SCORE_ROLES)


def render_pair(encoder: PromptEncoder, pair: Pair) -> str:
    """Returns the text of a pair by a score template. Raises ApiError 400 if the template refuses it."""
    messages = [{"role": "query", "content": pair.first}, {"role": "document", "content": pair.second}]
    return encoder.render(messages, add_generation_prompt=False)


def _checked_ids(ids: list[int], path: FieldPath, cut: Cut | None, limits: PromptLimits | None) -> list[int]:
    """Returns token ids, at most as many as `cut` says. Only those of which the engine may read each are examined."""
    if limits is not None:
        limits.check_tokens(len(ids), path)
    if cut is not None:
        ids = _shortened(ids, cut.tokens, cut.side)
    if not all(map(is_token_id, ids)):
        refuse_field(path, "must be a string or a list of token ids")
    return ids


def _shortened(ids: list[int], most: int, side: Side) -> list[int]:
    if len(ids) <= most:
        return ids
    return ids[len(ids) - most :] if side == "left" else ids[:most]


def check_task(pooler: PoolerConfig, task: str) -> None:
    """Raises ApiError 400 if the model cannot do this; the message says what it can do, and which model could."""
    can = {
        "generate": pooler.generates,
        "embed": pooler.task == "embed",
        "classify": pooler.task == "classify",
        "score": pooler.task == "embed" or pooler.is_cross_encoder,
    }
    if can[task]:
        return
    if pooler.task == "classify" and pooler.is_cross_encoder:
        has = "this model is a cross-encoder: /v1/score, /v1/rerank and /v1/classify answer"
    elif pooler.task == "classify":
        has = f"this model is a classifier with {pooler.size} labels: /v1/classify answers"
    else:
        has = "this model makes embeddings: /v1/embeddings, /v1/score and /v1/rerank answer"
    remedy = {
        "embed": "a model without a classification head makes embeddings",
        "classify": "a model whose architecture is ...ForSequenceClassification classifies",
        "score": "a cross-encoder with one label, or an embedding model, scores",
        "generate": "a model whose architecture is ...ForCausalLM generates text",
    }[task]
    raise ApiError(400, f"{has}; {remedy}", param="model", code="unsupported_task")
