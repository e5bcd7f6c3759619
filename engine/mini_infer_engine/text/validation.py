"""Validates prompts and sampling parameters, for HTTP and for `LLM`. Knows neither of them."""

from array import array
from collections.abc import Sequence

from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.sampling.parameters import out_of_range
from mini_infer_web.api_errors import FieldPath, context_length, field_name

_MAX_STOP_STRINGS = 64
_MAX_STOP_STRING_LENGTH = 1024
MAX_LOGPROBS = 20
"""Most likely tokens that can be reported at a position; vLLM's default of `max_logprobs`."""
_MAX_BIAS = 100.0
_FEW_TOKENS = 128
"""Number of tokens below which comparing them one by one is faster than numpy's start."""
_MAX_NAMED_TOKENS = 128
_LONGEST_PATTERN = 1024
_MAX_VALUES = 8_000_000
"""Most log probabilities of one output if those of all tokens are requested: some hundred megabytes of JSON."""


class ParameterError(ValueError):
    """Raised for a value that cannot be served; the message begins with its name `param`."""

    def __init__(self, param: str | FieldPath, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.path = (param,) if isinstance(param, str) else param
        self.param = field_name(self.path)
        self.code = code


def check_sampling(
    params: SamplingParams, vocab_size: int, has_text: bool, max_tokens_name: str = "max_tokens"
) -> None:
    """Raises ParameterError if a value is out of its range, or needs text while the engine has no tokenizer."""
    if (wrong := out_of_range(params)) is not None:
        raise ParameterError(*wrong)
    if params.max_tokens is not None and params.max_tokens < 1:
        raise ParameterError(max_tokens_name, f"{max_tokens_name} is {params.max_tokens}; it must be at least 1")
    if params.min_tokens < 0 or (params.max_tokens is not None and params.min_tokens > params.max_tokens):
        raise ParameterError(
            "min_tokens",
            f"min_tokens is {params.min_tokens}; it must be from 0 to {max_tokens_name} ({params.max_tokens})",
        )
    _check_tokens("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_stop_strings(params, has_text)
    _check_logprobs(params, vocab_size)
    _check_named_tokens(params, vocab_size)
    _check_repetition_detection(params)
    _check_logit_changes(params, vocab_size)


def _check_logprobs(params: SamplingParams, vocab_size: int) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        number = getattr(params, name)
        if number is not None and not -1 <= number <= MAX_LOGPROBS:
            raise ParameterError(name, f"{name} is {number}; it must be from 0 to {MAX_LOGPROBS}, or -1 for all tokens")
    if params.logprobs == -1 and (params.max_tokens is None or params.max_tokens * vocab_size > _MAX_VALUES):
        raise ParameterError(
            "logprobs",
            f"logprobs of all {vocab_size} tokens come with at most {_MAX_VALUES // vocab_size} tokens of output: send "
            f"max_tokens, and not more",
        )


def _check_named_tokens(params: SamplingParams, vocab_size: int) -> None:
    named = params.logprob_token_ids
    if named is None:
        return
    if params.logprobs is None:
        raise ParameterError("logprob_token_ids", "logprob_token_ids needs logprobs: send both, or neither")
    if not 1 <= len(named) <= _MAX_NAMED_TOKENS:
        message = f"logprob_token_ids has {len(named)} tokens; it must have from 1 to {_MAX_NAMED_TOKENS}"
        raise ParameterError("logprob_token_ids", message)
    for token_id in named:
        _check_token("logprob_token_ids", token_id, vocab_size)


def _check_repetition_detection(params: SamplingParams) -> None:
    detection, name = params.repetition_detection, "repetition_detection"
    if detection is None:
        return
    if not 0 <= detection.min_pattern_size <= detection.max_pattern_size <= _LONGEST_PATTERN:
        raise ParameterError(
            name,
            f"{name} looks for patterns of {detection.min_pattern_size} to {detection.max_pattern_size} tokens; "
            f"min_pattern_size must be from 0 to max_pattern_size, and that at most {_LONGEST_PATTERN}",
        )
    if detection.max_pattern_size and detection.min_count < 2:
        raise ParameterError(name, f"{name}.min_count is {detection.min_count}; it must be at least 2")


def _check_tokens(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if len(token_ids) > vocab_size:  # a million would take a tenth of a second to look at
        raise ParameterError(name, f"{name} has {len(token_ids)} ids, and there are {vocab_size}: send each once")
    for token_id in token_ids:
        _check_token(name, token_id, vocab_size)


def _check_logit_changes(params: SamplingParams, vocab_size: int) -> None:
    for token_id, value in params.logit_bias.items():
        _check_token("logit_bias", token_id, vocab_size)
        if not -_MAX_BIAS <= value <= _MAX_BIAS:
            raise ParameterError(
                "logit_bias", f"logit_bias of token {token_id} is {value}; it must be from -{_MAX_BIAS} to {_MAX_BIAS}"
            )
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise ParameterError("allowed_token_ids", "allowed_token_ids is empty; leave it out, or allow some tokens")
        _check_tokens("allowed_token_ids", params.allowed_token_ids, vocab_size)
    if "" in params.bad_words:
        raise ParameterError("bad_words", "bad_words holds an empty word: leave it out")
    for word in params.bad_words_token_ids:
        if not word:
            raise ParameterError("bad_words", "bad_words holds an empty word")
        for token_id in word:
            _check_token("bad_words", token_id, vocab_size)


def _check_token(param: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        message = f"{param} holds the token id {token_id}; ids are from 0 to {vocab_size - 1}, for {vocab_size} tokens"
        raise ParameterError(param, message)


def _check_stop_strings(params: SamplingParams, has_text: bool) -> None:
    if not params.stop:
        return
    if not has_text:
        raise ParameterError("stop", "stop needs a tokenizer, and this engine runs without: use stop_token_ids")
    if not params.detokenize:
        raise ParameterError("stop", "stop needs text: leave detokenize on, or use stop_token_ids")
    if len(params.stop) > _MAX_STOP_STRINGS:
        raise ParameterError("stop", f"stop has {len(params.stop)} strings; at most {_MAX_STOP_STRINGS} are allowed")
    for stop in params.stop:
        if not 1 <= len(stop) <= _MAX_STOP_STRING_LENGTH:
            raise ParameterError(
                "stop", f"stop holds a string of {len(stop)} characters; allowed are 1 to {_MAX_STOP_STRING_LENGTH}"
            )


def check_resumed(num_prompt: int, token_ids: Sequence[int], max_model_len: int, vocab_size: int) -> None:
    """Raises ParameterError if no output of this model can begin with these tokens."""
    name = "resume_token_ids"
    if num_prompt + len(token_ids) > max_model_len:
        raise ParameterError(name, f"{name} has {len(token_ids)} tokens, more than the context has after the prompt")
    if not _are_below(token_ids, vocab_size):
        raise ParameterError(name, f"{name} holds an id that the model has not; ids are from 0 to {vocab_size - 1}")


def check_prompt(
    token_ids: Sequence[int],
    max_model_len: int,
    vocab_size: int,
    param: str | FieldPath = "prompt",
    *,
    output_room: int = 1,
) -> None:
    """Raises ParameterError if the prompt is empty, leaves no room for so many output tokens, or has ids that the
    model lacks.
    """
    name = param if isinstance(param, str) else field_name(param)
    if not token_ids:
        raise ParameterError(param, f"{name} has no tokens; at least one is needed")
    if len(token_ids) + output_room > max_model_len:
        beside = ", which must also hold the output" if output_room else ""
        raise ParameterError(
            param,
            f"{name} has {len(token_ids)} tokens, and {context_length(max_model_len)}{beside}: send a shorter one",
            code="context_length_exceeded",
        )
    if not _are_below(token_ids, vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise ParameterError(param, f"{name} holds the token id {wrong}; ids are from 0 to {vocab_size - 1}")


def _are_below(token_ids: Sequence[int], limit: int) -> bool:
    """Returns True if all are from 0 to `limit` - 1."""
    if isinstance(token_ids, array) and token_ids.typecode == "I":  # none is below 0
        if len(token_ids) < _FEW_TOKENS:
            return bool(max(token_ids) < limit)
        import numpy  # only here: a process that speaks HTTP has lists, and starts sooner without

        return bool(numpy.frombuffer(token_ids, dtype=numpy.uint32).max() < limit)
    return min(token_ids) >= 0 and max(token_ids) < limit


def check_output_fits(prompt_tokens: int, max_tokens: int, max_model_len: int, param: str = "max_tokens") -> None:
    """Raises ParameterError if prompt and requested output are together longer than the context."""
    if prompt_tokens + max_tokens > max_model_len:
        raise ParameterError(
            param,
            f"{param} is {max_tokens} and the prompt has {prompt_tokens} tokens, together "
            f"{prompt_tokens + max_tokens}, but {context_length(max_model_len)}: ask for at most "
            f"{max_model_len - prompt_tokens}",
            code="context_length_exceeded",
        )
