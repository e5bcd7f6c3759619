"""Reads from `config.json` how positions become rotations, under transformers 5's names or older ones."""

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.json_fields import MOST, Fields

RopeType = Literal["none", "default", "linear", "llama3", "yarn", "longrope", "proportional"]
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
"""Types that a file may name; "none" (NoPE) is what architectures say of single layers, and "proportional" is read by
Gemma 4 alone.
"""
_DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """The rotation of positions (RoPE); fields that a `type` does not use keep their defaults."""

    type: RopeType = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    """Divisors of longrope's frequencies if the served context is within the original one."""
    long_factors: tuple[float, ...] = ()
    """Divisors of longrope's frequencies for longer contexts."""
    partial: float = 1.0
    """Share of a head's dimensions that are rotated: the first ones of the checkpoint."""
    interleaved: bool = False
    """True if a rotated pair of the checkpoint is (2i, 2i + 1) instead of (i, i + rotary_dim / 2). Latent attention has
    a field of its own.
    """
    sections: tuple[int, ...] = ()
    """Pairs of dimensions that are rotated by the position in time, in height and in width (M-RoPE, arXiv 2409.12191);
    empty if positions have one dimension.
    """
    sections_alternate: bool = False
    """True if pairs of the three sections alternate, instead of standing one section after the other."""

    def context(self, max_position_embeddings: int) -> int:
        """Returns how many positions the model serves, derived as vLLM derives its `max_model_len`.

        Files may say `max_position_embeddings` of before YaRN or linear interpolation; those of llama3 and longrope,
        of after. A file that says more than YaRN's factor makes of the original context is taken at its word.
        """
        if self.type == "linear":
            return int(min(max_position_embeddings * self.factor, MOST))
        if self.type == "yarn":
            extended = int(min(self.original_max_position_embeddings * self.factor, MOST))
            return max(extended, max_position_embeddings)
        return max_position_embeddings

    def rotary_dim(self, head_dim: int) -> int:
        """Returns the number of a head's dimensions that are rotated. Proportional ones are half a head apart, and
        rotate the others by nothing.
        """
        return head_dim if self.type == "proportional" else int(head_dim * self.partial)

    def reorders_heads(self, head_dim: int) -> bool:
        """Returns True if a checkpoint has the dimensions of a head in another order than `layers.rotary`."""
        return self.interleaved or self.rotary_dim(head_dim) != head_dim


NO_ROTATION = RopeParameters(type="none")
"""The rotation of layers without position embeddings (NoPE, Kazemnejad et al. 2023, arXiv 2305.19466)."""


def parse_rope(
    fields: Fields,
    max_position_embeddings: int,
    default_theta: float = _DEFAULT_THETA,
    *,
    allows_partial: bool = False,
) -> RopeParameters:
    """Returns the one rotation of all layers, from `rope_scaling` (older files) or `rope_parameters`
    (transformers 5).
    """
    key, raw = rope_object(fields)
    if any(isinstance(value, dict) for value in raw.values()):
        raise fields.refuse(key, "different rotations for different layers are not supported.")
    return parse_rope_object(fields, key, raw, max_position_embeddings, default_theta, allows_partial=allows_partial)


def parse_partial_rope(
    fields: Fields, default_partial: float, default_theta: float = _DEFAULT_THETA, *, interleaved: bool = False
) -> RopeParameters:
    """Returns the one rotation of all layers, of models that rotate `default_partial` of a head unless the file has
    another `partial_rotary_factor`.
    """
    _, raw = rope_object(fields)
    partial = raw.get("partial_rotary_factor", fields.values.get("partial_rotary_factor", default_partial))
    fields = Fields(fields.path, {**fields.values, "partial_rotary_factor": partial})
    rope = parse_rope(fields, fields.size("max_position_embeddings"), default_theta, allows_partial=True)
    return replace(rope, interleaved=interleaved)


def rope_object(fields: Fields) -> tuple[str, dict[str, Any]]:
    """Returns the key and the object that describe the rotation; an empty object if the file has none."""
    key = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    raw = fields.values.get(key) or {}
    if not isinstance(raw, dict):
        raise fields.refuse(key, "must be an object.")
    return key, raw


def parse_rope_object(
    fields: Fields,
    key: str,
    raw: dict[str, Any],
    max_position_embeddings: int,
    default_theta: float = _DEFAULT_THETA,
    *,
    allows_partial: bool = False,
    allows_proportional: bool = False,
) -> RopeParameters:
    """Returns one rotation; `raw` is the object under `key`, and `rope_theta` may stand beside it in older files."""
    theta = fields.positive("rope_theta", default_theta)
    rope = Fields(fields.path, {"rope_theta": theta, **raw})
    rope_type = rope.values.get("rope_type") or rope.values.get("type") or "default"
    sections = tuple(map(int, rope.positives("mrope_section", [])))
    if len(sections) not in (0, 3):
        raise fields.refuse(key, "mrope_section must have three numbers.")
    if rope_type == "mrope" and sections:
        rope_type = "default"
    types = (*_ROPE_TYPES, "proportional") if allows_proportional else _ROPE_TYPES
    if rope_type not in types:
        raise fields.refuse(key, f"rope type {rope_type!r} is not supported; supported are {', '.join(types)}.")
    partial = fields.number("partial_rotary_factor", rope.number("partial_rotary_factor", 1.0))
    if not (0.0 < partial <= 1.0 if allows_partial else partial == 1.0):
        raise ModelError(f"{fields.path}: partial_rotary_factor = {partial}: only 1.0 is supported.")
    original = fields.size(
        "original_max_position_embeddings",
        rope.size("original_max_position_embeddings", max_position_embeddings),
    )
    needs = ("low_freq_factor", "high_freq_factor") if rope_type == "llama3" else ()
    for name in needs:
        rope.number(name)
    if rope_type in ("linear", "llama3"):
        rope.number("factor")
    extends, is_long = rope_type in ("yarn", "longrope"), rope_type == "longrope"
    return RopeParameters(
        type=cast("RopeType", rope_type),
        theta=rope.positive("rope_theta"),
        factor=rope.positive("factor", max_position_embeddings / original if extends else 1.0),
        original_max_position_embeddings=original,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.positive("beta_fast") if rope.values.get("beta_fast") else 32.0,
        beta_slow=rope.positive("beta_slow") if rope.values.get("beta_slow") else 1.0,
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
        short_factors=rope.positives("short_factor") if is_long else (),
        long_factors=rope.positives("long_factor") if is_long else (),
        partial=partial,
        sections=sections,
        sections_alternate=rope.boolean("mrope_interleaved", False),
    )
