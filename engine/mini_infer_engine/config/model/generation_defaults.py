"""A model folder's `generation_config.json`: the sampling defaults that the model's makers ship."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mini_infer_engine.config.json_fields import Fields


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling defaults that a model's makers ship; None for parameters without one."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    """The file's `max_new_tokens`: most tokens of an output whose request does not say how many."""
    is_limit: bool = False
    """True if no request gets more than `max_tokens`."""
    eos_token_ids: tuple[int, ...] = ()
    ignored: Mapping[str, Any] = field(default_factory=dict)
    """Fields that would change the text and have no counterpart here, with their values."""

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that have a default, by their names."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def summary(self) -> str:
        """Says which fields of generation_config.json are the defaults of requests, and which cannot
        be; "" for none.
        """
        defaults = self.sampling
        parts = [f"requests that say nothing else get {_listed(defaults)}"] if defaults else []
        if self.is_limit and self.max_tokens is not None:
            parts.append("no request gets more tokens")
        if self.ignored:
            parts.append(f"not supported and ignored: {_listed(self.ignored)}")
        return "; ".join(parts)

    def output_tokens(self, requested: int | None) -> int | None:
        """Returns the most tokens of an output; None for as many as the context takes. `requested` is the
        request's limit.
        """
        if requested is None or self.max_tokens is None:
            return self.max_tokens if requested is None else requested
        return min(requested, self.max_tokens) if self.is_limit else requested

    @staticmethod
    def from_directory(directory: Path) -> "GenerationDefaults":
        """Reads `generation_config.json`; all fields are None if the folder has none.

        Raises:
            ModelError: the file is no JSON object or a value has the wrong type.
        """
        path = directory / "generation_config.json"
        if not path.exists():
            return GenerationDefaults()
        fields = Fields.read(path)
        if fields.boolean("do_sample", True):
            sampling: dict[str, Any] = {
                name: fields.optional_number(name) for name in ("temperature", "top_p", "min_p")
            }
            top_k = fields.optional_integer("top_k")
        else:
            sampling, top_k = {"temperature": 0.0}, None
        ignored = {
            name: value
            for name, neutral in _UNSUPPORTED_GENERATION.items()
            if (value := fields.values.get(name)) is not None and value not in neutral
        }
        return GenerationDefaults(
            **sampling,
            top_k=top_k,
            repetition_penalty=fields.optional_number("repetition_penalty"),
            max_tokens=None if fields.values.get("max_new_tokens") is None else fields.size("max_new_tokens"),
            eos_token_ids=fields.token_ids("eos_token_id"),
            ignored=ignored,
        )


_UNSUPPORTED_GENERATION: dict[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "typical_p": (1,),
    "top_h": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "num_beams": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "stop_strings": ([],),
    "bad_words_ids": ([],),
    "sequence_bias": ({}, []),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
}
"""Fields of transformers' GenerationConfig that change the chosen tokens, and the values at which they do not."""


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value!r}" for name, value in values.items())
